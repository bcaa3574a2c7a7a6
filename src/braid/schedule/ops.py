"""Schedule ops: the instruction set of a pipeline rank, as immutable data.

A `Schedule` holds one list of ops per pipeline rank; all ranks of a stage (tp, cp, dp ...) run the list of
their stage. With several modules it holds one per station (see `graph`), and "rank" below means station.
Builders create schedules, `check` proves them, `simulate` times them, the engine executes them. Only builders
and the passes `with_replays`, `with_offloads`, `with_sums` and `lowered` insert ops.

**Semantics.** `F` and `B` are the forward and backward of one micro-batch on one segment (virtual stage).

- `F` of segment 0 reads the batch; every other `F` reads the output of the previous segment; `F` of the last
  segment includes the loss. `B` of the last segment starts at the loss; every other `B` reads the gradient from
  `B` of the next segment.
- A **channel** is (direction, sender, receiver); the direction is forward or backward. Each channel has its own
  communicator and delivers messages in order, so channels never block each other.
- `SEND_F` and `SEND_B` are asynchronous; the buffer is held until the message is delivered.
- `RECV_F` and `RECV_B` wait for the message. A receive may be posted earlier, as long as the receives of a
  channel are posted in list order.
- If a rank holds both neighbouring segments, the tensor is handed over locally, without a message. A pipeline
  of one rank has neither sends nor receives.
- `SUM_COPIES` all-reduces the gradient of a weight that several stages hold (the embedding, if the last stage
  has a tied head or MTP), once per step, after the last `B`.
- Sharded weights are grouped into **units** (FSDP units). `UNSHARD` starts the all-gather of a unit, `WAIT`
  waits for it, `RESHARD` frees the unit. `ACCUM` adds a micro-batch's gradient of a unit to the accumulated
  one, `REDUCE_GRAD` reduces the accumulated gradient over the ranks that share the unit. `FINISH` comes after
  the last of them; reduced gradients may be read from then on. Builders place none of these; `lowering` does.
- In a schedule with **phases** (see `phases`), `F` and `B` name the phase that they run. `W` names a wgrad
  bucket: it computes the weight gradients that the `B` of a phase has delayed. The phases that read `in` read
  the segment's input; the phase that writes `out` writes its output.
- `RECOMPUTE` (activation checkpointing) reruns a phase whose activations were not saved, after its `F` and
  before its first consumer: its own `B`, or a phase that saves its output. It uses the weights of the phase.
  `recompute` places these.
- `OFFLOAD` starts to copy what a block has saved in a micro-batch to a slot of host memory, after its last `F`.
  `FREE` makes the rank wait for the copy, and frees the device memory. `RELOAD` allocates it again and starts
  to copy it back, before the first `RECOMPUTE` or `B` of the block, which waits for it. `offload` places these.
- An op may declare the **collectives** that it issues, in order. Their members are pipeline ranks: a collective
  among the ranks of one stage has one member.

**Several modules.** A message of an **edge** passes the output of one module to another. All stations of both
sides take part in the n-th message of an edge and direction as one batch, which follows the batch before on all
of them. A station on one side posts its part when it sends or receives. A station on both sides posts its sends
and receives together, in the send; its receive only waits: two ranks that post sends first would wait for each
other. A message without an edge stays within its module and its pipelines.

- A segment has a `B` if it, or anything that it reads, is trained. If it has none, its sends are **bounded**:
  before it sends micro-batch m, it waits until micro-batch m - bound has been received.
- A turn of a stage that lies on several stations is a collective of these stations, declared by its first op:
  they share the collectives inside the turn, and run different lists.

**Syntax.** `F3.1` is the forward of micro-batch 3 on segment 1. `SEND_F3.1>2` sends its output to rank 2, which
has `RECV_F3.2<1`: a message names the segment on its own rank. `B3.1:2.mix` is one phase of `B3.1`.
`OFFLOAD3.1:2.block#0` copies what block 2 has saved to slot 0. Units are in parentheses, `UNSHARD(head)`,
declared collectives in brackets, `SUM_COPIES[embedding:grad@0,3]`, edges in braces: `SEND_F3.5{vision}>0,1`
sends the output of segment 5 to the stations 0 and 1, which have `RECV_F3.0{vision}<4`. `parse_op` reads what
`str` writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

from braid.schedule.graph import Graph, pipeline
from braid.schedule.phases import Phase


class Act(Enum):
    """The kind of an op, named as in torch.distributed.pipelining where it has the same action."""

    F = "F"
    B = "B"
    W = "W"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    FREE = "FREE"
    RELOAD = "RELOAD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SUM_COPIES = "SUM_COPIES"
    UNSHARD = "UNSHARD"
    WAIT = "WAIT"
    RESHARD = "RESHARD"
    ACCUM = "ACCUM"
    REDUCE_GRAD = "REDUCE_GRAD"
    FINISH = "FINISH"

    def __init__(self, name: str) -> None:
        self.computes = name in ("F", "B", "W", "RECOMPUTE")
        self.sends = name.startswith("SEND_")
        self.receives = name.startswith("RECV_")
        self.shards = name in ("UNSHARD", "WAIT", "RESHARD", "ACCUM", "REDUCE_GRAD", "FINISH")
        self.copies = name in ("OFFLOAD", "FREE", "RELOAD")
        self.inserted = self.shards or self.copies
        """Whether a pass inserts it between the ops of a builder, which know nothing of it."""
        self.direction = "R" if name == "RECOMPUTE" else name[-1]
        """`F`, `B`, `W`, or `R` for RECOMPUTE; empty for acts without one."""
        if not (self.computes or self.sends or self.receives):
            self.direction = ""

    __hash__ = object.__hash__  # that of Enum runs in Python, and acts are in the key of almost every dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that its members must issue in the same order."""

    communicator: str
    label: str
    """What it does: members that issue different collectives are detected by it."""
    members: tuple[int, ...]
    """Pipeline ranks, ascending."""

    def __str__(self) -> str:
        return f"[{self.communicator}:{self.label}@{','.join(map(str, self.members))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One entry of a rank's list."""

    act: Act
    micro_batch: int | None = None
    """None for an op of the whole step."""
    segment: int | None = None
    """The segment on the op's own rank; None if it concerns no single segment."""
    phase: str | None = None
    """A phase of the segment, a wgrad bucket for `W`, or a block for `OFFLOAD`, `FREE` and `RELOAD`, which is
    named as if it were one phase; None for the whole segment."""
    slot: int | None = None
    """The slot of host memory of an `OFFLOAD` or `RELOAD`; each block has slots of its own."""
    edge: str | None = None
    """The edge of a message between modules; None within a module."""
    peer: int | None = None
    """The other pipeline rank of a message; the first of them if there are several."""
    further: tuple[int, ...] = ()
    """All peers but the first."""
    unit: str | None = None
    """The unit that is unsharded, resharded, accumulated or reduced."""
    collectives: tuple[Collective, ...] = ()
    """The collectives that the op issues, in order."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The stations on the other side of a message, ascending. Those of an edge may include its own."""
        return () if self.peer is None else (self.peer, *self.further)

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f"{self.micro_batch}.{self.segment}"
        where += "" if self.phase is None else f":{self.phase}"
        where += "" if self.slot is None else f"#{self.slot}"
        where += "" if self.edge is None else f"{{{self.edge}}}"
        arrow = "" if self.peer is None else f"{'>' if self.act.sends else '<'}{','.join(map(str, self.peers))}"
        unit = "" if self.unit is None else f"({self.unit})"
        return f"{self.act.value}{where}{unit}{arrow}{''.join(map(str, self.collectives))}"


Channel = tuple[str, int, int]
"""(direction, sender, receiver). With several modules the direction also names the module, `F.vision`, unless
it is the first, or the edge, `F{vision}`."""

Message = tuple[str, int, int | str]
"""(direction, micro-batch, segment or edge that reads it)."""


def channel_of(rank: int, op: Op) -> Channel:
    """The channel that `rank` sends or receives on with this op."""
    assert op.peer is not None, f"{op} names no peer"
    return (op.act.direction, rank, op.peer) if op.act.sends else (op.act.direction, op.peer, rank)


def message_of(op: Op) -> Message:
    """The message that an op sends or receives: equal on both sides."""
    assert op.micro_batch is not None
    assert op.segment is not None
    if op.edge is not None:
        return op.act.direction, op.micro_batch, op.edge
    onward = (op.act is Act.SEND_F) - (op.act is Act.SEND_B)
    return op.act.direction, op.micro_batch, op.segment + onward


Turn = tuple[int, int]
"""(micro-batch, segment): the pass of a micro-batch through a segment."""

Ops = tuple[Op, ...]
"""The list of one pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The op lists of all pipeline ranks for one step, and the parameters that they were built for."""

    name: str
    """Of the builder."""
    micro_batches: int
    holder: tuple[int, ...]
    """The pipeline rank of each segment; with several modules, the first of its stations."""
    backward: bool
    """False for an evaluation, which has no `B`."""
    live_bound: tuple[int, ...]
    """For each rank, the most (micro-batch, segment) pairs whose activations may be alive at the same time."""
    ops: tuple[Ops, ...]
    phases: tuple[tuple[Phase, ...], ...] = ()
    """The phases of each segment, in forward order; empty if ops run whole segments."""
    delayed: bool = False
    """Whether weight gradients are delayed to `W` ops, for phases that have buckets."""
    recompute: tuple[str, ...] = ()
    """What is recomputed, by the names of `train.recompute`: phases with any such region have a `RECOMPUTE`."""
    reached: tuple[bool, ...] = ()
    """For each segment, whether gradients reach it: it, or a segment before it, is trained. Empty: as the graph
    says."""
    dropped: tuple[tuple[str, ...], ...] = ()
    """For each segment, the residual streams that are recomputed rather than saved."""
    offloaded: tuple[tuple[str, ...], ...] = ()
    """For each segment, the blocks that wait in host memory for their backward. Empty: none."""
    slots: tuple[int, ...] = ()
    """For each segment, how many slots of host memory each of these blocks has."""
    weights: Literal["unplaced", "resident", "sharded"] = "unplaced"
    """Which ops on units there are: none yet (not lowered); gradient accumulation only, for a rank that keeps
    all weights; or all of them."""
    modules: Graph | None = None
    """The segments of all modules and their edges; None for one module with a pipeline rank per stage."""

    @cached_property
    def graph(self) -> Graph:
        """`modules`, or the graph of a plain pipeline."""
        return self.modules or pipeline(self.holder)

    @cached_property
    def backwards(self) -> tuple[bool, ...]:
        """For each segment, whether it has a `B`."""
        return tuple(self.backward and each for each in self.reached or self.graph.backwards)

    @cached_property
    def trains(self) -> tuple[bool, ...]:
        """For each segment, whether any of its weights are trained."""
        return tuple(self.backward and segment.trains for segment in self.graph.segments)

    @property
    def pp(self) -> int:
        """The number of lists: pipeline ranks or, with several modules, stations."""
        return len(self.ops)

    @property
    def segments(self) -> int:
        return len(self.holder)

    @property
    def virtual(self) -> int:
        """Virtual stages (segments) per rank of a plain pipeline."""
        return self.segments // self.pp

    @cached_property
    def replayed(self) -> tuple[frozenset[str], ...]:
        """For each segment, the phases that are recomputed."""
        names = frozenset(self.recompute)
        return tuple(
            frozenset(
                phase.name for phase in phases if phase.backward and phase.replayed_units(names) is not None
            )
            for phases in self.phases
        )

    def has_backward(self, segment: int) -> bool:
        """Whether gradients reach a segment."""
        return self.backwards[segment]

    def segments_of(self, rank: int) -> tuple[int, ...]:
        return segments_of(self.holder, rank) if self.modules is None else self.modules.held[rank]

    def units(self, rank: int) -> tuple[str, ...]:
        """The units that the phases of a rank use, in the order of first use."""
        phases = (phase for segment in self.segments_of(rank) for phase in self.phases[segment])
        return tuple(dict.fromkeys(unit for phase in phases for unit in phase.units))

    def grad_units(self, rank: int) -> tuple[str, ...]:
        """Those of them that get a gradient."""
        phases = (phase for segment in self.segments_of(rank) for phase in self.phases[segment])
        return tuple(dict.fromkeys(unit for phase in phases for unit in phase.grad_units))

    def channels(self) -> tuple[Channel, ...]:
        """All channels in use, in the same order on all ranks."""
        used = {
            channel for rank, ops in enumerate(self.ops) for op in ops for channel in self.channels_of(rank, op)
        }
        return tuple(sorted(used))

    def channels_of(self, rank: int, op: Op) -> tuple[Channel, ...]:
        """The channels that a rank sends or receives on with an op, one per peer."""
        name = op.act.direction
        if op.edge is not None:
            name += f"{{{op.edge}}}"
        elif self.modules is not None and op.segment is not None and op.segment < self.segments:
            module = self.modules.segments[op.segment].module
            name += "" if module == self.modules.modules[0] else f".{module}"
        sends, peers = op.act.sends, op.peers
        if len(peers) == 1:  # every message of a pipeline
            return ((name, rank, peers[0]) if sends else (name, peers[0], rank),)
        return tuple((name, rank, peer) if sends else (name, peer, rank) for peer in peers)

    def pipe_of(self, op: Op) -> Channel:
        """The communicator of a message within a module: it connects two stages along every pipeline."""
        assert op.segment is not None
        graph, onward = self.graph, op.act in (Act.SEND_F, Act.RECV_B)
        other = graph.next(op.segment) if onward else graph.previous(op.segment)
        assert other is not None, f"{op} leaves its module without an edge"
        sender, receiver = (op.segment, other) if op.act.sends else (other, op.segment)
        module = graph.segments[op.segment].module
        name = op.act.direction + ("" if module == graph.modules[0] else f".{module}")
        return name, graph.stages[sender], graph.stages[receiver]

    def pipes(self, module: str) -> tuple[Channel, ...]:
        """The communicators of a module's pipelines, in the same order on all ranks."""
        messages = (op for ops in self.ops for op in ops if (op.act.sends or op.act.receives) and not op.edge)
        own = (op for op in messages if self.graph.segments[op.segment or 0].module == module)
        return tuple(sorted({self.pipe_of(op) for op in own}))

    def send_bound(self, op: Op) -> int | None:
        """How many messages like this one may be on their way: None for any number."""
        if self.modules is None or op.act is not Act.SEND_F:
            return None
        if op.segment is None or op.segment >= self.segments:
            return None
        return None if self.backwards[op.segment] else self.modules.segments[op.segment].bound

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ops))


def segments_of(holder: Sequence[int], rank: int) -> tuple[int, ...]:
    """The segments that a rank holds, in forward order."""
    return tuple(segment for segment, each in enumerate(holder) if each == rank)


_OP = re.compile(
    r"([A-Z_]+)(?:(\d+)\.(\d+)(?::([a-z0-9_.]+))?(?:#(\d+))?(?:\{([^{}\s]+)\})?)?"
    r"(?:\(([^()\s]+)\))?(?:[<>](\d+(?:,\d+)*))?((?:\[[^\]]*\])*)"
)
_COLLECTIVE = re.compile(r"\[([^:\]]+):([^@\]]+)@(\d+(?:,\d+)*)\]")


def parse_op(text: str) -> Op:
    """Read an op as `str` writes it; anything else is a `ValueError`."""
    if not (match := _OP.fullmatch(text)):
        examples = "F3.1, B3.1:2.mix, SEND_F3.1>2, SEND_F3.1{vision}>0,2 or SUM_COPIES[name:label@0,3]"
        raise ValueError(f"{text!r} is not an op: write one like {examples}")
    act, micro_batch, segment, phase, slot, edge, unit, arrow, collectives = match.groups()
    peers = [] if arrow is None else [int(peer) for peer in arrow.split(",")]
    op = Op(
        act=Act(act),
        micro_batch=None if micro_batch is None else int(micro_batch),
        segment=None if segment is None else int(segment),
        unit=unit,
        phase=phase,
        slot=None if slot is None else int(slot),
        edge=edge,
        peer=peers[0] if peers else None,
        further=tuple(peers[1:]),
        collectives=tuple(
            Collective(communicator=name, label=label, members=tuple(map(int, members.split(","))))
            for name, label, members in _COLLECTIVE.findall(collectives)
        ),
    )
    if str(op) != text:
        raise ValueError(f"{text!r} is not an op: write {op}")
    return op
