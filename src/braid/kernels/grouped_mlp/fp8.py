"""The grouped MLP in fp8_block on Hopper: the products of forward and input gradient take quantised operands,
and the kernel that makes an operand quantises it. Weight gradients are those of `fused`, in bfloat16.

`precision.LowPrecisionGroupedMlp` is what this must agree with. Saved for backward is what `fused` saves;
backward quantises anew. Weights are quantised wherever there is no copy of the step. What quantisation loses is
counted of rows, of gradients of the output and of weights, but not of what lies between two products.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.grouped_mlp.device import fp8_gemm, gemm
from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.grouped_mlp.device.tiles import TileConfig, tiles
from braid.kernels.grouped_mlp.fused import ExpertWeights, Gradients, Saved, apply, weight_gradient
from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.grouped_mlp.tuned_table import Tuned, WgradKernel, Work, nearest
from braid.kernels.launch import Launcher
from braid.kernels.precision.device.rows import Zeroed, quantize_rows
from braid.kernels.precision.device.weights import quantize_weight
from braid.kernels.precision.products import Products
from braid.kernels.precision.quantize import Quantized


@dataclass(frozen=True)
class Fp8Experts:
    """`GroupedMlp` in fp8_block, without biases, by the wgrad kernels that a tuned table chooses."""

    table: tuple[Tuned, ...]
    into: Products
    """Of gate and up: the step's copy of the weight, and who counts what quantisation loses."""
    down: Products
    tiling: TileConfig = field(default_factory=TileConfig)
    variants: fp8_gemm.Variants = fp8_gemm.VARIANTS
    launch: Launcher = field(default_factory=Launcher, compare=False, repr=False)

    def __call__(
        self,
        x_NC: Tensor,
        probs_N: Tensor,
        counts_E: Tensor,
        w_in_EFGC: Tensor,
        w_down_ECF: Tensor,
        activation: Activation,
        *,
        glu: Glu = SWIGLU,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """Each row through its expert's MLP, times the row's probability: as `reference.grouped_mlp`."""
        experts, ffn, _, hidden = w_in_EFGC.shape
        fused_activation = FusedActivation(kind=activation, alpha=glu.alpha, limit=glu.limit, offset=glu.offset)
        wgrad = nearest(self.table, Work(len(x_NC) // experts, hidden, ffn))
        config = Fp8Config(
            fused_activation, wgrad, self.tiling, self.variants, self.launch, self.into, self.down
        )
        return apply(config, wgrad_store, counts_E, x_NC, probs_N, (w_in_EFGC, w_down_ECF, None, None))


class Fp8Config(NamedTuple):
    """What the kernels are compiled for, what launches them, and the step's copies of weights."""

    activation: FusedActivation
    wgrad: WgradKernel
    tiling: TileConfig
    variants: fp8_gemm.Variants
    launch: Launcher
    into: Products
    down: Products

    def forward(
        self, counts_E: Tensor, x_NC: Tensor, probs_N: Tensor, weights: ExpertWeights
    ) -> tuple[Tensor, Saved]:
        """The output, and what is saved."""
        launch, dtype = self.launch, x_NC.dtype
        made = tiles(launch, counts_E, len(x_NC), self.tiling.rows)
        w_in = _for_forward(launch, self.into, weights.w_in_EFGC.flatten(1, 2))
        rows = _rows(launch, self.into, "input", x_NC)
        h, a_NF = fp8_gemm.grouped_gemm_activation(
            launch, rows, w_in, probs_N, made, self.activation, dtype, self.variants
        )
        w_down = _for_forward(launch, self.down, weights.w_down_ECF)
        return fp8_gemm.grouped_gemm(launch, a_NF, w_down, made, dtype, self.variants), Saved(
            x_NC, probs_N, h, made
        )

    def backward(
        self, dy_NC: Tensor, saved: Saved, weights: ExpertWeights, *, x_needs: bool = True
    ) -> Gradients:
        """All gradients of what `forward` returned."""
        launch, (x_NC, _, _, made) = self.launch, saved
        found, dx_NC = self._projection_gradients(dy_NC, saved, weights), None
        if x_needs and found.dh_quantized is not None:
            turned = _for_input_grad(launch, self.into, weights.w_in_EFGC.flatten(1, 2))
            dx_NC = fp8_gemm.grouped_gemm(launch, found.dh_quantized, turned, made, x_NC.dtype, self.variants)
        elif x_needs:
            w_in = weights.w_in_EFGC.flatten(1, 2)
            dx_NC = gemm.grouped_gemm(launch, found.dh, w_in, made, self.tiling, transposed=False)
        return Gradients(
            dx_NC,
            found.dprobs_N.to(saved.probs_N.dtype),
            weight_gradient(self, weights.w_in_EFGC, found.dh, x_NC, made),
            weight_gradient(self, weights.w_down_ECF, dy_NC, found.a_NF, made),
            None,
            None,
        )

    def _projection_gradients(
        self, dy_NC: Tensor, saved: Saved, weights: ExpertWeights
    ) -> fp8_gemm.ProjectionGradients:
        """dgrad2, by operands in fp8 or not, and the operand of dgrad1."""
        launch, (_, probs_N, h, made) = self.launch, saved
        quantised = self.into.input_grad is not None
        if self.down.input_grad is None:
            given = launch, dy_NC, weights.w_down_ECF, h, probs_N, made, self.activation, self.tiling
            return fp8_gemm.narrow_activation_backward(*given, quantised=quantised)
        rows = _rows(launch, self.down, "gradient", dy_NC)
        w_down_EFC = _for_input_grad(launch, self.down, weights.w_down_ECF)
        given_8 = launch, rows, w_down_EFC, h, probs_N, made, self.activation, self.variants
        found = fp8_gemm.grouped_gemm_activation_backward(*given_8)
        return found if quantised else found._replace(dh_quantized=None)


def _rows(launch: Launcher, products: Products, tensor: str, x_NC: Tensor) -> Quantized:
    counter = products.counter(x_NC.device)
    zeroed = None if counter is None else Zeroed(by_channels=counter)
    rows = _found(quantize_rows(launch, x_NC, by_channels=True, zeroed=zeroed).by_channels)
    products.counted(tensor, x_NC.numel(), counter)
    return rows


def _for_forward(launch: Launcher, products: Products, weight_EOI: Tensor) -> Quantized:
    copy = products.step_weight.for_forward(weight_EOI)
    if copy is not None:
        return _packed(copy)
    return _found(quantize_weight(launch, weight_EOI, transposed=False).whole)


def _for_input_grad(launch: Launcher, products: Products, weight_EOI: Tensor) -> Quantized:
    """Transposed, with the channels out next to each other, as tensor cores want fp8 operands."""
    copy = products.step_weight.for_input_grad(weight_EOI)
    if copy is not None:
        return _packed(copy)
    return _found(quantize_weight(launch, weight_EOI, whole=False).transposed)


def _found(quantized: Quantized | None) -> Quantized:
    assert quantized is not None
    return quantized


def _packed(copy: Quantized) -> Quantized:
    """A step's copy as kernels read it: values contiguous, and rows of scales evenly spaced. That of FSDP is a
    transposed view in backward."""
    scales = copy.scales
    even = scales.stride(2) == 1 and scales.stride(0) == scales.shape[1] * scales.stride(1)
    if copy.values.is_contiguous() and even:
        return copy
    return Quantized(
        values=copy.values.contiguous(),
        scales=scales.contiguous(),
        rows=copy.rows,
        columns=copy.columns,
    )
