"""The driver of sharded weights: FSDP2 by explicit actions, as the ops of a lowered schedule ask for them.

    driver.begin()   UNSHARD ──► WAIT ──► compute ──► ACCUM, REDUCE_GRAD ──► RESHARD   FINISH
                                    at any point: driver.abort()

From `begin` to `FINISH` or `abort` the hooks of FSDP2 are off, on every unit and on the root: parts of the
model are called as plain functions, and what they need must be ready. Before and after, the same model runs by
its hooks. An action that breaks a rule of `schedule.lifetime` raises before anything is done.

Weight gradients may come late: they are added to `.grad` of the Parameters that the forward has seen, whether
or not these are still gathered. Once they are not, `module.weight` is another Parameter.

All actions belong on the stream that computes. All ranks that share a unit take the same actions in the same
order, `abort` included: it waits for gathers that are under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from braid.engine import fsdp2
from braid.engine.executor import Executor, Wires, Work
from braid.engine.node import Watch
from braid.parallel.sharding import Strategy, Unit
from braid.schedule import Act, Op, Ops, Phase, Schedule, Span
from braid.schedule.lifetime import Figures, Lifetime, LifetimeError, Use, Uses
from braid.schedule.lowering import POLICIES, Sharding, lower, uses_of_phases


def named_units(root: nn.Module, units: Iterable[Unit]) -> dict[str, Unit]:
    """The units that are sharded by themselves, by the path of their module; none where a process is alone."""
    paths = {module: path for path, module in root.named_modules()}
    return {paths[unit.module]: unit for unit in units if isinstance(unit.module, FSDPModule)}


def units_of_segments(units: Mapping[str, Unit], *, pipeline: bool) -> dict[int, tuple[str, ...]]:
    """The names of the units of each segment. Without a pipeline one segment stands for the whole model."""
    held: dict[int, tuple[str, ...]] = {}
    for name, unit in units.items():
        segment = unit.segment if pipeline else 0
        held[segment] = (*held.get(segment, ()), name)
    return held


def lowered(
    schedule: Schedule, rank: int, meshes: Mapping[str, str], strategy: Strategy, *, tied: bool
) -> tuple[Ops, Uses]:
    """The list of a pipeline rank with ops about its units, whose meshes are given by name; and what each op of
    the list uses. For a schedule in phases."""
    phases = [phase for segment in schedule.phases for phase in segment]
    uses = uses_of_phases(units_of_phases(meshes, phases, tied=tied), unread={"embed"})
    sharding = Sharding(units=meshes, uses=uses, policy=POLICIES[strategy])
    return lower(schedule.ops[rank], sharding, rank), uses


def units_of_phases(
    meshes: Mapping[str, str], phases: Iterable[Phase], *, tied: bool
) -> dict[str, tuple[str, ...]]:
    """The names of the units that each phase uses, by its own name and those of its drawers; `meshes` has the
    mesh of every unit. What comes back from experts may go through a projection of the block, whose weight
    gradients then have a drawer."""
    teller = "embedding" if tied else "head"
    found: dict[str, tuple[str, ...]] = {}
    for phase in phases:
        depth = "" if phase.depth is None else f"mtp.{phase.depth}"
        block = f"{depth}.blocks.{phase.block}" if depth else f"stack.blocks.{phase.block}"
        inner = [name for name in meshes if name.startswith(f"{block}.")]
        experts = [name for name in inner if meshes[name] == "expert"]
        used = {
            "embed": ["embedding"],
            "enter": ["embedding", depth],
            "mix": [*(name for name in inner if name not in experts), block],
            "experts": experts,
            "combine": [block] if phase.drawers else [],
            "post": [block] if phase.drawers else [],
            "final_norm": [f"{depth}.exit", depth] if depth else ["exit", "final_norm"],
            "head": [teller],
        }
        units = tuple(name for name in used.get(phase.kind, ()) if name in meshes)
        found |= dict.fromkeys((phase.name, *phase.drawers), units)
    return found


class Driver:
    """The sharded weights of a model, step after step."""

    def __init__(self, root: nn.Module, units: Mapping[str, Unit]) -> None:
        """`units` are those of `named_units`."""
        self.root = root if isinstance(root, FSDPModule) else None
        self.modules: dict[str, FSDPModule] = {}
        for name, unit in units.items():
            assert isinstance(unit.module, FSDPModule), f"{name} is not sharded"
            self.modules[name] = unit.module
        self._hooks = fsdp2.Hooks(root)
        self._lifetime: Lifetime | None = None
        self._gathers: dict[str, UnshardHandle] = {}
        self.figures = Figures(0, 0, 0)
        """Of the last step that was finished."""

    # -------------------------------------------------------------------------------- a step's ends

    def begin(self) -> None:
        """Take over. Weights that somebody has left gathered are released: the optimizer may have changed
        them since."""
        if self._lifetime is not None:
            raise LifetimeError("a step has begun already: FINISH or abort it first")
        owing = [name for name, module in self.modules.items() if fsdp2.owes(module)]
        if owing:
            raise LifetimeError(f"gradients of an earlier step were never reduced: {', '.join(owing)}")
        if self.root is not None:
            fsdp2.wake(self.root)
            for module in self.modules.values():
                module.reshard()
            fsdp2.set_switches(self.root, False)
            self._hooks.off()
        self._lifetime = Lifetime(self.modules)

    def finish(self) -> None:
        """Give the model back to its hooks; reduced gradients can be read."""
        self._life().finish()
        self._end()

    def abort(self) -> None:
        """Leave nothing behind of a step that has begun: neither gathered weights nor gradients, reduced ones
        included. Nothing to do where none has."""
        if self._lifetime is None:
            return
        for gather in self._gathers.values():
            gather.wait()
        self._gathers.clear()
        for module in self.modules.values():
            module.reshard()
            fsdp2.forget(module)
        self._end()

    def _end(self) -> None:
        self.figures = self._life().figures
        self._lifetime = None
        self._hooks.on()
        if self.root is not None:
            fsdp2.settle(self.root)

    # -------------------------------------------------------------------------------------- actions

    def run(self, op: Op) -> None:
        """Do what an op says."""
        if op.act is Act.FINISH:
            return self.finish()
        assert op.unit is not None, f"{op} names no unit"
        actions = {
            Act.UNSHARD: self.unshard,
            Act.WAIT: self.wait,
            Act.RESHARD: self.reshard,
            Act.ACCUM: self.accumulate,
            Act.REDUCE_GRAD: self.reduce,
        }
        return actions[op.act](op.unit)

    def unshard(self, unit: str) -> None:
        """Begin to gather."""
        self._life().unshard(unit)
        gather = self.modules[unit].unshard(async_op=True)
        assert gather is not None
        self._gathers[unit] = gather

    def wait(self, unit: str) -> None:
        """Until it is gathered."""
        self._life().wait(unit)
        self._arrive(unit)

    def use(self, use: Use, micro_batch: int | None = None) -> None:
        """To be told before an op runs, and for which micro-batch."""
        self._life().use(use, micro_batch)

    def reshard(self, unit: str) -> None:
        """Release it. FSDP2 would not, while its gather is under way: so that comes to its end first."""
        self._life().reshard(unit)
        self._arrive(unit)
        self.modules[unit].reshard()

    def accumulate(self, unit: str) -> None:
        """Put what ops have added with the gradients of earlier micro-batches, in the dtype of reduction."""
        self._life().accumulate(unit)
        fsdp2.flush(self.modules[unit], reduce=False)

    def reduce(self, unit: str) -> None:
        """Begin to sum over ranks all that there is of its gradients."""
        self._life().reduce(unit)
        fsdp2.flush(self.modules[unit], reduce=True)

    def _arrive(self, unit: str) -> None:
        if unit in self._gathers:
            self._gathers.pop(unit).wait()

    def _life(self) -> Lifetime:
        if self._lifetime is None:
            raise LifetimeError("no step has begun")
        return self._lifetime


def execute_sharded(
    schedule: Schedule,
    rank: int,
    work: Work,
    wires: Wires,
    driver: Driver,
    uses: Uses,
    watch: Watch | None = None,
) -> tuple[Span, ...]:
    """`execute` for a list that is lowered. `work` leaves switches of FSDP2 alone, and reads no gradient before
    the list has come to FINISH. A step that fails is aborted."""
    driver.begin()
    try:
        return _ShardingExecutor(schedule, rank, work, wires, driver, uses, watch).run()
    except BaseException:
        driver.abort()
        raise


class _ShardingExecutor(Executor):
    """An interpreter that has ops about units done by a driver."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        work: Work,
        wires: Wires,
        driver: Driver,
        uses: Uses,
        watch: Watch | None,
    ) -> None:
        super().__init__(schedule, rank, work, wires, watch)
        self.driver, self.uses = driver, uses

    def _run(self, op: Op) -> None:
        if op.act.shards:
            self.driver.run(op)
        else:
            if use := self.uses(op):
                self.driver.use(use, op.micro_batch)
            super()._run(op)
