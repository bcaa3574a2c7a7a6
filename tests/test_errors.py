"""What a person is told of many faults of a kind."""

from __future__ import annotations

from braid.errors import MOST_TOLD, first_of


def test_the_first_faults_are_told_and_the_others_counted():
    faults = [f"fault {number}" for number in range(MOST_TOLD + 2)]
    assert first_of([]) == []
    assert first_of(faults[:MOST_TOLD]) == faults[:MOST_TOLD]
    assert first_of(faults[: MOST_TOLD + 1]) == [*faults[:MOST_TOLD], "... and 1 more of these"]
    assert first_of(faults, str.upper)[-2:] == [faults[MOST_TOLD - 1].upper(), "... and 2 more of these"]
