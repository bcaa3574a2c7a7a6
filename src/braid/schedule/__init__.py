"""Schedules as data: what every pipeline rank does in a step; made, proved, timed and drawn without a process.

ops.py has the vocabulary and what it means, phases.py what a segment is made of; builders.py makes schedules,
overlapped.py and dual.py those that go into phases; check.py proves them (faults.py has
the rules, order.py those about collectives), simulate.py times them, draw.py draws them. rendezvous.py is the
model of execution on which the last three stand.
"""

from braid.schedule.builders import (
    BUILDERS,
    build,
    dealt,
    evaluation,
    folded,
    forward_only,
    held,
    interleaved,
    one_f_one_b,
    schedule_problems,
    with_sums,
)
from braid.schedule.check import Report, check, live_peaks
from braid.schedule.draw import draw
from braid.schedule.dual import DUAL_PIPE_V, dual_pipe_v, dual_pipe_v_of_segments
from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import (
    Act,
    Channel,
    Collective,
    Message,
    Op,
    Ops,
    Schedule,
    channel_of,
    computed,
    message_of,
    parse_op,
    parse_ops,
)
from braid.schedule.order import collective_faults
from braid.schedule.overlapped import Options, overlapped
from braid.schedule.phases import Chain, Link, Phase, Stream, chains
from braid.schedule.rendezvous import Span
from braid.schedule.simulate import Costs, Timeline, simulate

__all__ = [
    "BUILDERS",
    "DUAL_PIPE_V",
    "Act",
    "Chain",
    "Channel",
    "Collective",
    "Costs",
    "Fault",
    "Link",
    "Message",
    "Op",
    "Ops",
    "Options",
    "Phase",
    "Report",
    "Rule",
    "Schedule",
    "Span",
    "Stream",
    "Timeline",
    "build",
    "chains",
    "channel_of",
    "check",
    "collective_faults",
    "computed",
    "dealt",
    "draw",
    "dual_pipe_v",
    "dual_pipe_v_of_segments",
    "evaluation",
    "folded",
    "forward_only",
    "held",
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
