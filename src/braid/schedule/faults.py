"""What can be wrong with a schedule: the rules, and a fault as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from braid.schedule.ops import Op


class Rule(Enum):
    """What a sound schedule keeps."""

    COMPLETE = "F and B name their micro-batch and segment, a message its peer too, an op about a unit the unit"
    EXISTS = "an op is about a micro-batch and a segment that exist"
    OWN_RANK = "an op stands in the list of the rank that holds its segment"
    ONCE = "every micro-batch passes every segment once forward, and once backward when training"
    F_BEFORE_B = "a backward comes after the forward of the same micro-batch and segment"
    AFTER_INPUT = "an op comes after the ops that make what it reads"
    PHASE_ORDER = "a micro-batch passes all phases of a segment in order, and backward in reverse"
    TURNS = "every phase sees micro-batches in their order, forward and backward, so that sums have one order"
    WEIGHTS = "weight gradients are added once, after the backward that left them, in the order of backwards"
    PEER = "a message goes to the rank that holds the neighbouring segment, and never to its own"
    MATCHED = "every message is sent once and received once"
    CHANNEL_ORDER = "the messages of a channel are received in the order in which they are sent"
    LIVE = "no more forwards wait for their backward than the schedule states"
    SAME_COLLECTIVES = "the members of a communicator issue the same collectives in the same order"
    COMMON_ORDER = "one order of all collectives of all communicators holds on every rank"
    DEADLOCK = "no rank waits for ever"
    UNSHARDED = "an op computes with weights that are gathered: after UNSHARD and WAIT, before RESHARD"
    RESHARDED = "weights are gathered where they are sharded, and released before FINISH"
    ACCUMULATED = "a micro-batch's gradient is accumulated or reduced before another one adds to it"
    REDUCED = "what ops have added to gradients is reduced before FINISH, and nothing else is"
    FINISHED = "a list has one FINISH, behind everything that is about units; copies are summed after it"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule that is broken, and where."""

    rank: int
    place: int
    """Where in the rank's list; one past its end for something that is missing."""
    op: Op
    """The op at fault, or the one that is missing."""
    rule: Rule
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank}, op {self.place}, {self.op}: {self.why}\n  rule  {self.rule.value}"
