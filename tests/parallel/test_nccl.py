"""On a GPU: every collective through NCCL, on a group of one rank, and FSDP2 with our units over it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from braid import architecture, collectives, kernels, pattern
from braid.collectives import Group
from braid.engine import fsdp2
from braid.model.language import LanguageModel
from braid.nn.moe.all_gather import AllGather
from braid.nn.moe.all_to_all import AllToAll
from braid.nn.moe.journey import Slots
from braid.parallel.sharding import before_backward, kept_of, local, shard_units
from tests.model.cases import batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield Group(name="one", size=1, rank=0, handle=dist.group.WORLD)
    dist.destroy_process_group()


DIFFERENTIABLE = {
    "gather": lambda x, group: collectives.gather(x, group, dim=1),
    "scatter": lambda x, group: collectives.scatter(x, group, dim=1),
    "total": collectives.total,
    "swap": lambda x, group: collectives.swap(x, group, split=2, join=1),
    "exchange": lambda x, group: collectives.exchange(x, group, [len(x)], [len(x)]),
}
PLAIN = {
    "gathered": collectives.gathered,
    "scattered": collectives.scattered,
    "summed": collectives.summed,
    "highest": collectives.highest,
    "swapped": lambda x, group: collectives.swapped(x, group, 1, 0),
    "exchanged": lambda x, group: collectives.exchanged(x, group, [len(x)], [len(x)]),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_differentiable_collective_of_one_rank_changes_nothing(one_rank, name, dtype):
    x = torch.randn(3, 5, 4, 2, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
    y = DIFFERENTIABLE[name](x, one_rank)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_plain_collective_of_one_rank_changes_nothing(one_rank, name, dtype):
    x = (torch.randn(4, 6, 2, device="cuda") * 9).to(dtype).transpose(0, 1)
    assert torch.equal(PLAIN[name](x, one_rank), x)


@pytest.mark.parametrize("dispatcher", [AllToAll, AllGather])
def test_dispatchers_bring_rows_there_and_back(one_rank, dispatcher):
    chosen = dispatcher(group=one_rank, travel=one_rank, held=4, slices=1)
    experts_NS = torch.randint(0, 4, (9, 2), device="cuda")
    journey = chosen.journey(Slots(experts_NS))
    x = torch.randn(18 if journey.leaving is not None else 9, 8, device="cuda", requires_grad=True)
    probs = torch.rand(18 if journey.leaving is not None else (9, 2), device="cuda")
    rows, _, journey = chosen.dispatch(x, probs, journey)
    assert int(journey.counts_E.sum()) == 18
    back = chosen.combine(rows, journey)
    back.sum().backward()
    assert torch.equal(back, x)
    assert torch.equal(x.grad, torch.ones_like(x))


SHAPE = architecture.Model(
    pattern="[M-][G*E]/*E",
    hidden=64,
    vocab=97,
    attention=architecture.Attention(heads=4, kv_heads=2, head_dim=16),
    mamba2=architecture.Mamba2(heads=4, head_dim=16, state=16),
    delta_net=architecture.DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=16),
    mlp=architecture.Mlp(ffn=64),
    moe=architecture.Moe(experts=4, top_k=2, ffn=32, shared_ffn=32, aux_loss=0.01),
)


def model_of(dtype: torch.dtype, stored: torch.dtype | None) -> LanguageModel:
    layout, device = pattern.parse(SHAPE.pattern), torch.device("cuda")
    chosen = kernels.choose(SHAPE, layout.kinds(), device, dtype)
    model = LanguageModel(SHAPE, layout, chosen, device=device, dtype=dtype, stored=stored)
    model.initialize(1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients", "all"])
def test_sharded_units_on_nccl_give_the_gradients_of_the_plain_model(one_rank, dtype, strategy):
    plain, sharded = model_of(dtype, None), model_of(dtype, torch.float32)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_cp",))
    shard_units(
        sharded,
        sharded.units(),
        meshes={"dense": mesh, "expert": mesh},
        strategy=strategy,
        compute=dtype,
        root_methods=("run",),
    )
    fsdp2.wake(sharded)
    rows = replace(batch([[7, 5], [12], [4, 8]], vocab=97), step=1)
    modules = [unit.module for unit in sharded.units()]
    for last in (False, True):
        plain.losses(plain.prepare(rows)).share(30, [20]).backward()
        _, losses = sharded.run(sharded.segments, None, sharded.prepare(rows))
        before_backward(sharded, modules, strategy, last=last, done=last)
        losses.share(30, [20]).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert parameter.dtype == torch.float32
        assert kept_of(parameter).first
        ours, wanted = local(parameter.grad).double(), theirs[name].grad.double()
        error = (ours - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert error < (1e-5 if dtype == torch.float32 else 5e-2), (name, float(error))
