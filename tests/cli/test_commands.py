"""The command line, as a person or a program meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from braid.cli import COMMANDS, main
from braid.errors import BraidError, ExitCode

ROOT = Path(__file__).resolve().parent.parent.parent


def every_kind_of_error(base=BraidError):
    return [base, *(kind for child in base.__subclasses__() for kind in every_kind_of_error(child))]


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"braid {command.name}" in text for command in COMMANDS)


def test_no_words_show_the_usage_and_are_an_error(capsys):
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("braid 0.")


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["patern", "*"]) == 2
    assert "did you mean 'pattern'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [each for each in COMMANDS if each.argument and not each.argument.startswith("[")],
    ids=lambda c: c.name,
)
def test_a_command_without_its_word_says_what_it_needs(command, capsys):
    assert main([command.name]) == 2
    assert f"`braid {command.name}` needs" in capsys.readouterr().err


def test_a_second_word_is_named(capsys):
    for words in (["watch", "runs/a", "runs/b"], ["train", "tiny", "steps"], ["eval", "runs/a", "text.txt"]):
        assert main(words) == ExitCode.CONFIG
        assert f"got {words[1]!r} and {words[2]!r}: braid {words[0]} " in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- pattern


def test_pattern_prints_a_table(capsys):
    assert main(["pattern", "[*-]|[*E]/*E", "--pp", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["4", "layers,", "2", "blocks,", "2", "segments,", "1", "MTP", "depth"]
    assert lines[3] == ["stage", "segment", "block", "layer", "kind"]
    assert lines[4] == ["0", "0", "0", "[*-]", "1", "*", "attention"]
    assert lines[7] == ["1", "1", "1", "[*E]", "4", "E", "moe"]
    assert lines[9] == ["1", "mtp", "0", "0", "[*E]", "2", "E", "moe"]


def test_pattern_prints_json(capsys):
    assert main(["pattern", "[*-]|[*E]/*E", "--pp", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in ("physical", "logical", "segments", "mtp")} == {
        "physical": 4,
        "logical": 2,
        "segments": [["[*-]"], ["[*E]"]],
        "mtp": {"depths": 1, "layers": "*E"},
    }
    assert told["stages"]["1"] == [
        {"vp": 0, "segment": 1, "blocks": ["[*E]"], "layers": [3, 4], "layers_before": 2, "blocks_before": 1}
    ]


@pytest.mark.parametrize("text", ["-M", "--", "-", ""])
def test_patterns_may_begin_with_a_dash_or_be_empty(text, capsys):
    assert main(["pattern", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["physical"] == len(text)


@pytest.mark.parametrize(("words", "caret"), [(["[*"], "  ^"), (["M*M", "--pp", "2"], "     ^")])
def test_a_bad_pattern_exits_2_with_the_caret_on_stderr(words, caret, capsys):
    assert main(["pattern", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == caret
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_pattern_does_not_load_torch():
    code = "import sys; from braid.cli import main; main(['pattern', '*']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_reader_that_leaves_early_is_no_error():
    """As `braid recipes | head` does. Unbuffered, so that the first line meets the closed pipe."""
    command = [sys.executable, "-u", "-m", "braid", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


# ------------------------------------------------------------------------------------ recipes and show


def test_a_folder_without_permission_is_named_without_a_traceback(monkeypatch, capsys):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["watch", "runs/of-others", "--once"]) == ExitCode.CONFIG
    assert "runs/of-others: this user may not read or write it" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "watch", "report", "show", "train"])
def test_a_name_that_no_file_can_have_is_shown_without_a_traceback(command, capsys):
    assert main([command, "x" * 5000]) == 2
    error = capsys.readouterr().err
    assert "File name too long" in error
    assert len(error) < 1000


@pytest.mark.parametrize(
    "option",
    [
        ("--world", "9" * 5000),
        ("--world", "100000"),
        ("--model.hidden", "9" * 30),
        ("--model.pattern", "[" * 50_000),
        ("--model.pattern", "*-" * 60_000),
    ],
    ids=lambda option: f"{option[0]} {option[1][:9]}",
)
def test_enormous_settings_are_refused_in_few_words_and_without_torch(option):
    words = ["train", "tiny", *option]
    command = [sys.executable, "-X", "importtime", "-m", "braid", *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    imports, said = [], []
    for line in ended.stderr.splitlines():
        (imports if line.startswith("import time:") else said).append(line)
    assert len("\n".join(said)) < 20_000
    assert not any(line.endswith(" torch") for line in imports)


def test_a_tensor_that_no_machine_can_address_is_refused(capsys):
    words = ["plan", "tiny", "--model.hidden", str(2**40), "--model.vocab", str(2**40)]
    assert main(words) == 2
    assert "more bytes than a machine can address" in capsys.readouterr().err


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"tiny", "deepseek-v3"} < set(names)


def test_show_prints_the_run_after_overrides(capsys):
    assert main(["show", "tiny", "--optim.lr", "3e-4", "--model.attention.qk-norm", "False"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert shown["optim.lr"] == "0.0003"
    assert shown["model.attention.qk_norm"] == "False"


def test_show_prints_json(capsys):
    assert main(["show", "tiny", "--train.steps", "7", "--optim.warmup-steps", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["steps"] == 7


def test_a_misspelt_field_names_the_nearest_and_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["show", "tiny", "--optim.lrr", "1"])
    assert caught.value.code == ExitCode.CONFIG
    assert "--optim.lr" in capsys.readouterr().err


def test_all_problems_of_a_run_are_printed_at_once(capsys):
    assert main(["show", "tiny", "--optim.lr", "-1", "--model.pattern", "[*", "--train.steps", "0"]) == 2
    text = capsys.readouterr().err
    assert all(field in text for field in ("optim.lr", "model.pattern", "train.steps"))


# ------------------------------------------------------------------------------------------ exit codes


def test_every_kind_of_failure_has_an_exit_code_and_is_documented():
    codes = {kind.exit_code for kind in every_kind_of_error() if kind is not BraidError}
    assert codes == set(ExitCode) - {ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    document = (ROOT / "docs" / "exit-codes.md").read_text()
    for code in ExitCode:
        assert f"| {code.value} | {code.name.lower().replace('_', ' ')} |" in document
