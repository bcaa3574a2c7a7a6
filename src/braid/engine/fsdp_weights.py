"""Sharded weights: FSDP2 driven by explicit ops, as a plan has them.

    begin   UNSHARD ──► WAIT ──► compute ──► ACCUM, REDUCE_GRAD ──► RESHARD   FINISH
                                    at any point: abort

FSDP2's own hooks are taken off for good: parts of the model are called as plain functions, and what they need
must be ready. An action that breaks a rule of `schedule.lifetime` raises before anything is done.

Weight gradients may come late: they are added to `.grad` of the Parameters that the forward has seen, whether
or not these are still gathered. Once they are not, `module.weight` is another Parameter.

All actions belong on the stream that computes. All ranks that share a unit take the same actions in the same
order, `abort` included: it waits for gathers that are under way.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from braid.engine import fsdp2
from braid.schedule import Act, Op, Rule
from braid.schedule.lifetime import Figures, Lifetime, LifetimeError, Use


class FsdpWeights:
    """The sharded weights of a model, step after step."""

    def __init__(self, root: nn.Module, units: Iterable[str]) -> None:
        """`units` are the paths of the modules that `shard_units` has sharded within the root."""
        assert isinstance(root, FSDPModule), "the model is not sharded"
        self.root = root
        self.modules: dict[str, FSDPModule] = {}
        for path in units:
            module = root.get_submodule(path)
            assert isinstance(module, FSDPModule), f"{path} is not sharded"
            self.modules[path] = module
        self.mains = fsdp2.Accumulated(root)
        fsdp2.wake(root)
        fsdp2.take_hooks_off(root)
        fsdp2.set_switches(root, False)
        self._lifetime: Lifetime | None = None
        self._gathers: dict[str, UnshardHandle] = {}
        self.figures = Figures(0, 0, 0)
        """Of the last step that was finished."""

    # -------------------------------------------------------------------------------- a step's ends

    def begin(self) -> None:
        """A step begins, or an evaluation."""
        if self._lifetime is not None:
            raise LifetimeError(Rule.FINISHED, "a step has begun already: FINISH or abort it first")
        owing = [name for name, module in self.modules.items() if fsdp2.owes(module)]
        if owing:
            raise LifetimeError(
                Rule.REDUCED, f"gradients of an earlier step were never reduced: {', '.join(owing)}"
            )
        self._lifetime = Lifetime(self.modules)

    def finish(self) -> None:
        """Reduced gradients can be read from now on."""
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
            raise LifetimeError(Rule.FINISHED, "no step has begun")
        return self._lifetime
