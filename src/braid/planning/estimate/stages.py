"""estimate(plan) -> Estimate: peak memory and collective traffic of every pipeline stage, or station."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from braid.errors import ConfigError
from braid.nn.cost import Call, Cost
from braid.planning.estimate.edges import EdgeEstimate, edges_of
from braid.planning.estimate.memory import Memory, Step, memory_of
from braid.planning.estimate.moments import activations, waiting_bytes
from braid.planning.estimate.offload import moved, parts_of_blocks, slots_for
from braid.planning.estimate.rank import HeldModule
from braid.planning.estimate.weights import Counted, counted_by_station, peak_gathered, sharding_calls
from braid.planning.local_model import is_alone
from braid.planning.plan import Plan
from braid.schedule import Act, live_peaks, segment_peaks


@dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
    """Where the activations of one micro-batch are between forward and backward, in bytes of one rank."""

    held: int
    """On the device."""
    recomputed: int
    """Nowhere: backward recomputes them."""
    offloaded: int
    """On the host."""
    pool: int
    """Host memory for all micro-batches in flight."""


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """Estimate for the rank of a pipeline stage with the largest shards; uneven shards make others smaller."""

    stage: int
    layers: str
    """The pattern of its layers."""
    weights: int
    """Parameters of this rank before FSDP sharding."""
    live: int
    """Maximum number of live micro-batches."""
    memory: Memory
    calls: tuple[Call, ...]
    """Collectives of one step, identical ones merged."""
    sends: int
    """Bytes sent to other stages in one step."""
    offload: OffloadEstimate | None = None
    """None if nothing is offloaded."""

    @property
    def sent(self) -> dict[str, int]:
        """Bytes sent by the rank in one step, by group family."""
        totals: dict[str, int] = {}
        for call in self.calls:
            totals[call.family] = totals.get(call.family, 0) + call.sent
        return totals | ({"pp": totals.get("pp", 0) + self.sends} if self.sends else {})


@dataclass(frozen=True, kw_only=True)
class StationEstimate:
    """Estimate for a rank of a station. Memory kinds are sums over its modules, but for those that peak at
    different times: gathered weights, activations and temporaries."""

    ranks: tuple[int, ...]
    modules: dict[str, StageEstimate]
    """Its modules by name, the language model first, each as if it were alone on the rank."""
    memory: Memory
    features: int
    """Most bytes of rows of edges, and of their gradients, that wait to be read or to leave."""
    waiting: dict[str, int]
    """The same for each edge by itself."""
    edge_sends: dict[str, int]
    """Bytes of rows and gradients that the rank sends over each edge in one step, if none of them stay."""

    @property
    def sent(self) -> int:
        """Bytes sent by the rank in one step."""
        return sum(sum(each.sent.values()) for each in self.modules.values()) + sum(self.edge_sends.values())


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimates of all stages of a plan, or of all stations if it has several modules."""

    plan: Plan
    device: str
    """`cuda` or `cpu`."""
    stages: tuple[StageEstimate, ...] = ()
    """The pipeline stages of a plan without modules."""
    stations: tuple[StationEstimate, ...] = ()
    """The stations of a plan with modules, in the order of the schedule's lists."""
    edges: tuple[EdgeEstimate, ...] = ()

    @property
    def peak(self) -> int:
        """Peak memory in bytes, over all ranks."""
        return max(memory.peak for memory in self._memories)

    @property
    def saved(self) -> int:
        """What the rank with most of it writes to a checkpoint, in bytes."""
        return max(memory.saved for memory in self._memories)

    @property
    def _memories(self) -> list[Memory]:
        return [stage.memory for stage in self.stages] + [station.memory for station in self.stations]


def estimate(plan: Plan, device: str = "cuda", counted: Sequence[Sequence[Counted]] | None = None) -> Estimate:
    """Memory and communication of every stage of a plan on a `device` (`cuda` or `cpu`). `counted` is what its
    stations hold (`counted_by_station`), if that is known already."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device}: must be cpu or cuda")
    if counted is None:
        counted = counted_by_station(plan, device)
    if plan.encoders:
        edges, peaks = tuple(edges_of(plan)), segment_peaks(plan.schedule)
        stations = (_station(plan, station, each, edges, peaks) for station, each in enumerate(counted))
        return Estimate(plan=plan, device=device, stations=tuple(stations), edges=edges)
    # `live_peaks` counts forwards of segments; a micro-batch has one for each segment of the rank.
    live = [-(-each // plan.schedule.virtual) for each in live_peaks(plan.schedule)]
    stages = (_stage(plan, stage, live[stage], module) for stage, (module,) in enumerate(counted))
    return Estimate(plan=plan, device=device, stages=tuple(stages))


def _station(
    plan: Plan, station: int, modules: Sequence[Counted], edges: Sequence[EdgeEstimate], live: Sequence[int]
) -> StationEstimate:
    """Estimate for a station; `live` are the live micro-batches of each segment."""
    memory, features = _memory(plan, station, modules, edges)
    return StationEstimate(
        ranks=plan.schedule.graph.ranks[station],
        modules={
            module.held.name: _stage(
                plan, station, max(live[segment] for segment in module.held.segments), module
            )
            for module in sorted(modules, key=lambda each: each.held.segments)
        },
        memory=memory,
        features=features,
        waiting={edge.name: waiting_bytes(plan, station, edge) for edge in edges},
        edge_sends=dict(_edge_sends(plan, station, edges)),
    )


def _stage(plan: Plan, station: int, live: int, module: Counted) -> StageEstimate:
    """Estimate for one module of a station. Without modules, stations are pipeline stages."""
    held, micro_batches = module.held, plan.run.train.micro_batches
    calls = [call for cost in held.costs.values() for call in cost.times(micro_batches).calls]
    if not is_alone(plan):
        calls += sharding_calls(module.units, plan.schedule.ops[station])
    calls += module.once
    return StageEstimate(
        stage=held.stage,
        layers=held.layers,
        weights=held.weights,
        live=live,
        memory=_memory(plan, station, [module])[0],
        calls=tuple(_merge(calls)),
        sends=_sends(plan, station, held),
        offload=_offload(plan, station, held) if any(plan.schedule.offloaded) else None,
    )


def _offload(plan: Plan, station: int, held: HeldModule) -> OffloadEstimate:
    everything = held.model.costs(replace(held.workload, recompute=frozenset()))
    parts = set(parts_of_blocks(plan, station).values())
    kept = sum(cost.kept for cost in held.costs.values())
    away = sum(moved(cost) for part, cost in held.costs.items() if part in parts)
    return OffloadEstimate(
        held=kept - away,
        recomputed=sum(cost.kept for cost in everything.values()) - kept,
        offloaded=away,
        pool=sum(slots_for(plan, station, held.costs).values()),
    )


def _memory(
    plan: Plan, station: int, modules: Sequence[Counted], edges: Sequence[EdgeEstimate] = ()
) -> tuple[Memory, int]:
    """Memory of a rank with these modules, and how much of it rows of edges take."""
    ops, costs = plan.schedule.ops[station], dict[str, Cost]()
    for module in modules:
        costs |= module.held.costs
    units = [unit for module in modules for unit in module.units]
    live = activations(plan, station, costs, edges)
    step = Step(
        single=is_alone(plan),
        micro_batches=plan.run.train.micro_batches,
        activations=live,
        gathered=peak_gathered(units, ops),
        whole=any(phase.kind == "segment" for phases in plan.schedule.phases for phase in phases),
        working=max(module.working for module in modules),
    )
    return memory_of(units, costs, step), live.features


def _merge(calls: Iterable[Call]) -> Iterable[Call]:
    """Merge identical calls, in the order of their first occurrence."""
    totals: dict[Call, int] = {}
    for call in calls:
        kind = call._replace(times=0)
        totals[kind] = totals.get(kind, 0) + call.times
    return (kind._replace(times=times) for kind, times in totals.items())


_SENDS = frozenset({Act.SEND_F, Act.SEND_B})


def _sends(plan: Plan, station: int, module: HeldModule) -> int:
    """Bytes of activations and their gradients that the schedule sends to other stages of the module."""
    sent = [op for op in plan.schedule.ops[station] if op.act in _SENDS]
    count = sum(op.edge is None and op.segment in module.segments for op in sent)
    tokens = module.workload.local_tokens(module.model.groups.tp_cp)
    return count * tokens * prod(module.model.shape.stream) * module.workload.narrow


def _edge_sends(plan: Plan, station: int, edges: Iterable[EdgeEstimate]) -> Iterator[tuple[str, int]]:
    """Bytes that a rank of a station sends over each edge that it is on."""
    acts = Counter((op.edge, op.act) for op in plan.schedule.ops[station] if op.edge is not None)
    for edge in edges:
        rows, gradients = acts[edge.name, Act.SEND_F], acts[edge.name, Act.SEND_B]
        if (rows or gradients) and not edge.is_local:
            yield edge.name, rows * edge.source_bytes + gradients * edge.target_bytes
