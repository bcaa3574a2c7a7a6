"""How kernels are launched: by what they were compiled to.

Triton looks at every argument of every launch to find what to run, and calls hooks before and after: that takes
the host longer than a small kernel takes the device. Here what to run is asked once for each kind of arguments,
and no hook is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime import driver

ALIGNED = 16
"""Bytes. Triton makes a kernel of its own for tensors that begin elsewhere, and for numbers that are not
multiples of it."""


class Descriptor(Protocol):
    """What the copy engine is told about a tensor; Triton's, or Gluon's. How tiles lie on the chip follows from
    their shape."""

    base: Tensor
    block_shape: Sequence[int]


class Launcher:
    """Launches kernels, and remembers what each was compiled to."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[int, ...]]] = {}
        """By kind of arguments: what to run, and the number of warps, where the kernel wants to be told."""
        self._multiprocessors: dict[torch.device, int] = {}

    def __reduce__(self) -> tuple[type[Launcher], tuple[()]]:
        """A copy begins anew: what was compiled is of this process."""
        return Launcher, ()

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        operands: Sequence[Tensor | Descriptor | int | None],
        numbers: tuple[int, ...],
        constants: Mapping[str, object],
        *,
        warps: int,
        stages: int = 1,
    ) -> None:
        """A kernel takes operands, numbers that it is not compiled for, and constants, in the order given. The
        first operand is a tensor, or the descriptor of one, and says on which device the others are."""
        first = operands[0] if isinstance(operands[0], Tensor) else operands[0].base  # type: ignore[union-attr]
        given, kinds, aligned = _kinds(operands)
        values, device = constants.values(), first.get_device()
        key = (kernel.fn, device, warps, stages, *kinds, *values)
        found = self._compiled.get(key) if aligned else None
        if found is not None:
            compiled, told = found
            stream = driver.active.get_current_stream(device)
            what = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, 1, stream, *what, *given, *numbers, *values, *told)
            return
        compiled = kernel[grid](*operands, *numbers, **constants, num_warps=warps, num_stages=stages)
        interpreted = compiled is None
        if aligned and not interpreted:
            names = kernel.arg_names[len(operands) + len(numbers) :]
            told = (warps,) if names[-1] == "num_warps" else ()
            assert names == [*constants, *(["num_warps"] if told else [])]
            self._compiled[key] = compiled, told

    def multiprocessors(self, device: torch.device) -> int:
        """How many there are. A CPU, where kernels are only interpreted, counts as one that has some."""
        if device not in self._multiprocessors:
            on_gpu = device.type == "cuda"
            found = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
            self._multiprocessors[device] = found
        return self._multiprocessors[device]


def _kinds(operands: Sequence[Tensor | Descriptor | int | None]) -> tuple[list[Any], list[object], bool]:
    """What a kernel is given for them, what of them it is compiled for, and whether all tensors begin where
    they usually do."""
    given, kinds, addresses = list[Any](), list[object](), 0
    for operand in operands:
        if isinstance(operand, Tensor):
            address = operand.data_ptr()
            given.append(address)
            kinds.append(operand.dtype)
            addresses |= address
        elif operand is None:
            given.append(0)
            kinds.append(None)
        elif isinstance(operand, int):
            given.append(operand)
            kinds.append((operand == 1, operand % ALIGNED == 0, operand.bit_length() > 31))
        else:
            given.append(operand)
            kinds.append((operand.base.dtype, *operand.block_shape))
    return given, kinds, addresses % ALIGNED == 0


def parts_of(whole: int, part: int) -> int:
    """How many parts of a size it takes to cover all."""
    return -(-whole // part)


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
