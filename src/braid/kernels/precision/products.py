"""The three products of a linear layer, each in its own format: forward, input gradient and weight gradient.

    forward           y[n, o]  = Σ_i x[n, i] · w[o, i]          blocks along i
    input gradient    dx[n, i] = Σ_o g[n, o] · w[o, i]          blocks along o
    weight gradient   dw[o, i] = Σ_n g[n, o] · x[n, i]          blocks along n, beginning anew at each sequence

Activations and gradients are quantised for each product anew, from the tensors that it would take without
quantisation: what is saved for backward and what a checkpoint holds does not change. Weights are, too, unless
the step has a copy (`step_weight`). Sums are in float32, or float64 in a float64 run. On a GPU bfloat16 runs
multiply mxfp8 operands as bfloat16, which has every e4m3 value times a power of two: tensor cores then take
the very numbers that float32 would hold.

Shapes: N tokens, or rows of experts; I channels in, O channels out; B sequences of T tokens; E experts may lead
a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from braid.distributed.collectives import Group
from braid.kernels.precision.formats import Format
from braid.kernels.precision.quantize import Losses, Quantized, Slice, all_reduces, losses, quantize
from braid.kernels.precision.step_weight import StepWeight

if TYPE_CHECKING:
    from braid.kernels.precision.dense import BlockKernels


class Tally(Protocol):
    """Counts what quantisation loses, by the kind of tensor. `counting` says whether it does."""

    counting: bool

    def add(self, tensor: str, lost: Losses, copies: int) -> None:
        """`copies` are the ranks that have the same tensor."""


@dataclass(frozen=True)
class Shards:
    """What a rank holds of a weight. None: all of it."""

    inputs: Slice | None = None
    outputs: Slice | None = None


WHOLE = Shards()


@dataclass(frozen=True, kw_only=True)
class Products:
    """The formats of the products of a layer. None: not quantised, in the dtype of the operands."""

    forward: Format | None
    input_grad: Format | None
    weight_grad: Format | None
    shards: Shards = WHOLE
    tally: Tally | None = None
    copies: int = 1
    """Ranks that have the same part of the weight."""
    kernels: BlockKernels | None = field(default=None, compare=False)
    """Those that multiply where sizes fit; None: the reference does."""
    step_weight: StepWeight = field(default_factory=StepWeight, compare=False)
    """The weight's copy, of the layer that these products are of."""

    @property
    def shares_weight(self) -> bool:
        """Whether forward and input gradient take the same copy of the weight: its blocks are square."""
        form = self.forward
        return form is not None and form == self.input_grad and form.block == form.weight_rows

    def copies_by_kernel(self, weight: tuple[int, ...]) -> bool:
        """Whether a kernel makes the step's copies of a weight of this shape, one for each product that is
        quantised, as tensor cores read them. It knows no other ranks."""
        shards = ((self.shards.outputs, weight[-2]), (self.shards.inputs, weight[-1]))
        block = None if self.forward is None else self.forward.block
        return (
            self.kernels is not None
            and block is not None
            and not any(part is not None and part.cuts(held, block) for part, held in shards)
        )

    def quantize_weight(self, weight_OI: Tensor) -> None:
        """Make the step's copy of the weight."""
        self.step_weight.clear()
        if self.kernels is not None and self.copies_by_kernel(tuple(weight_OI.shape)):
            self.step_weight.forward, self.step_weight.input_grad = self.kernels.step_copies(weight_OI, self)
            return
        forward = None if self.forward is None else self.quantized_weight(weight_OI, self.forward)
        if self.shares_weight and forward is not None:
            input_grad: Quantized | None = forward.transposed()
        else:
            form = self.input_grad
            input_grad = None if form is None else self.quantized_weight_IO(weight_OI, form)
        self.step_weight.forward, self.step_weight.input_grad = forward, input_grad

    def quantized_x(self, x_NI: Tensor, form: Format) -> Quantized:
        """The input of the forward."""
        return self._quantized("input", x_NI, form, columns=self.shards.inputs)

    def quantized_weight(self, weight_OI: Tensor, form: Format) -> Quantized:
        """The weight of the forward."""
        copy = self.step_weight.for_forward(weight_OI)
        if copy is not None:
            return copy
        parts = {"rows": self.shards.outputs, "columns": self.shards.inputs}
        return self._quantized("weight", weight_OI, form, weight=True, **parts)

    def quantized_grad(self, grad_NO: Tensor, form: Format) -> Quantized:
        """The gradient that the input gradient is computed from."""
        return self._quantized("gradient", grad_NO, form, columns=self.shards.outputs)

    def quantized_weight_IO(self, weight_OI: Tensor, form: Format) -> Quantized:
        """The weight that the input gradient is computed from."""
        copy = self.step_weight.for_input_grad(weight_OI)
        if copy is not None:
            return copy
        parts = {"rows": self.shards.inputs, "columns": self.shards.outputs}
        return self._quantized("weight", weight_OI.transpose(-1, -2), form, weight=True, **parts)

    def _quantized(
        self,
        tensor: str,
        x_RK: Tensor,
        form: Format,
        *,
        weight: bool = False,
        rows: Slice | None = None,
        columns: Slice | None = None,
    ) -> Quantized:
        quantized = quantize(x_RK, form, weight=weight, rows=rows, columns=columns)
        self._count(tensor, x_RK, quantized, self._holders(tensor))
        return quantized

    def count_weight(self, part_OI: Tensor, quantized: Quantized, parts: int) -> None:
        """Count what quantisation lost of one of several equal parts of the weight, each on a rank."""
        self._count("weight", part_OI, quantized, self.copies // parts)

    def _count(self, tensor: str, x_RK: Tensor, quantized: Quantized, copies: int) -> None:
        if self.tally is not None and self.tally.counting:
            self.tally.add(tensor, losses(x_RK, quantized), copies)

    def counter(self, device: torch.device) -> Tensor | None:
        """Where a kernel counts the elements that become zero; None if nobody asks."""
        if self.tally is None or not self.tally.counting:
            return None
        return torch.zeros((), dtype=torch.int64, device=device)

    def counted(self, tensor: str, elements: int, zeroed: Tensor | None) -> None:
        """Report what a kernel counted. No element of fp8_block saturates."""
        if zeroed is not None:
            assert self.tally is not None
            self.tally.add(tensor, Losses(elements, torch.zeros_like(zeroed), zeroed), self._holders(tensor))

    def _holders(self, tensor: str) -> int:
        """Ranks with the same tensor: inputs of a column-parallel layer, gradients of a row-parallel one."""
        if tensor == "weight":
            return self.copies
        split = self.shards.outputs if tensor.startswith("input") else self.shards.inputs
        return 1 if split is None else split.group.size

    def outputs_of(self, x_NI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the forward, which stand for x and for the weight."""
        if self.forward is None:
            return x_NI, weight_OI
        wide = factors_dtype(x_NI, self.forward)
        x = self.quantized_x(x_NI, self.forward).dequantized(wide)
        return x, self.quantized_weight(weight_OI, self.forward).dequantized(wide)

    def input_grad_of(self, grad_NO: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the input gradient."""
        if self.input_grad is None:
            return grad_NO, weight_OI
        wide = factors_dtype(grad_NO, self.input_grad)
        grad = self.quantized_grad(grad_NO, self.input_grad).dequantized(wide)
        weight_IO = self.quantized_weight_IO(weight_OI, self.input_grad).dequantized(wide)
        return grad, weight_IO.transpose(-1, -2)

    def weight_grad_of(self, grad_BTO: Tensor, x_BTI: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the weight gradient, with tokens of all sequences in one dim."""
        if self.weight_grad is None:
            return grad_BTO.flatten(0, -2), x_BTI.flatten(0, -2)
        wide = factors_dtype(x_BTI, self.weight_grad)
        named = (("gradient_by_tokens", grad_BTO), ("input_by_tokens", x_BTI))
        grad, x = (
            self._quantized(name, each.transpose(-1, -2), self.weight_grad).dequantized(wide)
            for name, each in named
        )
        return grad.transpose(-1, -2).flatten(0, -2), x.transpose(-1, -2).flatten(0, -2)


@dataclass(frozen=True)
class AmaxReduce:
    """An all-reduce of the largest magnitudes of blocks that several ranks share."""

    tensor: str
    group: Group
    floats: int
    backward: bool


def amax_reduces(products: Products, tokens: int, weight: tuple[int, ...]) -> Iterator[AmaxReduce]:
    """Those of one forward and backward of a layer, by the shape of its weight. A weight that serves both
    products has none here: where ranks share one, FSDP gathers its values."""
    *experts, outputs, inputs = weight
    i, o = products.shards.inputs, products.shards.outputs
    for backward, form, x, w in (
        (False, products.forward, ("input", inputs, i), ((*experts, outputs, inputs), o, i)),
        (True, products.input_grad, ("gradient", outputs, o), ((*experts, inputs, outputs), i, o)),
    ):
        if form is not None:
            for group, floats in all_reduces((tokens, x[1]), form, columns=x[2]):
                yield AmaxReduce(x[0], group, floats, backward)
            if products.shares_weight:
                continue
            for group, floats in all_reduces(w[0], form, weight=True, rows=w[1], columns=w[2]):
                yield AmaxReduce("weight", group, floats, backward)


def factors_dtype(x: Tensor, form: Format) -> torch.dtype:
    """The dtype in which a product takes what quantised operands stand for."""
    if x.is_cuda and x.dtype == torch.bfloat16 and form.power_of_two:
        return torch.bfloat16
    return accumulated(x.dtype)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)
