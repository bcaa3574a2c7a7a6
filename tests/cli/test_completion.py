"""`braid completion`: real shells read the scripts, and complete what the commands themselves accept."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

from braid import recipes
from braid.cli import COMMANDS, main
from braid.cli.completion import SCRIPTS, completions

Complete = Callable[..., list[str]]
OUTSIDE = {
    "bash": """
        source "$1"; shift
        COMP_WORDS=(braid "$@"); COMP_CWORD=$#
        _braid; printf '%s\\n' "${COMPREPLY[@]}"
    """,
    # What zsh's completion would call, printing what it is given.
    "zsh": """
        compdef() { }; compadd() { shift; print -l -- ${(M)@:#$PREFIX*} }
        _files() { print -l -- $PREFIX*(N) }
        _describe() { local -a all; all=(${(P)2}); print -l -- ${(M)${all%%:*}:#$PREFIX*} }
        source "$1"; shift
        words=(braid "$@"); CURRENT=$#words; PREFIX=$words[-1]
        _braid
    """,
    "fish": """
        source $argv[1]
        complete -C (string join -- ' ' braid $argv[2..-1]) | string replace -r '\\t.*' ''
    """,
}
"""Per shell, a script that takes the file and the words up to the cursor, and prints the completions."""


@pytest.fixture(scope="module", params=list(SCRIPTS))
def complete(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """The completions of a command line, by a real shell, in a folder with the file `mine.yaml`."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs a shell: apt-get install {shell}")
    folder = tmp_path_factory.mktemp(shell)
    (folder / "mine.yaml").touch()
    script = folder / "script"
    script.write_text(SCRIPTS[shell](COMMANDS, completions()))

    def complete(*words: str) -> list[str]:
        quiet = [] if shell == "fish" else ["-f"] if shell == "zsh" else ["--norc"]
        named = [] if shell == "fish" else [shell]
        command = [shell, *quiet, "-c", OUTSIDE[shell], *named, str(script), *words]
        home = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=folder, env=home, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr
        return [each for each in done.stdout.splitlines() if each]

    return complete


def test_commands_recipes_options_and_choices_are_completed(complete: Complete) -> None:
    assert {command.name for command in COMMANDS} <= set(complete(""))
    assert complete("wat") == ["watch"]
    assert set(recipes.bundled()) <= set(complete("train", ""))
    assert sorted(complete("plan", "tiny-m")) == ["tiny-mhc", "tiny-multimodal"]
    assert complete("train", "mi") == ["mine.yaml"]
    heads = complete("train", "tiny", "--model.mamba2.hea")
    assert sorted(heads) == ["--model.mamba2.head-dim", "--model.mamba2.heads"]
    assert sorted(complete("train", "tiny", "--optim.name", "")) == ["adamw", "muon"]
    assert complete("train", "tiny", "--optim.name", "muon", "--model.moe.routing", "top") == ["top_k"]
    assert complete("train", "tiny", "--train.recompute", "norm", "cor") == ["core"]
    assert complete("data", "b") == ["build"]
    assert sorted(complete("data", "build", "--format", "")) == ["chat", "text"]
    assert "--tokenizer" in complete("data", "build", "--")
    assert complete("data", "verify", "--tok") == []
    assert complete("eval", "runs/tiny", "--data", "mi") == ["mine.yaml"]
    assert set(SCRIPTS) <= set(complete("completion", ""))
    assert complete("report", "train", "--optim") == [], "a folder named like a command is none"


@pytest.mark.parametrize(
    "command",
    [
        "train tiny",
        "train deepseek-v3",
        "plan tiny-mhc",
        "import x",
        "data build",
        "checkpoint inspect x",
        "grid",
    ],
)
def test_every_option_of_the_help_is_completed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    flags = set(re.findall(r"^[│ ] (?:-h, )?(--[a-z][\w.-]*)", text, re.MULTILINE))
    name = " ".join(command.split()[: 2 if command.startswith(("data", "checkpoint")) else 1])
    (found,) = (each for each in completions() if each.name == name)
    offered = {option.flag.replace("--no-", "--") for option in found.options}
    assert len(flags) > 2
    assert {flag for flag in flags if not flag.startswith("--modules.")} <= offered


def test_every_command_is_completed() -> None:
    found = {each.name.split()[0] for each in completions()}
    assert {command.name for command in COMMANDS} - found == {"recipes"}


def test_the_script_of_a_shell_is_printed_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"](COMMANDS, completions())
    assert main(["completion", "--help"]) == 0
    assert "~/.zfunc/_braid" in capsys.readouterr().out
    assert main(["completion", "fihs"]) == 2
    assert "did you mean 'fish'?" in capsys.readouterr().err
    assert main(["completion", "bash", "zsh"]) == 2
    assert "takes no arguments" in capsys.readouterr().err
