"""The grid of ranks: who is with whom, for any arrangement, and what is refused."""

import json
import subprocess
import sys
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.cli import main
from braid.errors import ConfigError
from braid.topology import DENSE, EXPERT, FAMILIES, Grid, View, standard, standard_problems

DENSE_AXES, EXPERT_AXES = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
ALL_AXES = ((DENSE, DENSE_AXES), (EXPERT, EXPERT_AXES))


def read(text: str) -> tuple[tuple[int, ...], ...]:
    """`01 23` or `0,8 1,9`: groups as the examples write them."""
    return tuple(
        tuple(int(rank) for rank in (group.split(",") if "," in group else group)) for group in text.split()
    )


def subsets(axes):
    return chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1))


def by_definition(grid: Grid, axes, view: str):
    """The family by its definition alone: ranks that agree on every other axis, one group after another."""
    names, sizes = grid.view(view).names, grid.view(view).sizes
    found: dict[tuple[int, ...], list[int]] = {}
    for place, rank in enumerate(grid.ranks):
        kept = []
        for name, size in zip(names, sizes, strict=True):
            place, coordinate = divmod(place, size)
            if name not in axes:
                kept.append(coordinate)
        found.setdefault(tuple(kept), []).append(rank)
    return tuple(sorted(tuple(group) for group in found.values()))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def grids(draw) -> Grid:
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    etp = draw(st.sampled_from(divisors(tp * cp * dp)))
    ep = draw(st.sampled_from(divisors(tp * cp * dp // etp)))
    return standard(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, offset=draw(st.integers(0, 5)))


# -------------------------------------------------------------------------------------------- examples


def test_example_1():
    grid = Grid(dense=View.of(tp=2, cp=2, dp=2))
    assert grid.groups("tp") == read("01 23 45 67")
    assert grid.groups("cp") == read("02 13 46 57")
    assert grid.groups("dp") == read("04 15 26 37")
    assert grid.groups({"cp", "dp"}) == read("0246 1357")
    assert grid.groups({"tp", "cp"}) == read("0123 4567")


def test_example_2():
    grid = standard(tp=2, cp=1, dp=4, pp=1, etp=1, ep=4)
    assert grid.view(EXPERT).size_of("edp") == 2
    assert grid.groups("dp") == read("0246 1357")
    assert grid.groups("ep", EXPERT) == read("0123 4567")
    assert grid.groups("edp", EXPERT) == read("04 15 26 37")


def test_example_3():
    grid = standard(tp=2, cp=1, dp=4, pp=2, etp=1, ep=4)
    stages = read("0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15")
    assert grid.groups("pp") == grid.groups("pp", EXPERT) == stages
    assert grid.groups("ep", EXPERT) == read("0123 4567 8,9,10,11 12,13,14,15")
    assert grid.groups("edp", EXPERT) == read("0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15")
    assert grid.groups(("tp", "pp")) == read("0,1,8,9 2,3,10,11 4,5,12,13 6,7,14,15")
    assert grid.groups(("etp", "ep", "pp"), EXPERT) == read("0,1,2,3,8,9,10,11 4,5,6,7,12,13,14,15")


def test_runs_are_neighbours_along_an_axis():
    grid = standard(tp=4, dp=2)
    assert grid.runs("tp", 2) == read("01 23 45 67")
    assert grid.runs("dp", 2) == grid.groups("dp")
    assert grid.runs("tp", 1) == read("0 1 2 3 4 5 6 7")
    assert grid.run_of(6, "tp", 2) == (6, 7)


def test_listed_ranks_stand_in_for_places():
    grid = Grid(dense=View.of(tp=2, dp=2), explicit=(1, 3, 4, 9))
    assert grid.groups("tp") == ((1, 3), (4, 9))
    assert grid.groups("dp") == ((1, 4), (3, 9))
    assert grid.group_of(9, "dp") == (3, 9)
    assert grid.coordinates(4) == {"tp": 0, "dp": 1}


@pytest.mark.parametrize("axes", [("dp", "tp"), ["tp", "dp"], {"dp", "tp"}, frozenset(("tp", "dp"))])
def test_axes_come_in_any_order_and_in_any_collection(axes):
    assert standard(tp=2, cp=2, dp=2).groups(axes) == read("0145 2367")


def test_sizes_may_be_numpy_integers():
    grid = Grid(dense=View.of(tp=np.int64(2), dp=np.int32(2)))
    assert grid.groups("dp") == read("02 13")
    assert json.dumps(grid.groups("dp")) == "[[0, 2], [1, 3]]"


# ------------------------------------------------------------------------------------------ invariants


@settings(max_examples=60, deadline=None)
@given(grids())
def test_families_are_what_their_definition_says(grid):
    for view, names in ALL_AXES:
        for axes in subsets(names):
            assert grid.groups(axes, view) == by_definition(grid, axes, view)


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_one_ranks_group_is_the_one_of_the_family(grid, data):
    rank = data.draw(st.sampled_from(grid.ranks))
    for view, names in ALL_AXES:
        for axes in subsets(names):
            (mine,) = (group for group in grid.groups(axes, view) if rank in group)
            assert grid.group_of(rank, axes, view) == mine
        for axis in names:
            length = data.draw(st.sampled_from(divisors(grid.view(view).size_of(axis))))
            (mine,) = (run for run in grid.runs(axis, length, view) if rank in run)
            assert grid.run_of(rank, axis, length, view) == mine
            assert sorted(chain.from_iterable(grid.runs(axis, length, view))) == list(grid.ranks)


def check_invariants(grid: Grid, ranks) -> None:
    """I1 to I6 and I8 of a standard grid; those that speak of one rank, for `ranks`."""
    sizes = dict(zip(grid.dense.names, grid.dense.sizes, strict=True))
    slab = sizes["tp"] * sizes["cp"] * sizes["dp"]
    assert grid.size == slab * sizes["pp"] == Grid(dense=grid.dense).size  # I2
    for view, names in ALL_AXES:
        for axes in subsets(names):
            groups = grid.groups(axes, view)
            assert sorted(chain.from_iterable(groups)) == list(grid.ranks)  # I1
            assert {len(group) for group in groups} == {
                np.prod([grid.view(view).size_of(a) for a in axes])
            }  # I5
            if "pp" not in axes:
                stages = [{(rank - grid.offset) // slab for rank in group} for group in groups]
                assert all(len(stage) == 1 for stage in stages)  # I3
    assert grid.groups("pp") == grid.groups("pp", EXPERT)  # I4
    if grid.dense.sizes == grid.view(EXPERT).sizes:  # I6
        for dense, expert in zip(DENSE_AXES, EXPERT_AXES, strict=True):
            assert grid.groups(dense) == grid.groups(expert, EXPERT)
    for rank in ranks:  # I8
        for dense, expert in ((d, e) for d in DENSE_AXES for e in EXPERT_AXES):
            check_meeting(grid, rank, dense, expert)


def check_meeting(grid: Grid, rank: int, dense: str, expert: str) -> None:
    """A dense and an expert group meet in the ranks of one that agree on all other axes of the other view."""

    def others(one: int) -> dict[str, int]:
        return {axis: at for axis, at in grid.coordinates(one, EXPERT).items() if axis != expert}

    met = set(grid.group_of(rank, dense)) & set(grid.group_of(rank, expert, EXPERT))
    assert met == {one for one in grid.group_of(rank, dense) if others(one) == others(rank)}


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_invariants(grid, data):
    check_invariants(grid, [data.draw(st.sampled_from(grid.ranks))])


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 4, "ep": 4},
        {"tp": 2, "cp": 2, "dp": 2, "etp": 2, "ep": 2},
        {"tp": 2, "dp": 4, "pp": 2, "ep": 4},
        {"tp": 8, "cp": 2, "dp": 64, "pp": 16, "etp": 2, "ep": 32},
    ],
    ids=["8 ranks", "8 ranks, equal factors", "16 ranks", "16,384 ranks"],
)
def test_invariants_of_named_arrangements(sizes):
    grid = standard(**sizes)
    check_invariants(grid, [0, grid.size // 3, grid.size - 1])


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 100))
def test_an_offset_only_moves(grid, by):
    moved = Grid(dense=grid.dense, others=grid.others, shared=grid.shared, offset=grid.offset + by)
    for view, axes in FAMILIES.values():
        expected = tuple(tuple(rank + by for rank in group) for group in grid.groups(axes, view))
        assert moved.groups(axes, view) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=5, max_size=5), st.permutations(range(5)))
def test_axes_are_shared_exactly_where_their_groups_are_equal(sizes, order):
    """Any two axes, in any two orders: the closed form agrees with the enumerations, singly and jointly."""
    names = ("a", "b", "c", "d", "e")
    one = View(names=names, sizes=tuple(sizes))
    other = View(names=tuple(names[i] for i in order), sizes=tuple(sizes[i] for i in order))
    apart = Grid(dense=one, others={"other": other})
    equal = all(apart.groups(axes) == apart.groups(axes, "other") for axes in ("a", "b", ("a", "b")))
    try:
        Grid(dense=one, others={"other": other}, shared=("a", "b"))
    except ConfigError:
        assert not equal
    else:
        assert equal


def test_a_name_may_mean_different_things_in_two_views():
    grid = Grid(dense=View.of(a=2, b=4), others={"other": View.of(a=4, b=2)})
    assert grid.groups("a") == read("01 23 45 67")
    assert grid.groups("a", "other") == read("0123 4567")


# ---------------------------------------------------------------------------------------------- errors

GOOD = standard(tp=2, dp=4, pp=2, ep=4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: View(names=("tp", "tp"), sizes=(2, 2)), ["'tp' is repeated", "another name"]),
        (lambda: View.of(tp=0), ["tp = 0", "1 or more"]),
        (lambda: View.of(tp=-2, dp=-2), ["tp = -2", "dp = -2", "1 or more"]),
        (lambda: View.of(tp=2.0), ["tp = 2.0", "whole number"]),
        (lambda: View(names=("tp", "dp"), sizes=(2,)), ["one size per axis", "as many sizes as names"]),
        (lambda: View(names=(), sizes=()), ["at least one axis"]),
        (lambda: Grid(dense=View.of(tp=2), offset=-1), ["offset = -1", "0 or more"]),
        (lambda: Grid(dense=View.of(tp=2), explicit=(3, 3)), ["3 3", "unique", "sorted"]),
        (lambda: Grid(dense=View.of(tp=2), explicit=(3, 1)), ["ascend", "sorted"]),
        (lambda: Grid(dense=View.of(tp=2), explicit=(-1, 1)), ["non-negative"]),
        (lambda: Grid(dense=View.of(tp=2), explicit=(1, 2, 3)), ["has 2 ranks, but 3 are given"]),
        (lambda: Grid(dense=View.of(tp=2), explicit=(1, 2), offset=1), ["not both"]),
        (lambda: Grid(dense=View.of(tp=2), others={"dense": View.of(dp=2)}), ["another name"]),
        (
            lambda: Grid(dense=View.of(tp=2, dp=2), others={"expert": View.of(ep=3)}),
            ["ep 3 = 3", "tp 2 x dp 2 = 4", "product is 4"],
        ),
        (lambda: Grid(dense=View.of(tp=2), shared=("tp", "tp")), ["'tp' is repeated"]),
        (lambda: Grid(dense=View.of(tp=2), shared=("pp",)), ["'pp'", "the dense view has no such axis"]),
        (
            lambda: Grid(dense=View.of(tp=2), others={"expert": View.of(ep=2)}, shared=("tp",)),
            ["the expert view has no such axis"],
        ),
        (lambda: GOOD.groups(()), ["at least one axis"]),
        (lambda: GOOD.groups(("tp", "tp")), ["'tp' is repeated"]),
        (lambda: GOOD.groups("tpx"), ["'tpx'", "no such axis", "did you mean 'tp'?"]),
        (lambda: GOOD.groups("tp-cp"), ["no such axis", "one of tp, cp, dp, pp"]),
        (lambda: GOOD.groups(("tp", "ep")), ["the expert view has", "axes of one view"]),
        (lambda: GOOD.groups(("ep", "dp"), EXPERT), ["'dp'", "the dense view has"]),
        (lambda: GOOD.groups("ep", "experts"), ["no such view", "did you mean 'expert'?"]),
        (lambda: GOOD.coordinates(16), ["rank = 16", "0 to 15"]),
        (lambda: GOOD.group_of(-1, "tp"), ["rank = -1", "0 to 15"]),
        (lambda: GOOD.runs("dp", 3), ["length = 3", "divide dp (4)", "one of 1, 2, 4"]),
        (lambda: GOOD.run_of(0, "dp", 0), ["length = 0"]),
        (lambda: standard(tp=2, dp=4, ep=3), ["ep = 3", "must divide tp x cp x dp (8)", "2 or 4"]),
        (lambda: standard(tp=2, dp=4, ep=4, etp=4), ["ep = 4", "tp x cp x dp / etp (2)"]),
        (lambda: standard(tp=2, dp=4, etp=3), ["etp = 3", "must divide tp x cp x dp (8)"]),
        (lambda: standard(tp=0, pp=-1), ["tp = 0", "pp = -1", "2 problems"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule_and_a_remedy(make, told):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(part in str(caught.value) for part in told), str(caught.value)
    assert all(problem.rule and problem.remedy for problem in caught.value.problems)


def test_a_shared_axis_that_differs_is_refused_with_both_enumerations():
    dense, expert = View.of(tp=2, pp=2, dp=4), View.of(etp=1, ep=4, pp=2, edp=2)
    with pytest.raises(ConfigError) as caught:
        Grid(dense=dense, others={"expert": expert}, shared=("pp",))
    text = str(caught.value)
    assert "(0,4) (1,5) (2,6) (3,7) and 4 more" in text
    assert "(0,2) (1,3) (4,6) (5,7) and 4 more" in text


def test_a_grid_may_be_smaller_than_the_job_but_not_larger():
    grid = standard(dp=4, offset=2)
    assert not list(grid.problems_in(6))
    assert not list(grid.problems_in(8))
    (problem,) = grid.problems_in(5)
    assert (problem.field, problem.value, problem.remedy) == ("world", 5, "6 or more ranks")


def test_problems_of_an_arrangement_carry_the_names_of_a_runs_fields():
    found = standard_problems(tp=1, cp=1, dp=6, pp=0, etp=1, ep=4, prefix="mesh.")
    assert [problem.field for problem in found] == ["mesh.pp"]
    found = standard_problems(tp=1, cp=1, dp=6, pp=1, etp=1, ep=4, prefix="mesh.")
    assert [problem.field for problem in found] == ["mesh.ep"]


# --------------------------------------------------------------------------------------------- command


def test_the_command_prints_every_family(capsys):
    assert main(["grid", "--tp", "2", "--dp", "4", "--pp", "2", "--ep", "4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["16 ranks", "tp 2 x cp 1 x dp 4 x pp 2", "etp 1 x ep 4 x edp 2 x pp 2 for experts"]
    assert "dp 4 of 4 0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15" in lines
    assert "ep 4 of 4 0-3 4-7 8-11 12-15" in lines
    assert "cp 16 of 1 one rank each" in lines
    assert {line.split()[0] for line in lines[5:]} == set(FAMILIES)


def test_the_command_prints_json(capsys):
    assert main(["grid", "--tp", "2", "--dp", "4", "--pp", "2", "--ep", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["world"] == 16
    assert set(told["families"]) == set(FAMILIES)
    assert told["families"]["tp"][:2] == [[0, 1], [2, 3]]
    assert told["families"]["edp"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert told["families"]["slab"] == [list(range(8)), list(range(8, 16))]


def test_the_command_shows_one_rank(capsys):
    words = ["grid", "--tp", "2", "--dp", "4", "--pp", "2", "--ep", "4", "--rank", "5"]
    assert main(words) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["tp 1 cp 0 dp 2 pp 0", "etp 0 ep 1 edp 1 pp 0 for experts"]
    assert "dp 2 4 1,3,5,7" in lines
    assert "tp 1 2 4-5" in lines
    assert "cp 0 1 alone" in lines
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["coordinates"]["expert"] == {"etp": 0, "ep": 1, "edp": 1, "pp": 0}
    assert told["families"]["edp"] == [1, 5]


def test_the_command_counts_what_a_line_cannot_hold(capsys):
    assert main(["grid", "--tp", "8", "--dp", "128", "--pp", "16", "--ep", "64"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "0,8,16,24,..,1016" in text
    assert "more" in text


def test_the_command_refuses_in_words(capsys):
    assert main(["grid", "--tp", "3", "--ep", "2"]) == 2
    assert "must divide tp x cp x dp (3)" in capsys.readouterr().err
    assert main(["grid", "--rank", "1"]) == 2
    assert "0 to 0" in capsys.readouterr().err


def test_the_command_does_not_load_torch():
    code = "import sys; from braid.cli import main; main(['grid']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
