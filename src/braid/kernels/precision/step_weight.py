"""The quantised copy of a weight that all micro-batches of a step share: weights change between steps only.

Whoever begins a step makes the copies, and drops them when it ends, so that none outlives an update. A weight
without one is quantised wherever a product needs it, with the same result.

Shapes: O channels out, I channels in; o and i blocks of them. Experts may lead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from braid.kernels.precision.formats import VALUES
from braid.kernels.precision.quantize import Blocks, Quantized


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """The scales of a weight whose values are all-gathered when they are needed."""

    scales_oi: Tensor
    rows: Blocks
    columns: Blocks


@dataclass(eq=False)
class StepWeight:
    """The copy of one weight, if there is one. Either its operands are held, or only their scales."""

    forward: Quantized | None = None
    input_grad: Quantized | None = None
    """The transposed weight, in blocks along the channels out."""
    gathered: Scales | None = None

    def clear(self) -> None:
        self.forward = self.input_grad = self.gathered = None

    def for_forward(self, weight_OI: Tensor) -> Quantized | None:
        return self.forward if weight_OI.dtype != VALUES else self._with_values(weight_OI)

    def for_input_grad(self, weight_OI: Tensor) -> Quantized | None:
        return self.input_grad if weight_OI.dtype != VALUES else self._with_values(weight_OI).transposed()

    def _with_values(self, values_OI: Tensor) -> Quantized:
        """`values_OI` are those of the weight, and stand in its place."""
        scales = self.gathered
        assert scales is not None, "quantised values were gathered outside of a step"
        return Quantized(
            values=values_OI.detach(), scales=scales.scales_oi, rows=scales.rows, columns=scales.columns
        )
