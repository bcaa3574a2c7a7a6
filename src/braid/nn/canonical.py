"""How weights in memory map to the tensors that checkpoints name.

Memory may fuse what a checkpoint keeps apart: query, key and value in one parameter, all experts in another.
Every module lists its canonical tensors, each as a place inside one of its parameters. Initial weights,
checkpoints and weight decay all go by this list, so none of them depends on the layout in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Fill = Literal["normal", "residual", "ones", "zeros", "taps", "decay_log", "time_step"]
"""How a tensor starts: drawn from a normal distribution, drawn narrower because it writes into the residual
stream, all ones, all zeros; as the taps of a convolution, the log of a decay rate, or the bias of a time step
before softplus (see `init`)."""


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """One tensor of the checkpoint, and where it lives."""

    parameter: str
    """Name of the parameter in the module that lists this tensor."""
    shape: tuple[int, ...]
    """The tensor's own shape."""
    fill: Fill
    index: tuple[int | slice, ...] = ()
    """The part of the parameter that holds it; empty for all of it."""

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, those of embedding and head included; not for norms and biases."""
        return len(self.shape) >= 2

    def read(self, parameter: Tensor) -> Tensor:
        """The canonical tensor, out of the parameter or of anything of its shape (gradient, moment)."""
        return parameter[self.index].reshape(self.shape)

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Put the canonical tensor in its place."""
        place = parameter.detach()[self.index]
        place.copy_(value.reshape(place.shape))


def under(name: str, attribute: str, tensors: Mapping[str, Canonical]) -> dict[str, Canonical]:
    """A submodule's list as its parent tells it: `name` before canonical names (empty for none), `attribute`
    before parameters."""
    prefix = f"{name}." if name else ""
    return {
        prefix + key: replace(tensor, parameter=f"{attribute}.{tensor.parameter}")
        for key, tensor in tensors.items()
    }
