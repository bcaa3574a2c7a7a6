"""Links of a cluster: the seconds of a collective or a message, by the machines that its ranks lie on.

Ranks fill machines in order. A **node** here is a domain of fast links (NVLink): the GPUs of a machine, or
those of a rack that has such links throughout. Within a node, seconds come from measured sizes of the device's
calibration. Over nodes,

    all-gather, reduce-scatter, all-reduce   rings: min(node bandwidth, k x NIC) each way for the k members of a
                                             node, and a latency for each node
    all-to-all                               the longer of what passes the NIC and what passes the node
    DeepEP                                   an all-to-all that sends a token once to a node, not to each expert
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from braid.errors import ConfigError, Problem
from braid.nn.cost import Call
from braid.timing.calibration import Calibration, names_in, shipped
from braid.timing.files import is_number, json_object, raise_problems, read_text, shown
from braid.timing.interpolation import along
from braid.topology import FAMILIES, Grid, Members
from braid.topology.view import View
from braid.validators import nearest

LinkClass = Literal["node", "network"]

UNMEASURED = 0.25
"""The relative spread of a class of links that nobody measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines that are alike, and the links between them. Bandwidths are bytes per second, per rank and in
    each direction."""

    name: str
    device: str
    """The name of its calibration."""
    ranks_per_node: int
    """GPUs of a machine."""
    domain: int
    """GPUs with fast links between them: those of a machine, or of a rack."""
    node_bandwidth: float
    """Of the fast links, at their peak."""
    node_latency: float
    """Seconds of a message within a node."""
    nic_bandwidth: float
    """Of the network, at its peak."""
    nic_latency: float
    """Seconds of a message between nodes."""
    nic_share: float = 0.9
    """What a collective reaches of the network's peak."""
    measured: bool = False
    """Whether the network was measured; otherwise its spread is that of links nobody measured."""
    source: str = ""
    """Where these numbers come from."""

    @property
    def network(self) -> float:
        """Bytes per second that reach another node from one rank."""
        return self.nic_bandwidth * self.nic_share


def filled(cluster: Cluster, world: int) -> Cluster:
    """The cluster as a job of `world` ranks uses it: domains of fast links that are filled alike, of whole
    machines, as large as they can be. 256 ranks take 64 of each rack of 72."""
    if world <= cluster.domain:
        return replace(cluster, domain=world)
    machine = cluster.ranks_per_node
    sizes = range(cluster.domain, cluster.domain // 2, -machine)
    size = next((size for size in sizes if world % size == 0), None)
    if size is None:
        near = sorted({max(world // machine * machine, machine), -(-world // machine) * machine})
        values = " or ".join(map(str, near)) if world % machine else f"a multiple of {cluster.domain}"
        raise ConfigError(
            [
                Problem(
                    field="world",
                    value=world,
                    rule=f"must fill machines of {machine} GPUs, and domains of up to {cluster.domain} "
                    f"alike, on the cluster {cluster.name}",
                    remedy=values,
                )
            ]
        )
    return replace(cluster, domain=size)


# -------------------------------------------------------------------------------------------- spans


class Span(NamedTuple):
    """How the groups of a family lie on nodes; the worst of them, if they differ."""

    members: int
    per_node: int
    """The fewest members that share a node."""
    nodes: int
    """The most nodes of a group."""

    @property
    def link(self) -> LinkClass:
        return "node" if self.nodes == 1 else "network"


def span(grid: Grid, family: str, domain: int) -> Span:
    """The span of a family of groups of a grid, where each `domain` ranks are a node. Families are those of
    `topology.FAMILIES`, `dispatch`, `ends`, and runs of tp ranks (`tp_run_4`)."""
    view, chosen = _pattern(grid, family)
    if isinstance(chosen, tuple):
        return span_of_groups(chosen, domain)
    if grid.explicit is None and grid.offset % domain == 0:
        aligned = _aligned(view, chosen, domain)
        if aligned is not None:
            return aligned
    return span_of_groups(_groups(grid, view, chosen), domain)


def _pattern(grid: Grid, family: str) -> tuple[View, frozenset[str] | tuple[Members, ...]]:
    """The axes that a family varies over, or its groups if these are no axes."""
    if family == "ends":
        return grid.dense, tuple((each[0], each[-1]) for each in grid.groups("pp"))
    if family.startswith("tp_run_"):
        return grid.dense, grid.runs("tp", int(family.removeprefix("tp_run_")))
    name = "ep_etp" if family == "dispatch" else family
    if name not in FAMILIES:
        known = ", ".join([*FAMILIES, "dispatch", "ends", "tp_run_N"])
        raise ConfigError(f"no family of groups {family!r}{nearest(family, FAMILIES)}: families are {known}")
    view, axes = FAMILIES[name]
    return grid.view(view), frozenset(axes)


def _groups(grid: Grid, view: View, axes: frozenset[str]) -> tuple[Members, ...]:
    ranks, offsets = grid.ranks, view.offsets(axes)
    firsts = view.offsets([name for name in view.names if name not in axes])
    return tuple(tuple(ranks[first + offset] for offset in offsets) for first in firsts)


def _aligned(view: View, axes: frozenset[str], domain: int) -> Span | None:
    """From sizes and strides alone, where a node is a whole number of steps along one axis; else None."""
    members = per_node = 1
    for name, size, stride in zip(view.names, view.sizes, view.strides, strict=True):
        end = stride * size
        if stride < domain < end and (domain % stride or end % domain):
            return None
        here = size if end <= domain else max(domain // stride, 1)
        members *= size if name in axes else 1
        per_node *= here if name in axes else 1
    last = view.size % domain
    if view.size > domain and last:
        return None
    return Span(members, per_node, members // per_node)


def span_of_groups(groups: Sequence[Members], domain: int) -> Span:
    """The span of groups that are given rank by rank."""
    fewest, most = len(groups[0]), 1
    for members in groups:
        nodes: dict[int, int] = {}
        for rank in members:
            nodes[rank // domain] = nodes.get(rank // domain, 0) + 1
        fewest, most = min(fewest, *nodes.values()), max(most, len(nodes))
    return Span(len(groups[0]), fewest, most)


# ------------------------------------------------------------------------------------------ seconds


def call_seconds(
    call: Call, span: Span, cluster: Cluster, calibration: Calibration, *, top_k: int | None = None
) -> float:
    """The seconds of one call of a collective. `top_k` is given for DeepEP: experts of a token."""
    if call.ranks == 1:
        return 0.0
    whole = call.payload * call.ranks if call.op == "all_gather" else call.payload
    if call.op in ("all_to_all", "all_to_all_v"):
        return exchange_seconds(whole, span, cluster, calibration, top_k=top_k)
    within = node_seconds(call.op, span.per_node, whole, cluster, calibration)
    if span.nodes == 1:
        return within
    bandwidth = min(cluster.node_bandwidth, span.per_node * cluster.network)
    passes = ring_share(call.op, span.members)
    steps = span.nodes * (2 if call.op == "all_reduce" else 1)
    # The part within a node runs at the same time, unless it is the slower one.
    return max(passes * whole / bandwidth, within) + steps * cluster.nic_latency


def exchange_seconds(
    payload: float, span: Span, cluster: Cluster, calibration: Calibration, *, top_k: int | None = None
) -> float:
    """An all-to-all in which every rank sends `payload` bytes, equally to all members."""
    local = payload * span.per_node / span.members
    within = node_seconds("all_to_all", span.per_node, local, cluster, calibration)
    if span.nodes == 1:
        return within
    away = payload - local
    if top_k is not None:
        away *= once_per_node(top_k, span.nodes)
    return max(away / cluster.network, within) + cluster.nic_latency


def once_per_node(top_k: int, nodes: int) -> float:
    """What remains of the bytes to other nodes if a token goes once to each node that has any of its experts,
    which are drawn evenly: nodes that at least one of `top_k` draws hits, over draws."""
    return nodes * (1 - (1 - 1 / nodes) ** top_k) / top_k


def node_seconds(op: str, ranks: int, whole: float, cluster: Cluster, calibration: Calibration) -> float:
    """A collective among ranks of one node, by measured sizes of its op; 0 for a single rank. Group sizes that
    were not measured take as long per byte that passes a link as the nearest that was."""
    if ranks == 1 or not whole:
        return 0.0
    tables = calibration.collectives.get("all_to_all" if op == "all_to_all_v" else op, {})
    if not tables:
        raise ConfigError(missing_collective(op, calibration))
    near = min(tables, key=lambda known: (abs(log(known / ranks)), known))
    measured = along(tables[near], whole) * ring_share(op, ranks) / ring_share(op, near)
    return max(measured, ring_share(op, ranks) * whole / cluster.node_bandwidth, cluster.node_latency)


def missing_collective(op: str, calibration: Calibration) -> str:
    known = ", ".join(calibration.collectives) or "none"
    return (
        f"{calibration.device}: no calibration for {op} within a node (measured: {known}); run `braid "
        "calibrate` under a launcher on several GPUs of a node"
    )


def missing_calls(calls: Sequence[Call], spans: Mapping[str, Span], calibration: Calibration) -> list[str]:
    """What the calibration has no seconds for, each once. `spans` are by family."""
    wanted = dict.fromkeys(
        "all_to_all" if call.op == "all_to_all_v" else call.op
        for call in calls
        if call.ranks > 1 and spans[call.family].per_node > 1
    )
    return [missing_collective(op, calibration) for op in wanted if not calibration.collectives.get(op)]


def ring_share(op: str, ranks: int) -> float:
    """Bytes that pass a rank's link, over those of the whole buffer."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def message_seconds(size: float, same_node: bool, cluster: Cluster) -> float:
    """A message from one rank to another."""
    if same_node:
        return cluster.node_latency + size / cluster.node_bandwidth
    return cluster.nic_latency + size / cluster.network


def same_node(first: int, second: int, cluster: Cluster) -> bool:
    return first // cluster.domain == second // cluster.domain


def link_spread(link: LinkClass, cluster: Cluster, calibration: Calibration) -> float:
    """The relative spread of a class of links."""
    if link == "network":
        return calibration.spread.get("network", UNMEASURED) if cluster.measured else UNMEASURED
    return calibration.spread.get("node", UNMEASURED)


# -------------------------------------------------------------------------------------------- files


def clusters() -> tuple[str, ...]:
    """Names of the clusters that have a file in this package."""
    return names_in("clusters")


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by its name, or one of a file."""
    if name.endswith(".json") or "/" in name:
        return cluster_from_json(read_text(Path(name)), name)
    if name not in clusters():
        raise ConfigError(
            f"no cluster {name!r}{nearest(name, clusters())}: shipped ones are {', '.join(clusters())}; a file "
            "(FILE.json) describes another, see docs/step-time.md"
        )
    return cluster_from_json(files(__package__).joinpath(f"clusters/{name}.json").read_text(), f"{name}.json")


def cluster_to_json(cluster: Cluster) -> str:
    return json.dumps(asdict(cluster), indent=2) + "\n"


def cluster_from_json(text: str, file: str = "cluster") -> Cluster:
    """The cluster of a file; `file` is its name in errors."""
    given = json_object(text, file, "a cluster")
    raise_problems(_cluster_problems(given), file)
    return Cluster(**given)


_LIMITS: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "ranks_per_node": (1, 2**10, "GPUs"),
        "domain": (1, 2**16, "GPUs"),
        "node_bandwidth": (1e8, 1e14, "bytes per second (400 Gb/s are 50e9)"),
        "nic_bandwidth": (1e8, 1e14, "bytes per second (400 Gb/s are 50e9)"),
        "node_latency": (1e-9, 0.1, "seconds"),
        "nic_latency": (1e-9, 0.1, "seconds"),
        "nic_share": (0.01, 1, "a share of the peak"),
    }
)
"""What numbers can be, and what they are: others are slips of the pen, such as Gb/s for bytes per second."""


def _cluster_problems(given: Mapping[str, Any]) -> Iterator[str]:
    known = {each.name: each for each in fields(Cluster)}
    for name in given:
        if name not in known:
            yield f"{name}: unknown field{nearest(name, known)}"
    for name, each in known.items():
        if each.default is MISSING and name not in given:
            yield f"{name}: missing"
    sound = [name for name, value in given.items() if name in known and _has_type(value, str(known[name].type))]
    for name, value in given.items():
        if name in known and name not in sound:
            yield f"{name}: {shown(value)} is not of type {known[name].type}"
        elif name in _LIMITS:
            low, high, unit = _LIMITS[name]
            if not value > 0:
                yield f"{name}: must be positive, not {value!r}"
            elif not low <= value <= high:
                yield f"{name}: {value!r} is impossible; from {low:g} to {high:g} {unit}"
    if "domain" in sound and "ranks_per_node" in sound:
        domain, machine = given["domain"], given["ranks_per_node"]
        if machine > 0 and domain > 0 and domain % machine:
            yield f"domain: {domain} must be a multiple of ranks_per_node, {machine}"
    if "device" in sound and given["device"] not in shipped() and not given["device"].endswith(".json"):
        names = ", ".join(shipped())
        yield f"device: {shown(given['device'])} is none of {names}, and no file of `braid calibrate`"


def _has_type(value: object, kind: str) -> bool:
    match kind:
        case "int":
            return is_number(value) and isinstance(value, int)
        case "float":
            return is_number(value)
        case "bool":
            return isinstance(value, bool)
        case _:
            return isinstance(value, str)
