"""Restarts with fewer ranks: which slots are used next, and whole trainings that lose one and get it back."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.cli import main
from braid.errors import ExitCode
from braid.launch.elastic import START_FAILURES, Slots, largest_world, nearest_worlds
from tests.launch.test_worker_pool import RECIPE, braid, start, torchrun, workers_of

pytestmark = pytest.mark.costly("launchers start processes from nothing: each takes seconds to load torch")

# ---------------------------------------------------------------------------------------- which slots


@given(st.sets(st.integers(1, 20)), st.integers(0, 20), st.integers(1, 20))
def test_the_largest_world_that_fits_and_is_there(fitting, available, smallest):
    possible = {world for world in fitting if smallest <= world <= available}
    assert largest_world(fitting.__contains__, available, smallest) == max(possible, default=None)


def test_the_nearest_worlds_that_fit():
    assert nearest_worlds(lambda n: n % 8 == 0, 12, most=100) == (8, 16)
    assert nearest_worlds(lambda n: n % 8 == 0, 3, most=100) == (8,)
    assert nearest_worlds(lambda n: n in (1, 2, 4), 7, most=4) == (4,)
    assert nearest_worlds(lambda n: False, 5, most=100) == ()
    assert nearest_worlds(lambda n: n == 1, 0, most=100) == (1,)


def test_the_nearest_worlds_are_found_with_few_questions_however_many_ranks_were_asked_for():
    asked = []

    def fits(world: int) -> bool:
        asked.append(world)
        return 8 % world == 0

    assert nearest_worlds(fits, 10**9, most=8) == (8,)
    assert asked == [8]
    assert nearest_worlds(fits, 10**9, most=sys.maxsize) == ()
    assert len(asked) < 5000


def slots(folder: Path, *, count: int = 4, min_world: int = 1) -> Slots:
    """Of a run that fits on 1, 2 and 4 ranks."""
    file = folder / "out" / "out-of-service"
    return Slots(count, min_world=min_world, fits=(1, 2, 4).__contains__, file=file)


def test_slots_out_of_service_are_left_out_and_surplus_ones_wait(tmp_path):
    four = slots(tmp_path)
    assert four.usable() == (0, 1, 2, 3)
    four.file.parent.mkdir()
    four.file.write_text("1 is warm\n\nnot a slot\n9\n")
    assert four.out_of_service() == {1, 9}
    assert four.usable() == (0, 2)
    four.file.write_text("0\n1\n2\n")
    assert four.usable() == (3,)
    assert slots(tmp_path, min_world=2).usable() == ()


def test_lines_that_name_no_slot_are_passed_over(tmp_path):
    four = slots(tmp_path)
    four.file.parent.mkdir()
    odd = ["", "nothing", "-1", "9" * 5000, "9" * 20, "\u0663", "1x", "3 was taken away"]
    four.file.write_bytes("\n".join(odd).encode() + b"\n\xff\x00")
    assert four.out_of_service() == {3}


def test_a_run_changes_slots_if_it_can_grow_or_loses_one(tmp_path):
    four = slots(tmp_path)
    assert not four.should_change((0, 1, 2, 3))
    assert four.should_change((0, 2))
    four.file.parent.mkdir()
    four.file.write_text("3\n")
    assert four.should_change((0, 1, 2, 3))
    assert not four.should_change((0, 1))
    assert four.should_change((0, 3))
    four.file.write_text("0\n1\n2\n3\n")
    assert not four.should_change((0, 1))


def test_a_slot_that_fails_again_before_a_step_is_done_goes_out_of_service(tmp_path):
    four = slots(tmp_path)
    for _ in range(START_FAILURES - 1):
        assert four.note_failure(2, "was killed") is None
    four.note_progress()
    for _ in range(START_FAILURES - 1):
        assert four.note_failure(2, "was killed") is None
        assert four.note_failure(3, "was killed") is None
    note = four.note_failure(2, "was killed")
    assert f"remove its line from {four.file}" in note
    assert four.file.read_text() == "2 was killed, 2 times in a row before a step was done\n"
    assert four.usable() == (0, 1)


def test_a_slot_stays_in_use_if_the_file_cannot_be_written(tmp_path):
    four = slots(tmp_path)
    (tmp_path / "out").write_text("a file in the place of the folder")
    notes = [four.note_failure(2, "was killed") for _ in range(START_FAILURES)]
    assert "it stays in use" in notes[-1]
    assert four.usable() == (0, 1, 2, 3)


def test_without_min_world_no_slot_is_given_up(tmp_path):
    fixed = slots(tmp_path, min_world=4)
    assert [fixed.note_failure(1, "was killed") for _ in range(5)] == [None] * 5
    assert not fixed.file.exists()
    fixed.file.parent.mkdir()
    fixed.file.write_text("1\n")
    assert fixed.usable() == (0, 1, 2, 3)
    assert not fixed.should_change((0, 1, 2, 3))


# ------------------------------------------------------------------------------------ whole trainings


@pytest.fixture
def words(tmp_path, corpus):
    """`train` and its words, for a small run that writes to the folder of the test."""
    (tmp_path / "mine.py").write_text(RECIPE)
    return ["train", f"{tmp_path}/mine.py:small", "--data.sources", str(corpus), "--out", str(tmp_path / "out")]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--min-world", "2"], "--min-world 2 is about restarts: set --restarts N too"),
        (["--min-world", "4", "--restarts", "1"], "must be from 1 to 3, below the number of ranks"),
        (["--min-world", "0", "--restarts", "1"], "must be from 1 to 3, below the number of ranks"),
        (["--min-world", "3", "--restarts", "1"], "no number of ranks from 3 to 3 fits"),
    ],
)
def test_min_world_must_leave_a_choice(more, said, words, capsys):
    assert main([*words, "--world", "4", *more]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


@contextmanager
def slot_dies_while(gone: threading.Event, launcher: int) -> Iterator[None]:
    """Kill whatever runs on slot 3, as soon as it is seen, while `gone` is set."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            with suppress(OSError):  # processes end while they are looked at
                if gone.is_set() and (process := workers_of(launcher, "LOCAL_RANK").get(3)):
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
def test_a_run_that_loses_a_slot_goes_on_with_fewer_and_takes_it_back(words, tmp_path):
    """4 ranks; slot 3 dies in step 12 and whenever it is started again: 2 ranks; it returns: 4 ranks. The
    losses are those of one process."""
    words += ["--train.dtype", "fp64", "--train.steps", "200", "--train.save-every", "5"]
    listed, gone, worlds = tmp_path / "out" / "out-of-service", threading.Event(), []
    with start(braid(*words, "--world", "4", "--restarts", "4", "--min-world", "2")) as launcher:
        with slot_dies_while(gone, launcher.pid):
            for line in launcher.stdout:
                if line.startswith("ranks"):
                    worlds.append(line.split()[1])
                step = re.match(r"step +(\d+)/", line)
                if step and int(step[1]) == 12 and worlds == ["4:"]:
                    gone.set()
                if step and int(step[1]) >= 20 and worlds[-1] == "2:" and gone.is_set():
                    gone.clear()
                    listed.unlink()
        errors = launcher.stderr.read()
    assert launcher.returncode == ExitCode.OK, errors
    assert (worlds[0], *dict.fromkeys(worlds), worlds[-1]) == ("4:", "4:", "2:", "4:"), errors
    assert "braid: slot 3 failed 2 times in a row before a step was done: out of service" in errors
    assert "braid: going on with 2 ranks instead of 4; out of service: slot 3" in errors
    assert "1 wait, as no larger world fits" in errors
    assert "braid: going on with 4 ranks instead of 2" in errors
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 201)]
    assert len([line for line in lines if "recovery_s" in line]) >= 2
    assert main([*words, "--out", str(tmp_path / "alone")]) == ExitCode.OK
    alone = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-12)


@pytest.mark.long
def test_under_torchrun_ranks_that_do_not_fit_wait_and_end_with_the_others(words):
    three = ("--standalone", "--nproc-per-node", "3")
    with start(torchrun("braid", *words, "--min-world", "2", settings=three)) as agent:
        report, errors = agent.communicate()
    assert agent.returncode == 0, errors
    assert "braid: going on with 2 ranks of 3, the others wait" in errors
    assert "step 40/40" in report
    assert "ranks    2:" in report
