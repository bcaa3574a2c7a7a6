"""Dense layers in low precision: by the reference, or in fp8_block by kernels for Hopper (`device.dense`).

The kernels take whole blocks: a layer, or a call, whose sizes do not fit runs as the reference, with the same
operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.choice import KernelChoice, why_not_fused
from braid.kernels.grouped_mlp.product import WgradStore
from braid.kernels.precision.formats import FORMATS
from braid.kernels.precision.products import Products
from braid.kernels.precision.quantize import Quantized
from braid.precision import ProductFormats

if TYPE_CHECKING:
    from braid.kernels.precision.device.dense import DenseKernels

FORM = FORMATS["fp8_block"]
BLOCK = 128
CHANNELS = 16
"""Inputs, outputs and tokens of a layer must be multiples of this: cuBLAS reads rows of whole 16 bytes."""
HOPPER = 9
"""The major compute capability of GPUs whose tensor cores scale blocks."""


@dataclass(frozen=True)
class BlockKernels:
    """Layers in fp8_block on tensor cores. The first call imports Triton: plans do without."""

    @cached_property
    def layers(self) -> DenseKernels:
        from braid.kernels.launch import Launcher
        from braid.kernels.precision.device.dense import DenseKernels

        return DenseKernels(Launcher())

    def mlp(
        self,
        x_NC: Tensor,
        w_in_PC: Tensor,
        w_down_CF: Tensor,
        activation: Activation,
        glu: Glu,
        into: Products,
        down: Products,
        wgrad_store: WgradStore | None,
    ) -> Tensor:
        """An MLP without biases, with gate and up of a channel as neighbours."""
        from braid.kernels.grouped_mlp.device.activation import FusedActivation

        fused = FusedActivation(kind=activation, alpha=glu.alpha, limit=glu.limit, offset=glu.offset)
        return self.layers.mlp(x_NC, w_in_PC, w_down_CF, fused, into, down, wgrad_store)

    def step_copies(self, weight_OI: Tensor, products: Products) -> tuple[Quantized | None, Quantized | None]:
        """The weight of the forward, and that of the input gradient, which is transposed: in one read. Experts
        may lead."""
        return self.layers.step_copies(weight_OI, products)

    def takes(self, products: Products, weight: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether a layer with a weight of so many outputs and inputs takes tensors of this shape. The last dim
        but one is that of a sequence's tokens."""
        outputs, inputs = weight
        *sequences, tokens, _ = shape
        rows = tokens
        for each in sequences:
            rows *= each
        forms = (products.forward, products.input_grad, products.weight_grad)
        return (
            products.forward is not None
            and all(form is None or form == FORM for form in forms)
            and rows > 0
            and outputs % CHANNELS == inputs % CHANNELS == rows % CHANNELS == 0
            # Blocks along tokens begin anew at each sequence.
            and (products.weight_grad is None or rows == tokens or tokens % BLOCK == 0)
        )


def _choice(name: str, function: BlockKernels | None, reason: str) -> KernelChoice[BlockKernels | None]:
    return KernelChoice(op="low_precision", name=name, function=function, reason=reason)


REFERENCE = _choice("reference", None, "it was requested")


def choose(
    device: torch.device, dtype: torch.dtype, formats: ProductFormats
) -> KernelChoice[BlockKernels | None]:
    """`fused` for fp8_block on a Hopper GPU, otherwise `reference`, which emulates any format."""
    given = {formats.forward, formats.input_grad, formats.weight_grad} - {None}
    if others := sorted(str(each) for each in given - {FORM.name}):
        return _choice("reference", None, f"fused multiplies {FORM.name}, not {' and '.join(others)}")
    if formats.forward is None:
        return _choice("reference", None, "fused is for layers whose forward is quantised")
    if (reason := why_not_fused(device, dtype, (torch.bfloat16,)) or _not_hopper(device)) is not None:
        return _choice("reference", None, f"{reason}; it emulates, which is slower than not quantising")
    return _choice(
        "fused", BlockKernels(), f"tensor cores multiply layers whose channels are multiples of {CHANNELS}"
    )


def _not_hopper(device: torch.device) -> str | None:
    """Why tensor cores of this GPU do not scale blocks. Without a GPU to ask, a plan assumes Hopper."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return None
    return (
        f"fused is for Hopper, and {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    )
