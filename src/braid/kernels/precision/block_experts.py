"""Experts in fp8_block on the tensor cores of Hopper: `grouped_mlp.fp8`, where sizes and settings fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from braid import architecture
from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, projections
from braid.kernels.choice import KernelChoice
from braid.kernels.grouped_mlp import FusedGroupedMlp, GroupedMlp
from braid.kernels.grouped_mlp.grouped import ALIGNMENT
from braid.kernels.grouped_mlp.product import WgradStore, WritesInPlace
from braid.kernels.precision.formats import FORMATS
from braid.kernels.precision.grouped_mlp import LowPrecisionGroupedMlp
from braid.precision import Precision

if TYPE_CHECKING:
    from braid.kernels.grouped_mlp.fp8 import Fp8Experts

FORM = FORMATS["fp8_block"]


@dataclass(frozen=True, kw_only=True)
class BlockGroupedMlp(LowPrecisionGroupedMlp, WritesInPlace):
    """`LowPrecisionGroupedMlp` by kernels, without biases. The first call imports Triton: plans do without."""

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
        b_in_EFG: Tensor | None = None,
        b_down_EC: Tensor | None = None,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """As the emulation, up to the order of sums."""
        assert b_in_EFG is None
        assert b_down_EC is None
        given = x_NC, probs_N, counts_E, w_in_EFGC, w_down_ECF, activation
        return self.experts(*given, glu=glu, wgrad_store=wgrad_store)

    @cached_property
    def experts(self) -> Fp8Experts:
        from braid.kernels.grouped_mlp.fp8 import Fp8Experts
        from braid.kernels.grouped_mlp.tuned_table import tuned_table

        return Fp8Experts(tuned_table(), self.into, self.down)


def operand_bytes(rows: int, experts: int, channels: int, projected: int) -> int:
    """Of what backward holds beside its tensors in bfloat16 when it holds most: the gradient of the projections
    and the weight that it is multiplied with, in fp8 with their scales."""
    blocks = -(-projected // 128)
    of_rows = rows * (projected + 4 * blocks)
    return of_rows + experts * (projected * channels + 4 * blocks * -(-channels // 128))


def why_emulated(
    precision: Precision, *, hidden: int, ffn: int, projections: int, biased: bool, etp: int
) -> str | None:
    """Why kernels cannot take experts with so many channels on this rank, as a clause; None if they can."""
    both = precision.experts, precision.experts_down
    if any(each.forward != FORM.name or each.input_grad not in (FORM.name, None) for each in both):
        return f"kernels take {FORM.name} in forward, and it or bf16 in input gradient"
    if any(each.weight_grad is not None for each in both):
        return "kernels take weight gradients of experts in bf16"
    if biased:
        return "kernels take experts without biases"
    if hidden % ALIGNMENT or ffn % ALIGNMENT:
        return f"kernels take channels that are multiples of {ALIGNMENT}, not {hidden} and {ffn}"
    if etp > 1 and (ffn % FORM.weight_rows or ffn * projections % FORM.weight_rows):
        return f"kernels take blocks of {FORM.weight_rows} that no rank shares, not {ffn} channels a rank"
    return None


def explained(
    choice: KernelChoice[GroupedMlp], precision: Precision, shape: architecture.Moe, hidden: int, etp: int
) -> KernelChoice[GroupedMlp]:
    """The choice of the experts' MLP, with what its products in low precision run on. `shape` is that of this
    rank."""
    if not (precision.experts.quantised or precision.experts_down.quantised):
        return choice
    reason = why_emulated(
        precision,
        hidden=shape.latent or hidden,
        ffn=shape.ffn,
        projections=len(projections(shape.activation)),
        biased=shape.bias,
        etp=etp,
    )
    if not isinstance(choice.function, FusedGroupedMlp):
        reason = "only fused has kernels for them"
    how = "on tensor cores" if reason is None else f"emulated: {reason}"
    return replace(choice, reason=f"{choice.reason}; products in low precision are {how}")
