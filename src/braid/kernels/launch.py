"""How kernels are launched: by what they were compiled to.

Triton looks at every argument of every launch to find what to run, and calls hooks before and after: that takes
the host longer than a small kernel takes the device. Here what to run is asked once for each kind of arguments,
and no hook is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

ALIGNED = 16
"""Bytes. Triton makes a kernel of its own for tensors that begin elsewhere."""


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
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int, ...],
        constants: Mapping[str, object],
        *,
        warps: int,
        stages: int = 1,
    ) -> None:
        """A kernel takes tensors, numbers that it is not compiled for, and constants, in the order given. The
        first tensor is there, and says on which device the others are."""
        assert tensors[0] is not None
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        values = constants.values()
        device = tensors[0].get_device()
        key = (kernel.fn, device, warps, stages, *dtypes, *values)
        aligned = not reduce(or_, addresses) % ALIGNED
        compiled = self._compiled.get(key) if aligned else None
        if compiled is not None:
            stream = driver.active.get_current_stream(device)
            what = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, 1, stream, *what, *addresses, *numbers, *values)
            return
        compiled = kernel[grid](*tensors, *numbers, **constants, num_warps=warps, num_stages=stages)
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


def parts_of(whole: int, part: int) -> int:
    """How many parts of a size it takes to cover all."""
    return -(-whole // part)


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
