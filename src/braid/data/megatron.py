"""Megatron-LM indexed datasets: .bin/.idx pairs, read in place.

    .idx   9 bytes magic, <Q version (1), 1 byte dtype code, <Q sequences, <Q entries of the document index,
           then int32 lengths, int64 byte pointers, int64 document index (documents + 1)
    .bin   the tokens of all sequences, one after the other

The format stores no vocabulary size, tokenizer or checksums. So the caller passes the vocabulary size, token
ids are checked as they are read or all at once by `verify`, and the fingerprint covers the .idx and the .bin's
size.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import MappingProxyType

import numpy as np

from braid.data.files import check_size, memory_map, sha256_of_file, sha256_of_json
from braid.data.source import Source, TokenShard
from braid.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
"""Integer dtypes by code; codes 6 and 7 are float types, which hold no tokens."""


def open_megatron(prefix: Path, vocab: int | None) -> Source:
    """Open `prefix`.bin and `prefix`.idx."""
    index, tokens = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    if vocab is None:
        raise DataError(f"{index} does not store its vocabulary size: give the vocabulary size of the model")
    dtype, lengths, pointers, documents = _read_index(index)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    if len(lengths) and lengths.min() < 0:
        raise DataError(f"{index} is damaged: sequence {int(np.argmax(lengths < 0))} has a negative length")
    if not np.array_equal(pointers, ends[:-1] * dtype.itemsize):
        sequence = int(np.argmax(pointers != ends[:-1] * dtype.itemsize))
        raise DataError(f"{index} is damaged: sequence {sequence} does not start where the previous one ends")
    if len(documents) == 0 or documents.min() < 0 or documents.max() > len(lengths):
        raise DataError(f"{index} is damaged: its document index exceeds the {len(lengths)} sequences")
    size = int(ends[-1]) * dtype.itemsize
    check_size(tokens, size)
    shard = TokenShard(
        file=tokens,
        ids=memory_map(tokens, dtype, count=int(ends[-1])),
        offsets=ends[documents],
        loss_mask=None,
        records=(),
    )
    shard.check_offsets(index)
    return Source(
        path=prefix,
        shards=(shard,),
        vocab=vocab,
        tokenizer_description=None,
        fingerprint=sha256_of_json({"idx": sha256_of_file(index), "bin_bytes": size}),
    )


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Token dtype, sequence lengths, sequence byte pointers, document index."""
    if not path.is_file():
        raise DataError(f"{path} is missing: a Megatron dataset is a .bin and an .idx file of the same name")
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise DataError(f"{path} is not a Megatron index: its first bytes are {head[:9]!r}, not {MAGIC!r}")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{path} has version {version} and dtype code {code}; this program reads version 1 with integer "
            f"tokens (codes {', '.join(map(str, DTYPES))})"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    if path.stat().st_size == expected + sequences > expected:
        raise DataError(f"{path} has a mode per sequence (multimodal data), which this program does not read")
    check_size(path, expected)
    start = HEADER.size
    lengths = memory_map(path, "<i4", offset=start, count=sequences)
    pointers = memory_map(path, "<i8", offset=start + 4 * sequences, count=sequences)
    documents = memory_map(path, "<i8", offset=start + 12 * sequences, count=entries)
    return np.dtype(DTYPES[code]), lengths, pointers, documents
