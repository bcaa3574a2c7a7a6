"""What a mesh asks of a run: every rule, with what to set instead, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.architecture import DeltaNet, LatentAttention, Mamba2, Moe
from braid.config import Mesh, Run
from braid.pattern import Kind
from braid.planning import divisibility
from braid.planning.plan import check, plan
from tests.runs import small_run


def meshed(run: Run | None = None, **mesh: object) -> Run:
    run = small_run() if run is None else run
    return replace(run, mesh=replace(run.mesh, **mesh))


def with_model(**changes: object) -> Run:
    run = small_run()
    return replace(run, model=replace(run.model, **changes))


MAMBA = with_model(pattern="[M-]", mamba2=Mamba2(heads=6, head_dim=4, state=4, groups=3))
DELTA = with_model(pattern="[G-]", delta_net=DeltaNet(key_heads=3, value_heads=6, key_dim=4, value_dim=4))
LATENT = with_model(
    pattern="[+-]",
    latent_attention=LatentAttention(heads=6, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4),
)


BIASED = with_model(moe=replace(small_run().model.moe, bias=True, ffn=12))


@pytest.mark.parametrize(
    ("run", "world", "field", "rule"),
    [
        (meshed(tp=2), 3, "world", "multiple of mesh.tp times mesh.cp times mesh.pp (2)"),
        (meshed(ep=3), 2, "mesh.ep", "must divide tp x cp x dp (2)"),
        (meshed(tp=8), 8, "mesh.tp times mesh.cp", "must divide model.attention.heads (4)"),
        (meshed(cp=8), 8, "mesh.tp times mesh.cp", "must divide model.attention.heads (4)"),
        (meshed(ep=2, dispatcher="deep_ep"), 2, "mesh.dispatcher", "DeepEP supports only bf16"),
        (meshed(tp=5), 5, "data.sequence_tokens", "multiple of mesh.tp times mesh.cp (5)"),
        (meshed(tp=5), 5, "mesh.tp", "must divide model.mlp.ffn (24)"),
        (meshed(tp=3), 3, "model.attention.kv_heads", "must divide mesh.tp (3) or be a multiple of it"),
        (meshed(), 3, "train.batch_samples", "multiple of data-parallel ranks times train.micro_batches (6)"),
        (meshed(ep=8), 8, "mesh.ep", "must divide model.moe.experts (4)"),
        (meshed(etp=3), 3, "mesh.etp", "must divide model.moe.ffn (8)"),
        (meshed(tp=3), 3, "mesh.tp", "must divide model.moe.shared_ffn (8)"),
        (meshed(), 16, "model.moe.ffn", "mesh.etp times ranks that shard the same experts (16)"),
        (meshed(BIASED), 3, "model.hidden", "ranks that shard the same experts (3)"),
        (meshed(replicate=2, shard="none"), 2, "mesh.replicate", "already replicates everything on every rank"),
        (meshed(replicate=3), 2, "mesh.replicate", "must divide dp times mesh.cp (2)"),
        (meshed(ep=2, replicate=2), 2, "mesh.replicate", "ranks that hold the same experts (1)"),
        (meshed(with_model(pattern="[*-]"), ep=2), 2, "mesh.ep", "has no experts to distribute"),
        (meshed(MAMBA, tp=4), 4, "mesh.tp times mesh.cp", "must divide model.mamba2.heads (6)"),
        (meshed(MAMBA, tp=2), 2, "model.mamba2.groups", "must divide mesh.tp (2) or be a multiple of it"),
        (meshed(DELTA, tp=2), 2, "model.delta_net.key_heads", "must divide mesh.tp (2) or be a multiple of it"),
        (meshed(LATENT, tp=4), 4, "mesh.tp times mesh.cp", "must divide model.latent_attention.heads (6)"),
    ],
)
def test_what_does_not_fit_is_told_with_the_rule(run, world, field, rule):
    told = [problem for problem in check(run, world) if problem.field == field and rule in problem.rule]
    assert len(told) == 1, check(run, world)
    assert told[0].remedy


def test_everything_that_does_not_fit_is_told_at_once():
    fields = {problem.field for problem in check(meshed(tp=5), 5)}
    assert {"mesh.tp times mesh.cp", "model.attention.kv_heads", "data.sequence_tokens", "mesh.tp"} <= fields


def test_a_remedy_for_experts_divides_the_ranks_too():
    run = with_model(pattern="*E", moe=Moe(experts=6, top_k=2, ffn=8))
    (problem,) = (each for each in check(meshed(run, ep=4), 4) if each.field == "mesh.ep")
    assert problem.remedy == "2"
    assert not [each for each in check(meshed(run, ep=2), 4) if each.field == "mesh.ep"]


def test_a_remedy_for_heads_works():
    run = meshed(tp=3)
    (problem,) = (each for each in check(run, 3) if each.field == "model.attention.kv_heads")
    for heads in map(int, problem.remedy.split(" or ")):
        attention = replace(run.model.attention, heads=12, kv_heads=heads)
        again = replace(run, model=replace(run.model, attention=attention))
        assert "model.attention.kv_heads" not in {each.field for each in check(again, 3)}


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
    more=st.integers(1, 3),
)
def test_sizes_multiply_out_and_the_smallest_world_fits(tp, cp, pp, ep, etp, more):
    mesh = Mesh(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    world = divisibility.smallest_world(mesh) * more
    sizes = divisibility.axis_sizes(mesh, world)
    assert sizes.tp * sizes.cp * sizes.dp * sizes.pp == world
    assert sizes.etp * sizes.ep * sizes.edp == sizes.slab
    dense, expert = tp * cp, ep * etp
    smaller = [w for w in range(1, divisibility.smallest_world(mesh)) if w % (dense * pp) == 0]
    assert all((w // pp) % expert for w in smaller)


def test_16384_ranks_are_planned():
    run = small_run()
    moe = replace(run.model.moe, experts=64, ffn=64)
    attention = replace(run.model.attention, heads=64, kv_heads=8)
    model = replace(run.model, pattern="[*-]|[*E]|[*-]|[*E]", moe=moe, attention=attention)
    train = replace(run.train, batch_samples=16384, micro_batches=16)
    run = replace(run, model=model, train=train, mesh=Mesh(tp=8, cp=2, pp=4, ep=64))
    worked_out = plan(run, 16384)
    assert (worked_out.axes.dp, worked_out.axes.edp) == (256, 64)
    assert prod(worked_out.grid.dense.sizes) == 16384
    assert divisibility.tp_runs(run.model, frozenset({Kind.ATTENTION}), 8) == frozenset()
    assert divisibility.tp_runs(run.model, frozenset({Kind.ATTENTION}), 16) == frozenset({2})


def test_weights_that_are_not_sharded_have_a_copy_on_every_rank_that_uses_them():
    sizes = divisibility.axis_sizes(Mesh(tp=2, cp=2, ep=2, shard="none"), 16)
    assert (sizes.dp, sizes.dense_copies, sizes.expert_copies) == (4, 8, 8)
    sizes = divisibility.axis_sizes(Mesh(tp=2, cp=2, ep=2, replicate=2), 16)
    assert (sizes.dense_copies, sizes.expert_copies) == (2, 2)
