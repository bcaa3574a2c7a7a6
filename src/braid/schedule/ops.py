"""The op vocabulary: what a pipeline rank can be told to do, as immutable data.

A `Schedule` holds one list of ops for each pipeline rank; every rank of a stage (tp, cp, dp ...) runs the list
of its stage. Builders make schedules, `check` proves them, `simulate` times them, the engine runs them: none
of these adds an op of its own.

**What the ops mean.** Segment s of micro-batch m is computed forward by `F` and backward by `B`.

- `F` of segment 0 reads the batch; `F` of the last segment includes the loss. Every other `F` reads the output
  of the segment before. `B` of the last segment begins at the loss, every other `B` reads the gradient that
  `B` of the next segment made; `B` of segment 0 ends there, and sends nothing.
- A **channel** is (direction, sender, receiver), the direction being forward or backward. Each channel has a
  communicator of its own and carries its messages in order, so two channels never wait for each other.
- `SEND_F` and `SEND_B` post the message and go on. The buffer is held until the message is through.
- `RECV_F` and `RECV_B` wait until the message is there. A receive may be posted any time earlier, as long as
  the receives of its channel are posted in the order of the list.
- Where a rank holds both neighbours there is no message: the output is handed over on the rank. So a pipeline
  of one rank has neither sends nor receives.
- `SUM_COPIES` adds up the gradients of a weight that several stages hold (the embedding, where the last stage
  has a tied head or MTP). It stands after the last `B` and is done once per step.
- Weights that ranks of a stage share come and go by **units**: `UNSHARD` begins to gather one and goes on,
  `WAIT` waits for it, `RESHARD` lets go of it. `ACCUM` puts a micro-batch's gradient of a unit with those
  before it, `REDUCE_GRAD` sums what there is over the ranks that share it. `FINISH` stands behind the last of
  them: reduced gradients can be read after it. A builder places none of these; `lowering` does.
- Where a schedule goes into **phases** (see `phases`), `F` and `B` name the phase that they run, and `W` names
  a bucket: it adds the weight gradients that the `B` of a phase has left there for later. What a segment is
  given is read by the phases that read `in`, what it sends is made by the one that writes `out`.
- Where something of a phase is not kept but made again, `RECOMPUTE` runs it a second time, after its `F` and
  before whatever needs it: its own `B`, or a phase that keeps what it wrote. It uses the weights of the phase.
  `recompute` places these.
- An op may declare the **collectives** that it issues, in order. Their members are pipeline ranks: a collective
  among the ranks of one stage has one member.

**Text.** `F3.1` is the forward of micro-batch 3 on segment 1, `SEND_F3.1>2` sends its output to rank 2, which
has `RECV_F3.2<1`: a message op names the segment on its own rank. `B3.1:2.mix` is one phase of `B3.1`. A unit
stands in parentheses, `UNSHARD(head)`. Declared collectives follow in brackets,
`SUM_COPIES[embedding:grad@0,3]`. `parse_op` and `parse_ops` read what `str` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

from braid.schedule.phases import Phase


class Act(Enum):
    """What an op does. The names are those of torch.distributed.pipelining where it has one."""

    F = "F"
    B = "B"
    W = "W"
    RECOMPUTE = "RECOMPUTE"
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
        self.direction = "R" if name == "RECOMPUTE" else name[-1]
        """`F`, `B`, `W` or `R`; nothing for an act that has none."""
        if not (self.computes or self.sends or self.receives):
            self.direction = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective operation, as its members must agree on it."""

    communicator: str
    label: str
    """What is done, so that two members that do different things are told apart."""
    members: tuple[int, ...]
    """The pipeline ranks that meet, ascending."""

    def __str__(self) -> str:
        return f"[{self.communicator}:{self.label}@{','.join(map(str, self.members))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One entry of a rank's list."""

    act: Act
    micro_batch: int | None = None
    """Counted from 0; none where the op is about the whole step."""
    segment: int | None = None
    """The segment on the op's own rank; none where the op is about no single one."""
    phase: str | None = None
    """The part of the segment, where the op is not about all of it; for `W`, a bucket of it."""
    peer: int | None = None
    """The other pipeline rank of a message."""
    unit: str | None = None
    """The weights that are gathered, released or reduced."""
    collectives: tuple[Collective, ...] = ()
    """What the op issues on communicators, in order."""

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f"{self.micro_batch}.{self.segment}"
        where += "" if self.phase is None else f":{self.phase}"
        arrow = "" if self.peer is None else f"{'>' if self.act.sends else '<'}{self.peer}"
        unit = "" if self.unit is None else f"({self.unit})"
        return f"{self.act.value}{where}{unit}{arrow}{''.join(map(str, self.collectives))}"


Channel = tuple[str, int, int]
"""(direction, sender, receiver): carries its messages in order, on a communicator of its own."""

Message = tuple[str, int, int]
"""(direction, micro-batch, segment that reads it): what a channel carries."""


def channel_of(rank: int, op: Op) -> Channel:
    """The channel on which `rank` sends or receives with this op."""
    assert op.peer is not None, f"{op} names no peer"
    return (op.act.direction, rank, op.peer) if op.act.sends else (op.act.direction, op.peer, rank)


def message_of(op: Op) -> Message:
    """What the op sends or receives: the same value on both sides."""
    assert op.micro_batch is not None
    assert op.segment is not None
    onward = (op.act is Act.SEND_F) - (op.act is Act.SEND_B)
    return op.act.direction, op.micro_batch, op.segment + onward


Turn = tuple[int, int]
"""(micro-batch, segment): one way of a micro-batch through a segment."""

Ops = tuple[Op, ...]
"""The list of one pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every pipeline rank does in one step, and the facts that it was made for."""

    name: str
    """The builder's."""
    micro_batches: int
    holder: tuple[int, ...]
    """The pipeline rank that holds each segment."""
    backward: bool
    """Whether it trains; an evaluation has no `B`."""
    live_bound: tuple[int, ...]
    """For each rank, how many forwards may wait for their backward at most: (micro-batch, segment) pairs."""
    ops: tuple[Ops, ...]
    """The list of each rank."""
    phases: tuple[tuple[Phase, ...], ...] = ()
    """The phases of each segment, in the order of a forward; none where ops are about whole segments."""
    delayed: bool = False
    """Whether weight gradients of phases that have them get ops of their own."""
    recompute: tuple[str, ...] = ()
    """What is recomputed, by the names of `train.recompute`: phases that have any of it are run again before
    their backward."""
    dropped: tuple[tuple[str, ...], ...] = ()
    """For each segment the residual streams that nobody keeps until then."""
    weights: Literal["unplaced", "resident", "sharded"] = "unplaced"
    """Whether there are ops about units: none yet; only those about gradients, where every rank has all of its
    weights at any time; or those that gather and release them as well."""

    @property
    def pp(self) -> int:
        return len(self.ops)

    @property
    def segments(self) -> int:
        return len(self.holder)

    @property
    def virtual(self) -> int:
        """How many segments each rank holds."""
        return self.segments // self.pp

    @cached_property
    def replayed(self) -> tuple[frozenset[str], ...]:
        """For each segment the phases that are run again before their backward."""
        names = frozenset(self.recompute)
        return tuple(
            frozenset(phase.name for phase in phases if phase.replayed_units(names) is not None)
            for phases in self.phases
        )

    def held(self, rank: int) -> tuple[int, ...]:
        """The segments of a rank, in the order of a forward."""
        return tuple(segment for segment, each in enumerate(self.holder) if each == rank)

    def units(self, rank: int) -> tuple[str, ...]:
        """The units of weights that the phases of a rank use, in the order of their first use."""
        phases = (phase for segment in self.held(rank) for phase in self.phases[segment])
        return tuple(dict.fromkeys(unit for phase in phases for unit in phase.units))

    def channels(self) -> tuple[Channel, ...]:
        """Every channel that carries something, in an order on which all ranks agree."""
        used = {channel_of(rank, op) for rank, ops in enumerate(self.ops) for op in ops if op.peer is not None}
        return tuple(sorted(used))

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, ops))}" for rank, ops in enumerate(self.ops))


_OP = re.compile(
    r"([A-Z_]+)(?:(\d+)\.(\d+)(?::([a-z0-9_.]+))?)?(?:\(([^()\s]+)\))?(?:[<>](\d+))?((?:\[[^\]]*\])*)"
)
_COLLECTIVE = re.compile(r"\[([^:\]]+):([^@\]]+)@(\d+(?:,\d+)*)\]")


def parse_op(text: str) -> Op:
    """Read one op as `str` writes it; anything else is a `ValueError`."""
    if not (found := _OP.fullmatch(text)):
        like = "F3.1, B3.1:2.mix, SEND_F3.1>2 or SUM_COPIES[name:label@0,3]"
        raise ValueError(f"{text!r} is no op: write one like {like}")
    act, micro_batch, segment, phase, unit, peer, collectives = found.groups()
    op = Op(
        act=Act(act),
        micro_batch=None if micro_batch is None else int(micro_batch),
        segment=None if segment is None else int(segment),
        unit=unit,
        phase=phase,
        peer=None if peer is None else int(peer),
        collectives=tuple(
            Collective(communicator=name, label=label, members=tuple(map(int, members.split(","))))
            for name, label, members in _COLLECTIVE.findall(collectives)
        ),
    )
    if str(op) != text:
        raise ValueError(f"{text!r} is no op: it would be written {op}")
    return op


def parse_ops(text: str) -> Ops:
    """Read ops that blanks separate."""
    return tuple(parse_op(word) for word in text.split())


def computed(ops: Iterable[Op]) -> Ops:
    """Those that compute: the order that the literature draws."""
    return tuple(op for op in ops if op.act.computes)
