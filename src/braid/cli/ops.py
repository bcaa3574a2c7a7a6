"""`braid plan --ops RANK`: the op list that the engine executes on a rank in one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.planning.plan import Plan
from braid.schedule import Act, Op

DESCRIPTIONS = MappingProxyType(
    {
        Act.F: "forward",
        Act.B: "backward",
        Act.W: "delayed weight gradients",
        Act.RECOMPUTE: "recompute activations that were not saved",
        Act.SEND_F: "send activations to",
        Act.RECV_F: "receive activations from",
        Act.SEND_B: "send gradients to",
        Act.RECV_B: "receive gradients from",
        Act.SUM_COPIES: "all-reduce the gradient of a weight that two stages hold",
        Act.UNSHARD: "start the all-gather of weights",
        Act.WAIT: "wait for the all-gather",
        Act.RESHARD: "free gathered weights",
        Act.ACCUM: "accumulate the gradients of this micro-batch",
        Act.REDUCE_GRAD: "start the reduce-scatter of gradients",
        Act.FINISH: "wait for all gradient reductions; the optimizer may read gradients",
    }
)


def format_ops(plan: Plan, rank: int, *, as_json: bool) -> str:
    """The op list of a rank, annotated or as JSON."""
    if not 0 <= rank < plan.world:
        rule, remedy = "must be a rank of the run, counted from 0", "0"
        if plan.world > 1:
            remedy = f"0 to {plan.world - 1}"
        raise ConfigError([Problem(field="ops", value=rank, rule=rule, remedy=remedy)])
    if rank not in plan.grid.ranks:
        ranks = f"{plan.grid.ranks[0]} to {plan.grid.ranks[-1]}"
        rule = f"mesh.ranks puts the model on the ranks {ranks}; the others execute no ops"
        raise ConfigError([Problem(field="ops", value=rank, rule=rule, remedy=ranks)])
    pp_group = next(group for group in plan.grid.groups("pp") if rank in group)
    stage = pp_group.index(rank)
    ops = plan.schedule.ops[stage]
    if as_json:
        return json.dumps({"rank": rank, "stage": stage, "ops": [str(op) for op in ops]}, indent=2)
    return "\n".join([_header(plan, rank, stage), *_lines(ops, pp_group, plan)])


def _header(plan: Plan, rank: int, stage: int) -> str:
    count = len(plan.schedule.ops[stage])
    same = "" if plan.axes.slab == 1 else ", the same on every rank of the stage"
    where = "" if plan.axes.pp == 1 else f", stage {stage} of {plan.axes.pp}"
    return f"rank {rank} of {plan.world}{where}: {count:,} ops per step{same}\n"


def _lines(ops: tuple[Op, ...], pp_group: tuple[int, ...], plan: Plan) -> Iterator[str]:
    index_width = len(str(max(len(ops) - 1, 0)))
    texts = [str(replace(op, collectives=())) for op in ops]
    width = max((len(text) for text in texts), default=0)
    for index, (op, text) in enumerate(zip(ops, texts, strict=True)):
        yield f"{index:{index_width}}  {text:{width}}  {_description(op, pp_group, plan)}"


def _description(op: Op, pp_group: tuple[int, ...], plan: Plan) -> str:
    if plan.grid.size == 1 and op.act in (Act.ACCUM, Act.REDUCE_GRAD):
        return "accumulate the gradients of this micro-batch, in the optimizer's dtype"
    text = DESCRIPTIONS[op.act]
    if op.peer is not None:
        return f"{text} rank {pp_group[op.peer]}"
    axes = plan.axes
    meshes = {
        "dense": ("dp and cp", axes.dp * axes.cp, axes.dense_copies),
        "expert": ("edp", axes.edp, axes.expert_copies),
    }
    used = {collective.communicator.partition(".")[0] for collective in op.collectives}
    for names, ranks, replicas in (meshes[mesh] for mesh in sorted(used & meshes.keys())):
        if op.act is not Act.REDUCE_GRAD:
            ranks //= replicas
        elif replicas > 1:
            text = text.replace(
                "reduce-scatter", "all-reduce" if ranks == replicas else "reduce-scatter and all-reduce"
            )
        text += f" over {names} ({ranks} {'rank: nothing is sent' if ranks == 1 else 'ranks'})"
    return text
