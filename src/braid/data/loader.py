"""The data loader: a stateless map from global sample indices to a micro-batch.

Each rank asks for the indices it needs. The only state of a run's data is the number of samples consumed, so a
run resumes exactly on any number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from braid.data.batch import collate
from braid.data.files import sha256_of_json
from braid.data.items import ItemLimits, ItemSource, SyntheticItems, SyntheticText
from braid.data.mixture import Interleave, Mixture, interleave
from braid.data.order import shuffled
from braid.data.packing import Concatenated, Packed, Packing, cut_samples
from braid.data.source import DocumentSpan, Source
from braid.model.context import MicroBatch


@dataclass(frozen=True, eq=False)
class Loader:
    """Loads samples of a source or a mixture. Raises at construction if the data and settings do not match."""

    data: Source | Mixture
    length: int
    """T: input tokens of a sample."""
    seed: int
    """Seed of the shuffle."""
    packing: Packing = "concatenate"
    """How documents become samples: `concatenate` for pretraining, `documents` for supervised fine-tuning."""
    synthetic: Mapping[str, ItemLimits] = field(default_factory=dict)
    """The modules whose items are made up from the text, by name."""

    def __post_init__(self) -> None:
        _ = self.samples, self._interleave  # both check their arguments

    @cached_property
    def samples(self) -> tuple[Concatenated | Packed, ...]:
        """The samples of each source."""
        return tuple(cut_samples(source, self.length, self.packing) for source in self._mixture.sources)

    @property
    def samples_per_epoch(self) -> int:
        """Number of distinct samples, over all sources."""
        return sum(samples.count for samples in self.samples)

    @cached_property
    def items(self) -> Mapping[str, ItemSource]:
        """Where the items of each module come from, by its name."""
        return {name: SyntheticItems(name=name, samples=self._text_with_items) for name in self.synthetic}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the tokens and items of a sample index, as JSON."""
        items = {name: source.identity for name, source in self.items.items()}
        return {
            "sources": [source.fingerprint for source in self._mixture.sources],
            "tokenizers": [
                source.tokenizer_description and sha256_of_json(source.tokenizer_description)
                for source in self._mixture.sources
            ],
            "shares": list(self._interleave.shares),
            "length": self.length,
            "packing": self.packing,
            "seed": self.seed,
            **({"items": items} if items else {}),
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of the identity, saved in checkpoints and compared on resume."""
        return sha256_of_json(self.identity)

    def batch(self, samples: Sequence[int]) -> MicroBatch:
        """The samples with these global indices; 0 is the first of the run. Items have placeholders."""
        return collate(self._text_with_items.read(samples), samples, self.length)

    def read_text(self, samples: Sequence[int]) -> list[DocumentSpan]:
        """The text of these samples, without placeholders of made-up items."""
        indices = np.asarray(samples, np.int64)
        assert indices.ndim == 1
        assert (indices >= 0).all()
        from_source, nth = self._interleave.at(indices)
        visited = np.empty_like(nth)
        for stream, packed in enumerate(self.samples):
            here = from_source == stream
            visited[here] = shuffled(nth[here], packed.count, seed=self.seed, stream=stream)
        return [
            self.samples[source].read(sample)
            for source, sample in zip(from_source.tolist(), visited.tolist(), strict=True)
        ]

    @cached_property
    def _text_with_items(self) -> SyntheticText:
        bits = max(source.vocab - 1 for source in self._mixture.sources).bit_length()
        return SyntheticText(text=self.read_text, modules=self.synthetic, seed=self.seed, bits=bits)

    @cached_property
    def _mixture(self) -> Mixture:
        return self.data if isinstance(self.data, Mixture) else Mixture(sources=(self.data,), weights=(1.0,))

    @cached_property
    def _interleave(self) -> Interleave:
        return interleave(self._mixture.weights)
