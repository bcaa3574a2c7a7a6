"""Pipeline schedules as data: built, checked, simulated and drawn without starting a process.

ops.py defines the ops and their semantics, phases.py the parts of a segment, graph.py the modules and ranks
that segments belong to. builders.py builds 1F1B and interleaved schedules, overlapped.py and dual.py those that
overlap expert communication, multimodule.py those of a language model with encoders (clock.py orders their
turns). freezing.py removes backwards that frozen weights make needless, recompute.py inserts activation
recomputation, offload.py copies to the host and back, lowering.py the FSDP ops on sharded weights. check.py
proves a schedule (faults.py lists the rules; order.py checks collectives, station_faults.py several modules,
lifetime.py sharded weights), simulate.py times it, draw.py, draw_text.py and trace.py render it.
event_simulator.py is the model of execution behind check.py and simulate.py.
"""

from braid.schedule.builders import (
    BUILDERS,
    build,
    evaluation,
    forward_only,
    in_phases,
    interleaved,
    one_f_one_b,
    round_robin,
    schedule_problems,
    v_shape,
    with_sums,
)
from braid.schedule.check import CheckReport, check, live_peaks, segment_peaks
from braid.schedule.draw import draw
from braid.schedule.draw_text import draw_text
from braid.schedule.dual import DUAL_PIPE_V, dual_pipe_v
from braid.schedule.event_simulator import OpSpan
from braid.schedule.faults import Fault, Rule
from braid.schedule.freezing import freeze
from braid.schedule.graph import Edge, Graph, Segment
from braid.schedule.multimodule import ahead_problems, multimodule
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
    message_of,
    parse_op,
    segments_of,
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
    "Edge",
    "Fault",
    "Graph",
    "Link",
    "Message",
    "Op",
    "OpSpan",
    "Ops",
    "Options",
    "Phase",
    "Rule",
    "Schedule",
    "Segment",
    "Stream",
    "Timeline",
    "Turn",
    "ahead_problems",
    "build",
    "channel_of",
    "check",
    "collective_faults",
    "draw",
    "draw_text",
    "dual_pipe_v",
    "evaluation",
    "forward_only",
    "freeze",
    "in_phases",
    "interleaved",
    "live_peaks",
    "message_of",
    "multimodule",
    "one_f_one_b",
    "overlapped",
    "parse_op",
    "round_robin",
    "schedule_problems",
    "segment_peaks",
    "segments_of",
    "simulate",
    "v_shape",
    "with_sums",
]
