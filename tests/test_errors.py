"""What a person is told of many faults of a kind."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from braid.errors import (
    CHECKOUT,
    MAX_LISTED,
    BraidError,
    ConfigError,
    ExitCode,
    Problem,
    ScheduleError,
    enumeration,
    first_of,
    how_to_install,
)
from braid.pattern import PatternError


def test_the_first_faults_are_told_and_the_others_counted():
    faults = [f"fault {number}" for number in range(MAX_LISTED + 2)]
    assert first_of([]) == []
    assert first_of(faults[:MAX_LISTED]) == faults[:MAX_LISTED]
    assert first_of(faults[: MAX_LISTED + 1]) == [*faults[:MAX_LISTED], "... and 1 more of these"]
    assert first_of(faults, str.upper)[-2:] == [faults[MAX_LISTED - 1].upper(), "... and 2 more of these"]


def test_parts_are_enumerated_as_in_a_sentence():
    assert [enumeration(["a", "b", "c"][:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_a_schedule_that_breaks_its_rules_is_a_bug_told_without_a_traceback():
    error = ScheduleError([f"fault {number}" for number in range(MAX_LISTED + 3)])
    assert isinstance(error, BraidError), "the command line prints these alone"
    assert error.exit_code is ExitCode.BUG
    assert len(error.faults) == MAX_LISTED + 3
    first, *listed = str(error).splitlines()
    assert f"has {MAX_LISTED + 3} faults; nothing was started" in first
    assert "report it" in first
    assert listed == [*(f"fault {number}" for number in range(MAX_LISTED)), "... and 3 more of these"]
    assert "has 1 fault;" in str(ScheduleError(["fault"]))


def test_errors_come_back_whole_from_another_process():
    wrong = [Problem(field="optim.lr", value=-1, rule="must be above 0", remedy="a number above 0")]
    for error in (ConfigError(wrong), ScheduleError(["one", "other"]), PatternError("] is missing", "[*", 1)):
        same = pickle.loads(pickle.dumps(error))
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


SPELLED = re.compile(r"(pip install|install) '?braid\b")


def test_a_checkout_has_make_and_a_wheel_has_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, elsewhere = tmp_path / "a checkout", tmp_path / "env" / "bin"
    script, pip = checkout / "scripts" / "setup_venv.py", elsewhere / "pip"
    for file in (script, pip):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    made = {"checkout": checkout, "python": checkout / ".venv" / "bin" / "python"}
    monkeypatch.chdir(checkout)
    assert how_to_install("tokenizers", "transformers", **made) == "make venv"
    monkeypatch.chdir(tmp_path)
    assert how_to_install("triton", **made) == f"make -C '{checkout}' venv"
    assert how_to_install("wandb", **made, has_pip=True) == f"'{made['python']}' -m pip install wandb"
    # A Python that `make venv` did not make is not helped by it, and the shell's pip may not be its own.
    installed = {"checkout": checkout, "python": elsewhere / "python", "has_pip": True}
    monkeypatch.setenv("PATH", "/usr/bin")
    assert how_to_install("triton", **installed) == f"{elsewhere / 'python'} -m pip install triton"
    # uv makes environments without pip; other tools may leave it out, too.
    alone, python = {**installed, "has_pip": False}, elsewhere / "python"
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = f"{python} -m ensurepip && {python} -m pip install triton"
    assert how_to_install("triton", **alone) == expected
    (tmp_path / "uv").touch(0o755)
    assert how_to_install("triton", **alone) == f"uv pip install --python {python} triton"
    monkeypatch.setenv("PATH", f"{elsewhere}:/usr/bin")
    assert how_to_install("triton", "wandb", **installed) == "pip install triton wandb"


def test_no_message_or_page_installs_braid_by_name() -> None:
    files = [*CHECKOUT.glob("src/**/*.py"), *CHECKOUT.glob("docs/*.md"), CHECKOUT / "README.md"]
    assert len(files) > 100
    assert [str(file) for file in files if SPELLED.search(file.read_text())] == []
