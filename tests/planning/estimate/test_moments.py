"""Activations that are there together, op by op."""

from __future__ import annotations

from braid.planning.estimate.moments import _sums


def test_what_an_op_keeps_is_there_from_its_first_place_to_its_last():
    assert _sums(4, [((1, 2), 5)]) == [0, 5, 5, 0]
    assert _sums(4, [((0, 3), 1), ((3,), 10), ((2, 3), 100)]) == [1, 1, 101, 111]
    assert _sums(0, []) == []
