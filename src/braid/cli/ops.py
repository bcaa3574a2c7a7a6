"""`braid plan --ops RANK`: what a rank will do in a step, op by op, as the plan has it and the engine runs
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.planning.plan import Plan
from braid.schedule import Act, Op

MEANINGS = MappingProxyType(
    {
        Act.F: "forward",
        Act.B: "backward",
        Act.W: "weight gradients that backward has left",
        Act.RECOMPUTE: "forward again, for what was not kept",
        Act.SEND_F: "send activations to",
        Act.RECV_F: "receive activations from",
        Act.SEND_B: "send gradients to",
        Act.RECV_B: "receive gradients from",
        Act.SUM_COPIES: "all-reduce the gradient of a weight that two stages hold",
        Act.UNSHARD: "begin to all-gather weights",
        Act.WAIT: "wait until they are there",
        Act.RESHARD: "release weights",
        Act.ACCUM: "add this micro-batch's gradient to those before it",
        Act.REDUCE_GRAD: "begin to reduce-scatter gradients",
        Act.FINISH: "wait for all reductions: the optimizer may read gradients",
    }
)


def ops_of(planned: Plan, rank: int, *, as_json: bool) -> str:
    """The list of one rank, for people or as JSON."""
    if not 0 <= rank < planned.world:
        rule = f"there are {planned.world} ranks, counted from 0"
        raise ConfigError([Problem(field="ops", value=rank, rule=rule, remedy=f"0 to {planned.world - 1}")])
    lines = list(zip(*planned.grid.groups("pp"), strict=True))
    stage = next(stage for stage, ranks in enumerate(lines) if rank in ranks)
    peers = next(line for line in planned.grid.groups("pp") if rank in line)
    ops = planned.schedule.ops[stage]
    if as_json:
        return json.dumps({"rank": rank, "stage": stage, "ops": [str(op) for op in ops]}, indent=2)
    return "\n".join([_head(planned, rank, stage), *_lines(ops, peers, alone=planned.world == 1)])


def _head(planned: Plan, rank: int, stage: int) -> str:
    count = len(planned.schedule.ops[stage])
    same = "" if planned.axes.slab == 1 else ", as does every rank of the stage"
    where = "" if planned.axes.pp == 1 else f", stage {stage} of {planned.axes.pp}"
    return f"rank {rank} of {planned.world}{where}: {count:,} ops in a step{same}\n"


def _lines(ops: tuple[Op, ...], peers: tuple[int, ...], *, alone: bool) -> Iterator[str]:
    place_width = len(str(max(len(ops) - 1, 0)))
    texts = [str(replace(op, collectives=())) for op in ops]
    width = max((len(text) for text in texts), default=0)
    for place, (op, text) in enumerate(zip(ops, texts, strict=True)):
        yield f"{place:{place_width}}  {text:{width}}  {_meaning(op, peers, alone=alone)}"


def _meaning(op: Op, peers: tuple[int, ...], *, alone: bool) -> str:
    if alone and op.act in (Act.ACCUM, Act.REDUCE_GRAD):
        return "add this micro-batch's gradient to those before it, in the optimizer's dtype"
    words = MEANINGS[op.act]
    if op.peer is not None:
        words += f" rank {peers[op.peer]}"
    meshes = {each.communicator.partition(".")[0] for each in op.collectives}
    over = {"dense": "over dp and cp", "expert": "over edp"}
    return " ".join([words, *(over[mesh] for mesh in sorted(meshes & over.keys()))])
