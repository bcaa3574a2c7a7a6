"""CUDA C++ kernels: compiled with NVRTC on first use, launched through the driver API, with TMA tensor maps."""

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
"""The `a` enables instructions specific to Hopper: wgmma, setmaxnreg."""


@dataclass(frozen=True)
class CudaSource:
    """A kernel before compilation."""

    package: str
    file: str
    name: str
    macros: tuple[tuple[str, int], ...]
    """Preprocessor definitions."""
    threads: int
    """Threads per block."""
    shared: int
    """Bytes of dynamic shared memory per block."""


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded on a device."""

    function: Any
    threads: int
    shared: int

    def __call__(self, blocks: int, arguments: Sequence[Any], stream: int) -> None:
        """Launch the kernel. Arguments are tensor maps, tensors and integers."""
        from cuda.bindings import driver

        # `values` keeps the arguments alive until the driver has copied them.
        values = [_kernel_argument(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(address for _, address in values))
        params, shape = ctypes.addressof(addresses), (blocks, 1, 1, self.threads, 1, 1)
        _checked(driver.cuLaunchKernel(self.function, *shape, self.shared, stream, params, 0))


def _kernel_argument(argument: Any) -> tuple[Any, int]:
    """The C value of an argument, and its address."""
    if isinstance(argument, Tensor):
        pointer = ctypes.c_uint64(argument.data_ptr())
        return pointer, ctypes.addressof(pointer)
    if isinstance(argument, int):
        number = ctypes.c_int(argument)
        return number, ctypes.addressof(number)
    return argument, argument.getPtr()


@cache
def loaded(source: CudaSource, device: torch.device) -> Kernel:
    """The kernel on a device, compiled and loaded on first use."""
    from cuda.bindings import driver

    binary, _ = compiled(source)
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(binary))
        function = _checked(driver.cuModuleGetFunction(module, source.name.encode()))
        # More than 48 KiB of shared memory per block is opt-in.
        max_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, max_shared, source.shared))
    return Kernel(function, source.threads, source.shared)


def compiled(source: CudaSource, *options: str) -> tuple[bytes, str]:
    """The cubin for Hopper, and the compiler log. Needs no GPU."""
    from cuda.bindings import nvrtc

    text = files(source.package).joinpath(source.file).read_text()
    options += (f"--gpu-architecture={HOPPER}", "--std=c++17")
    options += tuple(f"-D{name}={value}" for name, value in source.macros)
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), source.file.encode(), 0, [], []))
    try:
        (failure,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        if failure != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source.file} does not compile for {dict(source.macros)}:\n{log.decode()}")
        binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary, log.decode()


def tensor_map(x: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """TMA tensor map (descriptor) for copies of boxes with 128-byte rows, in the 128B-swizzled layout of shared
    memory. Dims go from the outermost to the innermost, which is contiguous; strides are in elements."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    dtype = {
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[x.dtype]
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    return _checked(
        driver.cuTensorMapEncodeTiled(
            dtype,
            len(sizes),
            x.data_ptr(),
            [u64(size) for size in reversed(sizes)],
            [u64(stride * x.itemsize) for stride in reversed(strides[:-1])],
            [u32(length) for length in reversed(box)],
            [u32(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _checked(result: tuple[Any, ...]) -> Any:
    """The result of a driver or NVRTC call; raises if it failed."""
    error, *values = result
    if error:
        raise RuntimeError(f"CUDA call failed: {error!r}")
    return values[0] if values else None
