"""Building: text in, a source out, as a whole or not at all."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from braid.data import (
    BuildResult,
    ByteTokenizer,
    HfTokenizer,
    Source,
    build,
    open_source,
    open_splits,
    standard_library_files,
    unigram_entropy,
    verify,
)
from braid.errors import DataError
from tests.data.helpers import NumberTokenizer


def texts(source: Source) -> list[str]:
    """Every document as text; each must end with its end of document."""
    offsets = source.document_offsets()
    documents = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids = source.read(start, stop).ids_S
        assert ids[-1] == 256
        documents.append(bytes(ids[:-1].tolist()).decode())
    return documents


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.txt").write_text("second\r\n", newline="")
    (folder / "a.md").write_text("first ü")
    (folder / "empty.py").write_text("")
    (folder / "deep" / "er" / "c").write_text("third")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros").write_bytes(b"text\0text")
    (folder / ".git" / "config").write_text("hidden")
    built = build(folder, tmp_path / "out", ByteTokenizer())
    source = open_source(tmp_path / "out")
    assert texts(source) == ["first ü", "second\r\n", "third", ""]
    assert built == BuildResult(
        output=tmp_path / "out",
        documents=4,
        tokens=8 + 8 + 5 + 4,
        bytes=8 + 8 + 5 + 6 + 9,
        skipped=2,
        validation_documents=0,
        validation_tokens=0,
    )
    assert (source.documents, source.tokens) == (4, 25)


def test_a_pattern_and_a_list_choose_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.py", "b.txt", "c.py"):
        (tmp_path / "in" / name).write_text(name)
    build(tmp_path / "in", tmp_path / "py", ByteTokenizer(), glob="*.py")
    build([tmp_path / "in" / "c.py", tmp_path / "in" / "a.py"], tmp_path / "list", ByteTokenizer())
    build(tmp_path / "in" / "b.txt", tmp_path / "one", ByteTokenizer())
    assert texts(open_source(tmp_path / "py")) == ["a.py", "c.py"]
    assert texts(open_source(tmp_path / "list")) == ["c.py", "a.py"]
    assert texts(open_source(tmp_path / "one")) == ["b.txt"]


def test_rows_mask_the_prompt(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"text": "plain", "id": 7},
        {"prompt": "2+2=", "response": "4"},
        {"prompt": "", "response": ""},
        {"text": "more"},
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    file.write_text(file.read_text().replace("\n", "\n\n", 1))
    build(file, tmp_path / "out", ByteTokenizer())
    source = open_source(tmp_path / "out")
    assert texts(source) == ["plain", "2+2=4", "", "more"]
    counted = "".join("01"[c] for c in source.read(0, source.tokens).loss_mask_S.tolist())
    assert counted == "111111" + "000011" + "1" + "11111"


def test_a_source_knows_its_tokenizer(tmp_path: Path) -> None:
    build(write_jsonl(tmp_path / "r.jsonl", [{"text": "grün"}]), tmp_path / "out", ByteTokenizer())
    source = open_source(tmp_path / "out")
    assert source.tokenizer().decode(source.read(0, source.tokens).ids_S) == "grün"


def test_a_hugging_face_tokenizer_builds_and_comes_back(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    file = write_jsonl(tmp_path / "r.jsonl", [{"prompt": "a b", "response": "b c"}])
    build(file, tmp_path / "out", HfTokenizer.from_file(tmp_path / "tokenizer.json"))
    source = open_source(tmp_path / "out")
    span = source.read(0, source.tokens)
    assert span.ids_S.tolist() == [1, 2, 2, 0, 3]
    assert span.loss_mask_S.tolist() == [False, False, True, True, True]
    assert source.tokenizer().encode("b a").tolist() == [2, 1]


def test_a_folder_of_rows_and_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "in" / "b.txt").write_text("three")
    build(tmp_path / "in", tmp_path / "out", ByteTokenizer())
    assert texts(open_source(tmp_path / "out")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{'text': 1}", "not a JSON object"),
        ('{"text": "\udcff"}', "not a JSON object in UTF-8"),
        ('{"text": 1}', "has 'text' as a number"),
        ('{"text": "t", "text": "t"}', "has the field 'text' twice in an object"),
        ('{"prompt": "p"}', "has the fields 'prompt'"),
        ('{"text": "t", "prompt": "p", "response": "r"}', "has the fields 'text', 'prompt', 'response'"),
        ('["text"]', "is a list; a row is"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DataError, match=f"rows.jsonl, line 3: .*{reason}"):
        build(file, tmp_path / "out", ByteTokenizer())
    assert list(tmp_path.iterdir()) == [file]


def test_a_tokenizer_that_leaves_its_vocabulary_is_caught(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": "1 2"}, {"text": "3 4 50"}])
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 2: document 1, offset 2: .* id 50, .*vocabulary of 50"
    ):
        build(file, tmp_path / "out", NumberTokenizer(vocab=50))


def test_held_out_documents_are_a_partition(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": f"document {i}"} for i in range(2000)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    built = build(file, tmp_path / "out", ByteTokenizer(), validation=0.1, seed=3)
    splits = open_splits(tmp_path / "out")
    assert splits.validation is not None
    train, held = texts(splits.train), texts(splits.validation)
    assert sorted(train + held) == sorted(str(row["text"]) for row in rows)
    assert 140 <= len(held) == built.validation_documents <= 260
    assert built.validation_tokens == splits.validation.tokens
    build(file, tmp_path / "again", ByteTokenizer(), validation=0.1, seed=3)
    build(file, tmp_path / "other", ByteTokenizer(), validation=0.1, seed=4)
    again, other = (open_splits(tmp_path / name).train.fingerprint for name in ("again", "other"))
    assert again == splits.train.fingerprint != other
    with pytest.raises(DataError, match=r"contains two sources: open .*train or .*validation"):
        open_source(tmp_path / "out")


def test_without_a_held_out_part_there_is_one_source(tmp_path: Path) -> None:
    build(write_jsonl(tmp_path / "r.jsonl", [{"text": "a"}]), tmp_path / "out", ByteTokenizer())
    splits = open_splits(tmp_path / "out")
    assert splits.validation is None
    assert splits.train.documents == 1


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "r.jsonl", [{"text": "a"}])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    (tmp_path / "full").mkdir()
    out, tokenizer = tmp_path / "out", ByteTokenizer()
    with pytest.raises(DataError, match="full exists already"):
        build(file, tmp_path / "full", tokenizer)
    with pytest.raises(DataError, match=r"cannot be made, .*binary is a file"):
        build(file, binary / "new" / "out", tokenizer)
    with pytest.raises(DataError, match="absent does not exist"):
        build(tmp_path / "absent", out, tokenizer)
    with pytest.raises(DataError, match=r"no files that match '\*.rs'"):
        build(tmp_path, out, tokenizer, glob="*.rs")
    with pytest.raises(DataError, match="is not a pattern"):
        build(tmp_path, out, tokenizer, glob="/etc/*")
    with pytest.raises(DataError, match=r"validation = 1\.5"):
        build(file, out, tokenizer, validation=1.5)
    with pytest.raises(DataError, match="leaves one split empty"):
        build(file, out, tokenizer, validation=0.5)
    with pytest.raises(DataError, match="binary has no document: 1 not text in UTF-8"):
        build(binary, out, tokenizer)
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"r\.jsonl has no document: nothing to read"):
        build(tmp_path / "r.jsonl", out, tokenizer)
    with pytest.raises(DataError, match="field = 'body': none of the 1 files has rows"):
        build(binary, out, tokenizer, field="body")
    with pytest.raises(DataError, match=r"failed and left nothing behind.*gone\.txt"):
        build([tmp_path / "gone.txt"], out, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "full", "r.jsonl"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "r.jsonl", [{"text": "a"}, {"text": "b"}])

    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(file, tmp_path / "out", ByteTokenizer(), progress=interrupt)
    assert list(tmp_path.iterdir()) == [file]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "r.jsonl", [{"text": "a"}, {"text": "bcd"}])
    calls: list[tuple[int, int]] = []
    build(file, tmp_path / "out", ByteTokenizer(), progress=lambda done, total: calls.append((done, total)))
    size = file.stat().st_size
    assert calls == [(14, size), (size, size)]


def test_the_standard_library(tmp_path: Path) -> None:
    files = standard_library_files()
    assert list(files) == sorted(files)
    assert {"argparse.py", "decoder.py"} <= {file.name for file in files}
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    built = build(files, tmp_path / "out", ByteTokenizer(), validation=0.02)
    assert built.documents + built.skipped == len(files)
    assert built.bytes > 5_000_000
    train = open_splits(tmp_path / "out").train
    verify(train)
    assert 2.5 < unigram_entropy(train) < math.log(257)


def test_entropy_is_that_of_the_counts(tmp_path: Path) -> None:
    text = "abracadabra"
    build(write_jsonl(tmp_path / "r.jsonl", [{"text": text}]), tmp_path / "out", ByteTokenizer())
    counts = Counter([*text, "end"])
    expected = -sum(n / 12 * math.log(n / 12) for n in counts.values())
    assert unigram_entropy(open_source(tmp_path / "out")) == pytest.approx(expected, rel=1e-12)
