"""Sharded weights: FSDP2 driven by the explicit ops of a schedule instead of its hooks.

    begin   UNSHARD ──► WAIT ──► compute ──► ACCUM, REDUCE_GRAD ──► RESHARD   FINISH
                                    at any point: abort

FSDP2's hooks are removed: phases are called as plain functions and expect the parameters they use to be
unsharded. An action that violates `schedule.lifetime` raises before it takes effect.

A delayed weight gradient may arrive after RESHARD. It is accumulated into `.grad` of the unsharded Parameter
that the forward used, which FSDP2 keeps; `module.weight` is the sharded Parameter by then.

All actions run on the compute stream. All ranks that share a unit issue the same actions in the same order,
including `abort`, which waits for pending all-gathers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from braid.engine import fsdp2
from braid.engine.quantised_shards import QuantisedShards
from braid.schedule import Act, Op, Rule
from braid.schedule.lifetime import Lifetime, LifetimeError, UnitStats, Use


class FsdpWeights:
    """The weights of a model that `shard_units` has sharded."""

    def __init__(self, root: nn.Module, units: Iterable[str]) -> None:
        """`units` are the paths of the sharded modules within the root."""
        assert isinstance(root, FSDPModule), "the model is not sharded"
        self.root = root
        self.modules: dict[str, FSDPModule] = {}
        for path in units:
            module = root.get_submodule(path)
            assert isinstance(module, FSDPModule), f"{path} is not sharded"
            self.modules[path] = module
        self.mains = fsdp2.AccumulatedGrads(root)
        fsdp2.init_root(root)
        fsdp2.remove_fsdp_hooks(root)
        fsdp2.set_sync_and_reshard(root, False)
        self._quantised = QuantisedShards(root, self.modules)
        self._lifetime: Lifetime | None = None
        self._pending: dict[str, UnshardHandle] = {}
        """All-gathers that have not been waited for, by unit."""
        self.stats = UnitStats(0, 0, 0)
        """Of the last step that ended."""

    def unreduced(self) -> dict[str, list[Tensor]]:
        """The gradients that this rank has not reduced yet, by parameter."""
        return {
            name: gradients
            for module in self.modules.values()
            for name, gradients in fsdp2.unreduced_grads(module).items()
        }

    # ------------------------------------------------------------------------------- step boundaries

    def begin(self) -> None:
        """Begin a training step or an evaluation."""
        if self._lifetime is not None:
            raise LifetimeError(Rule.FINISHED, "a step has begun already: FINISH or abort it first")
        unreduced = [name for name, module in self.modules.items() if fsdp2.has_unreduced_grads(module)]
        if unreduced:
            raise LifetimeError(
                Rule.REDUCED, f"gradients of an earlier step were never reduced: {', '.join(unreduced)}"
            )
        self._lifetime = Lifetime(self.modules)
        self._quantised.begin()

    def finish(self) -> None:
        """End the step. The current stream waits for all reductions, so reduced gradients may be read."""
        self._life().finish()
        self._end()

    def abort(self) -> None:
        """Reshard all units and drop all gradients, including reduced ones. A no-op outside of a step."""
        if self._lifetime is None:
            return
        for handle in self._pending.values():
            _wait(handle)
        self._pending.clear()
        for module in self.modules.values():
            module.reshard()
            fsdp2.clear_grads(module)
        self._end()

    def _end(self) -> None:
        self.stats = self._life().stats
        self._lifetime = None
        self._quantised.end()
        fsdp2.finalize_backward(self.root)

    # -------------------------------------------------------------------------------------- actions

    def run(self, op: Op) -> None:
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
        """Start the all-gather of a unit."""
        self._life().unshard(unit)
        handle = self.modules[unit].unshard(async_op=True)
        assert handle is not None
        self._pending[unit] = handle

    def wait(self, unit: str) -> None:
        """Wait for the all-gather of a unit."""
        self._life().wait(unit)
        self._wait_for_gather(unit)

    def use(self, use: Use, micro_batch: int | None = None) -> None:
        """Check that a compute op may use its units. Call it before the op runs."""
        self._life().use(use, micro_batch)

    def reshard(self, unit: str) -> None:
        """Free the unsharded parameters of a unit."""
        self._life().reshard(unit)
        self._wait_for_gather(unit)  # FSDP2 does not free a unit whose all-gather is pending
        self.modules[unit].reshard()

    def accumulate(self, unit: str) -> None:
        """Add this micro-batch's gradients to those of earlier micro-batches, in the reduce dtype."""
        self._life().accumulate(unit)
        fsdp2.post_backward(self.modules[unit], reduce=False)

    def reduce(self, unit: str) -> None:
        """Start the reduce-scatter of a unit's accumulated gradients."""
        self._life().reduce(unit)
        fsdp2.post_backward(self.modules[unit], reduce=True)

    def _wait_for_gather(self, unit: str) -> None:
        if unit in self._pending:
            _wait(self._pending.pop(unit))
            self._quantised.gathered(unit)

    def _life(self) -> Lifetime:
        if self._lifetime is None:
            raise LifetimeError(Rule.FINISHED, "no step has begun")
        return self._lifetime


def _wait(handle: UnshardHandle) -> None:
    """On a mesh of one rank torch 2.11 copies a unit into a tensor that has a view made without gradients.
    With gradients, that is an error."""
    with torch.no_grad():
        handle.wait()
