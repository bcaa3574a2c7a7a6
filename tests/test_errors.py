"""What a person is told of many faults of a kind."""

from __future__ import annotations

from braid.errors import MOST_TOLD, BraidError, ExitCode, ScheduleError, first_of


def test_the_first_faults_are_told_and_the_others_counted():
    faults = [f"fault {number}" for number in range(MOST_TOLD + 2)]
    assert first_of([]) == []
    assert first_of(faults[:MOST_TOLD]) == faults[:MOST_TOLD]
    assert first_of(faults[: MOST_TOLD + 1]) == [*faults[:MOST_TOLD], "... and 1 more of these"]
    assert first_of(faults, str.upper)[-2:] == [faults[MOST_TOLD - 1].upper(), "... and 2 more of these"]


def test_a_schedule_that_breaks_its_rules_is_a_bug_told_without_a_traceback():
    error = ScheduleError([f"fault {number}" for number in range(MOST_TOLD + 3)])
    assert isinstance(error, BraidError), "the command line prints these alone"
    assert error.exit_code is ExitCode.BUG
    assert len(error.faults) == MOST_TOLD + 3
    first, *listed = str(error).splitlines()
    assert f"has {MOST_TOLD + 3} faults; nothing was started" in first
    assert "report it" in first
    assert listed == [*(f"fault {number}" for number in range(MOST_TOLD)), "... and 3 more of these"]
    assert "has 1 fault;" in str(ScheduleError(["fault"]))
