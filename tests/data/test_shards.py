"""Token shards: the format on disk, and what happens when it is damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braid.data import open_source, verify
from braid.data.files import sha256_of_json
from braid.errors import DataError
from tests.data.helpers import write_source

DOCUMENTS = ((5, 6, 0), (), (7, 0), (8, 9, 10, 0))
MASKS = (None, None, (False, True), None)


def test_the_format_on_disk(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", DOCUMENTS, masks=MASKS)
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    (shard,) = index["shards"]
    assert np.fromfile(tmp_path / "s" / "00000.tokens", "<u2").tolist() == [5, 6, 0, 7, 0, 8, 9, 10, 0]
    assert np.fromfile(tmp_path / "s" / "00000.offsets", "<i8").tolist() == [0, 3, 3, 5, 9]
    assert list((tmp_path / "s" / "00000.mask").read_bytes()) == [1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert (index["vocab"], shard["min_id"], shard["max_id"]) == (1000, 0, 10)
    assert (shard["token_count"], shard["document_count"]) == (9, 4)
    for kind in ("tokens", "offsets", "mask"):
        content = (tmp_path / "s" / shard[kind]["name"]).read_bytes()
        assert shard[kind]["bytes"] == len(content)
        assert shard[kind]["sha256"] == hashlib.sha256(content).hexdigest()
    assert (source.documents, source.tokens, source.vocab) == (4, 9, 1000)


@pytest.mark.parametrize(("vocab", "dtype"), [(65_499, "uint16"), (65_500, "int32"), (200_000, "int32")])
def test_large_vocabularies_take_32_bits(tmp_path: Path, vocab: int, dtype: str) -> None:
    source = write_source(tmp_path / "s", [[vocab - 1, 0]], vocab=vocab)
    assert source.shards[0].ids.dtype == dtype
    assert source.read(0, 2).ids_S.tolist() == [vocab - 1, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data(), documents=st.lists(st.lists(st.integers(0, 999), max_size=6), min_size=1, max_size=12))
def test_any_span_of_any_shards_reads_the_stream(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, documents: list[list[int]]
) -> None:
    masks = [
        data.draw(st.none() | st.lists(st.booleans(), min_size=len(d), max_size=len(d))) for d in documents
    ]
    shard_tokens = data.draw(st.integers(1, 10))
    folder = tmp_path_factory.mktemp("source") / "s"
    source = write_source(folder, documents, masks=masks, shard_tokens=shard_tokens)
    ids = [i for document in documents for i in document]
    counted = [
        c for d, m in zip(documents, masks, strict=True) for c in (m if m is not None else [True] * len(d))
    ]
    starts = [position == 0 for document in documents for position in range(len(document))]
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    span = source.read(start, stop)
    assert span.ids_S.tolist() == ids[start:stop]
    assert span.loss_mask_S.tolist() == counted[start:stop]
    assert span.starts_S.tolist() == starts[start:stop]
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    assert source.document_offsets().tolist() == ends
    verify(source)


@pytest.mark.parametrize("name", ["00000.tokens", "00000.offsets", "00000.mask"])
def test_missing_truncated_and_long_files_are_refused_at_opening(tmp_path: Path, name: str) -> None:
    write_source(tmp_path / "s", DOCUMENTS, masks=MASKS)
    file = tmp_path / "s" / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{name} is truncated: {len(content) - 1} bytes where {len(content)}"):
        open_source(tmp_path / "s")
    file.write_bytes(content + b"\0")
    with pytest.raises(DataError, match=f"{name} is too long"):
        open_source(tmp_path / "s")
    file.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_source(tmp_path / "s")


def test_no_single_flipped_bit_passes(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS, masks=MASKS)
    for file in sorted((tmp_path / "s").iterdir()):
        content = file.read_bytes()
        for bit in range(0, 8 * len(content), 7):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << (bit % 8)
            file.write_bytes(flipped)
            with pytest.raises(DataError, match=file.name):
                verify(open_source(tmp_path / "s"))
        file.write_bytes(content)
    verify(open_source(tmp_path / "s"))


def test_damaged_offsets_are_refused_at_opening(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    for offsets, reason in (
        ([1, 3, 3, 5, 9], "go 1 to 9"),
        ([0, 3, 3, 5, 8], "go 0 to 8"),
        ([0, 6, 3, 5, 9], "document 1 ends before it starts"),
    ):
        np.asarray(offsets, "<i8").tofile(tmp_path / "s" / "00000.offsets")
        with pytest.raises(DataError, match=rf"00000.offsets is damaged.*{reason}"):
            open_source(tmp_path / "s")


def rewritten(index: Path, **changes: object) -> None:
    """Change an index and give it the fingerprint of its new content."""
    body = {**json.loads(index.read_text()), **changes}
    del body["fingerprint"]
    index.write_text(json.dumps({**body, "fingerprint": sha256_of_json(body)}))


def test_an_index_cannot_lead_outside_its_folder(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    index = tmp_path / "s" / "index.json"
    shards = json.loads(index.read_text())["shards"]
    shards[0]["tokens"]["name"] = "../outside"
    rewritten(index, shards=shards)
    with pytest.raises(DataError, match=r"names a file '../outside'"):
        open_source(tmp_path / "s")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 3}, "version 3"),
        ({"format": "other"}, "format 'other'"),
        ({"dtype": "object"}, "dtype 'object'"),
        ({"shards": [{}]}, "not a valid index"),
        ({"shards": None}, "not a valid index"),
    ],
)
def test_a_strange_index_is_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    rewritten(tmp_path / "s" / "index.json", **changes)
    with pytest.raises(DataError, match=reason):
        open_source(tmp_path / "s")


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    index = tmp_path / "s" / "index.json"
    shards = json.loads(index.read_text())["shards"]
    rewritten(index, shards=[{**shards[0], "max_id": 1000}])
    with pytest.raises(DataError, match=r"max_id of 00000\.tokens is wrong"):
        open_source(tmp_path / "s")
    rewritten(index, shards=[{**shards[0], "token_count": 10}])
    with pytest.raises(DataError, match=r"00000\.tokens has 18 bytes, its counts say 20"):
        open_source(tmp_path / "s")


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index.json is missing"):
        open_source(tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match="not a JSON object"):
        open_source(tmp_path)
    with pytest.raises(DataError, match="absent does not exist"):
        open_source(tmp_path / "absent")


def test_a_model_with_a_smaller_vocabulary_is_refused_at_opening(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    with pytest.raises(DataError, match=r"00000.tokens: document 3, offset 1: token id 9 .*vocabulary of 9 "):
        open_source(tmp_path / "s", vocab=9)
    assert open_source(tmp_path / "s", vocab=11).vocab == 11
    assert open_source(tmp_path / "s", vocab=2048).vocab == 1000


def test_ids_are_checked_again_when_they_are_read(tmp_path: Path) -> None:
    write_source(tmp_path / "s", DOCUMENTS)
    file = tmp_path / "s" / "00000.tokens"
    ids = np.fromfile(file, "<u2")
    ids[6] = 1000
    ids.tofile(file)
    source = open_source(tmp_path / "s")
    source.read(0, 6)
    with pytest.raises(DataError, match=r"00000.tokens: document 3, offset 1: token id 1000"):
        source.read(0, 9)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify(write_source(tmp_path / "s", DOCUMENTS), lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == 18 + 40 + 18


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    first = write_source(tmp_path / "a", DOCUMENTS)
    assert write_source(tmp_path / "b", DOCUMENTS).fingerprint == first.fingerprint
    assert write_source(tmp_path / "c", DOCUMENTS[:3]).fingerprint != first.fingerprint
    assert write_source(tmp_path / "d", DOCUMENTS, vocab=1001).fingerprint != first.fingerprint
    assert write_source(tmp_path / "e", DOCUMENTS, masks=MASKS).fingerprint != first.fingerprint
