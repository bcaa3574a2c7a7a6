"""Data: tokenise text into shards, with its images, pack shards into samples, load samples as micro-batches.

    build -> open_source / open_splits -> Loader(source, length, seed).batch(indices) -> MicroBatch

Everything after the build is read-only and random-access. The shuffle is a pure function of (seed, epoch,
index), so the only state of the data loader is the number of samples consumed. See docs/data.md.
"""

from __future__ import annotations

from braid.data.build import BuildResult, build
from braid.data.corpus import standard_library_files
from braid.data.image_items import ImageItems
from braid.data.items import ItemLimits, ItemSource, Patches, SyntheticItems
from braid.data.loader import Loader, open_stream
from braid.data.mixture import Mixture
from braid.data.opening import Splits, open_source, open_splits
from braid.data.packing import Packed, Packing
from braid.data.source import Source, unigram_entropy, verify
from braid.data.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, eos_token_of, tokenizer_from

__all__ = [
    "BuildResult",
    "ByteTokenizer",
    "HfTokenizer",
    "ImageItems",
    "ItemLimits",
    "ItemSource",
    "Loader",
    "Mixture",
    "Packed",
    "Packing",
    "Patches",
    "Source",
    "Splits",
    "SyntheticItems",
    "Tokenizer",
    "build",
    "eos_token_of",
    "open_source",
    "open_splits",
    "open_stream",
    "standard_library_files",
    "tokenizer_from",
    "unigram_entropy",
    "verify",
]
