"""Data: text to token shards, token shards to batches.

    build -> open_source / open_splits -> Loader(source, length, seed).batch(indices) -> Batch

Everything after the build is read-only and random-access: the order of samples is a pure function of
(seed, epoch, index), and a run's data has one number of state, the samples it has consumed. See docs/data.md.
"""

from __future__ import annotations

from braid.data.batch import Batch
from braid.data.build import Built, build
from braid.data.corpus import standard_library_files
from braid.data.loader import Loader
from braid.data.mixture import Mixture
from braid.data.opening import Splits, open_source, open_splits
from braid.data.packing import Packed, Packing
from braid.data.source import Source, unigram_entropy, verify
from braid.data.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, tokenizer_from

__all__ = [
    "Batch",
    "Built",
    "ByteTokenizer",
    "HfTokenizer",
    "Loader",
    "Mixture",
    "Packed",
    "Packing",
    "Source",
    "Splits",
    "Tokenizer",
    "build",
    "open_source",
    "open_splits",
    "standard_library_files",
    "tokenizer_from",
    "unigram_entropy",
    "verify",
]
