"""On ranks that share layers: what autograd keeps on a rank, and what it sends, are as every module says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Mesh, Run, Train
from braid.distributed.groups import opened_groups
from braid.model.context import MicroBatch
from braid.nn.head_scalars import HeadScalars
from braid.nn.moe.router import Router
from braid.nn.precision import matrix, quantised_weights
from braid.planning import divisibility
from braid.planning.estimate.rank import first_rank, model_of, workload_of
from braid.planning.plan import plan
from braid.train.build import make_model
from braid.train.device import choose_device
from tests.model.cases import batch
from tests.planning.estimate.reality import OPS, Calls, kept, recorded
from tests.ranks import run_ranks

MOE = Moe(
    experts=8,
    top_k=2,
    ffn=24,
    shared_ffn=16,
    shared_gate=True,
    routing="round_robin",
    aux_loss=0.1,
    sequence_aux_loss=0.1,
)
"""Each expert in its turn, so that loads are even."""


def run_of(text: str, mesh: Mesh, dtype: Any, **more: Any) -> Run:
    model = Model(
        pattern=text,
        hidden=16,
        vocab=19,
        tied=False,
        attention=Attention(heads=8, kv_heads=2, head_dim=4, qk_norm=True, gate=True),
        latent_attention=LatentAttention(heads=8, q_rank=6, kv_rank=10, nope_dim=3, rope_dim=4, v_dim=5),
        mamba2=Mamba2(heads=8, head_dim=6, state=5, groups=2, norm_per_group=False),
        delta_net=DeltaNet(key_heads=2, value_heads=8, key_dim=3, value_dim=5),
        mlp=Mlp(ffn=20),
        moe=MOE,
    )
    model = replace(model, **more)
    # The vocabulary has no use for a tokenizer here, and the rule about bytes does not hold.
    data = Data(sequence_tokens=128, tokenizer="none.json")
    return Run(model=model, data=data, mesh=mesh, train=Train(steps=1, batch_samples=2, dtype=dtype))


def measured(rank: int, world: int, run: Run) -> tuple[int, Calls]:
    """What this rank's graph keeps after forward, and its calls forward and backward."""
    worked_out = plan(run, world)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        model = make_model(worked_out, choose_device("cpu"), groups)
        model.to_empty(device=torch.device("cpu")).to(model.dtype)
        model.device = torch.device("cpu")
        for module in model.modules():
            if isinstance(module, Router | HeadScalars):
                module.float()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        for path, name, products in quantised_weights(model):
            if products.shares_weight:  # once a step, before its micro-batches
                products.quantize_weight(matrix(model.get_submodule(path).get_parameter(name).detach()))
        whole: MicroBatch = batch([[run.data.sequence_tokens]] * 2, vocab=run.model.vocab)
        context = model.prepare(whole)
        losses: list[torch.Tensor] = []

        def forward() -> torch.Tensor:
            losses.append(model.losses(context).share(100, [100] * len(worked_out.layout.mtp)))
            return losses[0]

        with recorded() as calls:
            size = kept(forward, model.parameters())
            losses[0].backward()
        return size, calls


NO_GATE = {"moe": replace(MOE, latent=6, shared_gate=False)}
PER_GROUP = {"mamba2": Mamba2(heads=8, head_dim=6, state=5, groups=2)}
OLMO: dict[str, Any] = {
    "norm_position": "attention_post",
    "attention": Attention(heads=8, kv_heads=2, head_dim=4, qk_norm=True, qk_norm_over="all", gate=True),
}
long = pytest.mark.long
CASES = [
    ("[*E][M-][G-]/*E", Mesh(tp=2, ep=2), "fp32", {}),
    ("[*E][M-][G-]", Mesh(tp=2, cp=2, ep=4), "bf16", OLMO),
    ("[*E]-", Mesh(tp=4, etp=2, dispatcher="all_gather"), "fp32", OLMO),
    ("[+E][+-]", Mesh(tp=2, cp=2, ep=4), "bf16", {}),
    pytest.param("[*E][M-][G-]", Mesh(tp=2, ep=2), "bf16", {}, marks=long),
    pytest.param("[*E][M-][G-]", Mesh(cp=2), "fp32", {}, marks=long),
    pytest.param("[*E][M-][G-]", Mesh(tp=2, cp=2, ep=2), "fp32", {}, marks=long),
    pytest.param("[*E]", Mesh(tp=4, etp=4), "bf16", {}, marks=long),
    pytest.param("[*E]-", Mesh(tp=4, ep=2, etp=2), "fp32", NO_GATE, marks=long),
    pytest.param("[+E][+-]", Mesh(tp=2, ep=2), "fp32", {}, marks=long),
    pytest.param("M", Mesh(tp=4), "fp32", PER_GROUP, marks=long),
]


@pytest.mark.parametrize(("text", "mesh", "dtype", "more"), CASES, ids=lambda value: str(value)[:40])
def test_a_rank_keeps_and_sends_what_its_modules_say(
    text: str, mesh: Mesh, dtype: str, more: dict[str, Any]
) -> None:
    run, world = run_of(text, mesh, dtype, **more), mesh.tp * mesh.cp
    told_bytes, told, size, calls = told_and_measured(run, world)
    assert told == calls
    assert told_bytes == size


LOW_PRECISION = [
    ("[*E][M-][*-]", Mesh(tp=2, etp=2), "fp32", ("fp8_block", "ends"), PER_GROUP),
    pytest.param("[+E][G-]", Mesh(tp=2, ep=2), "bf16", ("mxfp8", "ends"), {}, marks=long),
    pytest.param("[*E][*E][*-]", Mesh(tp=2, cp=2, etp=4), "bf16", ("fp8_row",), {}, marks=long),
]


@pytest.mark.parametrize(("text", "mesh", "dtype", "precision", "more"), LOW_PRECISION)
def test_a_rank_sends_the_largest_magnitudes_of_blocks_that_others_share(
    text: str, mesh: Mesh, dtype: str, precision: tuple[str, ...], more: dict[str, Any]
) -> None:
    """Beside what it sends without quantisation; nothing more is kept."""
    run, world = run_of(text, mesh, dtype, **more), mesh.tp * mesh.cp
    run = replace(run, train=replace(run.train, precision=precision))
    told_bytes, told, size, calls = told_and_measured(run, world)
    assert told == calls
    assert size <= told_bytes
    assert sum(times for (op, *_), times in calls.items() if op == "all_reduce") >= 4


def told_and_measured(run: Run, world: int) -> tuple[int, Calls, int, Calls]:
    """What is kept and sent, as modules say and in reality."""
    size, calls = run_ranks(world, measured, run)[0]
    worked_out = plan(run, world)
    costs = model_of(worked_out, first_rank(worked_out, 0), "cpu").costs(workload_of(worked_out, "cpu"))
    told: Calls = Counter()
    for cost in costs.values():
        for call in cost.calls:
            told[OPS.get(call.op, call.op), call.ranks, call.payload] += call.times
    return sum(cost.kept for cost in costs.values()), told, size, calls
