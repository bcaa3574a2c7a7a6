"""Evaluation: scores against plain logits, figures against lm-evaluation-harness, files by the command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.architecture import Mamba2
from braid.cli import main
from braid.config import to_json
from braid.data import ByteTokenizer
from braid.errors import DataError, ExitCode
from braid.evaluation.scoring import Request, encode_pair, score, windows
from braid.evaluation.tasks import Settings, evaluate_files
from braid.model.context import MicroBatch
from braid.train.load_model import LoadedModel, load_models
from tests.model.cases import SHAPE, build
from tests.runs import small_run

LENGTH = 24


def harness() -> Any:
    return pytest.importorskip("lm_eval", reason="needs the package lm_eval (extra `eval`)")


def plain(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By the logits of one row without padding."""
    row = torch.tensor([[*context, *continuation]])
    logits = model.logits(model.prepare(MicroBatch.of_tokens(row[:, :-1]))).detach()[0, len(context) - 1 :]
    labels = row[0, len(context) :]
    logprob = logits.log_softmax(-1).gather(1, labels[:, None]).sum()
    return float(logprob), bool((logits.argmax(-1) == labels).all())


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_scores_are_those_of_single_rows(batch_tokens: int) -> None:
    mamba2 = Mamba2(heads=4, head_dim=4, state=3, groups=1, conv=3)
    model, chosen = build("[*-][M-][*E]", replace(SHAPE, mamba2=mamba2)), random.Random(0)
    pairs = []
    for _ in range(9):
        sizes = chosen.randint(1, 12), chosen.randint(1, 9)
        pairs.append(tuple([chosen.randrange(17) for _ in range(size)] for size in sizes))
    row = torch.tensor([[3, 5]])
    for _ in range(3):
        logits = model.logits(model.prepare(MicroBatch.of_tokens(row)))
        row = torch.cat([row, logits[:, -1:].argmax(-1)], 1)
    pairs.append(([3, 5], row[0, 2:].tolist()))  # what greedy decoding writes
    counted: list[int] = []
    requests = [Request(context=first, continuation=second) for first, second in pairs]
    requests.insert(4, Request(context=[1], continuation=[]))
    found = score(model, requests, length=32, batch_tokens=batch_tokens, done=counted.append)
    assert (found.pop(4).logprob, counted[-1]) == (0.0, len(pairs) + 1)
    for each, (context, continuation) in zip(found, pairs, strict=True):
        logprob, greedy = plain(model, context, continuation)
        assert each.logprob == pytest.approx(logprob, rel=1e-12)
        assert each.greedy == greedy
    assert [each.greedy for each in found].count(True) >= 1
    assert found[-1].greedy


def test_long_contexts_are_cut_at_their_beginning() -> None:
    model = build("[*-]")
    ids = [random.Random(0).randrange(17) for _ in range(30)]
    (found,) = score(model, [Request(context=ids[:25], continuation=ids[25:])], length=8, batch_tokens=99)
    assert found.logprob == pytest.approx(plain(model, ids[-9:-5], ids[-5:])[0], rel=1e-12)
    with pytest.raises(DataError, match=r"a text of 30 tokens .* a row has 8: set a larger --length"):
        score(model, [Request(context=[1], continuation=ids)], length=8, batch_tokens=99)


@pytest.mark.parametrize(("length", "overlap"), [(1, 1), (8, 1), (8, 3), (8, 8), (40, 5)])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 30])
def test_windows_are_those_of_the_harness(size: int, length: int, overlap: int) -> None:
    harness()
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids = list(range(size))
    expected = [make_disjoint_window(pair) for pair in get_rolling_token_windows(ids, 99, length, overlap)]
    found = [(list(each.context), list(each.continuation)) for each in windows(ids, 99, length, overlap)]
    assert found == [(list(first), list(second)) for first, second in expected]


# ----------------------------------------------------------------------------------------- a checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{i} and {i + 1} and so on"}}\n' for i in range(99)))
    words = ["--input", f"{folder}/rows.jsonl", "--output", f"{folder}/data"]
    assert main(["data", "build", *words]) == 0
    run = small_run()
    run = replace(run, model=replace(run.model, pattern="[*-]*", moe=None), train=replace(run.train, steps=4))
    (folder / "small.json").write_text(json.dumps(to_json(run)))
    options = ["--data.sources", f"{folder}/data", "--data.sequence-tokens", str(LENGTH)]
    words = ["train", f"{folder}/small.json", *options, "--out", f"{folder}/run", "--device", "cpu"]
    assert main(words) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_models(checkpoint, "cpu")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200, with queries that end with a space or are empty, and choices of different lengths."""
    chosen, rows = random.Random(1), []
    for number in range(200):
        query = "".join(chosen.choices("abcdefg é", k=chosen.randint(0, 12)))
        choices = [
            "".join(chosen.choices("and so on0123é", k=chosen.randint(1, 9))) for _ in range(number % 3 + 2)
        ]
        gold = chosen.randrange(len(choices))
        choices = list(dict.fromkeys(choices)) if len(set(choices)) > 1 else ["a", "b"]
        rows.append({"query": query, "choices": choices, "gold": min(gold, len(choices) - 1)})
    rows[0]["query"], rows[1]["query"] = "", "ends with spaces  "
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.long  # the harness and its data sets take ten seconds to load
def test_accuracy_is_that_of_the_harness(
    checkpoint: Path, loaded: LoadedModel, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own task, requests, cutting of tokens and metrics, on the adapter."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    lm_eval = harness()
    from braid.evaluation.harness import BraidLM

    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    model = BraidLM(str(checkpoint), device="cpu", length=LENGTH)
    theirs = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, log_samples=True)
    samples = sorted(theirs["samples"]["local"], key=lambda sample: sample["doc_id"])
    result = evaluate_files(loaded.language, loaded.tokenizer, [questions], Settings(length=LENGTH))[questions]
    assert [sample["acc"] for sample in samples] == list(map(float, result.right))
    assert [sample["acc_norm"] for sample in samples] == list(map(float, result.right_by_length))
    figures, found = theirs["results"]["local"], result.as_json()
    assert found["questions"] == 200
    for name in ("acc", "acc_norm"):
        assert figures[f"{name},none"] == pytest.approx(found[name], abs=1e-15)
        assert 0.1 < found[name] < 0.9
    assert result.right != result.right_by_length


def test_the_adapter_rolls_over_texts_and_generates(checkpoint: Path, loaded: LoadedModel) -> None:
    harness()
    from lm_eval.api.instance import Instance

    from braid.evaluation.harness import BraidLM

    def asked(kind: str, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    model = BraidLM(str(checkpoint), device="cpu")
    texts = ["0 and 1 and so on", "", "a longer text than a window has room for, by far"]
    found = model.loglikelihood_rolling([asked("loglikelihood_rolling", text) for text in texts])
    short = plain(loaded.language, [256], list(texts[0].encode()))[0]
    assert found[:2] == [pytest.approx(short, rel=1e-5), 0]
    assert found[2] < found[0]
    options = {"until": ["n"], "max_gen_toks": 12, "do_sample": False}
    (stopped,) = model.generate_until([asked("generate_until", "0 a", options)])
    (whole,) = model.generate_until([asked("generate_until", "0 a", {**options, "until": []})])
    assert stopped == whole.split("n")[0]
    row, expected = torch.tensor([list(b"0 a")]), []
    for _ in range(12):
        logits = loaded.language.logits(loaded.language.prepare(MicroBatch.of_tokens(row)))
        row = torch.cat([row, logits[:, -1:, :257].argmax(-1)], 1)
        if row[0, -1] == 256:
            break
        expected.append(int(row[0, -1]))
    assert whole == bytes(expected).decode(errors="replace")


def test_texts_have_perplexity_and_bits_per_byte_by_file(
    checkpoint: Path, loaded: LoadedModel, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["0 and 1 and so on", "ü", "", "much longer than the window of the model, with ümläuts in it"]
    (tmp_path / "one.txt").write_text(texts[3])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[:3]))
    (tmp_path / "empty.jsonl").write_text("")
    expected = []
    for text in texts:
        ids = list(text.encode())
        cut = windows(ids, 256, LENGTH, 4)
        nats = [plain(loaded.language, list(each.context), list(each.continuation))[0] for each in cut]
        expected.append((len(ids), -math.fsum(nats)))
    capsys.readouterr()
    files = [str(tmp_path / name) for name in ("one.txt", "rows.jsonl", "empty.jsonl")]
    words = ["--device", "cpu", "--overlap", "4", "--field", "body"]
    assert main(["eval", str(checkpoint), "--data", *files, *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for file, chosen in ((files[0], expected[3:]), (files[1], expected[:3])):
        count, nats = sum(size for size, _ in chosen), math.fsum(each for _, each in chosen)
        figures = told["texts"][file]
        assert (figures["documents"], figures["tokens"], figures["bytes"]) == (len(chosen), count, count)
        assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / count, rel=1e-5)
    total = math.fsum(each for _, each in expected) / sum(size for size, _ in expected)
    assert told["all_texts"]["nats_per_token"] == pytest.approx(total, rel=1e-5)
    assert told["texts"][files[2]]["perplexity"] is None
    assert (told["length"], told["overlap"]) == (LENGTH, 4)
    assert main(["eval", str(checkpoint), "--data", files[0], str(questions), "--device", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0][-9:] == ["windows", "of", "24", "tokens,", "1", "of", "them", "read", "again"][-9:]
    assert ["one.txt" in line[0] for line in lines] == [False, False, True, False, False]
    assert lines[4][1] == "200"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"query": "q", "choices": ["a"], "gold": 0}, "a question is"),
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "a question is"),
        ({"query": "q", "choices": ["a", "b"], "gold": "c"}, "a question is"),
        ({"query": "q", "choices": ["a", "b"], "gold": True}, "a question is"),
        ({"query": "q", "choices": ["a", ""], "gold": 0}, "a question is"),
        ({"choices": ["a", "b"], "gold": 0}, "a question is"),
        ({"query": "\ud800", "choices": ["a", "b"], "gold": 0}, "is not valid text"),
        ({"text": "x"}, "a question is"),
        ("text", "not a JSON object"),
    ],
)
def test_bad_questions_are_named(row: object, why: str, loaded: LoadedModel, tmp_path: Path) -> None:
    good = {"query": "q", "choices": ["a", "b"], "gold": "b"}
    bad = "{" if row == "text" else json.dumps(row)
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(good)}\n{bad}\n")
    with pytest.raises(DataError, match=rf"q\.jsonl, line 2: .*{why}"):
        evaluate_files(loaded.language, loaded.tokenizer, [tmp_path / "q.jsonl"], Settings(length=LENGTH))


def test_what_cannot_be_evaluated_is_refused(checkpoint: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "images.jsonl").write_text('{"content": [{"image": "a.png"}, {"text": "x"}]}\n')
    (tmp_path / "empty.txt").touch()
    whys = {"none.txt": "is no file", "binary": "is not UTF-8", "images.jsonl": "has images"}
    for name, why in {**whys, "empty.txt": "nothing to evaluate"}.items():
        command = ["eval", str(checkpoint), "--data", str(tmp_path / name), "--device", "cpu"]
        assert main(command) == ExitCode.DATA
        assert why in " ".join(capsys.readouterr().err.split())
    command = ["eval", str(checkpoint), "--data", str(tmp_path / "binary"), "--overlap", "99"]
    assert main(command) == ExitCode.CONFIG
    assert "set it lower" in capsys.readouterr().err
    assert main(["eval", str(checkpoint), "--data"]) == ExitCode.CONFIG
    assert "--data has no file" in capsys.readouterr().err


def test_a_choice_that_adds_no_token_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    class Joining(ByteTokenizer):
        """`12` is one token, as `1` is."""

        def encode(self, text: str) -> Any:
            return super().encode(text.replace("12", "1"))

    row = {"query": "1 + 11 = 1", "choices": ["2", "3"], "gold": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    settings = Settings(length=LENGTH, separator="")
    with pytest.raises(DataError, match=r"the choice '2' adds no token to '1 \+ 11 = 1'"):
        evaluate_files(loaded.language, Joining(), [tmp_path / "q.jsonl"], settings)


def test_pairs_without_a_context_begin_a_document() -> None:
    tokenizer = ByteTokenizer()
    assert encode_pair(tokenizer, "", " a") == Request(context=[256], continuation=[32, 97])
    assert encode_pair(tokenizer, "b  ", " a") == Request(context=[98], continuation=[32, 32, 32, 97])
