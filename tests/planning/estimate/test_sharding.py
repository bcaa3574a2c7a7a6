"""Weights, gradients, optimizer state and what FSDP2 sends, against a real step on ranks: every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from braid.config import Mesh, Run
from braid.distributed.collectives import Group, all_reduce_max_no_grad
from braid.distributed.groups import opened_groups
from braid.engine import quantised_shards
from braid.optim.adamw import MOMENTS
from braid.optim.shards import local
from braid.planning import divisibility
from braid.planning.estimate import estimate
from braid.planning.estimate.rank import held_modules
from braid.planning.estimate.weights import held_units
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import state_context
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.step import backward, count, micro_batches
from tests.planning.estimate.reality import Calls
from tests.ranks import run_ranks
from tests.runs import small_run
from tests.train.helpers import corpus


class Real(NamedTuple):
    """What one rank has after the backward of a step."""

    parameters: int
    gradients: int
    optimizer: int
    calls: Calls
    """What FSDP2 sent."""


@contextmanager
def sharding_calls() -> Iterator[Calls]:
    """Gathers and reductions of FSDP2, which calls torch's functions by their newest names."""
    calls: Calls = Counter()

    def record(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            given = options.get("input_tensor", options.get("input"))
            tensor = given if given is not None else arguments[0 if name == "all_reduce" else 1]
            calls[name, dist.get_world_size(options["group"]), tensor.nbytes] += 1
            return function(*arguments, **options)

        return call

    def maximum(tensor: Tensor, group: Group) -> Tensor:
        if group.name in ("dp_cp", "edp"):
            calls["all_reduce", group.size, tensor.nbytes] += 1
        return all_reduce_max_no_grad(tensor, group)

    newest = hasattr(dist, "all_gather_single")
    gather = "all_gather_single" if newest else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if newest else "reduce_scatter_tensor"
    with (
        mock.patch.object(dist, gather, record("all_gather", getattr(dist, gather))),
        mock.patch.object(dist, scatter, record("reduce_scatter", getattr(dist, scatter))),
        mock.patch.object(quantised_shards, "all_reduce_max_no_grad", maximum),
    ):
        yield calls


def measured(rank: int, world: int, run: Run, folder: str) -> Real:
    worked_out = plan(run, world)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with (
        opened_groups(worked_out.grid, rank, tp_runs=runs) as groups,
        state_context(worked_out, choose_device("cpu"), groups) as state,
    ):
        states.initialize(state, run)
        feed = open_data_pipeline(run, Path(folder))
        batches = micro_batches(run, feed.train, 1, 0, groups.dp)
        counts = count(state, batches)
        with sharding_calls() as calls:
            backward(state, run, batches, counts)
        optimizer = state.optimizer
        return Real(
            parameters=sum(local(p).nbytes for p in state.model.parameters()),
            gradients=sum(gradient.nbytes for gradient in optimizer.gradients().values()),
            optimizer=sum(optimizer.moment(kind, name).nbytes for name in optimizer.main for kind in MOMENTS),
            calls=calls,
        )


def run_on(folder: Path, mesh: Mesh, dtype: Any, precision: tuple[str, ...] = (), **model: Any) -> Run:
    run = small_run()
    return replace(
        run,
        model=replace(run.model, **model),
        data=replace(run.data, sources=(str(corpus(folder)),)),
        train=replace(run.train, batch_samples=8, micro_batches=2, dtype=dtype, precision=precision),
        mesh=mesh,
    )


FP8 = {"precision": ("fp8_block", "ends"), "pattern": "[*-][*E]"}
MTP = {"pattern": "[*-][*E]/*"}
long = pytest.mark.long
CASES = [
    (Mesh(shard="none"), "bf16", {}),
    (Mesh(shard="optimizer"), "bf16", {}),
    (Mesh(shard="gradients"), "bf16", {"tied": False, **MTP}),
    (Mesh(shard="all", tp=2, ep=2), "bf16", {}),
    (Mesh(shard="all", ep=2, overlap=True, delay_weights=True), "bf16", MTP),
    (Mesh(shard="all", tp=2, ep=2), "bf16", FP8),
    (Mesh(shard="gradients", ep=2), "bf16", FP8),
    pytest.param(Mesh(shard="none", tp=2), "bf16", FP8, marks=long),
    pytest.param(Mesh(shard="all"), "fp32", {"precision": ("mxfp8", "ends")}, marks=long),
    pytest.param(Mesh(shard="gradients", ep=2, overlap=True), "bf16", {}, marks=long),
    pytest.param(Mesh(shard="all"), "bf16", MTP, marks=long),
    pytest.param(Mesh(shard="all"), "fp32", {"tied": False}, marks=long),
    pytest.param(Mesh(shard="all", replicate=2), "bf16", {}, marks=long),
]


@pytest.mark.parametrize(("mesh", "dtype", "model"), CASES, ids=lambda value: str(value)[:80])
def test_a_rank_holds_and_sends_what_was_estimated(
    mesh: Mesh, dtype: str, model: dict[str, Any], tmp_path: Path
) -> None:
    run, world = run_on(tmp_path, mesh, dtype, **model), 4
    real: Real = run_ranks(world, measured, run, str(tmp_path))[0]
    stage = estimate(plan(run, world), "cpu").stages[0]
    assert stage.memory.parameters == real.parameters
    assert stage.memory.optimizer == real.optimizer
    assert stage.memory.updated == real.gradients
    told: Calls = Counter()
    for call in stage.calls:
        if call.family in ("dp_cp", "edp") and (call.op != "all_reduce" or "magnitudes" in call.purpose):
            told[call.op, call.ranks, call.payload] += call.times
    assert told == real.calls


@pytest.mark.parametrize("schedule", ["auto", "dual_pipe_v"])
def test_a_stage_without_weights_has_an_estimate(schedule: str) -> None:
    run = small_run()
    pp, text = (4, "[*E]||[*-]|[*E]") if schedule == "auto" else (2, "[*E]|||[*E]")
    run = replace(run, model=replace(run.model, pattern=text), mesh=Mesh(pp=pp, schedule=schedule))
    stages = estimate(plan(run, pp), "cpu").stages
    assert stages[1].memory.parameters == 0
    assert stages[0].memory.parameters > 0


def test_stages_send_activations_one_way_and_their_gradients_the_other() -> None:
    run = small_run()
    run = replace(run, model=replace(run.model, pattern="[*-]|[*E]"), mesh=Mesh(pp=2))
    run = replace(run, train=replace(run.train, dtype="bf16"))
    first, last = estimate(plan(run, 2), "cpu").stages
    rows = run.train.batch_samples // run.train.micro_batches
    message = rows * run.data.sequence_tokens * run.model.hidden * 2
    assert first.sends == last.sends == run.train.micro_batches * message


def test_quantised_weights_are_gathered_as_half_the_bytes_of_bfloat16() -> None:
    """And their scales are there before: one float for each block of 128 × 128 that a rank gathers, once a
    step. Other formats would need two copies, and are gathered as they are."""
    run = replace(small_run(), model=replace(small_run().model, pattern="[*-][*E]"), mesh=Mesh(shard="all"))

    def sent(*precision: str) -> tuple[dict[str, int], dict[str, int]]:
        train = replace(run.train, dtype="bf16", precision=precision)
        (stage,) = estimate(plan(replace(run, train=train), 2), "cpu").stages
        gathers = {call.purpose: 0 for call in stage.calls if call.op == "all_gather"}
        for call in stage.calls:
            if call.op == "all_gather":
                gathers[call.purpose] += call.sent
        return gathers, {call.family: call.payload for call in stage.calls if "magnitudes" in call.purpose}

    (plain, none), (fp8, scales) = sent(), sent("fp8_block", "ends")
    assert none == {}
    assert fp8["expert weights"] == plain["expert weights"] / 2
    assert plain["dense weights"] / 2 < fp8["dense weights"] < plain["dense weights"]
    experts, moe = small_run().model.moe.experts, small_run().model.moe
    assert max(small_run().model.hidden, 2 * moe.ffn) <= 128
    assert scales["edp"] == 2 * 4 * experts
    assert sent("mxfp8", "ends") == (plain, {})
    assert sent("fp8_block", "ends", "dense.input_grad=bf16", "experts.forward=bf16") == (plain, {})


def gathered(run: Run) -> tuple[int, dict[str, int]]:
    """The most that is gathered at a time, and the gathered size of each unit."""
    worked_out = plan(run, 2)
    (stage,) = estimate(worked_out, "cpu").stages
    (held,) = held_modules(worked_out, 0, "cpu")
    return stage.memory.gathered, {unit.name: unit.gathered_bytes for unit in held_units(held, worked_out)}


def test_of_sharded_weights_those_of_an_op_and_of_the_next_one_are_gathered_at_a_time() -> None:
    """The list begins with UNSHARD(embedding) UNSHARD(stack.blocks.0) WAIT(embedding) F0.0:embed
    RESHARD(embedding), and goes on with the units of block 1 before F0.0:0.block: no more than these two ops'
    are there together, and whatever is larger counts. The embedding is the largest unit, but not the head's
    neighbour: what stands between it and a block is gathered beside it, and that is next to nothing."""
    run = replace(small_run(), mesh=Mesh(shard="all"))
    most, sizes = gathered(run)
    assert most == sizes["embedding"] + sizes["stack.blocks.0"]
    assert sizes["final_norm"] < sizes["stack.blocks.0"]
    few = replace(run, model=replace(run.model, vocab=19), data=replace(run.data, tokenizer="none.json"))
    most, sizes = gathered(few)
    units_of_a_block = ("stack.blocks.1.layers.moe.inner.experts", "stack.blocks.1")
    assert most == sizes["stack.blocks.0"] + sum(sizes[unit] for unit in units_of_a_block)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_weights_that_are_not_sharded_are_all_there_at_a_time(shard: Any) -> None:
    most, sizes = gathered(replace(small_run(), mesh=Mesh(shard=shard)))
    assert most == sum(sizes.values())


def test_sharded_gradients_do_not_wait_whole_for_the_next_micro_batch() -> None:
    run = replace(
        small_run(), train=replace(small_run().train, batch_samples=16, micro_batches=4, dtype="bf16")
    )

    def gradients(shard: str) -> int:
        (stage,) = estimate(plan(replace(run, mesh=Mesh(shard=shard)), 4), "cpu").stages
        return stage.memory.gradients

    assert gradients("gradients") == gradients("all")
    assert gradients("gradients") < gradients("optimizer") / 2
