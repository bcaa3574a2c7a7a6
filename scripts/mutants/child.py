"""One run of pytest in a process forked from one that has torch loaded, but nothing of braid.

Loading torch and its friends takes longer than most mutants live. The parent computes nothing: a process that
is forked after torch has started threads would hang in its first large product.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from scripts.mutants.selection import MARKERS

WARM = (
    "hypothesis",
    "numpy",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "tyro",
)
"""What children have already."""

SEED = 0
"""Of examples that tests draw: a mutant that was caught is caught again."""

CANNOT_RUN = 70
"""Exit code of a child in which pytest itself fails: that says nothing about the mutant."""

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class Note(NamedTuple):
    """What a run of pytest leaves behind."""

    failed: str | None
    """The first test that failed, or the file that could not be collected."""
    failures: list[str]
    """All of them; one, where the first failure ends the run."""
    hangs: bool
    """Whether it failed because ranks did not come to an end."""
    seconds: dict[str, float]
    """How long the tests of each file took."""


class _Notes:
    """A plugin that writes down what happens, as it happens: a mutant may kill its process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failed: str | None = None
        self.failures: list[str] = []
        self.hangs = False
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        self._look_at(report, str(report.longrepr) if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report, "")

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport, text: str) -> None:
        if not report.failed:
            return
        self.failures.append(report.nodeid)
        if self.failed is None:
            self.failed, self.hangs = report.nodeid, "hanging after" in text
        self._write()

    def _write(self) -> None:
        told = {
            "failed": self.failed,
            "failures": list(dict.fromkeys(self.failures)),
            "hangs": self.hangs,
            "seconds": self.seconds,
        }
        self.file.write_text(json.dumps(told))


def read_note(file: Path) -> Note:
    """What a run has left behind; nothing where it was killed before."""
    with suppress(OSError, ValueError):
        return Note(**json.loads(file.read_text()))
    return Note(failed=None, failures=[], hangs=False, seconds={})


def warm_up() -> None:
    """Load what all children need."""
    for name in WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is not looked at is not copied


def start(
    copy: Path, tests: Sequence[str], *, deselected: Sequence[str], all_failures: bool, log: Path, note: Path
) -> int:
    """Fork a process that runs tests in a copy of the repository, to the first failure or to the end; its
    number."""
    note.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(copy, tests, deselected, all_failures, log, note)
    return pid


def _be_child(
    copy: Path, tests: Sequence[str], deselected: Sequence[str], all_failures: bool, log: Path, note: Path
) -> NoReturn:
    code = CANNOT_RUN
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent()
        os.setsid()
        with open(os.devnull) as nothing, log.open("w") as told:
            os.dup2(nothing.fileno(), 0)
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
        _move_to(copy)
        more = [f"--deselect={each}" for each in deselected]
        plain = ["--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKERS]
        plain.append(f"--hypothesis-seed={SEED}")
        if not all_failures:
            plain.append("-x")
        temporary = f"--basetemp={copy.parent / (copy.name + '-tmp')}"
        code = int(pytest.main([*plain, temporary, *more, *tests], plugins=[_Notes(note)]))
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """However that ends: a session of its own would go on for an hour."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _move_to(copy: Path) -> None:
    """Whatever is imported from now on comes from the copy, here and in programs that tests start."""
    import hypothesis
    import torch

    before = Path.cwd()
    foreign = {"", ".", str(before), str(before / "src")}
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in foreign)]
    os.environ["PYTHONPATH"] = str(copy)
    # The next mutant of this copy has most byte code in common with this one.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    importlib.invalidate_caches()
    torch.set_num_threads(1)  # several children share the cores, and so none is to be judged by its speed
    slow = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    hypothesis.settings.register_profile("mutants", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("mutants")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scripts", "braid", "tests")]:
        if name != __name__:
            del sys.modules[name]


def end_session(pid: int) -> None:
    """Kill whatever a child has left running: all processes of the session that it leads."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid:
                os.kill(int(entry.name), signal.SIGKILL)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def exit_of(status: int) -> Any:
    """The exit code of a child, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(status)
