"""Ways to break what keeps ranks together, one at a time: each must turn the comparison red.

A sabotage replaces one function, for as long as its `with` lasts, on every rank alike, so that nobody waits for
somebody who does not come. `seen_by` is the check that is there for it; others may see it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from braid.distributed import collectives
from braid.distributed.collectives import Group, all_reduce_no_grad, own_slice
from braid.engine import executor
from braid.kernels.linear_cross_entropy import reference as loss
from braid.model.context import Context, MicroBatch
from braid.nn import embedding
from braid.nn.moe import balance, router
from braid.optim import gradients
from braid.schedule import Act
from braid.train import counts, expert_load, step
from tests.topology.matrix import Topology

Break = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Sabotage:
    """Something that is broken, and where that matters."""

    broken: Break
    model: str
    topology: Topology
    seen_by: str
    """The check that is there for it."""
    steps: int = 1
    """After which it is seen; most show in the first, or in the evaluation after it."""


# --------------------------------------------------------------------------------- sums over a group


def not_summed(module: ModuleType, family: str, entries: int | None = None) -> Break:
    """Sums that a module takes over a family of groups are left out; of tensors with so many entries."""

    def own(x: Tensor, group: Group) -> Tensor:
        left_out = group.name == family and entries in (None, x.numel())
        return x if left_out else all_reduce_no_grad(x, group)

    return lambda: patch.object(module, "all_reduce_no_grad", own)


def copies_not_summed(families: Collection[str]) -> Break:
    """Copies of a weight keep gradients of their own, where such a family holds them."""
    whole = gradients.sum_copies_

    def some(found: Mapping[str, Tensor], copies: Collection[gradients.ReplicatedPart]) -> None:
        whole(found, [each for each in copies if each.group.name not in families])

    return lambda: patch.object(gradients, "sum_copies_", some)


def length_of(**wrong: Any) -> Break:
    """The gradient's length is taken without knowing what several ranks hold."""
    whole = gradients.own_square

    def counted_twice(found: Any, copies: Any, repeated: Any, **known: Any) -> Tensor:
        return whole(found, **{"copies": copies, "repeated": repeated, **known, **wrong})

    return lambda: patch.object(gradients, "own_square", counted_twice)


# -------------------------------------------------------------------------------------- collectives


def replaced(function: Any, direction: str, local: Callable[..., Any]) -> Break:
    """One direction of a collective with gradients."""
    return lambda: patch.object(function, direction, staticmethod(local))


def kept_to_itself(x: Tensor, group: Group, dim: int) -> Tensor:
    """What a rank would gather, if all others had what it has."""
    return torch.cat([x] * group.size, dim)


def _gather_forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
    ctx.group, ctx.dim = group, dim
    return kept_to_itself(x, group, dim)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own_slice(grad, ctx.group, ctx.dim).contiguous(), None, None


def _scatter_forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
    ctx.group, ctx.dim = group, dim
    return own_slice(x, group, dim).contiguous()


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return kept_to_itself(grad, ctx.group, ctx.dim), None, None


def _total_forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
    ctx.group = group
    return x.clone()


def _total_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


def _swap_forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
    ctx.group, ctx.split, ctx.join = group, split, join
    return torch.cat(x.chunk(group.size, split), join)


def _swap_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.cat(grad.chunk(ctx.group.size, ctx.join), ctx.split), None, None, None


def _exchange_forward(ctx: Any, x: Tensor, group: Group, send: Any, receive: Any) -> Tensor:
    ctx.group, ctx.send, ctx.receive = group, send, receive
    return torch.zeros_like(collectives.all_to_all_v_no_grad(x, group, send, receive))


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad.new_zeros(sum(ctx.send), *grad.shape[1:]), None, None, None


def no_gradients_sent() -> AbstractContextManager[Any]:
    """A pipeline rank sends zeros back."""
    send = executor._Execution._send

    def zeros(self: Any, op: Any, message: Tensor) -> None:
        send(self, op, torch.zeros_like(message) if op.act is Act.SEND_B else message)

    return patch.object(executor._Execution, "_send", zeros)


# ------------------------------------------------------------------------- sharded data parallelism


def fsdp(**wrong: Callable[..., None]) -> Break:
    """FSDP2's own collectives, under the names of all versions of torch."""
    names = {
        "gather": ("all_gather_into_tensor", "all_gather_single"),
        "scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
        "total": ("all_reduce",),
    }
    changed = {name: function for kind, function in wrong.items() for name in names[kind]}
    known = {name: getattr(dist, name) for name in dir(dist) if not name.startswith("__")}
    return lambda: patch.object(_fsdp_collectives, "dist", SimpleNamespace(**(known | changed)))


def _own_shard(output: Tensor, input: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
    output.copy_(input.chunk(group.size())[group.rank()])


def _shard_again(output: Tensor, input: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
    output.copy_(input.repeat(group.size()))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def divided() -> AbstractContextManager[Any]:
    """Gradients are averaged over data-parallel ranks, as FSDP2 does by default."""
    whole = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, _: whole(self, 2.0))


# --------------------------------------------------------------------- what concerns whole sequences


def rows_in_parts() -> AbstractContextManager[Any]:
    """A router takes its part of a row for the whole of it."""
    return patch.multiple(router, whole_rows=lambda x, rows, group: x, own_part=lambda x, rows, group: x)


def places_from_zero() -> AbstractContextManager[Any]:
    """Every rank numbers its tokens from 0: random masks repeat."""
    places = Context._positions_T.func
    return patch.object(Context, "_positions_T", property(lambda self: torch.arange(len(places(self)))))


def same_samples() -> AbstractContextManager[Any]:
    """All data-parallel ranks read the first one's samples."""
    whole = step.micro_batches

    def first(*given: Any) -> list[MicroBatch]:
        *before, dp = given
        return whole(*before, replace(dp, rank=0))

    return patch.object(step, "micro_batches", first)


def padding_counts() -> AbstractContextManager[Any]:
    """The padding of the vocabulary has a probability."""
    whole = embedding.linear_cross_entropy

    def with_padding(*given: Any) -> Any:
        *before, vocabulary, scale, wgrad_store = given
        counted = copy(vocabulary)
        counted.held = counted.rows
        return whole(*before, counted, scale, wgrad_store)

    return patch.object(embedding, "linear_cross_entropy", with_padding)


# ------------------------------------------------------------------------------------------ all of them


def _on(world: int, words: str, model: str, broken: Break, seen_by: str, steps: int = 1) -> Sabotage:
    topology = Topology(world=world, words=words)
    return Sabotage(broken=broken, model=model, topology=topology, seen_by=seen_by, steps=steps)


SABOTAGES: Mapping[str, Sabotage] = MappingProxyType(
    {
        "gradients of weights replicated over tp are not summed": _on(
            2, "tp2", "hybrid", copies_not_summed({"tp"}), "gradients"
        ),
        "gradients of key-value heads replicated over some tp ranks are not summed": _on(
            4, "tp4", "hybrid", copies_not_summed({"tp_run_2"}), "gradients"
        ),
        "gradients of down biases replicated over etp are not summed": _on(
            2, "etp2", "hybrid", copies_not_summed({"etp"}), "gradients"
        ),
        "gradients of the embedding at both ends of a pipeline are not summed": _on(
            2, "pp2", "tied", copies_not_summed({"ends"}), "gradients"
        ),
        "dense gradients are not reduced": _on(2, "ep2", "hybrid", fsdp(scatter=_own_shard), "gradients"),
        "expert gradients are not reduced": _on(2, "tp2", "hybrid", fsdp(scatter=_own_shard), "gradients"),
        "gradients are not summed over replicas of the shards": _on(
            2, "replicate2", "hybrid", fsdp(total=_nothing), "gradients"
        ),
        "weights are not all-gathered": _on(2, "", "tied", fsdp(gather=_shard_again), "first loss"),
        "gradients are averaged over ranks": _on(2, "", "tied", divided, "gradient norm"),
        "all-gather, forward": _on(
            2, "tp2", "hybrid", replaced(collectives._AllGather, "forward", _gather_forward), "first loss"
        ),
        "all-gather, backward": _on(
            2, "tp2", "hybrid", replaced(collectives._AllGather, "backward", _gather_backward), "gradients"
        ),
        "reduce-scatter, forward": _on(
            2, "tp2", "hybrid", replaced(collectives._ReduceScatter, "forward", _scatter_forward), "first loss"
        ),
        "reduce-scatter, backward": _on(
            2, "tp2", "hybrid", replaced(collectives._ReduceScatter, "backward", _scatter_backward), "gradients"
        ),
        "all-reduce, forward": _on(
            2, "tp2", "hybrid", replaced(collectives._AllReduce, "forward", _total_forward), "first loss"
        ),
        "all-reduce, backward": _on(
            2, "tp2", "hybrid", replaced(collectives._AllReduce, "backward", _total_backward), "gradients"
        ),
        "all-to-all, forward": _on(
            2, "cp2", "hybrid", replaced(collectives._AllToAll, "forward", _swap_forward), "first loss"
        ),
        "all-to-all, backward": _on(
            2, "cp2", "hybrid", replaced(collectives._AllToAll, "backward", _swap_backward), "gradients"
        ),
        "all-to-all-v, forward": _on(
            2, "ep2", "hybrid", replaced(collectives._AllToAllV, "forward", _exchange_forward), "first loss"
        ),
        "all-to-all-v, backward": _on(
            2, "ep2", "hybrid", replaced(collectives._AllToAllV, "backward", _exchange_backward), "gradients"
        ),
        "all-gather over cp, backward": _on(
            2, "cp2", "latent", replaced(collectives._AllGather, "backward", _gather_backward), "gradients"
        ),
        "all-gather dispatch, backward": _on(
            2, "etp2", "sinkhorn", replaced(collectives._AllGather, "backward", _gather_backward), "gradients"
        ),
        "pipeline stages send no gradients": _on(2, "pp2", "hybrid", no_gradients_sent, "gradients"),
        "cross-entropy: maximum over the vocabulary": _on(
            2,
            "tp2",
            "tied",
            lambda: patch.object(loss, "all_reduce_max_no_grad", lambda x, group: x),
            "first loss",
        ),
        "cross-entropy: sum over the vocabulary": _on(
            2, "tp2", "tied", lambda: patch.object(loss, "all_reduce_no_grad", lambda x, group: x), "first loss"
        ),
        "vocabulary padding enters the loss": _on(2, "tp2", "tied", padding_counts, "first loss"),
        "load-balancing counts over the ranks of a micro-batch": _on(
            2, "", "hybrid", not_summed(balance, "slab"), "other figures"
        ),
        "load-balancing counts over the ranks of a sequence": _on(
            2, "tp2", "hybrid", not_summed(balance, "tp_cp"), "other figures"
        ),
        "token counts of a step over all ranks": _on(
            2, "", "hybrid", not_summed(counts, "everyone"), "first loss"
        ),
        "metrics of a step over all ranks": _on(2, "", "hybrid", not_summed(step, "everyone"), "first loss"),
        "sums of an evaluation over all ranks": _on(
            2, "", "hybrid", not_summed(step, "everyone", entries=2), "validation loss"
        ),
        "expert counts for selection biases": _on(
            2, "", "hybrid", not_summed(expert_load, "slab"), "selection biases", steps=3
        ),
        "gradient norm over all ranks": _on(2, "", "tied", not_summed(gradients, "everyone"), "gradient norm"),
        "gradient norm counts copies of data-parallel ranks": _on(
            2, "none", "tied", length_of(repeated=frozenset()), "gradient norm"
        ),
        "gradient norm counts copies of tp ranks": _on(2, "tp2", "tied", length_of(copies=()), "gradient norm"),
        "capacity decided on parts of sequences": _on(2, "tp2", "capacity", rows_in_parts, "first loss"),
        "Sinkhorn decided on parts of sequences": _on(2, "cp2", "sinkhorn", rows_in_parts, "first loss"),
        "dropout masks from rank-local positions": _on(2, "tp2", "tied", places_from_zero, "first loss"),
        "all data-parallel ranks read the same samples": _on(2, "", "tied", same_samples, "first loss"),
    }
)
