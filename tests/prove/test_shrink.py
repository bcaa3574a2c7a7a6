"""What a small run has in common with the run that it stands for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.config import Mesh, Run
from braid.errors import ConfigError
from braid.pattern import parse
from braid.planning import divisibility
from braid.planning.plan import check
from braid.prove.shrink import AXES, MOST_RANKS, Shrunk, shrink
from braid.recipes import bundled, load

TEXT = [name for name in bundled() if not load(name).modules]
LARGE = ["deepseek-v3", "glm-4-5-air", "nemotron-nano-30b-a3b", "qwen3-next-80b-a3b"]


def on(name: str, mesh: Mesh, micro_batches: int = 8, samples: int = 2048) -> Run:
    run = load(name)
    return replace(run, mesh=mesh, train=replace(run.train, micro_batches=micro_batches, batch_samples=samples))


def axes_of(small: Shrunk) -> set[str]:
    mesh = small.run.mesh
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp}
    sizes["dp"] = divisibility.axis_sizes(mesh, small.world).dp
    return {axis for axis in AXES if sizes[axis] > 1}


@pytest.mark.parametrize("name", list(bundled()))
def test_every_recipe_has_a_small_run_of_the_same_layers(name):
    run = load(name)
    (small,) = shrink(run, 1, all_layers=True)
    assert (small.run.model.pattern, small.world) == (run.model.pattern, 1)
    assert small.run.modules.keys() == run.modules.keys()
    assert small.run.model.hidden <= run.model.hidden
    assert check(small.run, 1) == []


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(LARGE),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 16]),
    ep=st.sampled_from([1, 2, 8, 16]),
    most=st.sampled_from([2, 4, 8]),
)
def test_all_axes_and_every_pair_of_them_are_in_some_small_run(name, tp, cp, pp, dp, ep, most):
    run, world = on(name, Mesh(tp=tp, cp=cp, pp=pp, ep=ep)), tp * cp * pp * dp
    if check(run, world):
        with pytest.raises(ConfigError):
            shrink(run, world, most)
        return
    small = shrink(run, world, most)
    there = {axis for axis, size in zip(AXES, (tp, cp, pp, dp), strict=True) if size > 1}
    found = [axes_of(each) for each in small]
    assert set().union(*found) == there
    if most >= 4:
        assert all(any({*pair} <= each for each in found) for pair in combinations(there, 2))
    for each in small:
        assert each.world <= most
        assert check(each.run, each.world) == []
        assert parse(each.run.model.pattern).kinds() == parse(run.model.pattern).kinds()


def test_heads_are_shared_as_they_were():
    """By query heads, and by tensor ranks where there are fewer heads than ranks."""
    run = on("qwen3-30b-a3b", Mesh(tp=8))  # 32 query heads, 4 key-value heads
    (small,) = shrink(run, 64)
    shape = small.run.model.attention
    assert small.run.mesh.tp == 2
    assert (shape.heads, shape.kv_heads) == (2, 1)
    (small,) = shrink(on("qwen3-30b-a3b", Mesh(tp=2)), 64)
    assert (small.run.model.attention.heads, small.run.model.attention.kv_heads) == (4, 2)


@pytest.mark.parametrize("name", [name for name in TEXT if load(name).model.moe is not None])
def test_a_token_chooses_some_experts_and_leaves_some(name):
    run = on(name, Mesh(ep=8))
    for small in shrink(run, 64):
        moe = small.run.model.moe
        assert moe.top_k < moe.experts
        assert (moe.top_k > 1) == (run.model.moe.top_k > 1)
        assert (moe.groups > 1) == (run.model.moe.groups > 1)
        assert small.run.mesh.ep > 1


def test_experts_with_copies_on_other_ranks_still_have_some():
    (small,) = shrink(on("qwen3-30b-a3b", Mesh(ep=16)), 64)
    assert (small.world, small.run.mesh.ep) == (4, 2)
    (small,) = shrink(on("qwen3-30b-a3b", Mesh(ep=64)), 64)
    assert (small.world, small.run.mesh.ep) == (2, 2)


def test_schedules_and_options_stay():
    mesh = Mesh(pp=4, ep=8, schedule="dual_pipe_v", shard="gradients", late_weights=True)
    run = on("qwen3-30b-a3b", mesh, micro_batches=16)
    run = replace(run, train=replace(run.train, recompute=("norm", "experts")))
    (small,) = shrink(run, 64)
    kept = replace(small.run.mesh, pp=4, ep=8)
    assert kept == mesh
    assert small.run.train.recompute == ("norm", "experts")
    assert "mesh.schedule" not in small.changes
    assert small.changes["mesh.pp"] == (4, 2)


def test_a_job_that_fits_keeps_its_mesh():
    run = on("tiny", Mesh(tp=4), micro_batches=2, samples=16)
    (small,) = shrink(run, 8)
    assert (small.world, small.run.mesh) == (8, run.mesh)


def test_modules_on_ranks_of_their_own_are_not_moved():
    run = load("tiny-vlm", world=16)
    with pytest.raises(ConfigError, match="on at most 8 ranks, and --world is 16"):
        shrink(run, 16)
    assert shrink(load("tiny-vlm", world=4), 4)[0].world <= MOST_RANKS


def test_a_run_that_is_refused_has_no_small_one():
    with pytest.raises(ConfigError, match=r"model\.attention\.heads"):
        shrink(on("tiny", Mesh(tp=8)), 8)
