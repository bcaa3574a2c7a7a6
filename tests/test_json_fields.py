"""Dataclasses from JSON values: what comes back, and every problem at once with its place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pytest

from braid.json_fields import read


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = (1,)
    pair: tuple[float, bool] | None = None


@dataclass(frozen=True)
class Whole:
    part: Part
    kind: Literal["first", "second"] = "first"
    shares: Mapping[str, float] | None = None
    parts: Mapping[str, Part] | None = None


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ({"part": {"name": "x"}}, Whole(Part("x"))),
        ({"part": {"name": "x", "sizes": [], "pair": [1, True]}}, Whole(Part("x", (), (1.0, True)))),
        (
            {"part": {"name": ""}, "kind": "second", "shares": {"b": 2, "a": 0.5}},
            Whole(Part(""), "second", {"b": 2.0, "a": 0.5}),
        ),
        ({"part": {"name": "x"}, "parts": {"y": {"name": "z"}}}, Whole(Part("x"), parts={"y": Part("z")})),
    ],
)
def test_values_come_back_as_their_fields_say(data, value):
    found, problems = read(Whole, data, "it")
    assert (found, problems) == (value, [])
    if found.shares:
        assert list(found.shares) == ["b", "a"]
        assert all(type(share) is float for share in found.shares.values())


def test_every_problem_has_its_place():
    data = {
        "part": {"name": 3, "sizes": [1, 2.0, True], "pair": [1]},
        "kind": "secnd",
        "shares": {"a": "x"},
        "parts": {"y": {"nme": "z"}},
        "more": 1,
    }
    found, problems = read(Whole, data, "it")
    assert found is None
    assert {problem.path: str(problem) for problem in problems} == {
        ("part", "name"): "it.part.name = 3: must be of type str",
        ("part", "sizes", 1): "it.part.sizes[1] = 2.0: must be of type int",
        ("part", "sizes", 2): "it.part.sizes[2] = True: must be of type int",
        ("part", "pair"): "it.part.pair = [1]: must have 2 values",
        ("kind",): "it.kind = 'secnd': must be one of first, second; did you mean 'second'?",
        ("shares", "a"): "it.shares[a] = 'x': must be of type float",
        ("parts", "y", "nme"): "it.parts[y].nme is not a known field; did you mean 'name'?",
        ("parts", "y"): "it.parts[y].name is missing",
        ("more",): "it.more is not a known field",
    }


@pytest.mark.parametrize("data", [None, 3, [], "part"])
def test_what_is_no_object_is_one_problem(data):
    found, (problem,) = read(Whole, data, "it")
    assert (found, problem.path) == (None, ())
    assert "must be an object with the fields of Whole" in str(problem)


def test_a_whole_number_that_no_float_holds_is_refused():
    value, problems = read(Whole, {"part": {"name": "x", "pair": [10**400, True]}}, "it")
    assert value is None
    assert [str(each) for each in problems] == [
        "it.part.pair[0]: a whole number of 401 digits is too large for a float"
    ]
