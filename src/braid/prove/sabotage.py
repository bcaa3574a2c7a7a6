"""Sums that are left out on purpose: a comparison that cannot fail proves nothing.

    with broken("gradients"):
        ...                   # this rank leaves the sum out, and so do all others

Every rank still issues what others wait for, so that a broken run ends, with a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from braid.distributed import collectives
from braid.distributed.collectives import Group, own_slice
from braid.engine import executor
from braid.errors import ConfigError
from braid.planning.plan import Plan
from braid.schedule import Act
from braid.train import counts

Swap = tuple[Any, str, Any]
"""A module or class, the name of a function of it, and what takes its place."""


@dataclass(frozen=True, kw_only=True)
class Sabotage:
    """What is left out, and which plans have it."""

    what: str
    there: Callable[[Plan], bool]
    swaps: Callable[[], list[Swap]]


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Within, this rank leaves a sum out; None leaves all as they are."""
    with ExitStack() as stack:
        for owner, attribute, substitute in [] if name is None else SABOTAGES[name].swaps():
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, substitute)
        yield


def check_there(name: str, plan: Plan) -> None:
    """Raise a `ConfigError` if a plan has no such sum."""
    known = [each for each, sabotage in SABOTAGES.items() if sabotage.there(plan)]
    if name not in known:
        there = ", ".join(f"{each} ({SABOTAGES[each].what})" for each in known)
        raise ConfigError(f"--sabotage {name}: this mesh has no such sum; it has {there or 'none at all'}")


# --------------------------------------------------------------------------------------- substitutes


def _gradients() -> list[Swap]:
    """FSDP2's own collectives, under the names of all versions of torch."""
    known = {name: getattr(dist, name) for name in dir(dist) if not name.startswith("__")}
    changed = {
        "reduce_scatter_tensor": _own_shard,
        "reduce_scatter_single": _own_shard,
        "all_reduce": lambda *_, **__: None,
    }
    return [(_fsdp_collectives, "dist", SimpleNamespace(**(known | changed)))]


def _own_shard(output: Tensor, input: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
    output.copy_(input.chunk(group.size())[group.rank()])


def _token_counts() -> list[Swap]:
    return [(counts, "all_reduce_no_grad", lambda x, group: x)]


def _tensor_parallel() -> list[Swap]:
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return own_slice(x, group, dim).contiguous()

    return [(collectives._ReduceScatter, "forward", staticmethod(forward))]


def _context_parallel() -> list[Swap]:
    def gathered(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(grad, ctx.group, ctx.dim).contiguous(), None, None

    def swapped(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.cat(grad.chunk(ctx.group.size, ctx.join), ctx.split), None, None, None

    return [
        (collectives._AllGather, "backward", staticmethod(gathered)),
        (collectives._AllToAll, "backward", staticmethod(swapped)),
    ]


def _experts() -> list[Swap]:
    def sent(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.new_zeros(sum(ctx.send), *grad.shape[1:]), None, None, None

    def gathered(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(grad, ctx.group, ctx.dim).contiguous(), None, None

    return [
        (collectives._AllToAllV, "backward", staticmethod(sent)),
        (collectives._AllGather, "backward", staticmethod(gathered)),
    ]


def _pipeline() -> list[Swap]:
    send = executor._Execution._send

    def zeros(self: Any, op: Any, message: Tensor) -> None:
        send(self, op, torch.zeros_like(message) if op.act is Act.SEND_B else message)

    return [(executor._Execution, "_send", zeros)]


def _share_gradients(plan: Plan) -> bool:
    """Whether any weight is on several ranks that see other tokens."""
    axes, mesh = plan.axes, plan.run.mesh
    experts = plan.run.model.moe is not None and axes.tp * axes.cp * axes.dp > mesh.ep * mesh.etp
    return axes.dp * axes.cp > 1 or experts


SABOTAGES: Mapping[str, Sabotage] = MappingProxyType(
    {
        "gradients": Sabotage(
            what="gradients over the ranks that share weights", there=_share_gradients, swaps=_gradients
        ),
        "loss": Sabotage(
            what="counts of tokens over data-parallel ranks",
            there=lambda plan: plan.axes.dp > 1,
            swaps=_token_counts,
        ),
        "tp": Sabotage(
            what="outputs of row-parallel layers", there=lambda plan: plan.axes.tp > 1, swaps=_tensor_parallel
        ),
        "cp": Sabotage(
            what="gradients of what context-parallel ranks exchange",
            there=lambda plan: plan.axes.cp > 1,
            swaps=_context_parallel,
        ),
        "ep": Sabotage(
            what="gradients of the tokens that experts receive",
            there=lambda plan: plan.run.model.moe is not None and plan.run.mesh.ep * plan.run.mesh.etp > 1,
            swaps=_experts,
        ),
        "pp": Sabotage(
            what="gradients that pipeline stages send", there=lambda plan: plan.axes.pp > 1, swaps=_pipeline
        ),
    }
)
"""By the word of `--sabotage`."""
