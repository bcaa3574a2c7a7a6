"""On a GPU: every collective through NCCL, on a group of one rank, and FSDP2 with our units over it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from braid import architecture, kernels
from braid.choices import Strategy
from braid.config import Data, Mesh, Run, Train
from braid.distributed import collectives
from braid.distributed.collectives import Group
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.nn.moe.all_gather import AllGather
from braid.nn.moe.all_to_all import AllToAll
from braid.nn.moe.dispatch_plan import Slots
from braid.optim.adamw import AdamW
from braid.optim.shards import local_shard
from braid.planning.plan import Plan, plan
from braid.schedule import Act
from braid.train.build import make_state
from braid.train.device import choose_device
from braid.train.state import State, initialize
from braid.train.step import backward, count
from tests.model.cases import batch
from tests.states import language_state

CUDA = torch.device("cuda")
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
    "gather": lambda x, group: collectives.all_gather(x, group, dim=1),
    "scatter": lambda x, group: collectives.reduce_scatter(x, group, dim=1),
    "total": collectives.all_reduce,
    "swap": lambda x, group: collectives.all_to_all(x, group, split=2, join=1),
    "exchange": lambda x, group: collectives.all_to_all_v(x, group, [len(x)], [len(x)]),
}
PLAIN = {
    "gathered": collectives.all_gather_no_grad,
    "scattered": collectives.reduce_scatter_no_grad,
    "summed": collectives.all_reduce_no_grad,
    "highest": collectives.all_reduce_max_no_grad,
    "swapped": lambda x, group: collectives.all_to_all_no_grad(x, group, 1, 0),
    "exchanged": lambda x, group: collectives.all_to_all_v_no_grad(x, group, [len(x)], [len(x)]),
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
    chosen = dispatcher(group=one_rank, dispatch_group=one_rank, local_experts=4, etp=1)
    experts_NS = torch.randint(0, 4, (9, 2), device="cuda")
    dispatch_plan = chosen.dispatch_plan(Slots(experts_NS))
    x = torch.randn(18 if dispatch_plan.send_order is not None else 9, 8, device="cuda", requires_grad=True)
    probs = torch.rand(18 if dispatch_plan.send_order is not None else (9, 2), device="cuda")
    rows, _, dispatch_plan = chosen.dispatch(x, probs, dispatch_plan)
    assert int(dispatch_plan.counts_E.sum()) == 18
    back = chosen.combine(rows, dispatch_plan)
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


def run_of(dtype: Any, strategy: Strategy) -> Run:
    return Run(
        model=SHAPE,
        data=Data(sequence_tokens=12, tokenizer="none.json"),
        train=Train(steps=1, batch_samples=8, micro_batches=2, dtype=dtype),
        mesh=Mesh(shard=strategy),
    )


def sharded_state(worked_out: Plan) -> State:
    """What `make_state` makes where there are ranks to share with: here there is one."""
    model = LanguageModel(
        SHAPE,
        worked_out.layout,
        kernels.choose(SHAPE, worked_out.layout.kinds(), CUDA, DTYPES[worked_out.run.train.dtype]),
        device=CUDA,
        dtype=DTYPES[worked_out.run.train.dtype],
        stored=torch.float32,
    )
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_cp",))
    shard_units(
        model,
        model.units(),
        meshes={"dense": mesh, "expert": mesh},
        strategy=worked_out.run.mesh.shard,
        compute=model.dtype,
    )
    optim = worked_out.run.optim
    optimizer = AdamW(
        dict(model.named_parameters()),
        decaying=model.decaying(),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    keeper = FsdpWeights(model, [unit.path for unit in model.units()])
    return language_state(worked_out, model, optimizer, keeper, model.device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients", "all"])
def test_sharded_units_on_nccl_give_the_gradients_of_the_plain_model(one_rank, dtype, strategy):
    run = run_of(dtype, strategy)
    plain = make_state(plan(run, 1), choose_device("cuda"))
    # Its list of ops is that of ranks which share; a group of one of them has nobody to share with.
    sharded = sharded_state(plan(run, 2))
    batches = [
        replace(batch(rows, vocab=97), step=1) for rows in ([[7, 5], [12], [4, 8]], [[12], [6, 6], [3, 9]])
    ]
    found = []
    for state in (plain, sharded):
        initialize(state, run)
        backward(state, run, batches, count(state, batches))
        found.append(state.optimizer.gradients())
    wanted, ours = found
    acts = {op.act for op, _ in sharded.program.ops}
    assert {Act.UNSHARD, Act.WAIT, Act.RESHARD, Act.REDUCE_GRAD, Act.FINISH} <= acts
    for name, parameter in sharded.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert local_shard(parameter).first
        theirs = wanted[name].double()
        error = (ours[name].double() - theirs).norm() / theirs.norm().clamp(min=1e-6)
        assert error < (1e-5 if dtype == "fp32" else 5e-2), (name, float(error))
