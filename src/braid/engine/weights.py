"""Who keeps the weights of a model while a schedule runs: what ops about units ask of them.

`FsdpWeights` shards them over ranks (`fsdp_weights.py`); `WholeWeights` has all of them all the time, so that
only gradients have something to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from braid.nn.delayed_wgrad import Mains
from braid.optim.adamw import AdamW
from braid.schedule import Act, Op
from braid.schedule.lifetime import Use


class Weights(Protocol):
    """What the executor asks of them. From `begin` on until FINISH or `abort`, weights are used by ops
    alone."""

    @property
    def mains(self) -> Mains:
        """The gradients that grow over the micro-batches of a step: products may write there."""
        ...

    def begin(self) -> None:
        """A step begins, or an evaluation."""
        ...

    def run(self, op: Op) -> None:
        """Do what an op about units says."""
        ...

    def use(self, use: Use, micro_batch: int | None) -> None:
        """An op is about to compute, for a micro-batch."""
        ...

    def abort(self) -> None:
        """Leave nothing behind of a step that has begun: neither gathered weights nor gradients."""
        ...


class WholeWeights:
    """Every weight is on this rank. What a micro-batch adds to gradients joins those of the step so far, in the
    dtype of the optimizer, before another one adds to them."""

    def __init__(self, root: nn.Module, units: Iterable[str], optimizer: AdamW) -> None:
        named = parameters_of_units(root, units)
        self._root, self._optimizer = root, optimizer
        self._narrow = {unit: optimizer.apart(names) for unit, names in named.items()}
        """The parameters of each unit whose main copies are apart: others have their gradients in place."""
        self.mains: Mains = optimizer.mains()

    def begin(self) -> None:
        return None

    def run(self, op: Op) -> None:
        if op.act in (Act.ACCUM, Act.REDUCE_GRAD):
            assert op.unit is not None, f"{op} names no unit"
            self._optimizer.gather(self._narrow[op.unit])

    def use(self, use: Use, micro_batch: int | None) -> None:
        return None

    def abort(self) -> None:
        self._optimizer.forget()
        for parameter in self._root.parameters():
            parameter.grad = None


def parameters_of_units(root: nn.Module, units: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The names of the parameters of each unit, without those of units within it; inner units come first."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    found = {}
    for unit in units:
        inside = root.get_submodule(unit).parameters()
        found[unit] = tuple(names.pop(each) for each in inside if each in names)
    return found
