"""Weight management during a step: the protocol behind UNSHARD, RESHARD, ACCUM, REDUCE_GRAD and FINISH.

`FsdpWeights` (`fsdp_weights.py`) shards parameters over ranks with FSDP2. `ResidentWeights` keeps all of them
on a single rank, where only gradients have to be accumulated. `ModuleWeights` joins those of several modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from braid.nn.delayed_wgrad import Mains
from braid.nn.precision import matrix, quantised_weights
from braid.nn.units import parameters_of_units
from braid.optim.adamw import AdamW
from braid.schedule import Act, Op
from braid.schedule.graph import LANGUAGE, module_and_unit
from braid.schedule.lifetime import Use


class Weights(Protocol):
    """What the executor needs. Between `begin` and FINISH or `abort`, only ops may touch the weights."""

    def begin(self) -> None:
        """Begin a training step or an evaluation."""
        ...

    def run(self, op: Op) -> None:
        """Execute an op on a unit of weights, or FINISH."""
        ...

    def use(self, use: Use, micro_batch: int | None) -> None:
        """Called before a compute op that uses units runs."""
        ...

    def abort(self) -> None:
        """Abandon the step: drop gathered weights and gradients."""
        ...


class ModelWeights(Weights, Protocol):
    """Those of one model."""

    @property
    def mains(self) -> Mains:
        """Main gradients, accumulated over the micro-batches of a step. Wgrad GEMMs may add to them
        directly."""
        ...

    def unreduced(self) -> Mapping[str, Sequence[Tensor]]:
        """The gradients that this rank holds by itself at this point of a step, by parameter."""
        ...


class ResidentWeights:
    """All weights stay on this rank. The gradients of a micro-batch are added to those of the step, in the
    optimizer's dtype, before the next micro-batch adds to them."""

    def __init__(self, root: nn.Module, units: Iterable[str], optimizer: AdamW) -> None:
        named = parameters_of_units(root, units)
        self._root, self._optimizer = root, optimizer
        trained = optimizer.main
        self._narrow = {
            unit: optimizer.with_main_copy(name for name in names if name in trained)
            for unit, names in named.items()
        }
        """Per unit, the parameters with a separate main copy; the others accumulate into `.grad` directly."""
        self.mains: Mains = optimizer.main_copies()
        self._quantised = tuple(quantised_weights(root))

    def unreduced(self) -> Mapping[str, Sequence[Tensor]]:
        return {
            name: [each.grad for each in {parameter, main} if each.grad is not None]
            for name, parameter, main in self._optimizer.pairs()
        }

    @torch.no_grad()
    def begin(self) -> None:
        """Quantise the weights of products in low precision: they do not change until the step ends."""
        for path, name, products in self._quantised:
            products.quantize_weight(matrix(self._root.get_submodule(path).get_parameter(name)))

    def run(self, op: Op) -> None:
        if op.act is Act.FINISH:
            self._end()
        elif op.act in (Act.ACCUM, Act.REDUCE_GRAD):
            assert op.unit is not None, f"{op} names no unit"
            self._optimizer.accumulate_grads(self._narrow[op.unit])

    def use(self, use: Use, micro_batch: int | None) -> None:
        return None

    def _end(self) -> None:
        for each in self._quantised:
            each.products.step_weight.clear()

    def abort(self) -> None:
        self._end()
        self._optimizer.zero_grad()
        for parameter in self._root.parameters():
            parameter.grad = None


class ModuleWeights:
    """The weights of all modules of a rank, each managed by its own. Units carry the names of modules."""

    def __init__(self, by_module: Mapping[str, Weights]) -> None:
        self.by_module = by_module

    def begin(self) -> None:
        for weights in self.by_module.values():
            weights.begin()

    def run(self, op: Op) -> None:
        if op.act is Act.FINISH:
            for weights in self.by_module.values():
                weights.run(op)
            return
        assert op.unit is not None, f"{op} names no unit"
        module, unit = module_and_unit(op.unit)
        self.by_module[module].run(op if unit == op.unit else replace(op, unit=unit))

    def use(self, use: Use, micro_batch: int | None) -> None:
        # An op computes one segment, so its units are those of one module.
        module, _ = module_and_unit((*use.reads, *use.grads)[0])
        if module != LANGUAGE:
            own = ((module_and_unit(unit)[1] for unit in units) for units in (use.reads, use.grads))
            reads, grads = map(tuple, own)
            use = Use(reads=reads, grads=grads)
        self.by_module[module].use(use, micro_batch)

    def abort(self) -> None:
        for weights in self.by_module.values():
            weights.abort()
