"""Training, generating and building data from the command line, as a person does it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid import checkpoint
from braid.cli import main
from braid.cli.next_steps import next_commands, program, prompt_of
from braid.errors import ExitCode
from braid.planning.plan import plan
from tests.commands import start
from tests.data.pictures import png, write_rows
from tests.data.test_images import bomb
from tests.runs import small_run

RECIPE = """
from braid.architecture import Attention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train

def small() -> Run:
    '''For tests.'''
    return Run(
        model=Model(
            pattern="[*-][*E]", hidden=16, vocab=257, dropout=0.1,
            attention=Attention(heads=2, kv_heads=1, head_dim=8),
            mlp=Mlp(ffn=24), moe=Moe(experts=4, top_k=2, ffn=8),
        ),
        data=Data(sequence_tokens=32),
        optim=Optim(lr=1e-2),
        train=Train(steps=20, batch_samples=4, save_every=10, log_every=1, eval_samples=4),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recipe and a corpus in it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.py").write_text(RECIPE)
    (folder / "texts").mkdir()
    for i in range(30):
        (folder / "texts" / f"{i}.txt").write_text(f"text number {i}, " + "and so on, " * (i % 9))
    words = ["data", "build", "--input", str(folder / "texts"), "--output", str(folder / "corpus")]
    assert main([*words, "--validation", "0.2"]) == 0
    return folder


def test_data_commands_tell_of_images(tmp_path, capsys):
    rows = [{"content": [{"image": "0.png"}, {"video": ["0.png"] * 2}, {"text": "x"}]}, {"text": "y"}]
    file = write_rows(tmp_path, {"0.png": png(4, 4)}, rows)
    build = ["data", "build", "--input", str(file), "--output", str(tmp_path / "out"), "--validation", "0"]
    assert main(build) == 0
    said = capsys.readouterr().out
    assert "documents: 2; tokens: 6 from" in said
    assert "with 1 image and 1 video" in said
    assert said.rstrip().endswith("--modules.NAME.items image")
    assert main(["data", "verify", "--source", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith("2 documents, 6 tokens, 1 image and 1 video, all valid\n")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.png", png(9, 9)[:-30], "is truncated"),
        ("huge.png", bomb(60_000, 60_000), "is 60,000 x 60,000 pixels"),
        ("../away.png", png(4, 4), "leads out of"),
    ],
)
def test_data_build_names_the_image_that_it_refuses(name, content, reason, tmp_path, capsys):
    rows = [{"text": "y"}, {"content": [{"text": "x"}, {"image": name}]}]
    file = write_rows(tmp_path / "in", {name: content}, rows)
    build = ["data", "build", "--input", str(file), "--output", str(tmp_path / "out"), "--validation", "0"]
    assert main(build) == ExitCode.DATA
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"rows\.jsonl, line 2, content\[1\]\.image: {re.escape(name)}: {reason}", said)
    assert not (tmp_path / "out").exists()


def words_for(folder, out, *more):
    return ["train", f"{folder}/mine.py:small", "--data.sources", f"{folder}/corpus", "--out", str(out), *more]


def stop_at(words, step, number):
    """Start a run, send it a signal when it tells of a step, and return its exit code and last words."""
    with start(words) as process:
        for line in process.stdout:
            if line.startswith(f"step {step:>2}/20"):
                process.send_signal(number)
                break
        _, errors = process.communicate()
        return process.returncode, errors


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def tensors(out):
    path = checkpoint.latest(out / "checkpoints").path
    assert path.name == "step-00000020"
    manifest = checkpoint.read_manifest(path)
    like = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in manifest.tensors.items()}
    return checkpoint.read(path, like)


@pytest.fixture(scope="module")
def whole(folder):
    """A run of 20 steps in one go."""
    out = folder / "whole"
    with start(words_for(folder, out)) as process:
        told, errors = process.communicate()
    assert process.returncode == 0, errors
    return out, told


def test_a_run_tells_what_it_does_and_where_everything_is(whole):
    out, told = whole
    for words in (
        "model ",
        "kernels ",
        "step 20/20",
        "validation loss",
        "sample ",
        "unigram entropy of the data",
    ):
        assert words in told
    assert str(out / "checkpoints" / "step-00000020") in told
    assert str(out / "metrics.jsonl") in told
    generate, train, show = told.splitlines()[-3:]
    program = [sys.executable, "-m", "braid"]
    assert shlex.split(generate)[:5] == [*program, "generate", str(out)]
    assert shlex.split(train) == [*program, *words_for(out.parent, out), "--train.steps", "40"]
    assert shlex.split(show) == [*program, "show", *words_for(out.parent, out)[1:4]]
    assert "\x1b" not in told


@pytest.mark.long
def test_ranks_tell_of_schedule_trace_and_commands_that_work_as_they_stand(folder, tmp_path, monkeypatch):
    """From a folder with a blank in its name, without the program on the path."""
    out, trace = tmp_path / "the run", tmp_path / "the trace.json"
    mesh = ["--world", "2", "--device", "cpu", "--mesh.ep", "2", "--mesh.overlap", "True"]
    more = ["--train.steps", "3", "--train.recompute-span", "2", "--trace", str(trace), "--trace-steps", "2:2"]
    with start(words_for(folder, out, *mesh, *more)) as process:
        told, errors = process.communicate()
    assert process.returncode == 0, errors
    rows = dict(line.split(maxsplit=1) for line in told.splitlines() if len(line.split()) > 1)
    assert rows["schedule"] == "overlapped"
    assert rows["trace"] == f"{trace}: open it in https://ui.perfetto.dev"
    assert len(json.loads(trace.read_text())["traceEvents"]) > 10
    assert errors.count("braid: mesh.overlap needs a second micro-batch") == 1, "rank 0 alone warns"
    assert errors.count("braid: train.recompute_span 2 changes nothing") == 1
    generate, train, show = told.splitlines()[-3:]
    assert shlex.split(train)[4:] == [*words_for(folder, out, *mesh, *more[2:])[1:], "--train.steps", "6"]
    done = subprocess.run(
        f"{generate} --tokens 3",
        shell=True,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/nowhere"},
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    called, shown = shlex.split(show)[:3], shlex.split(show)[3:]
    assert called == shlex.split(generate)[:3], "the program that has just worked"
    assert main(shown) == 0


def test_a_trace_that_has_no_steps_is_not_announced(folder, tmp_path, capsys):
    more = [
        "--train.steps",
        "1",
        "--train.save-every",
        "0",
        "--device",
        "cpu",
        "--trace",
        f"{tmp_path}/trace.json",
    ]
    assert main([*words_for(folder, tmp_path / "out"), *more]) == 0
    told = capsys.readouterr()
    assert "is empty: the run had none of the steps 2 to 4" in told.err
    assert "perfetto" not in told.out
    assert "mesh.overlap" not in told.err


PROGRAM = ("/opt/bin/braid",)


@pytest.mark.parametrize(
    ("given", "environment", "again"),
    [
        (["--world", "2"], {"BRAID_LAUNCHER": "1", "LOCAL_WORLD_SIZE": "2"}, ["--world", "2"]),
        ([], {"LOCAL_WORLD_SIZE": "2"}, ["--world", "2"]),
        (["--world=2"], {"LOCAL_WORLD_SIZE": "2"}, ["--world", "2"]),
        ([], {"LOCAL_WORLD_SIZE": "1"}, None),
        ([], {}, None),
    ],
)
def test_as_many_ranks_are_started_again_whoever_started_them(given, environment, again):
    run = small_run()
    run = replace(run, mesh=replace(run.mesh, tp=2))
    globs = ["--trained", "blocks.*", "--lr-share", "blocks.0.*", "0.5"]
    words = ["my recipe.py:small", "--mesh.tp", "2", "--train.steps=8", *globs, "--trace", "x.json", *given]
    generate, train, show = next_commands(words, Path("out"), plan(run, 2), PROGRAM, environment)
    told = ["train", "my recipe.py:small", "--mesh.tp", "2", *globs, "--trace", "x.json"]
    assert shlex.split(train, comments=True) == [*PROGRAM, *told, *(again or []), "--train.steps", "16"]
    assert train.endswith("# under the launcher that started this run") == (again is None)
    assert shlex.split(generate) == [*PROGRAM, "generate", "out", "--prompt", "class "]
    fields = ["--mesh.tp", "2", "--train.steps=8", *globs]
    assert shlex.split(show) == [*PROGRAM, "show", "my recipe.py:small", *fields, "--world", "2"]


def test_what_to_generate_from_suits_the_data(tmp_path):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "chat_template.jinja").write_text("{{ messages }}")
    notes, chats = str(tmp_path / "notes"), str(tmp_path / "chats")
    assert prompt_of((), "def ").options == ["--prompt", "class "]  # the standard library
    assert prompt_of((notes,), "\nTo do today:\n- read").options == ["--prompt", "To do today:"]
    assert prompt_of((notes,), "\x1b[2J").options == ["--prompt", "The "]
    assert prompt_of((notes,), "").options == ["--prompt", "The "]
    assert prompt_of((notes, chats), "<|im_start|>").options == ["--chat"]


def test_ranks_name_the_program_that_started_them():
    assert program({"BRAID_PROGRAM": "'/opt/my programs/braid'"}) == ["/opt/my programs/braid"]


@pytest.mark.parametrize("path", ["/opt/bin/braid", ".venv/bin/braid"])
def test_a_script_is_called_by_its_path_and_anything_else_by_the_interpreter(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path, "train"])
    assert program() == [path]
    monkeypatch.setattr(sys, "argv", ["/somewhere/braid/__main__.py", "train"])
    assert program() == [sys.executable, "-m", "braid"]


def assert_equals_one_go(out, whole):
    assert losses(out) == losses(whole)
    again, once = tensors(out), tensors(whole)
    assert again.keys() == once.keys()
    assert [name for name in once if not torch.equal(again[name], once[name])] == []


def test_stopped_and_started_again_equals_one_go_bit_for_bit(folder, whole, tmp_path, capsys):
    exit_code, errors = stop_at(words_for(folder, tmp_path), 15, signal.SIGTERM)
    assert exit_code == ExitCode.PREEMPTED, errors
    assert main(words_for(folder, tmp_path)) == 0
    assert "continues from step" in capsys.readouterr().out
    assert_equals_one_go(tmp_path, whole[0])


def test_killed_and_started_again_it_goes_on_although_nobody_watches_any_more(folder, whole, tmp_path):
    """And equals one go bit for bit. The save of step 10 waits until that of step 5 is whole."""
    words = words_for(folder, tmp_path, "--train.save-every", "5")
    exit_code, errors = stop_at(words, 15, signal.SIGKILL)
    assert exit_code == -signal.SIGKILL, errors
    with start(words) as process:
        assert any("continues from step" in line for line in process.stdout)
        process.stdout.close()
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert_equals_one_go(tmp_path, whole[0])


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(folder, whole, tmp_path, capsys):
    out = shutil.copytree(whole[0], tmp_path / "run")
    checkpoints = sorted((out / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for path in checkpoints:
        os.truncate(path / "part-00000.safetensors", 100)
    before = contents(out)
    assert main(words_for(folder, out)) == ExitCode.CHECKPOINT
    text = capsys.readouterr().err
    assert all(f"{path} is damaged" in text for path in checkpoints)
    assert "--start-over" in text
    assert contents(out) == before
    assert main(words_for(folder, out, "--start-over", "--train.steps", "1")) == 0
    after = contents(out)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {
        "step-00000001",
        *(f"{path.name}.damaged" for path in checkpoints),
    }
    assert after["metrics-cut.jsonl"] == before["metrics.jsonl"]
    assert len(after["metrics.jsonl"].splitlines()) == 1


def contents(out):
    """Every file of a run by its name, but the lock, which every command holds."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_fine_tuning_wants_the_model_of_the_checkpoint(folder, whole, tmp_path, capsys):
    words = [*words_for(folder, tmp_path / "tuned", "--init", str(whole[0])), "--train.steps", "1"]
    assert main([*words, "--model.norm-eps", "0.1", "--model.moe.scale", "2.0"]) == ExitCode.CHECKPOINT
    text = capsys.readouterr().err
    assert f"the model in {whole[0]}/checkpoints/step-00000020 and that of the run differ in 2 settings" in text
    assert "model.norm_eps = 0.1\n" in text
    assert "  set   1e-05, or --init-allow model.norm_eps\n" in text
    assert "model.moe.scale = 2.0\n" in text
    assert main([*words, "--model.dropout", "0.0", "--model.pattern", "[*-]|[*E]"]) == 0
    assert f"a new run from the weights of {whole[0]}" in capsys.readouterr().out


def test_the_plan_of_a_start_is_printed_and_nothing_is_trained(folder, whole, tmp_path, capsys):
    words = words_for(folder, tmp_path / "tuned", "--model.tied", "False", "--init-plan")
    assert main(words) == ExitCode.CONFIG
    assert "set --init PATH" in capsys.readouterr().err
    words += ["--init", str(whole[0]), "--init-rules"]
    assert main([*words, "ties"]) == ExitCode.CONFIG
    assert "there is no such rule" in capsys.readouterr().err
    assert main([*words, "untie", "fresh:final_norm.*", "--init-allow", "model.norm_eps"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(re.fullmatch(r"head\.weight \[\d+, \d+\] <- embedding\.weight", line) for line in lines)
    assert any(re.fullmatch(r"final_norm\.weight \[\d+\] <- fresh", line) for line in lines)
    assert not (tmp_path / "tuned").exists()


def test_generation_is_the_same_for_the_same_seed(whole, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        words = ["generate", str(whole[0]), "--prompt", "text ", "--tokens", "30", "--seed", seed]
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("text ")
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate", "nowhere"], ExitCode.CHECKPOINT, "nowhere"),
        (
            ["train", "{folder}/mine.py:small", "--data.sources", "nowhere"],
            ExitCode.DATA,
            "nowhere does not exist",
        ),
        (["train", "{folder}/mine.py:small", "--model.vocab", "200"], ExitCode.CONFIG, "model.vocab = 200"),
        (["train", "{folder}/mine.py:small", "--mesh.pp", "2"], ExitCode.CONFIG, "mesh.pp"),
        (["train", "{folder}/mine.py:small", "--train.steps", "0"], ExitCode.CONFIG, "train.steps = 0"),
        (["data", "build", "--input", "nowhere", "--output", "{folder}/x"], ExitCode.DATA, "nowhere"),
        (
            ["data", "build", "--input", "{folder}/texts", "--output", "{folder}/corpus"],
            ExitCode.DATA,
            "exists",
        ),
        (["data", "bild"], ExitCode.CONFIG, "did you mean 'build'?"),
    ],
)
def test_what_cannot_work_says_why_and_exits_by_kind(
    words, code, message, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(folder=folder) for word in words]) == code
    assert message in capsys.readouterr().err


def test_a_corrupt_shard_is_named_before_training_starts(folder, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    words = ["data", "build", "--input", str(folder / "texts"), "--output", str(corpus), "--validation", "0"]
    assert main(words) == 0
    shard = max(corpus.iterdir(), key=lambda path: path.stat().st_size if path.name != "index.json" else 0)
    shard.write_bytes(shard.read_bytes()[:-2])
    assert main([*words_for(folder, tmp_path / "out"), "--data.sources", str(corpus)]) == ExitCode.DATA
    assert shard.name in capsys.readouterr().err
    assert main(["data", "verify", "--source", str(corpus)]) == ExitCode.DATA


def test_supervised_fine_tuning_on_rows_with_prompts(folder, tmp_path, capsys):
    rows = [{"prompt": f"what is {i}? ", "response": f"it is {i}."} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "build", "--input", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "rows")]
    assert main(words) == 0
    more = ["--data.packing", "documents", "--train.steps", "2", "--train.save-every", "0"]
    words = [*words_for(folder, tmp_path / "out"), "--data.sources", str(tmp_path / "rows"), *more]
    assert main(words) == 0
    assert losses(tmp_path / "out")[0] > 0


def test_a_padded_vocabulary_trains_and_generates(folder, tmp_path, capsys):
    more = ["--model.vocab", "1024", "--train.steps", "2", "--train.save-every", "0"]
    assert main([*words_for(folder, tmp_path), *more]) == 0
    words = ["generate", str(tmp_path / "checkpoints"), "--temperature", "1e-320", "--prompt", "\udcff"]
    assert main([*words, "--tokens", "20"]) == 0


@pytest.mark.parametrize("option", [["--temperature", "nan"], ["--tokens", "-1"], ["--seed", "9" * 30]])
def test_generation_refuses_what_makes_no_sense(option, whole, capsys):
    assert main(["generate", str(whole[0]), *option]) == ExitCode.CONFIG
    assert option[0][2:] in capsys.readouterr().err
