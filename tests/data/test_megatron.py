"""Megatron's .bin/.idx open unchanged. The writer here follows the byte layout, not the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from braid.data import Loader, open_source, unigram_entropy, verify
from braid.errors import DataError

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_megatron(
    prefix: Path, sequences: Sequence[Sequence[int]], documents: Sequence[int] | None = None, dtype: str = "u2"
) -> None:
    """Sequences of ids; `documents` says at which sequence each document starts, and where the last ends."""
    documents = range(len(sequences) + 1) if documents is None else documents
    with open(f"{prefix}.bin", "wb") as tokens, open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]))
        index.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents)))
        index.write(b"".join(struct.pack("<i", len(sequence)) for sequence in sequences))
        for sequence in sequences:
            index.write(struct.pack("<q", tokens.tell()))
            tokens.write(np.asarray(sequence, f"<{dtype}").tobytes())
        index.write(b"".join(struct.pack("<q", entry) for entry in documents))


SEQUENCES = tuple(tuple(range(10 * i, 10 * i + 3 + i)) for i in range(10))


def test_ten_documents_have_the_known_size(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", SEQUENCES)
    assert (tmp_path / "x.idx").stat().st_size == 242


@pytest.mark.parametrize("name", ["x.y", "x.y.bin", "x.y.idx"])
@pytest.mark.parametrize("dtype", ["u2", "i4", "i8", "i2", "u1"])
def test_opens_by_prefix_or_either_file(tmp_path: Path, name: str, dtype: str) -> None:
    write_megatron(tmp_path / "x.y", SEQUENCES, dtype=dtype)
    source = open_source(tmp_path / name, vocab=128)
    verify(source)
    assert source.read(0, source.tokens).ids_S.tolist() == [i for sequence in SEQUENCES for i in sequence]
    assert np.diff(source.document_offsets()).tolist() == [len(sequence) for sequence in SEQUENCES]
    assert unigram_entropy(source) > 0


def test_documents_may_hold_several_sequences_or_none(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2], [3], [], [4, 5, 6]], documents=[0, 2, 2, 4])
    source = open_source(tmp_path / "x", vocab=10)
    assert source.document_offsets().tolist() == [0, 3, 3, 6]
    batch = Loader(source, length=5, seed=0).batch([0])
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1]]


def test_the_vocabulary_must_be_given(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", SEQUENCES)
    with pytest.raises(DataError, match=r"x\.idx does not store its vocabulary size"):
        open_source(tmp_path / "x")


def test_the_tokenizer_is_unknown(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", SEQUENCES)
    with pytest.raises(DataError, match="does not store its tokenizer"):
        open_source(tmp_path / "x", vocab=128).tokenizer()


def test_ids_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[1, 2], [3, -1, 4]], dtype="i4")
    source = open_source(tmp_path / "x", vocab=5)
    for read in (lambda: verify(source), lambda: source.read(2, 5), lambda: Loader(source, 4, 0).batch([0])):
        with pytest.raises(DataError, match=r"x\.bin: document 1, offset 1: token id -1"):
            read()
    with pytest.raises(DataError, match=r"x\.bin: document 1, offset 0: token id 3"):
        verify(open_source(tmp_path / "x", vocab=3))


def test_damage_is_refused_at_opening(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write_megatron(prefix, SEQUENCES)
    good = {name: (tmp_path / name).read_bytes() for name in ("x.idx", "x.bin")}

    def refused(name: str, content: bytes | None, reason: str) -> None:
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason):
            open_source(prefix, vocab=128)
        (tmp_path / name).write_bytes(good[name])

    index, tokens = good["x.idx"], good["x.bin"]
    refused("x.bin", None, r"x\.bin is missing")
    refused("x.idx", None, r"x\.idx is missing")
    refused("x.bin", tokens[:-2], r"x\.bin is truncated")
    refused("x.bin", tokens + b"\0", r"x\.bin is too long")
    refused("x.idx", index[:-1], r"x\.idx is truncated")
    refused("x.idx", index[:20], r"x\.idx is not a Megatron index")
    refused("x.idx", b"PK" + index[2:], "not a Megatron index")
    refused("x.idx", index[:9] + struct.pack("<Q", 2) + index[17:], "version 2")
    refused("x.idx", index[:17] + b"\x07" + index[18:], "dtype code 7")
    refused("x.idx", index[:18] + struct.pack("<Q", 2**60) + index[26:], r"x\.idx is truncated")
    refused("x.idx", index + bytes(10), "mode per sequence")
    refused("x.idx", index[:34] + struct.pack("<i", -3) + index[38:], "negative length")
    refused("x.idx", index[:34] + struct.pack("<i", 4) + index[38:], "sequence 1 does not start")
    refused("x.idx", index[:-8] + struct.pack("<q", 11), "exceeds the 10 sequences")
    refused("x.idx", index[:-8] + struct.pack("<q", 9), "document offsets go 0 to")
    refused("x.idx", index[:-16] + struct.pack("<qq", 3, 10), "ends before it starts")


def test_fingerprints_follow_the_index(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", SEQUENCES)
    write_megatron(tmp_path / "y", SEQUENCES)
    write_megatron(tmp_path / "z", SEQUENCES[:9])
    x, y, z = (open_source(tmp_path / name, vocab=128).fingerprint for name in "xyz")
    assert x == y != z
