"""A MoE layer whose experts and tokens ranks share: the answer is that of one process, gradients and all."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from braid.distributed.collectives import Group, Groups
from braid.nn.canonical import Shard
from braid.nn.moe import all_to_all
from braid.nn.moe.experts import SHARD_DIMS
from braid.nn.moe.replay import Recording
from braid.nn.moe.token_dispatcher import DispatcherName, choose
from tests.nn.moe_cases import forward, shape
from tests.nn.moe_ranks import (
    EXPERTS,
    HIDDEN,
    Case,
    Found,
    Layout,
    build,
    groups_of,
    joined,
    part,
    random,
    run,
    tokens_of,
)
from tests.ranks import run_ranks

LOSSES = {"aux_loss": 0.7, "sequence_aux_loss": 0.5, "global_aux_loss": 0.3, "z_loss": 0.2}
SIGMOID = {"score": "sigmoid", "selection_bias": True}


def case(padded: bool = False, favourite: int | None = None, **changes: object) -> Case:
    given = {"experts": EXPERTS, "ffn": 4, "aux_loss": 0.0} | changes
    return Case(shape=shape(**given), padded=padded, favourite=favourite)


CASES = {
    "all losses, a shared expert": case(**LOSSES, shared_ffn=8),
    "padding, biases, groups, latent": case(
        **(LOSSES | SIGMOID),
        padded=True,
        groups=4,
        top_groups=2,
        bias=True,
        latent=3,
        shared_ffn=4,
        shared_gate=True,
        activation="relu2",
    ),
    "dropped by probability": case(padded=True, bias=True, capacity_factor=0.6, sequence_aux_loss=1.0),
    "padded to capacity": case(
        padded=True, capacity_factor=0.8, drop="last_position", pad_to_capacity=True, bias=True
    ),
    "sinkhorn": case(padded=True, routing="sinkhorn", z_loss=0.1),
    "jitter and turns": case(jitter=0.3, routing="round_robin", top_k=3, **LOSSES),
    "all to one expert": case(**SIGMOID, favourite=5, top_k=1, normalize_top_k=False, bias=True),
    "all to one full expert": case(
        **SIGMOID, favourite=5, top_k=1, normalize_top_k=False, capacity_factor=1.0, pad_to_capacity=True
    ),
}
LAYOUTS = (
    Layout(tp=2),
    Layout(dp=2, ep=2),
    Layout(tp=2, ep=2),
    Layout(dp=2, etp=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(tp=2, dp=2, etp=2, ep=2),
    Layout(dp=4, ep=2),
    Layout(tp=4, etp=2),
    Layout(tp=2, cp=2, dp=2, etp=2, ep=4),
    Layout(tp=2, dp=4, ep=4),
)
DISPATCHERS: tuple[DispatcherName, ...] = ("all_to_all", "all_gather")


def everything(rank: int, world: int) -> dict[tuple[Layout, str, str], Found]:
    found = {}
    for layout in LAYOUTS:
        if layout.world == world:
            groups = groups_of(layout)
            for name, given in CASES.items():
                for asked in DISPATCHERS if groups.ep_etp.size > 1 else ("auto",):
                    found[layout, name, asked] = run(given, groups, asked)
    return found


def assert_near(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.shape == expected.shape, name
    assert (actual - expected).norm() <= 1e-12 * expected.norm() + 1e-15, name


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.long) for world in (4, 8))])
def test_ranks_find_what_one_process_finds(world: int) -> None:
    alone = {name: run(given) for name, given in CASES.items()}
    by_rank = run_ranks(world, everything)
    for layout, name, asked in by_rank[0]:
        label = f"{name}, {asked}, {layout}"
        together, expected = joined([found[layout, name, asked] for found in by_rank], layout), alone[name]
        assert_near(together.y_BtC, expected.y_BtC, label)
        assert_near(together.x_grad_BtC, expected.x_grad_BtC, label)
        assert together.losses == pytest.approx(expected.losses, rel=1e-12), label
        assert torch.equal(together.counts_E, expected.counts_E), label
        assert torch.equal(together.kept_E, expected.kept_E), label
        if "load_balance" in expected.losses:
            assert torch.equal(together.raw_counts_E, expected.raw_counts_E), label
        assert together.grads.keys() == expected.grads.keys(), label
        for tensor, (_, grad) in expected.grads.items():
            assert_near(together.grads[tensor][1], grad, f"{tensor} of {label}")


def test_the_cases_are_what_they_say() -> None:
    """Drops, padding and empty experts do happen, so that the test above can fail."""
    found = {name: run(given) for name, given in CASES.items()}
    for name in ("dropped by probability", "padded to capacity", "all to one full expert"):
        assert 0 < found[name].kept_E.sum() < found[name].counts_E.sum(), name
    assert found["all to one expert"].counts_E.tolist() == [0, 0, 0, 0, 0, 32, 0, 0]
    assert set(found["all losses, a shared expert"].losses) == {
        "load_balance",
        "sequence_balance",
        "global_balance",
        "router_z",
    }


# --------------------------------------------------------------------------------------- static shapes


def fixed_shapes(rank: int, world: int) -> list[list[int]]:
    groups = groups_of(Layout(tp=2, dp=2, ep=4))
    shapes = []
    for given in (CASES["padded to capacity"], case(capacity_factor=0.8, pad_to_capacity=True)):
        moe, tokens = build(given, groups, "all_to_all"), tokens_of(given, groups)
        x_NC = part(random("x", 4, 8, HIDDEN), groups).flatten(0, 1)
        routing = moe.router(x_NC, tokens)
        with (
            patch.object(all_to_all, "all_to_all_no_grad", side_effect=AssertionError("counts were exchanged")),
            patch.object(Tensor, "tolist", side_effect=AssertionError("the host waited")),
            patch.object(Tensor, "item", side_effect=AssertionError("the host waited")),
            patch.object(Tensor, "__int__", side_effect=AssertionError("the host waited")),
        ):
            dispatch_plan = moe.dispatch_plan(routing, tokens)
            rows, probs = moe.pack(x_NC, routing.probs_NS, dispatch_plan)
            rows, probs, dispatch_plan = moe.dispatcher.dispatch(rows, probs, dispatch_plan)
        assert dispatch_plan.counts_E is not None
        shapes.append([*rows.shape, *probs.shape, *dispatch_plan.counts_E.tolist()])
    return shapes


def test_with_places_for_everybody_nobody_waits_and_shapes_are_fixed() -> None:
    # ceil(8 · 2 / 8 · 0.8) = 2 places in each of 2 rows for each of 2 experts, from each of 4 ranks.
    assert run_ranks(4, fixed_shapes) == [[[32, HIDDEN, 32, 16, 16]] * 2] * 4


# ---------------------------------------------------------------------------------------------- replay


def repeated(rank: int, world: int) -> None:
    groups, given = groups_of(Layout(tp=2, ep=2)), CASES["dropped by probability"]
    moe, tokens = build(given, groups), tokens_of(given, groups)
    x_NC = part(random("x", 4, 8, HIDDEN), groups).flatten(0, 1)
    y_NC, routing = forward(moe, x_NC, tokens)
    recording = Recording()
    recording.write(tokens, routing.choice)
    assert torch.equal(forward(moe, x_NC, tokens, recording.read(tokens))[0], y_NC)


def test_a_rank_repeats_its_part_of_a_recording() -> None:
    run_ranks(2, repeated)


# ---------------------------------------------------------------------------------------------- choice


def arguments(ep: int, etp: int) -> Groups:
    sizes = {"ep": ep, "etp": etp, "ep_etp": ep * etp}
    return Groups(**{name: Group(name=name, size=size, rank=0, handle=None) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("ep", "etp", "asked", "chosen"),
    [
        (1, 1, "auto", "local"),
        (1, 1, "all_gather", "local"),
        (2, 1, "auto", "all_to_all"),
        (2, 1, "all_gather", "all_gather"),
        (1, 2, "auto", "all_gather"),
        (1, 2, "all_to_all", "all_to_all"),
        (2, 2, "auto", "all_to_all"),
    ],
)
def test_choice_of_a_dispatcher(ep: int, etp: int, asked: DispatcherName, chosen: str) -> None:
    choice = choose(case().shape, HIDDEN, arguments(ep, etp), asked)
    assert choice.name == chosen
    assert choice.reason
    assert str(choice).startswith(f"dispatch: {chosen}, because ")


# --------------------------------------------------------------------------------------------- shards


def test_shards_of_expert_weights_know_where_they_lie() -> None:
    """Data-parallel ranks keep slices of the ffn channels, or of a bias's channels."""
    moe = build(case(bias=True, experts=2, ffn=6))
    parameters = dict(moe.named_parameters())
    for name, place in moe.canonical().items():
        if not name.startswith("experts."):
            continue
        parameter = parameters[place.parameter]
        dim, whole = SHARD_DIMS[place.parameter.removeprefix("experts.")], place.read(parameter)
        for shard in (Shard(dim, 0, 4), Shard(dim, 4, parameter.shape[dim])):
            held = place.within(shard)
            kept = parameter.narrow(dim, shard.start, shard.stop - shard.start)
            assert torch.equal(held.read(kept), held.of(whole)), name
