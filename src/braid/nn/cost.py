"""Analytic cost model of a layer on one rank: activation memory, transient memory and collective traffic.

Every module has a closed-form `cost(workload)` for one micro-batch. To count each tensor exactly once, a module
counts

    its input, if one of its ops saves it for backward,
    every intermediate tensor that is saved,
    but not its output: its consumer counts that as an input.

Bytes are those of whole storages, because a saved slice keeps the tensor it views alive. Routing and document
lengths depend on the data; the model assumes rows of one document without padding and perfectly balanced
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from braid.distributed.collectives import Group

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v"]
Direction = Literal["forward", "backward", "recompute"]

INDEX_BYTES = 8
"""Bytes of an index or a count (int64)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One micro-batch as a rank sees it: its size, dtype, device and recompute policy."""

    rows: int
    """Rows of this rank."""
    tokens: int
    """Sequence length, before tp and cp ranks split it."""
    dtype: torch.dtype
    """Dtype of the activations."""
    items: int = 0
    """Items that the rows of an encoder are packed of; each has prefix tokens, if the encoder has any."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Some ops save more on a CPU, where they are composed of smaller ops."""
    references: frozenset[str] = frozenset()
    """Ops that run as their PyTorch reference although there may be a fused kernel (`train.kernels`)."""
    recompute: frozenset[str] = frozenset()
    """Kinds of regions that backward recomputes: see `nn.recompute`."""
    offloads: frozenset[str] = frozenset()
    """Kinds of regions whose tensors alone offload moves; all tensors, if there are none."""
    span: int = 1
    """Blocks between saved residual streams, if hyper-connections are recomputed."""
    fine: bool = False
    """Whether MoE blocks are split into phases. Everything recomputed for one phase is alive at once."""

    @property
    def narrow(self) -> int:
        """Bytes of an activation."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of a value computed in at least float32."""
        return torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def mixed(self) -> bool:
        """Whether the two differ, so that upcasting makes a copy."""
        return self.narrow != self.wide

    def may_fuse(self, op: str) -> bool:
        """Whether an op may run as a fused kernel, if there is one for this device and dtype."""
        return op not in self.references

    def recomputes(self, name: str) -> bool:
        return name in self.recompute

    def norm_output(self, saved: int, gathered: bool) -> int:
        """Bytes that a layer saves of its normed input. A recomputed norm saves nothing, unless the layer reads
        an all-gathered copy: the collective is not repeated."""
        return 0 if self.recomputes("norm") and not gathered else saved

    def local_tokens(self, *split_over: Group) -> int:
        """Tokens of all rows on one rank, if these groups split them."""
        ranks = 1
        for group in split_over:
            ranks *= group.size
        return self.rows * self.tokens // ranks


class Call(NamedTuple):
    """A collective that a rank issues, one or more times per micro-batch."""

    op: Op
    family: str
    """Name of the process group."""
    ranks: int
    """Size of the process group."""
    purpose: str
    """What is sent."""
    payload: int
    """Input bytes of one call on this rank."""
    times: int = 1
    phase: str = "mix"
    """The kind of phase that issues it: see `schedule.phases`. Those of FSDP have the name of their op."""
    direction: Direction = "forward"

    @property
    def label(self) -> str:
        """What is sent, and in which pass."""
        return self.purpose if self.direction == "forward" else f"{self.purpose}, {self.direction}"

    @property
    def sent(self) -> int:
        """Bytes that this rank sends in all calls, for ring algorithms."""
        others = self.ranks - 1
        match self.op:
            case "all_gather":
                each = self.payload * others
            case "all_reduce":
                each = 2 * self.payload * others // self.ranks
            case _:
                each = self.payload * others // self.ranks
        return each * self.times


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a module. Costs add up: saved bytes and calls are summed, transient bytes are a maximum."""

    kept: int = 0
    """Bytes saved for backward."""
    staying: int = 0
    """Bytes of these that are on the device whether they are saved or not: offload does not move them."""
    adopted: int = 0
    """Bytes of these that are saved for a recompute alone: inputs of regions which themselves save copies."""
    passing: int = 0
    """Transient bytes: how far backward at its peak exceeds the bytes saved for it. Weights and their gradients
    are not included. Unlike the other figures, this one is an estimate."""
    calls: tuple[Call, ...] = ()
    """Collectives of forward, backward and recomputation."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            kept=self.kept + other.kept,
            staying=self.staying + other.staying,
            adopted=self.adopted + other.adopted,
            passing=max(self.passing, other.passing),
            calls=self.calls + other.calls,
        )

    def times(self, count: int) -> Cost:
        """The cost of `count` such modules in sequence."""
        calls = tuple(call._replace(times=call.times * count) for call in self.calls)
        kept, staying, adopted = (count * each for each in (self.kept, self.staying, self.adopted))
        return replace(self, kept=kept, staying=staying, adopted=adopted, calls=calls)


# ------------------------------------------------------------------------------------------ calls


def recomputed_calls(calls: tuple[Call, ...], *not_repeated: str) -> tuple[Call, ...]:
    """The forward collectives among `calls` that a recomputation repeats; `not_repeated` are purposes of calls
    whose results are saved."""
    forward = (c for c in calls if c.direction == "forward" and c.purpose not in not_repeated)
    return tuple(call._replace(direction="recompute") for call in forward)


def in_phase(calls: tuple[Call, ...], phase: str) -> tuple[Call, ...]:
    """The calls of a module that runs in another phase than `mix`."""
    return tuple(call._replace(phase=phase) for call in calls)


def all_gather_calls(group: Group, part: int, purpose: str) -> tuple[Call, ...]:
    """An all-gather of `part` bytes from each rank, and the reduce-scatter of its backward."""
    return _forward_backward("all_gather", part, "reduce_scatter", part * group.size, group, purpose)


def reduce_scatter_calls(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    """A reduce-scatter of `payload` bytes, and the all-gather of its backward."""
    return _forward_backward("reduce_scatter", payload, "all_gather", payload // group.size, group, purpose)


def all_reduce_calls(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    return _forward_backward("all_reduce", payload, "all_reduce", payload, group, purpose)


def all_to_all_calls(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    return _forward_backward("all_to_all", payload, "all_to_all", payload, group, purpose)


def all_to_all_v_calls(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    """A balanced all-to-all-v: every rank receives as much as it sends."""
    return _forward_backward("all_to_all_v", payload, "all_to_all_v", payload, group, purpose)


def no_grad_call(op: Op, group: Group, payload: int, purpose: str, times: int = 1) -> tuple[Call, ...]:
    """A collective without a backward; empty for a group of one."""
    if group.size == 1 or not times:
        return ()
    return (Call(op, group.name, group.size, purpose, payload, times),)


def _forward_backward(
    op: Op, payload: int, backward_op: Op, backward_payload: int, group: Group, purpose: str
) -> tuple[Call, ...]:
    backward = no_grad_call(backward_op, group, backward_payload, purpose)
    return no_grad_call(op, group, payload, purpose) + tuple(
        call._replace(direction="backward") for call in backward
    )
