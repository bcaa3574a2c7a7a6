"""`braid plan --ops RANK`: the op list that the engine executes on a rank in one step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.planning.divisibility import AxisSizes
from braid.planning.plan import Plan
from braid.schedule import Act, Op
from braid.schedule.draw import format_ranks, held_stages

DESCRIPTIONS = MappingProxyType(
    {
        Act.F: "forward",
        Act.B: "backward",
        Act.W: "delayed weight gradients",
        Act.RECOMPUTE: "recompute activations that were not saved",
        Act.OFFLOAD: "start to copy what the block has saved to host memory",
        Act.FREE: "wait for the copy; the device memory is free",
        Act.RELOAD: "start to copy it back",
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
    station = plan.station(rank)
    if station is None:
        ranks = f"{plan.grid.ranks[0]} to {plan.grid.ranks[-1]}"
        rule = f"mesh.ranks puts the model on the ranks {ranks}; the others execute no ops"
        raise ConfigError([Problem(field="ops", value=rank, rule=rule, remedy=ranks)])
    ops = plan.schedule.ops[station]
    if as_json:
        row = "station" if plan.encoders else "stage"
        return json.dumps({"rank": rank, row: station, "ops": [str(op) for op in ops]}, indent=2)
    peers = _station_peers(plan, rank) if plan.encoders else _pipeline_peers(plan, rank)
    return "\n".join([_header(plan, rank, station), *_lines(ops, peers, plan)])


_Peers = Callable[[Op], str]
"""The ranks on the other side of a message."""


def _pipeline_peers(plan: Plan, rank: int) -> _Peers:
    pp_group = next(group for group in plan.grid.groups("pp") if rank in group)
    return lambda op: f"rank {pp_group[op.peers[0]]}"


def _station_peers(plan: Plan, rank: int) -> _Peers:
    """Within a module, the rank of the same pipeline; over an edge, all on the other side, as it depends on the
    data who of them takes part."""
    graph = plan.schedule.graph

    def peers(op: Op) -> str:
        assert op.segment is not None
        if op.edge is None:
            neighbour = op.segment + (1 if op.act in (Act.SEND_F, Act.RECV_B) else -1)
            own, other = graph.segments[op.segment].ranks, graph.segments[neighbour].ranks
            return f"rank {other[own.index(rank)]}"
        ranks = sorted(each for station in op.peers for each in graph.ranks[station])
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"

    return peers


def _header(plan: Plan, rank: int, station: int) -> str:
    count = len(plan.schedule.ops[station])
    if plan.encoders:
        graph, ranks = plan.schedule.graph, plan.schedule.graph.ranks[station]
        same = "" if len(ranks) == 1 else f", the same on ranks {format_ranks(ranks)}"
        return f"rank {rank} of {plan.world}, {held_stages(graph, station)}: {count:,} ops per step{same}\n"
    same = "" if plan.axes.slab == 1 else ", the same on every rank of the stage"
    where = "" if plan.axes.pp == 1 else f", stage {station} of {plan.axes.pp}"
    return f"rank {rank} of {plan.world}{where}: {count:,} ops per step{same}\n"


def _lines(ops: tuple[Op, ...], peers: _Peers, plan: Plan) -> Iterator[str]:
    index_width = len(str(max(len(ops) - 1, 0)))
    texts = [str(replace(op, collectives=())) for op in ops]
    width = max((len(text) for text in texts), default=0)
    for index, (op, text) in enumerate(zip(ops, texts, strict=True)):
        yield f"{index:{index_width}}  {text:{width}}  {_description(op, peers, plan)}"


def _description(op: Op, peers: _Peers, plan: Plan) -> str:
    if plan.schedule.weights == "resident" and op.act in (Act.ACCUM, Act.REDUCE_GRAD):
        return "accumulate the gradients of this micro-batch, in the optimizer's dtype"
    text = DESCRIPTIONS[op.act]
    if op.edge is not None:
        rows = "gradients" if op.act.direction == "B" else "activations"
        text = text.replace(rows, f"{'gradients of ' if op.act.direction == 'B' else ''}rows of {op.edge}")
    if op.peer is not None:
        return f"{text} {peers(op)}"
    axes = _axes(op, plan)
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


def _axes(op: Op, plan: Plan) -> AxisSizes:
    """The grid of the module whose unit an op is about."""
    module, slash, _ = (op.unit or "").partition("/")
    return plan.encoders[module].axes if slash else plan.axes
