"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/; at scale: Liu et al., arXiv 2502.16982):
momentum, orthogonalised matrix by matrix.

    m = μ m + (1 - μ) g        u = (1 - μ) g + μ m  (Nesterov), or m        o = NewtonSchulz(u)
    main = main · (1 - rate · decay) - rate · scale · o

A matrix is a tensor of a checkpoint: query, key and value apart, gate and up apart, every expert by itself,
however they are stored and sharded. The momentum is stored and sharded as the parameter, like AdamW's moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

from braid import optimizer
from braid.distributed.collectives import ALONE, Group
from braid.nn.canonical import Canonical, Held, Shape
from braid.optim.matrix_exchange import MatrixExchange, Part, Parts
from braid.optim.newton_schulz import orthogonal

MOMENT = "momentum"
"""The optimizer state of a parameter."""

RMS = 0.2
"""The usual root mean square of an update of AdamW, per learning rate."""


class Muon:
    """The parameters of a rank that Muon updates. Gradients serve as memory for updates."""

    def __init__(
        self,
        settings: optimizer.Muon,
        tensors: Mapping[str, tuple[Canonical, Held, bool]],
        compute: torch.dtype,
        group: Group = ALONE,
        tell: Callable[[Parts], Sequence[Parts]] = lambda mine: [mine],
    ) -> None:
        """`tensors` are the matrices by name, with this rank's part of each, and whether that is its first
        copy. The ranks of `group` hold all parts; `tell` gives those of each. `compute` is the run's dtype."""
        self.settings = settings
        self.names = frozenset(canonical.parameter for canonical, _, _ in tensors.values())
        """Parameters that Muon updates."""
        self._tensors = {name: each for name, each in tensors.items() if not each[1].empty}
        own = {name: Part(held.offset, held.shape, first) for name, (_, held, first) in self._tensors.items()}
        self.exchange = MatrixExchange(tell(own), group)
        self.dtype = dtype_of(settings, compute)

    @torch.no_grad()
    def directions(
        self, momenta: Mapping[str, Tensor], gradients: Mapping[str, Tensor], skip: Tensor | None
    ) -> None:
        """Move the momenta by the gradients, unless `skip` is set, and replace each gradient by the scaled
        direction of the update. Collective over the group."""
        keep, device = self.settings.momentum, None
        for name, momentum in momenta.items():
            gradient, device = gradients[name], momentum.device
            moved = torch.lerp(gradient, momentum, keep)
            gradient.copy_(torch.lerp(gradient, moved, keep) if self.settings.nesterov else moved)
            momentum.copy_(moved if skip is None else torch.where(skip, momentum, moved))

        def read(name: str) -> Tensor:
            canonical, held, _ = self._tensors[name]
            return held.read(gradients[canonical.parameter])

        def write(name: str, direction: Tensor) -> None:
            canonical, held, _ = self._tensors[name]
            gradient = gradients[canonical.parameter]
            held.write(gradient, direction.to(gradient.dtype) * self.factor(canonical.shape))

        def work(x_NRC: Tensor) -> Tensor:
            return orthogonal(x_NRC, self.settings.iterations)

        place = device or next((each.device for each in gradients.values()), torch.device("cpu"))
        self.exchange.run(read, write, work, dtype=self.dtype, device=place)

    def factor(self, shape: Shape) -> float:
        """What an orthogonal matrix is multiplied by."""
        rows, columns = shape
        return RMS * sqrt(max(shape)) if self.settings.scale == "match_rms" else sqrt(max(1, rows / columns))


def dtype_of(settings: optimizer.Muon, compute: torch.dtype) -> torch.dtype:
    """The dtype of iterations, of a run that computes in `compute`."""
    wide = torch.promote_types(compute, torch.float32)
    return {"auto": compute, "fp32": wide, "bf16": torch.bfloat16}[settings.dtype]


def held_matrices(
    tensors: Mapping[str, tuple[Canonical, Held]], parameters: Collection[str], first: Mapping[str, bool]
) -> dict[str, tuple[Canonical, Held, bool]]:
    """The matrices of some parameters, with this rank's part. `first` says of a parameter whether this is the
    first data-parallel replica of its shard."""
    return {
        name: (canonical, held, first[canonical.parameter] and canonical.copies.rank == 0)
        for name, (canonical, held) in tensors.items()
        if canonical.parameter in parameters
    }
