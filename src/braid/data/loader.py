"""The data loader: a stateless map from global sample indices to a micro-batch.

Each rank asks for the indices it needs. The only state of a run's data is the number of samples consumed, so a
run resumes exactly on any number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import numpy as np

from braid.choices import MADE_UP
from braid.data.batch import collate
from braid.data.files import sha256_of_json
from braid.data.image_items import ImageItems, StreamItem
from braid.data.item_stream import ItemStream
from braid.data.items import ItemLimits, ItemSource, SyntheticText
from braid.data.media import in_words
from braid.data.mixture import Interleave, Mixture, interleave
from braid.data.order import shuffled
from braid.data.packing import Concatenated, ConcatenatedItems, Packed, Packing, Stream, cut_samples
from braid.data.source import DocumentSpan, Source
from braid.errors import DataError
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
    images: Mapping[str, ItemLimits] = field(default_factory=dict)
    """The module whose items are the images and videos of the data, by name; none or one."""

    def __post_init__(self) -> None:
        assert len(self.images) <= 1
        _ = self.samples, self._interleave, self.items  # all check their arguments

    @cached_property
    def samples(self) -> tuple[Concatenated | ConcatenatedItems | Packed, ...]:
        """The samples of each source."""
        streams = [open_stream(source, self.images) for source in self._mixture.sources]
        return tuple(cut_samples(stream, self.length, self.packing) for stream in streams)

    @property
    def samples_per_epoch(self) -> int:
        """Number of distinct samples, over all sources."""
        return sum(samples.count for samples in self.samples)

    @cached_property
    def items(self) -> Mapping[str, ItemSource]:
        """Where the items of each module come from, by its name."""
        made_up: dict[str, ItemSource] = {
            name: resolve_name(MADE_UP[limits.items])(name=name, samples=self._text_with_items)
            for name, limits in self.synthetic.items()
        }
        return made_up | {
            name: ImageItems(limits=limits, place=self._place_images) for name, limits in self.images.items()
        }

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
        """The text of these samples, with placeholders of images, and without those of made-up items."""
        return [self._read(index, *each) for index, each in zip(samples, self._locate(samples), strict=True)]

    def _read(self, index: int, source: int, sample: int) -> DocumentSpan:
        try:
            return self.samples[source].read(sample)
        except DataError as error:
            if not self.images:
                raise
            raise DataError(f"sample {index}: {error}") from None

    def _locate(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        """The source of each sample, and the sample of that source."""
        indices = np.asarray(samples, np.int64)
        assert indices.ndim == 1
        assert (indices >= 0).all()
        from_source, nth = self._interleave.at(indices)
        visited = np.empty_like(nth)
        for stream, packed in enumerate(self.samples):
            here = from_source == stream
            visited[here] = shuffled(nth[here], packed.count, seed=self.seed, stream=stream)
        return list(zip(from_source.tolist(), visited.tolist(), strict=True))

    def _place_images(self, samples: Sequence[int]) -> list[list[StreamItem]]:
        """The images of each sample, in the order of their placeholders."""
        placed: list[list[StreamItem]] = []
        for source, sample in self._locate(samples):
            held, stream = self.samples[source], self.samples[source].source
            assert isinstance(stream, ItemStream), "a loader with images has no other streams"
            items = (item for each in held.ranges(sample) for item in stream.items(*each))
            placed.append([StreamItem(stream, item) for item in items])
        return placed

    @cached_property
    def _text_with_items(self) -> SyntheticText:
        bits = max(source.vocab - 1 for source in self._mixture.sources).bit_length()
        return SyntheticText(
            text=self.read_text,
            modules=self.synthetic,
            seed=self.seed,
            bits=bits,
            stored=frozenset(limits.token for limits in self.images.values()),
        )

    @cached_property
    def _mixture(self) -> Mixture:
        return self.data if isinstance(self.data, Mixture) else Mixture(sources=(self.data,), weights=(1.0,))

    @cached_property
    def _interleave(self) -> Interleave:
        return interleave(self._mixture.weights)


def open_stream(source: Source, images: Mapping[str, ItemLimits]) -> Stream:
    """A source as the module that reads images sees it; as it is stored if there is none."""
    for name, limits in images.items():
        return ItemStream(source=source, module=name, limits=limits)
    if source.media:
        raise DataError(
            f"{source.path} has {in_words(source.media)}, and no module reads them: set modules.NAME.items of "
            "an encoder to image, or use a source of text alone"
        )
    return source
