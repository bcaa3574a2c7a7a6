"""Low-overhead launches of Triton kernels.

Triton's own launch specializes on every argument and calls hooks each time, which takes the host longer than a
small kernel runs on the device. `Launcher` caches the compiled kernel by argument signature and calls it
directly, without hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime import driver

ALIGNED = 16
"""Triton specializes kernels on pointers and integers that are multiples of this."""
INT32_MAX = 2**31 - 1
"""Triton passes larger integers as 64 bits."""


class Descriptor(Protocol):
    """A TMA descriptor: Triton's `TensorDescriptor`, or Gluon's."""

    base: Tensor
    block_shape: list[int]


class Launcher:
    """Launches Triton kernels, with a cache of compiled kernels."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._multiprocessors: dict[torch.device, int] = {}

    def __reduce__(self) -> tuple[type[Launcher], tuple[()]]:
        # Pickling drops the cache: compiled kernels belong to this process.
        return Launcher, ()

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: tuple[Tensor | Descriptor | None, ...],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, object],
        *,
        warps: int,
        stages: int = 1,
        registers: int | None = None,
    ) -> None:
        """Launch a kernel whose parameters are tensors, numbers and constexprs, in this order. The first tensor
        must not be None and determines the device. Descriptors of a kernel with equal block shapes must have
        equal layouts, because the cache key contains only the block shape. A grid without programs, as of no
        rows, launches nothing: CUDA refuses it."""
        if not all(grid):
            return
        arguments, signature, aligned = _tensor_arguments(tensors)
        values = constants.values()
        device = _tensor_of(tensors[0]).get_device()
        key = (kernel.fn, device, warps, stages, registers, *signature, *map(_specialization, numbers), *values)
        compiled = self._compiled.get(key) if aligned else None
        if compiled is not None:
            stream = driver.active.get_current_stream(device)
            metadata = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, 1, stream, *metadata, *arguments, *numbers, *values)
            return
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        compiled = kernel[grid](*tensors, *numbers, **{**constants, **options})
        interpreted = compiled is None  # TRITON_INTERPRET=1
        if aligned and not interpreted:
            assert kernel.arg_names[-len(constants) :] == list(constants)
            self._compiled[key] = compiled

    def multiprocessors(self, device: torch.device) -> int:
        """Number of SMs; 4 on a CPU, where kernels are interpreted."""
        if device not in self._multiprocessors:
            on_gpu = device.type == "cuda"
            count = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
            self._multiprocessors[device] = count
        return self._multiprocessors[device]


def _tensor_arguments(
    tensors: tuple[Tensor | Descriptor | None, ...],
) -> tuple[list[int | Descriptor], list[object], bool]:
    """Launch arguments of the tensors, their part of the cache key, and whether all pointers are aligned.
    Descriptors always are."""
    arguments, signature, address_bits = list[int | Descriptor](), list[object](), 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            address = tensor.data_ptr()
            address_bits |= address
            arguments.append(address)
            signature.append(tensor.dtype)
        elif tensor is None:
            arguments.append(0)
            signature.append(None)
        else:
            arguments.append(tensor)
            signature += (tensor.base.dtype, *tensor.block_shape)
    return arguments, signature, address_bits % ALIGNED == 0


def _tensor_of(tensor: Tensor | Descriptor | None) -> Tensor:
    assert tensor is not None
    return tensor if isinstance(tensor, Tensor) else tensor.base


def _specialization(number: int | float) -> tuple[bool, bool, bool]:
    """The properties of an integer argument that Triton may specialize a kernel on."""
    return number == 1, number % ALIGNED == 0, number > INT32_MAX


def parts_of(whole: int, part: int) -> int:
    """ceil(whole / part)."""
    return -(-whole // part)


def power_of_two(number: int) -> int:
    """The next power of two, at least `number`."""
    return 1 << (number - 1).bit_length()
