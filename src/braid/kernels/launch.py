"""How kernels are launched: by what they were compiled to.

Triton looks at every argument of every launch to find what to run, and calls hooks before and after: that takes
the host longer than a small kernel takes the device. Here what to run is asked once for each kind of arguments,
and no hook is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime import driver

ALIGNED = 16
"""Triton makes a kernel of its own for tensors that begin at no multiple of so many bytes, and for numbers that
are no multiple."""
LARGEST = 2**31 - 1
"""Of the numbers that a kernel takes for 32 bits."""


class Descriptor(Protocol):
    """Tells the copy engine of a tensor: Triton's `TensorDescriptor`, or Gluon's."""

    base: Tensor
    block_shape: list[int]


class Launcher:
    """Launches kernels, and remembers what each was compiled to."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._multiprocessors: dict[torch.device, int] = {}

    def __reduce__(self) -> tuple[type[Launcher], tuple[()]]:
        """A copy begins anew: what was compiled is of this process."""
        return Launcher, ()

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: tuple[Tensor | Descriptor | None, ...],
        numbers: tuple[int, ...],
        constants: Mapping[str, object],
        *,
        warps: int,
        stages: int = 1,
        registers: int | None = None,
    ) -> None:
        """A kernel takes tensors, numbers and constants, in the order given. The first tensor is there, and
        says on which device the others are. A kernel's descriptors with blocks alike have layouts alike."""
        given, kinds, aligned = _looked_at(tensors)
        values = constants.values()
        device = _tensor_of(tensors[0]).get_device()
        key = (kernel.fn, device, warps, stages, registers, *kinds, *map(_kind, numbers), *values)
        compiled = self._compiled.get(key) if aligned else None
        if compiled is not None:
            stream = driver.active.get_current_stream(device)
            what = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, 1, stream, *what, *given, *numbers, *values)
            return
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        compiled = kernel[grid](*tensors, *numbers, **{**constants, **options})
        interpreted = compiled is None
        if aligned and not interpreted:
            assert kernel.arg_names[-len(constants) :] == list(constants)
            self._compiled[key] = compiled

    def multiprocessors(self, device: torch.device) -> int:
        """How many there are. A CPU, where kernels are only interpreted, counts as one that has some."""
        if device not in self._multiprocessors:
            on_gpu = device.type == "cuda"
            found = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
            self._multiprocessors[device] = found
        return self._multiprocessors[device]


def _looked_at(
    tensors: tuple[Tensor | Descriptor | None, ...],
) -> tuple[list[int | Descriptor], list[object], bool]:
    """What a launch is given for tensors, what of them a kernel is compiled for, and whether all of them begin
    where they should. Descriptors do, or could not have been made."""
    given, kinds, together = list[int | Descriptor](), list[object](), 0
    for each in tensors:
        if isinstance(each, Tensor):
            address = each.data_ptr()
            together |= address
            given.append(address)
            kinds.append(each.dtype)
        elif each is None:
            given.append(0)
            kinds.append(None)
        else:
            given.append(each)
            kinds += (each.base.dtype, *each.block_shape)
    return given, kinds, together % ALIGNED == 0


def _tensor_of(given: Tensor | Descriptor | None) -> Tensor:
    assert given is not None
    return given if isinstance(given, Tensor) else given.base


def _kind(number: int) -> tuple[bool, bool, bool]:
    """What of a number Triton may compile a kernel for."""
    return number == 1, number % ALIGNED == 0, number > LARGEST


def parts_of(whole: int, part: int) -> int:
    """How many parts of a size it takes to cover all."""
    return -(-whole // part)


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
