"""Schedules as data: what every pipeline rank does in a step; made, proved, timed and drawn without a process.

ops.py has the vocabulary and what it means, phases.py what a segment is made of. builders.py makes schedules,
overlapped.py and dual.py those in which phases run beside each other; recompute.py adds replays, lowering.py
the ops about sharded weights. check.py proves the whole (faults.py has the rules, order.py those about
collectives, lifetime.py those about weights), simulate.py times it, draw.py draws it. rendezvous.py is the
model of execution on which these stand.
"""

from braid.schedule.builders import (
    BUILDERS,
    build,
    dealt,
    evaluation,
    folded,
    forward_only,
    held,
    in_phases,
    interleaved,
    one_f_one_b,
    schedule_problems,
    with_sums,
)
from braid.schedule.check import CheckReport, check, live_peaks
from braid.schedule.draw import draw
from braid.schedule.dual import DUAL_PIPE_V, dual_pipe_v
from braid.schedule.event_simulator import OpSpan
from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import (
    Act,
    Channel,
    Collective,
    Message,
    Op,
    Ops,
    Schedule,
    Turn,
    channel_of,
    computed,
    message_of,
    parse_op,
    parse_ops,
)
from braid.schedule.order import collective_faults
from braid.schedule.overlapped import Options, overlapped
from braid.schedule.phases import Chain, Link, Phase, Stream
from braid.schedule.simulate import Costs, Timeline, simulate

__all__ = [
    "BUILDERS",
    "DUAL_PIPE_V",
    "Act",
    "Chain",
    "Channel",
    "CheckReport",
    "Collective",
    "Costs",
    "Fault",
    "Link",
    "Message",
    "Op",
    "OpSpan",
    "Ops",
    "Options",
    "Phase",
    "Rule",
    "Schedule",
    "Stream",
    "Timeline",
    "Turn",
    "build",
    "channel_of",
    "check",
    "collective_faults",
    "computed",
    "dealt",
    "draw",
    "dual_pipe_v",
    "evaluation",
    "folded",
    "forward_only",
    "held",
    "in_phases",
    "interleaved",
    "live_peaks",
    "message_of",
    "one_f_one_b",
    "overlapped",
    "parse_op",
    "parse_ops",
    "schedule_problems",
    "simulate",
    "with_sums",
]
