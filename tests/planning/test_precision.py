"""What `train.precision` asks of a run on ranks: every rule, with what to set instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.architecture import LatentAttention
from braid.config import Run
from braid.distributed.collectives import Group, Groups
from braid.kernels.precision import LowPrecisionGroupedMlp
from braid.kernels.precision.block_experts import BlockGroupedMlp
from braid.nn.linear import Linear, RowLinear
from braid.nn.moe.experts import Experts
from braid.planning.local_model import build_local_model, choose_kernels
from braid.planning.plan import check, plan
from braid.train.device import choose_device
from tests.runs import small_run

LATENT = LatentAttention(heads=4, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)


def run_with(*precision: str, tokens: int = 256, model: dict[str, object] | None = None, **mesh: int) -> Run:
    run = small_run()
    return replace(
        run,
        model=replace(run.model, **{"pattern": "[*-][*E][*-]", **(model or {})}),
        data=replace(run.data, sequence_tokens=tokens),
        train=replace(run.train, precision=precision),
        mesh=replace(run.mesh, **mesh),
    )


MANY_BLOCKS = {"pattern": "[*-][*E][*-]"}
WITH_LATENT = {"pattern": "[+-][+E][+-]", "latent_attention": LATENT}
EXPERT_LATENT = {"moe": replace(small_run().model.moe, latent=8)}


@pytest.mark.parametrize(
    ("run", "world", "field", "remedy"),
    [
        (run_with("mxfp8", model={"pattern": "[*-][*E]"}), 1, "train.precision", "the word ends behind it"),
        (run_with("mxfp8", tp=4), 4, "mesh.tp", "2, or train.precision dense=bf16"),
        (run_with("fp8_block", tokens=384, cp=2), 2, "data.sequence_tokens", "256 or 512, or train.precision"),
        (run_with("mxfp8", tokens=96, cp=2), 2, "data.sequence_tokens", "64 or 128, or train.precision"),
        (run_with("mxfp8", tokens=96, model=WITH_LATENT, tp=2), 2, "data.sequence_tokens", "64 or 128"),
        (run_with("mxfp8", tokens=40, model=EXPERT_LATENT), 1, "data.sequence_tokens", "32 or 64"),
        (
            run_with("fp8_row", "dense.weight_grad=fp8_row", cp=2),
            2,
            "train.precision",
            "dense.weight_grad=bf16",
        ),
        (run_with("mxfp8", "experts.weight_grad=mxfp8"), 2, "train.precision", "experts.weight_grad=bf16"),
    ],
)
def test_what_would_depend_on_the_topology_is_refused(run, world, field, remedy):
    (problem,) = check(run, world)
    assert problem.field == field
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("run", "world"),
    [
        (run_with("mxfp8", "ends", model={"pattern": "[*-][*E]"}), 1),
        (run_with("mxfp8", "dense=bf16", tp=4), 4),
        (run_with("fp8_block", tokens=512, cp=2), 2),
        (run_with("fp8_block", tokens=200), 2),
        (run_with("fp8_block", "dense.weight_grad=bf16", tokens=384, cp=2), 2),
        (run_with("fp8_row", "dense.weight_grad=fp8_row", tp=2), 2),
        (run_with("mxfp8", "experts.weight_grad=mxfp8"), 1),
        (run_with("fp8", model={"pattern": "[*-][*E]"}), 1),
    ],
)
def test_what_does_not_is_accepted(run, world):
    assert check(run, world) == []


def test_all_problems_are_reported_at_once():
    wrong = run_with("mxfp8", "experts.weight_grad=mxfp8", tokens=96, tp=4, cp=1, model=WITH_LATENT)
    wrong = replace(
        wrong, model=replace(wrong.model, pattern="[+-][+E]"), data=replace(wrong.data, weights=(1.0,))
    )
    assert [each.field for each in check(wrong, 4)] == [
        "data.weights",
        "train.precision",
        "data.sequence_tokens",
        "train.precision",
    ]


def test_projections_and_experts_of_inner_blocks_are_quantised_and_nothing_else():
    """Not the gate of a shared expert, routers, or MTP, which come after the last block."""
    gated = replace(small_run().model.moe, shared_gate=True)
    planned = plan(run_with("fp8_block", model={"pattern": "[*-][*E][*-]/*E", "moe": gated}), 1)
    model = build_local_model(
        planned, Groups(), choose_kernels(planned, choose_device("cpu").torch), device="meta"
    )
    found = {
        name
        for name, each in model.named_modules()
        if (isinstance(each, Linear | RowLinear) and each.products is not None)
        or (isinstance(each, Experts) and isinstance(each.grouped_mlp, LowPrecisionGroupedMlp))
    }
    at = "stack.blocks.1.layers"
    names = ("attention.inner.qkv", "attention.inner.o", "moe.inner.experts")
    shared = ("moe.inner.shared.into", "moe.inner.shared.down")
    assert found == {f"{at}.{name}" for name in (*names, *shared)}


def test_a_shard_knows_its_group():
    planned = plan(run_with("fp8_block", tp=2), 2)
    tp = Group(name="tp", size=2, rank=1, handle=None)
    chosen = choose_kernels(planned, choose_device("cpu").torch)
    model = build_local_model(planned, Groups(tp=tp, tp_cp=tp), chosen, device="meta")
    layers = dict(model.named_modules())
    into, out = (
        layers[f"stack.blocks.1.layers.attention.inner.{name}"].products.shards for name in ("qkv", "o")
    )
    assert (into.inputs, into.outputs.group) == (None, tp)
    assert (out.inputs.group, out.outputs) == (tp, None)


BIG = {"hidden": 32, "moe": replace(small_run().model.moe, ffn=64)}


@pytest.mark.parametrize(
    ("settings", "changed", "etp", "by_kernels"),
    [
        (("fp8_block",), {}, 1, True),
        (("fp8_block",), {}, 2, False),  # ranks share a block of 128
        (("fp8_block",), {"ffn": 256}, 2, True),
        (("fp8_block",), {"ffn": 24}, 1, False),  # rows of 24 bytes
        (("fp8_block",), {"bias": True}, 1, False),
        (("fp8_block", "experts.weight_grad=fp8_block"), {}, 1, False),
        (("fp8_block", "experts.input_grad=bf16"), {}, 1, True),
        (("fp8_block", "experts.down.input_grad=bf16"), {}, 1, True),
        (("fp8_block", "experts.down.forward=bf16"), {}, 1, False),
        (("fp8_block", "experts.down=mxfp8"), {}, 1, False),
        (("mxfp8",), {}, 1, False),
    ],
)
def test_experts_run_on_tensor_cores_of_hopper_where_sizes_and_settings_fit(
    settings: tuple[str, ...], changed: dict[str, object], etp: int, by_kernels: bool
) -> None:
    """Everything else is emulated, as is everything on a CPU."""
    run = run_with(*settings, model={**BIG, "moe": replace(BIG["moe"], **changed)})
    group = Group(name="etp", size=etp, rank=0, handle=None)
    planned = plan(replace(run, train=replace(run.train, dtype="bf16"), mesh=replace(run.mesh, etp=etp)), etp)
    for device, wanted in (("cuda", by_kernels), ("cpu", False)):
        chosen = choose_kernels(planned, torch.device(device))
        model = build_local_model(planned, Groups(etp=group), chosen, device="meta")
        experts = model.get_submodule("stack.blocks.1.layers.moe.inner.experts")
        assert isinstance(experts.grouped_mlp, BlockGroupedMlp) == wanted
        assert isinstance(experts.grouped_mlp, LowPrecisionGroupedMlp)
        how = "on tensor cores" if wanted else "emulated: "
        assert f"products in low precision are {how}" in chosen.grouped_mlp.reason
