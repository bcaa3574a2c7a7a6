"""The meter of a plan: a device's calibration and a cluster's links, which turn work and calls into seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from braid.nn.cost import Call
from braid.nn.work import Pass, Piece
from braid.planning.plan import Plan
from braid.schedule.graph import LANGUAGE
from braid.timing.calibration import Calibration, component, seconds, spread_class
from braid.timing.links import Cluster, Span, call_seconds, link_spread, message_seconds, same_node, span
from braid.topology import Grid

HOST = "host_link"
"""The class of copies to the host and back."""
_EXCHANGES = ("all_to_all", "all_to_all_v")
SHIPPED_SPREAD, MEASURED_SPREAD = 0.10, 0.03
"""The relative spread of the sustained factor: of a shipped file, at least, and of a measured one."""


@dataclass(frozen=True)
class ClusterMeter:
    """Seconds on the devices and links of a cluster."""

    plan: Plan
    cluster: Cluster
    calibration: Calibration
    side: float = 0.0
    """Where in the range of each figure: 0 is likely, 1 the slow end, -1 the fast end."""
    only: str | None = None
    """The class whose range is meant; all, if None."""
    known: dict[tuple[object, Pass], tuple[str, str, float]] = field(default_factory=dict, compare=False)
    """Pieces that were looked up: what they count as, the class of their spread, likely seconds."""
    known_calls: dict[tuple[str, int, int, Span], float] = field(default_factory=dict, compare=False)
    """Likely seconds of collectives that were looked up, by op, ranks, payload and span."""

    @cached_property
    def _grids(self) -> dict[str, Grid]:
        return {LANGUAGE: self.plan.grid} | {name: each.grid for name, each in self.plan.encoders.items()}

    @cached_property
    def _spans(self) -> dict[tuple[str, str], Span]:
        return {}

    def host(self, ops: int, launches: int) -> float:
        known = self.calibration
        return known.step_seconds + ops * known.op_seconds + launches * known.launch_seconds

    @property
    def optimizer(self) -> float:
        return self.calibration.optimizer / (self.calibration.sustained * self._factor("sustained"))

    def piece(self, piece: Piece, direction: Pass) -> tuple[str, float]:
        key = (piece.what, direction)
        if key not in self.known:
            each = seconds(piece, direction, self.calibration) * self.calibration.sustained
            self.known[key] = (component(piece), spread_class(piece), each)
        what, spread, each = self.known[key]
        return what, each * self._factor(spread) * self._factor("sustained")

    def call(self, call: Call, module: str) -> float:
        own = self._span(call, module)
        key = (call.op, call.ranks, call.payload, own)
        seconds = self.known_calls.get(key)
        if seconds is None:
            seconds = self.known_calls[key] = self._call(call, own)
        return seconds * self._factor(own.link)

    def _call(self, call: Call, own: Span) -> float:
        top_k = None
        if call.op in _EXCHANGES and self.plan.run.mesh.dispatcher == "deep_ep" and self.plan.run.model.moe:
            top_k = self.plan.run.model.moe.top_k
        return call_seconds(call, own, self.cluster, self.calibration, top_k=top_k)

    def copy(self, size: int, way: str) -> float:
        return size / self.calibration.host_link[way] * self._factor(HOST)

    def message(self, size: int, module: str, stages: tuple[int, int]) -> float:
        line = self._grids[module].group_of(self._grids[module].ranks[0], "pp")
        near = same_node(line[stages[0]], line[stages[1]], self.cluster)
        return message_seconds(size, near, self.cluster) * self._factor("node" if near else "network")

    def spread(self, name: str) -> float:
        """The relative spread of a class: a kind of piece, a class of links, the sustained factor."""
        match name:
            case "node" | "network":
                return link_spread(name, self.cluster, self.calibration)
            case "sustained":
                if self.calibration.source == "measured":
                    return MEASURED_SPREAD
                return max(SHIPPED_SPREAD, self.calibration.spread.get(name, 0.0))
            case _:
                return self.calibration.spread.get(name, SHIPPED_SPREAD)

    def _factor(self, name: str) -> float:
        if not self.side or self.only not in (None, name):
            return 1.0
        spread = self.spread(name)
        return 1 + spread if self.side > 0 else 1 / (1 + spread)

    def _span(self, call: Call, module: str) -> Span:
        key = (module, call.family)
        if key not in self._spans:
            self._spans[key] = span(self._grids[module], call.family, self.cluster.domain)
        whole = self._spans[key]
        if call.ranks == whole.members:
            return whole
        # Part of a family (HSDP): shards are neighbours, replicas lie as far apart as there are shards.
        per_node = min(whole.per_node, call.ranks)
        if call.op == "all_reduce":
            per_node = max(1, whole.per_node * call.ranks // whole.members)
        return Span(call.ranks, per_node, -(-call.ranks // per_node))
