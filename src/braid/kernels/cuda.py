"""Kernels in CUDA C++: compiled when they are first used, by the compiler that comes with torch, and launched
without looking at their arguments twice."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

HOPPER = "sm_90a"
"""With the instructions that only Hopper has."""


@dataclass(frozen=True)
class CudaSource:
    """A kernel before it is compiled."""

    package: str
    file: str
    name: str
    macros: tuple[tuple[str, int], ...]
    """What it is compiled for."""
    threads: int
    """Of each block."""
    shared: int
    """Bytes on the chip for each block."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that is loaded on a device."""

    function: Any
    threads: int
    shared: int

    def __call__(self, blocks: int, arguments: Sequence[Any], stream: int) -> None:
        """Launch it. Arguments are tensor maps, tensors and integers."""
        from cuda.bindings import driver

        held = [_argument(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(held))(*(address for _, address in held))
        where, shape = ctypes.addressof(addresses), (blocks, 1, 1, self.threads, 1, 1)
        _given(driver.cuLaunchKernel(self.function, *shape, self.shared, stream, where, 0))


def _argument(argument: Any) -> tuple[Any, int]:
    """What a launch copies, and where it is."""
    if isinstance(argument, Tensor):
        pointer = ctypes.c_uint64(argument.data_ptr())
        return pointer, ctypes.addressof(pointer)
    if isinstance(argument, int):
        number = ctypes.c_int(argument)
        return number, ctypes.addressof(number)
    return argument, argument.getPtr()


@cache
def loaded(source: CudaSource, device: torch.device) -> Kernel:
    """The kernel on a device; compiled and loaded once."""
    from cuda.bindings import driver

    binary, _ = compiled(source)
    with torch.cuda.device(device):
        module = _given(driver.cuModuleLoadData(binary))
        function = _given(driver.cuModuleGetFunction(module, source.name.encode()))
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _given(driver.cuFuncSetAttribute(function, dynamic, source.shared))
    return Kernel(function, source.threads, source.shared)


def compiled(source: CudaSource, *options: str) -> tuple[bytes, str]:
    """Machine code for Hopper, and what the compiler says of it. Needs no GPU."""
    from cuda.bindings import nvrtc

    text = files(source.package).joinpath(source.file).read_text()
    options += (f"--gpu-architecture={HOPPER}", "--std=c++17")
    options += tuple(f"-D{name}={value}" for name, value in source.macros)
    program = _given(nvrtc.nvrtcCreateProgram(text.encode(), source.file.encode(), 0, [], []))
    try:
        (failure,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * _given(nvrtc.nvrtcGetProgramLogSize(program))
        _given(nvrtc.nvrtcGetProgramLog(program, log))
        if failure != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source.file} does not compile for {dict(source.macros)}:\n{log.decode()}")
        binary = b" " * _given(nvrtc.nvrtcGetCUBINSize(program))
        _given(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary, log.decode()


def tensor_map(x: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """Tells the copy engine of a tensor, and what of it to move at a time: boxes whose rows are 128 bytes,
    which on the chip are turned by their number. Dims go from the outermost to the innermost, whose elements
    are neighbours; strides are in elements."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    dtype = {
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[x.dtype]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _given(
        driver.cuTensorMapEncodeTiled(
            dtype,
            len(sizes),
            x.data_ptr(),
            [wide(size) for size in reversed(sizes)],
            [wide(stride * x.itemsize) for stride in reversed(strides[:-1])],
            [narrow(length) for length in reversed(box)],
            [narrow(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _given(result: tuple[Any, ...]) -> Any:
    """What a call into CUDA gave; an error where it failed."""
    failure, *given = result
    if failure:
        raise RuntimeError(f"CUDA: {failure!r}")
    return given[0] if given else None
