"""Gradient norm and AdamW in Triton, over all tensors at once: two launches for norms, one for the update.

The norms read each gradient once. The update reads main parameter, gradient and two moments and writes all but
the gradient, and a narrow copy: 30 bytes per parameter, which is what it takes. Gradients are scaled on the
way, for clipping. Each chunk is summed in a fixed order, and chunks in float64, so the result is deterministic.

Tables of chunks depend on sizes alone and stay on the device. Addresses of gradients change from step to step:
they are copied to the device from pinned memory, without waiting for it.

Shapes: P tensors, K chunks of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.kernels.launch import ALIGNED, Launcher, parts_of
from braid.kernels.optimizer.device import kernels
from braid.kernels.optimizer.reference import Hyper, Moments, PlainOptimizer

CHUNK = 16384
"""Elements per program."""
BLOCK = 4096
"""Elements per step of a program in the norm."""
UPDATE_BLOCK, UPDATE_WARPS = 1024, 4
"""Elements per step of a program in the update, which holds five tensors, and its warps."""
NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of narrow copies."""


class _Table(NamedTuple):
    """The chunks of a list of tensors."""

    owner_K: Tensor
    """Index of the tensor."""
    chunk_K: Tensor
    """Index of the chunk within the tensor."""
    sizes_P: Tensor
    first_P1: Tensor
    """The first chunk of each tensor, and the number of chunks."""


class _Places(NamedTuple):
    """Where tensors lie, for kernels."""

    addresses: tuple[int, ...]
    distances_P: Tensor
    """From the base tensor, in units."""
    unit: int
    """Elements."""


class FusedOptimizer:
    """`OptimizerKernels` with Triton kernels, for float32 main parameters; other dtypes use the reference."""

    def __init__(self) -> None:
        self.launch = Launcher()
        self._tables: dict[tuple[torch.device, tuple[int, ...]], _Table] = {}
        self._known: dict[str, _Places] = {}
        self._constants: dict[tuple[torch.device, torch.dtype, tuple[float, ...]], Tensor] = {}
        self._plain = PlainOptimizer()

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Same as `PlainOptimizer.squares`."""
        if not any(tensor.numel() for tensor in tensors) or not _supported(tensors):
            return self._plain.squares(tensors)
        table, places = self._table(tensors), self._places("norm", tensors, tensors[0])
        sums_K = tensors[0].new_empty(len(table.owner_K))
        squares_P = tensors[0].new_empty(len(tensors), dtype=torch.float64)
        constants = {"WIDE": places.unit, "CHUNK": CHUNK, "BLOCK": BLOCK}
        given = (tensors[0], places.distances_P, table.owner_K, table.chunk_K, table.sizes_P, sums_K)
        self.launch(kernels.square_sums, (len(sums_K), 1), given, (), constants, warps=8)
        sums = (sums_K, table.first_P1, squares_P)
        self.launch(kernels.tensor_sums, (len(tensors), 1), sums, (), {"BLOCK": 512}, warps=4)
        return squares_P

    @torch.no_grad()
    def adamw(
        self,
        parameters: Sequence[Moments],
        gradients: Sequence[Tensor],
        hyper: Hyper,
        rate: float,
        step: Tensor,
        *,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Same as `PlainOptimizer.adamw`."""
        wide = [*(tensor for each in parameters for tensor in each[:3]), *gradients]
        narrow = [each.narrow for each in parameters if each.narrow is not None]
        if not _supported(wide) or not _supported(narrow, NARROW):
            return self._plain.adamw(parameters, gradients, hyper, rate, step, scale=scale, skip=skip)
        step += 1 if skip is None else ~skip
        # In float64: 1 - beta^step has few digits while it is small.
        corrections = 1 - self._constant(step.device, hyper.betas, torch.float64) ** step
        for dtype in sorted(
            {None if each.narrow is None else each.narrow.dtype for each in parameters}, key=str
        ):
            own = [
                (each, gradient)
                for each, gradient in zip(parameters, gradients, strict=True)
                if gradient.numel() and dtype == (None if each.narrow is None else each.narrow.dtype)
            ]
            if own:
                self._update(own, hyper, rate, corrections, scale, skip)

    def _update(
        self,
        own: Sequence[tuple[Moments, Tensor]],
        hyper: Hyper,
        rate: float,
        corrections: Tensor,
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """The parameters with narrow copies of one dtype, or those without."""
        base, narrow_base = own[0][0].main, own[0][0].narrow
        gradients = [gradient for _, gradient in own]
        tensors = [[each.main for each, _ in own], gradients]
        tensors += [[each.exp_avg for each, _ in own], [each.exp_avg_sq for each, _ in own]]
        wide = self._places(f"wide of {_dtype(narrow_base)}", [each for kind in tensors for each in kind], base)
        narrow = None
        if narrow_base is not None:
            narrows = [each.narrow for each, _ in own if each.narrow is not None]
            narrow = self._places(f"narrow of {_dtype(narrow_base)}", narrows, narrow_base)
        table = self._table(gradients)
        decays_P = self._constant(base.device, tuple(each.weight_decay for each, _ in own), torch.float32)
        constants: dict[str, Any] = {
            "BETA1": hyper.betas[0], "REST1": 1 - hyper.betas[0],
            "BETA2": hyper.betas[1], "REST2": 1 - hyper.betas[1], "EPS": hyper.eps,
            "WIDE": wide.unit, "NARROW": 0 if narrow is None else narrow.unit,
            "CHUNK": CHUNK, "BLOCK": UPDATE_BLOCK,
        }  # fmt: skip
        distances = (wide.distances_P, None if narrow is None else narrow.distances_P)
        given = (base, narrow_base, *distances, decays_P, *table[:3], corrections, scale, skip)
        numbers = (len(own), rate)
        self.launch(kernels.adamw, (len(table.owner_K), 1), given, numbers, constants, warps=UPDATE_WARPS)

    def _table(self, tensors: Sequence[Tensor]) -> _Table:
        device, sizes = tensors[0].device, tuple(tensor.numel() for tensor in tensors)
        if (device, sizes) not in self._tables:
            chunks_P = torch.tensor([parts_of(size, CHUNK) for size in sizes])
            owner_K = torch.arange(len(sizes)).repeat_interleave(chunks_P)
            first_P1 = torch.cat([torch.zeros(1, dtype=torch.int64), chunks_P.cumsum(0)])
            chunk_K = torch.arange(len(owner_K)) - first_P1[owner_K]
            table = (owner_K.int(), chunk_K, torch.tensor(sizes), first_P1.int())
            self._tables[device, sizes] = _Table(*(each.to(device) for each in table))
        return self._tables[device, sizes]

    def _places(self, name: str, tensors: Sequence[Tensor], base: Tensor) -> _Places:
        """Where a list of tensors lies. It is sent to the device only if it has changed."""
        addresses = (base.data_ptr(), *(tensor.data_ptr() for tensor in tensors))
        known = self._known.get(name)
        if known is None or known.addresses != addresses:
            aligned = not any(address % ALIGNED for address in addresses)
            unit = ALIGNED // base.element_size() if aligned else 1
            distances_P = torch.tensor(addresses[1:]).sub_(addresses[0]) // (unit * base.element_size())
            if base.is_cuda:
                distances_P = distances_P.pin_memory().to(base.device, non_blocking=True)
            self._known[name] = known = _Places(addresses, distances_P, unit)
        return known

    def _constant(self, device: torch.device, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        key = (device, dtype, values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[key]


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _supported(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> bool:
    return all(tensor.dtype in dtypes and tensor.is_contiguous() for tensor in tensors)
