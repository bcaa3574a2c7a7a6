"""Stages that hold equal blocks are built once: each counts as if it had been built by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from braid.architecture import Attention, Mamba2
from braid.config import Mesh, Run
from braid.planning.estimate.rank import held_modules
from braid.planning.estimate.weights import copy_calls, counted_by_station, held_units, scale_calls
from braid.planning.plan import Plan, plan
from tests.runs import small_run


def windows(run: Run) -> Run:
    """Every third attention has no window."""
    heads = Attention(heads=4, kv_heads=2, head_dim=8, window=16, window_pattern="SSL")
    return replace(run, model=replace(run.model, attention=heads, pattern="[*-]|[*-]|[*-]|[*-]"))


def later_norms(run: Run) -> Run:
    """Norms stand after attention and what follows it, but before other layers."""
    mamba2 = Mamba2(heads=4, head_dim=8, state=16, groups=2)
    model = replace(run.model, norm_position="attention_post", mamba2=mamba2, pattern="[*-]|-M|-M|[*-]")
    return replace(run, model=model, train=replace(run.train, recompute=("norm",)))


def low_precision(run: Run) -> Run:
    """The first and the last block are not quantised; the last stage has none."""
    model = replace(run.model, hidden=128, pattern="[*E]|[*E]|[*E]|")
    return replace(run, model=model, train=replace(run.train, precision=("fp8_block",)))


def same(run: Run) -> Run:
    return replace(run, model=replace(run.model, pattern="[*E][*-]|[*E][*-]|[*E][*-]|[*E][*-]"))


def twins(made: Plan) -> list[int | None]:
    """For each stage, the one that it is a twin of."""
    stations = [each.held for (each,) in counted_by_station(made, "cpu")]
    return [None if held.original is None else held.original.stage for held in stations]


@pytest.mark.parametrize("change", [same, windows, later_norms, low_precision])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_twin_counts_as_if_it_were_built(change: Callable[[Run], Run], tp: int) -> None:
    run = change(small_run())
    made = plan(replace(run, mesh=Mesh(pp=4, tp=tp, shard="all")), 8)
    for stage, (each,) in enumerate(counted_by_station(made, "cpu")):
        (built,) = held_modules(made, stage, "cpu")
        assert (each.held.layers, each.held.segments, each.held.weights) == (
            built.layers,
            built.segments,
            built.weights,
        )
        assert list(each.held.costs.items()) == list(built.costs.items())
        assert each.units == held_units(built, made)
        assert each.once == (*scale_calls(built), *copy_calls(built))


def test_inner_stages_of_equal_blocks_are_twins_and_ends_are_none() -> None:
    made = plan(replace(same(small_run()), mesh=Mesh(pp=4)), 4)
    assert twins(made) == [None, None, 1, None]


def test_stages_whose_attention_has_other_windows_are_no_twins() -> None:
    run = windows(small_run())
    assert twins(plan(replace(run, mesh=Mesh(pp=4)), 4)) == [None, None, None, None]
