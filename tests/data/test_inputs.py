"""Inputs of a build: fields by name, compressed files, Parquet; in one process and in several."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from braid.cli.progress import EVERY_S, lines
from braid.data import ByteTokenizer, build, open_source, open_splits, verify
from braid.data.chat import chat_template
from braid.errors import DataError
from tests.data.pictures import png, write_rows
from tests.data.test_build import texts, write_jsonl

ROWS: list[dict[str, object]] = [{"body": f"row {i} ü", "text": "-", "n": i} for i in range(7)]


def test_a_field_by_name(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"body": ""}])
    build(file, tmp_path / "out", ByteTokenizer(), field="body")
    assert texts(open_source(tmp_path / "out")) == [*(str(row["body"]) for row in ROWS), ""]


@pytest.mark.parametrize("line", ['{"text": "x"}', '{"body": 3}', '["body"]', "{}", '{"body": "\\ud800"}'])
def test_a_row_without_the_field_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n' + line + "\n")
    with pytest.raises(
        DataError, match=r"rows\.jsonl, line 2: (.*no text in the field 'body'|has an unpaired)"
    ):
        build(tmp_path / "rows.jsonl", tmp_path / "out", ByteTokenizer(), field="body")


def _zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard (extra `zstd`)")
    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", _zstd)],
)
def test_compressed_files_are_as_plain_ones(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(999)]).read_bytes()
    note = b"a note\n" * 99
    for name, of in (("plain", bytes), ("packed", pack)):
        (tmp_path / name).mkdir()
        more = suffix if of is pack else ""
        # Two members one after the other are one file, as parallel compressors write them.
        half = rows.index(b"\n", len(rows) // 2) + 1
        (tmp_path / name / f"a.jsonl{more}").write_bytes(of(rows[:half]) + of(rows[half:]))
        (tmp_path / name / f"b.txt{more.upper()}").write_bytes(of(note))
    calls: list[tuple[int, int]] = []
    plain = build(tmp_path / "plain", tmp_path / "1", ByteTokenizer())
    packed = build(
        tmp_path / "packed", tmp_path / "2", ByteTokenizer(), progress=lambda *each: calls.append(each)
    )
    assert open_source(tmp_path / "1").fingerprint == open_source(tmp_path / "2").fingerprint
    assert (plain.documents, plain.bytes) == (packed.documents, packed.bytes) == (1000, len(rows) + len(note))
    size = sum(file.stat().st_size for file in (tmp_path / "packed").iterdir())
    assert {total for _, total in calls} == {size} != {plain.bytes}
    assert calls[-1][0] == size
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    cut = tmp_path / "packed" / f"a.jsonl{suffix}"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl.*: cannot be decompressed"):
        build(cut, tmp_path / "3", ByteTokenizer())
    cut.write_bytes(b"no such format")
    with pytest.raises(DataError, match=r"a\.jsonl.*: cannot be decompressed"):
        build(cut, tmp_path / "3", ByteTokenizer())


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow (extra `parquet`)")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(ROWS * 400)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1000)
    calls: list[int] = []
    for field, expected in (("body", [str(row["body"]) for row in ROWS] * 400), (None, ["-"] * 2800)):
        out = tmp_path / f"out-{field}"
        build(
            tmp_path / "rows.parquet",
            out,
            ByteTokenizer(),
            field=field,
            progress=lambda done, _: calls.append(done),
        )
        assert texts(open_source(out)) == expected
    assert calls[-1] == (tmp_path / "rows.parquet").stat().st_size
    with pytest.raises(DataError, match=r"rows\.parquet: has the columns body, text, n, and none of story"):
        build(tmp_path / "rows.parquet", tmp_path / "x", ByteTokenizer(), field="story")
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: .*no text in the field 'n'"):
        build(tmp_path / "rows.parquet", tmp_path / "x", ByteTokenizer(), field="n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(DataError, match=r"bad\.parquet: is not a Parquet file"):
        build(tmp_path / "bad.parquet", tmp_path / "x", ByteTokenizer())
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "b"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "chat.parquet")
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}])
    for name in ("chat.parquet", "chat.jsonl"):
        build(tmp_path / name, tmp_path / f"{name}-out", ByteTokenizer(), chat=chat_template("chatml", None))
    first, second = (
        open_source(tmp_path / f"{name}-out").fingerprint for name in ("chat.parquet", "chat.jsonl")
    )
    assert first == second


def test_workers_change_nothing(tmp_path: Path) -> None:
    """Shards, splits, counts and errors."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = [
        {"content": [{"text": "word " * int(rng.integers(200))}]} for _ in range(1500)
    ]
    rows[700] = {"content": [{"image": "0.png"}, {"text": "an image"}]}
    rows[1400] = {"prompt": "p", "response": "r"}
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in", {"0.png": png(4, 4)}, rows)
    (tmp_path / "in" / "binary").write_bytes(b"\xff")
    built = [
        build(
            tmp_path / "in", tmp_path / f"{workers}", ByteTokenizer(), glob="[br]*", validation=0.2,
            shard_tokens=100_000, workers=workers,
        )
        for workers in (1, 3)
    ]  # fmt: skip
    one, three = (open_splits(each.output) for each in built)
    assert one.train.fingerprint == three.train.fingerprint
    assert one.validation is not None
    assert three.validation is not None
    assert one.validation.fingerprint == three.validation.fingerprint
    assert len(one.train.shards) > 3
    verify(three.train)
    counts = [{**vars(each), "output": None} for each in built]
    assert counts[0] == counts[1]
    assert (built[1].documents, built[1].images, built[1].skipped) == (1500, 1, 1)
    rows[900] = rows[1450] = {"txt": "x"}
    file = write_jsonl(tmp_path / "bad.jsonl", [row for row in rows if row is not rows[700]])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 900: has the fields 'txt'"):
        build(file, tmp_path / "x", ByteTokenizer(), workers=2)
    for workers in (0, 257):
        with pytest.raises(DataError, match=rf"workers = {workers}: set 1 to 256 processes"):
            build(file, tmp_path / "x", ByteTokenizer(), workers=workers)


def test_progress_that_is_piped_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, EVERY_S + 10, EVERY_S + 11, 3 * EVERY_S])
    update = lines("tokenizing", clock=lambda: next(times))
    for done in (1000, 20_000, 21_000, 2_000_000):
        update(done, 2_000_000)
    assert capsys.readouterr().err == "tokenizing: 20.0kB of 2.00MB, 500B/s, eta 1h06m\n"


def test_parquet_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow (extra `parquet`)")
    from pyarrow import parquet

    raw = pyarrow.array([b"good", b"\xff\xfe"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"r\.parquet: is not a Parquet file that can be read: .*0xff"):
        build(tmp_path / "r.parquet", tmp_path / "out", ByteTokenizer())
