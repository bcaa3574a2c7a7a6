"""What is kept with each kind of recompute is what modules say, to the byte: in one process, on a CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid import kernels
from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Mlp
from braid.choices import recomputed
from braid.config import Mesh, Run
from braid.distributed.groups import opened_groups
from braid.kernels.attention import spans_of
from braid.model.context import StackContext
from braid.model.language import LanguageModel
from braid.nn import attention, delta_net, latent_attention, mamba2, mlp
from braid.nn.cost import Workload
from braid.nn.head_scalars import HeadScalars
from braid.nn.moe.router import Router
from braid.nn.recompute import Recomputing, Replays, set_replays
from braid.nn.rotary import rotary_tables
from braid.planning import divisibility
from braid.planning.estimate import estimate
from braid.planning.estimate.rank import first_rank, workload_of
from braid.planning.estimate.rank import model_of as model_of_rank
from braid.planning.plan import plan
from braid.train.build import make_model
from braid.train.device import choose_device
from tests.covers import cover
from tests.model.cases import batch
from tests.planning.estimate.reality import OPS, Calls, recorded
from tests.planning.estimate.test_kept import CPU, DTYPES, HIDDEN, MOES, VARIED, model_of
from tests.planning.estimate.test_peak import peak_of
from tests.planning.estimate.test_peak import run_of as peak_run_of
from tests.planning.estimate.test_ranks import OLMO, run_of
from tests.planning.estimate.test_sharding import measured as sharded_step
from tests.planning.estimate.test_sharding import run_on
from tests.ranks import run_ranks

SIZES = ((2, 70), (1, 192))
"""Rows and tokens: the last chunk of recurrent mixers is full, or not."""
CHOICES = (
    ("norm",),
    ("activation",),
    ("core",),
    ("experts",),
    ("norm", "activation"),
    ("norm", "activation", "core", "experts"),
    ("block",),
    ("full",),
)


class Held:
    """A tensor that is kept; it dies with the last interest in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Measured(Replays):
    """Knows what it keeps."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._held: list[weakref.ref[Held]] = []

    def keep(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self._held.append(weakref.ref(held))
        return held

    def kept(self, left_out: Sequence[Tensor], besides: Sequence[Tensor] = ()) -> int:
        """Bytes of storages that are kept, and of some others."""
        tensors = [held.tensor for each in self._held if (held := each()) is not None]
        storages = [tensor.untyped_storage() for tensor in (*tensors, *besides)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        known = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        return sum(size for place, size in sizes.items() if place and place not in known)


def measured(module: Recomputing, names: Sequence[str], *given: Any, shared: Sequence[Tensor] = ()) -> int:
    """What a module keeps of its forward."""
    replays = Measured(names)
    set_replays(module, replays)
    with replays.save_hooks():
        result = module(*given)
    assert result is not None
    return replays.kept([*module.parameters(), *shared])


@pytest.fixture(params=SIZES, ids=str)
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def workload(request: pytest.FixtureRequest, size: tuple[int, int]) -> Workload:
    names = recomputed(["core", "activation"])
    return Workload(
        rows=size[0],
        tokens=size[1],
        dtype=request.param,
        device="cpu",
        recompute=names,
    )


def check(module: Any, workload: Workload, *given: Any, shared: Sequence[Tensor] = ()) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BTC = torch.randn(workload.rows, workload.tokens, HIDDEN).to(workload.dtype).requires_grad_()
    real = measured(module, sorted(workload.recompute), x_BTC, *given, shared=shared)
    assert module.cost(workload).kept == real


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qk_norm": True, "gate": True, "bias": True, "sinks": True},
        {"qk_norm": True, "qk_norm_over": "all", "gate": True},
        {"positions": "none"},
    ],
    ids=str,
)
def test_attention(workload: Workload, kv_heads: int, more: dict[str, Any]) -> None:
    shape = Attention(heads=4, kv_heads=kv_heads, head_dim=8, **more)
    places_BT = torch.arange(workload.tokens).expand(workload.rows, -1)
    rotary = rotary_tables(places_BT, 8, 1e4, workload.dtype) if shape.positions == "rope" else None
    attend = kernels.attention.choose(CPU, workload.dtype).function
    module = attention.Attention(shape, HIDDEN, 1e-5, attend, dtype=workload.dtype)
    check(module, workload, spans_of(torch.zeros_like(places_BT), None, CPU), rotary, shared=rotary or ())


@pytest.mark.parametrize(("q_rank", "v_dim"), [(16, 10), (None, 10), (16, 14), (16, 18)])
def test_latent_attention(workload: Workload, q_rank: int | None, v_dim: int) -> None:
    shape = LatentAttention(heads=4, q_rank=q_rank, kv_rank=12, nope_dim=6, rope_dim=8, v_dim=v_dim)
    places_BT = torch.arange(workload.tokens).expand(workload.rows, -1)
    rotary = rotary_tables(places_BT, shape.rope_dim, 1e4, workload.dtype)
    attend = kernels.attention.choose(CPU, workload.dtype).function
    module = latent_attention.LatentAttention(shape, HIDDEN, 1e-5, attend, dtype=workload.dtype)
    check(module, workload, spans_of(torch.zeros_like(places_BT), None, CPU), rotary, shared=rotary)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("more", [{}, {"norm_per_group": False, "conv": 3, "bias": True}], ids=str)
def test_mamba2(workload: Workload, groups: int, more: dict[str, Any]) -> None:
    shape = Mamba2(heads=4, head_dim=6, state=20, groups=groups, **more)
    ssd = kernels.ssd.choose(CPU, workload.dtype).function
    check(mamba2.Mamba2(shape, HIDDEN, 1e-5, ssd, dtype=workload.dtype), workload)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_delta_net(workload: Workload, key_heads: int) -> None:
    shape = DeltaNet(key_heads=key_heads, value_heads=4, key_dim=8, value_dim=12)
    rule = kernels.delta_rule.choose(CPU, workload.dtype).function
    check(delta_net.DeltaNet(shape, HIDDEN, 1e-5, rule, dtype=workload.dtype), workload)


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "gelu", "gelu_tanh"])
def test_mlp(workload: Workload, activation: Any) -> None:
    check(mlp.Mlp(Mlp(ffn=40, activation=activation), HIDDEN, dtype=workload.dtype), workload)


# --------------------------------------------------------------------------------------- whole models


def beside(context: StackContext, names: Sequence[str]) -> list[Tensor]:
    """What replays use that nobody saved: tables of positions, and where rows of whole blocks go."""
    tables = [table for rotary in context._rotary.values() for table in rotary]
    if recomputed(names).isdisjoint(["block"]):
        return tables
    orders = [
        order
        for dispatch_plan in context.dispatch_plans.values()
        for order in (dispatch_plan.send_order, dispatch_plan.recv_order)
    ]
    return tables + [tensor for order in orders if order is not None for tensor in (order.slot_M, order.row_NS)]


def check_model(model: LanguageModel, names: Sequence[str], rows: int = 2, tokens: int = 130) -> None:
    context, replays = model.prepare(batch([[tokens]] * rows)), Measured(names)
    set_replays(model, replays)
    with replays.save_hooks():
        loss = model.losses(context).share(10, [10] * len(model.layout.mtp))
    real = replays.kept(list(model.parameters()), beside(context, names))
    workload = Workload(rows=rows, tokens=tokens, dtype=model.dtype, device="cpu", recompute=recomputed(names))
    told = model.costs(workload)
    assert sum(cost.kept for cost in told.values()) == real
    loss.backward()


@pytest.mark.parametrize("names", CHOICES, ids="+".join)
@pytest.mark.parametrize("number", range(len(MOES)))
def test_experts(number: int, names: Sequence[str]) -> None:
    """In one dtype or the other."""
    dtype = (torch.float32, torch.bfloat16)[(number + len(names)) % 2]
    check_model(model_of("E", MOES[number], dtype), names)


WHOLE = list(product(("[M-][*E][G-][ME]/*-", "[+-][+E]/+E/+E"), (torch.float32, torch.bfloat16), CHOICES))
PAIRS = cover(WHOLE, lambda point: dict(zip(("text", "dtype", "names"), point, strict=True)))


@pytest.mark.parametrize(
    ("text", "dtype", "names"),
    [pytest.param(*point, marks=() if point in PAIRS else pytest.mark.long) for point in WHOLE],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_whole_models(text: str, dtype: torch.dtype, names: Sequence[str]) -> None:
    tied = dtype is torch.float32
    check_model(model_of(text, MOES[0], dtype, tied=tied, **(VARIED if tied else {})), names)


# ------------------------------------------------------------------------------------- shared by ranks


def on_a_rank(rank: int, world: int, run: Run) -> tuple[int, Calls]:
    """What this rank keeps after forward, and its calls forward, again and backward."""
    worked_out, names = plan(run, world), run.train.recompute
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        model = make_model(worked_out, choose_device("cpu"), groups)
        model.to_empty(device=CPU).to(model.dtype)
        model.device = CPU
        for module in model.modules():
            if isinstance(module, Router | HeadScalars):
                module.float()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        replays, context = Measured(names), model.prepare(batch([[128]] * 2, vocab=run.model.vocab))
        set_replays(model, replays)
        with recorded() as calls:
            with replays.save_hooks():
                loss = model.losses(context).share(100, [100] * len(worked_out.layout.mtp))
            size = replays.kept(list(model.parameters()), beside(context, names))
            loss.backward()
        return size, calls


EACH = ("norm", "activation", "core", "experts")
SHARED = [
    ("[*E][M-][G-]/*E", Mesh(tp=2, ep=2), "fp32", ("full",), {}),
    ("[*E][M-][G-]", Mesh(cp=2, ep=2), "bf16", EACH, OLMO),
    ("[+E][+-]/+E", Mesh(tp=2, cp=2, ep=4), "bf16", EACH, {}),
    ("[*E]-", Mesh(tp=4, etp=2, dispatcher="all_gather"), "fp32", ("block",), OLMO),
    pytest.param("[*E][M-][G-]", Mesh(tp=2, cp=2, ep=4), "bf16", EACH, OLMO, marks=pytest.mark.long),
    pytest.param("[+E][+-]/+E/+E", Mesh(tp=2, cp=2, ep=4), "bf16", EACH, {}, marks=pytest.mark.long),
    pytest.param("[*E][M-][G-]", Mesh(cp=2), "fp32", EACH, {}, marks=pytest.mark.long),
    pytest.param("[*E][M-][G-]", Mesh(cp=2), "bf16", ("full",), OLMO, marks=pytest.mark.long),
    pytest.param("[+E][+-]/+E/+E", Mesh(tp=2, ep=2), "fp32", ("norm",), {}, marks=pytest.mark.long),
    pytest.param("[*E]-", Mesh(tp=4, ep=2, etp=2), "fp32", ("full",), {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("text", "mesh", "dtype", "names", "more"), SHARED, ids=lambda value: str(value)[:40])
def test_a_rank_keeps_and_sends_what_its_modules_say(
    text: str, mesh: Mesh, dtype: str, names: tuple[str, ...], more: dict[str, Any]
) -> None:
    run, world = run_of(text, mesh, dtype, **more), mesh.tp * mesh.cp
    run = replace(run, train=replace(run.train, recompute=names))
    size, calls = run_ranks(world, on_a_rank, run)[0]
    worked_out = plan(run, world)
    costs = model_of_rank(worked_out, first_rank(worked_out, 0), "cpu").costs(workload_of(worked_out, "cpu"))
    told: Calls = Counter()
    for cost in costs.values():
        for call in cost.calls:
            told[OPS.get(call.op, call.op), call.ranks, call.payload] += call.times
    assert told == calls
    assert sum(cost.kept for cost in costs.values()) == size


# ------------------------------------------------------------------------------------------ a whole step


@pytest.mark.parametrize("names", [("norm",), EACH, ("block",), ("full",)], ids="+".join)
@pytest.mark.parametrize(("text", "dtype"), [("[*E]" * 2, "bf16"), ("[M-][G-]", "bf16"), ("[+E]+", "fp32")])
def test_the_peak_of_a_step_is_within_an_eighth(text: str, dtype: str, names: tuple[str, ...]) -> None:
    run = peak_run_of(text, dtype)
    run = replace(run, train=replace(run.train, recompute=names))
    worked_out = plan(run, 1)
    assert estimate(worked_out, "cpu").peak == pytest.approx(peak_of(worked_out), rel=0.125)


@pytest.mark.long
@pytest.mark.parametrize("names", [("norm", "core"), ("full",)], ids="+".join)
def test_weights_are_gathered_and_gradients_reduced_no_more_often(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """A RECOMPUTE stands right before the B of its phase, and needs the same units. That of the final norm
    stands before B0.0:head already: between it and F0.0:final_norm comes F0.0:head alone, so that the norm
    stays gathered, and comes once in a micro-batch instead of twice."""
    run = run_on(tmp_path, Mesh(shard="all", ep=2), "bf16")
    again = replace(run, train=replace(run.train, recompute=names))
    plain, real = (run_ranks(4, sharded_step, each, str(tmp_path))[0] for each in (run, again))
    norm = ("all_gather", 4, run.model.hidden // 4 * torch.bfloat16.itemsize)
    assert (plain.calls[norm], real.calls[norm]) == (4, 2)
    plain.calls[norm] = real.calls[norm]
    assert real == plain
