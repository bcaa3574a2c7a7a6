"""One run on any topology, told as whole tensors: what the invariance matrix compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid import fit
from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.collectives import Groups
from braid.config import Data, Optim, Run, Train
from braid.optim import gradients
from braid.parallel.groups import opened_groups
from braid.plan import Plan, plan
from braid.train import state as states
from braid.train.device import choose_device
from braid.train.feed import Feed, open_feed
from braid.train.loop import make_state
from braid.train.state import State
from braid.train.step import backward, count, evaluate, micro_batches, train_step

STEPS = 3


def hybrid(corpus: str) -> Run:
    """Every kind of layer but latent attention, with few key-value heads, groups and key heads."""
    return Run(
        model=Model(
            pattern="[M-][G*E]*[ME]/*E",
            hidden=16,
            vocab=259,
            tied=False,
            init_std=0.2,
            attention=Attention(heads=8, kv_heads=2, head_dim=4, qk_norm=True, bias=True, gate=True),
            mamba2=Mamba2(heads=8, head_dim=4, state=4, groups=1, conv=3, norm_per_group=False),
            delta_net=DeltaNet(key_heads=2, value_heads=8, key_dim=4, value_dim=4, conv=3),
            mlp=Mlp(ffn=16, bias=True),
            moe=Moe(
                experts=8,
                top_k=2,
                ffn=16,
                shared_ffn=16,
                shared_gate=True,
                bias=True,
                aux_loss=0.02,
                sequence_aux_loss=0.02,
                global_aux_loss=0.02,
                z_loss=0.01,
                selection_bias=True,
                score="sigmoid",
            ),
        ),
        data=Data(sources=(corpus,), sequence_tokens=16),
        optim=Optim(lr=1e-2, clip=0.5),
        train=Train(steps=STEPS, batch_samples=16, micro_batches=2, dtype="fp64", eval_samples=5),
    )


@dataclass
class Told:
    """What one rank has to say: its parts of tensors, each with where it begins."""

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    val_loss: float = 0.0
    gradients: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    weights: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)


def train(plan: Plan, groups: Groups, folder: Path) -> Told:
    """The gradient of the first step, and everything after three of them."""
    run, device = plan.run, choose_device("cpu")
    feed = open_feed(run, folder)
    state = make_state(plan, device, groups)
    states.initialize(state, run)
    told = Told(gradients=first_gradient(state, run, feed))
    for _ in range(STEPS):
        result = train_step(state, run, feed.train, rate=1e-2)
        told.loss.append(result.loss)
        told.norm.append(result.grad_norm)
    assert feed.validation is not None
    told.val_loss = evaluate(state.model, run, feed.validation)
    told.weights = parts(state, {**state.weights()})
    return told


def first_gradient(state: State, run: Run, feed: Feed) -> dict[str, Any]:
    batches = micro_batches(run, feed.train, 1, 0, state.model.groups.dp)
    backward(state, run, batches, count(state.model, batches))
    found = state.optimizer.gradients()
    gradients.sum_copies_(found, state.copies)
    told = parts(state, found)
    state.optimizer.forget()
    return told


def parts(state: State, holders: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of every canonical tensor that has a holder."""
    told = {}
    for name, tensor in state.model.canonical().items():
        if tensor.parameter in holders:
            held = tensor.within(state.kept[tensor.parameter].shard)
            told[name] = (held.offset, held.read(holders[tensor.parameter].detach()).clone())
    return told


def on_ranks(rank: int, world: int, run: Run, folder: str) -> Told:
    worked_out = plan(run, world)
    runs = fit.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    torch.set_num_threads(1)
    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        return train(worked_out, groups, Path(folder))


def whole(told: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors put together from what ranks hold; copies must agree to the last bit."""
    joined = {name: torch.full_like(value, torch.nan) for name, (_, value) in like.items()}
    for rank, each in enumerate(told):
        for name, (offset, value) in each.items():
            place = tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))
            there = joined[name][place]
            known = ~there.isnan()
            assert torch.equal(there[known], value[known]), f"rank {rank} has another copy of {name}"
            there.copy_(value)
    return joined


def change(run: Run, **mesh: Any) -> Run:
    return replace(run, mesh=replace(run.mesh, **mesh))
