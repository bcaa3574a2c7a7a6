"""The loader: global sample indices in, a batch out, and nothing remembered in between.

Which samples a rank reads is the caller's choice of indices, so the only state of a run's data is how many
samples it has consumed, and any number of data-parallel ranks continues any other's run exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from braid.data.batch import Batch, collated
from braid.data.files import sha256_of_json
from braid.data.mixture import Interleave, Mixture, interleave
from braid.data.order import ordered
from braid.data.packing import Concatenated, Packed, Packing, cut_samples
from braid.data.source import Source


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches of a source or a mixture. Everything that can be wrong with the choice is refused here."""

    data: Source | Mixture
    """Where samples come from."""
    length: int
    """Tokens the model reads of a sample: T."""
    seed: int
    """Chooses the order."""
    packing: Packing = "concatenate"
    """How documents become samples: `concatenate` for pretraining, `documents` for supervised fine-tuning."""

    def __post_init__(self) -> None:
        _ = self.samples, self._interleave  # both refuse what cannot work

    @cached_property
    def samples(self) -> tuple[Concatenated | Packed, ...]:
        """The samples of each source."""
        return tuple(cut_samples(source, self.length, self.packing) for source in self._mixture.sources)

    @property
    def samples_per_epoch(self) -> int:
        """Different samples there are, over all sources."""
        return sum(samples.count for samples in self.samples)

    @property
    def vocab(self) -> int:
        """Every id of every batch is below this number."""
        return max(source.vocab for source in self._mixture.sources)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides which tokens a sample index stands for, as JSON."""
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
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of the identity: stored with a run's state and compared when it is resumed."""
        return sha256_of_json(self.identity)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these global indices, 0 being the first of the run."""
        wanted = np.asarray(indices, np.int64)
        assert wanted.ndim == 1
        assert (wanted >= 0).all()
        from_source, nth = self._interleave.at(wanted)
        visited = np.empty_like(nth)
        for stream, samples in enumerate(self.samples):
            here = from_source == stream
            visited[here] = ordered(nth[here], samples.count, seed=self.seed, stream=stream)
        spans = [
            self.samples[source].read(sample)
            for source, sample in zip(from_source.tolist(), visited.tolist(), strict=True)
        ]
        return collated(spans, self.length)

    @cached_property
    def _mixture(self) -> Mixture:
        return self.data if isinstance(self.data, Mixture) else Mixture(sources=(self.data,), weights=(1.0,))

    @cached_property
    def _interleave(self) -> Interleave:
        return interleave(self._mixture.weights)
