"""Faults of a schedule: the rules that `check` proves, and a violation of one as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from braid.schedule.ops import Op


class Rule(Enum):
    """The rules of a sound schedule."""

    COMPLETE = "F and B name their micro-batch and segment, a message also its peer, an op on a unit the unit"
    EXISTS = "the micro-batch and segment of an op exist"
    OWN_RANK = "an op is in the list of the rank that holds its segment"
    ONCE = "every micro-batch passes every segment once forward, and once backward in training"
    F_BEFORE_B = "a backward comes after the forward of the same micro-batch and segment"
    AFTER_INPUT = "an op comes after the ops that produce its inputs"
    INPUTS = (
        "a forward comes after the receives of all its edges, a backward after the gradients of all readers"
    )
    TRAINS = "a segment has a backward if it, or anything that it reads, is trained, and W only if it is itself"
    TOGETHER = "the first op of a turn is a collective of all stations of its stage, if there are several"
    PHASE_ORDER = "a micro-batch passes all phases of a segment in order, and backward in reverse"
    TURNS = "micro-batches pass each phase in order, forward and backward, so that gradient sums have one order"
    WEIGHTS = "weight gradients are computed once, after their backward, and in the order of backwards"
    PEER = "a message goes to the rank that holds the neighbouring segment, never to the sender itself"
    MATCHED = "every message is sent once and received once"
    CHANNEL_ORDER = "the messages of a channel are received in the order in which they are sent"
    LIVE = "no more forwards are alive than the schedule states"
    HELD = "no more messages are sent and not read than the schedule states"
    SAME_COLLECTIVES = "the members of a communicator issue the same collectives in the same order"
    COMMON_ORDER = "one total order of the collectives of all communicators is consistent with every rank"
    DEADLOCK = "no rank waits forever"
    OFFLOADED = "a block goes to the host once, after its forward: OFFLOAD, FREE, RELOAD, then what needs it"
    SLOT = "a slot of host memory that the schedule states holds one block, from its OFFLOAD to its RELOAD"
    UNSHARDED = "an op computes with gathered weights: after UNSHARD and WAIT, before RESHARD"
    RESHARDED = "weights are unsharded only while sharded, and resharded before FINISH"
    ACCUMULATED = "a micro-batch's gradient is accumulated or reduced before another micro-batch adds to it"
    REDUCED = "every gradient that ops have added to is reduced before FINISH, and no other"
    FINISHED = "a list has one FINISH, after all ops on units; copies are summed after it"
    SUMMED = "the gradient of a unit that several ranks hold is summed over them, once per step; no other is"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A violation of a rule."""

    rank: int
    place: int
    """The index in the rank's list; one past its end for a missing op."""
    op: Op
    """The op at fault, or the missing one."""
    rule: Rule
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}, op {self.place}, {self.op}: {self.why}\n  rule  {self.rule.value}"
