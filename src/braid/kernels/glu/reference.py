"""MLP activations in PyTorch, on one tensor per projection. Any dtype; intermediate results have it too."""

from __future__ import annotations

from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate


class PlainActivation:
    """`MlpActivation` as `kernels.activation` writes it down."""

    joined = False

    def __call__(self, activation: Activation, *projected__F: Tensor, glu: Glu = SWIGLU) -> Tensor:
        return activate(activation, *projected__F, glu=glu)
