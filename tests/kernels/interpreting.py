"""Where Triton kernels are tested: on a GPU, or interpreted in a process of their own (`test_interpreted.py`).
Triton asks whether to interpret when it is first imported."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_kernels = pytest.mark.kernels
"""Tests that are skipped where there is neither (`conftest.py`), and those that are interpreted."""

if INTERPRETED:
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    set_attribute = interpreter._LangPatchScope.set_attr

    def set_and_mend(scope: Any, of: object, name: str, value: object) -> None:
        """Triton 3.6 makes an index of an array with one entry, which numpy 2.4 no longer does."""
        set_attribute(scope, of, name, (lambda x: x.handle.data.item()) if name == "__index__" else value)

    interpreter._LangPatchScope.set_attr = set_and_mend  # type: ignore[method-assign]

    convert_float = interpreter._convert_float

    def convert_as_hardware(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Triton 3.6 truncates to bfloat16, loses subnormal ones, and rounds to e4m3 without carry, saturation
        or NaN. Hardware rounds to the nearest, ties to even; e4m3 saturates, and has one NaN."""
        if source == tl.bfloat16 and target == tl.float32:
            return (data.astype(np.uint32) << 16).view(np.float32)
        if source == tl.float8e4nv and target == tl.float16:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(torch.float8_e4m3fn)
            return values.half().view(torch.uint16).numpy()
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return convert_float(data, source, target, rounding)
        x = torch.from_numpy(np.ascontiguousarray(data))
        if target == tl.bfloat16:
            return x.to(torch.bfloat16).view(torch.uint16).numpy()
        x = torch.where(x.isnan(), torch.nan, x.clamp(-448.0, 448.0))
        return x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def fused_multiply_add(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Triton 3.6 rounds the product. In float64 that of float32 numbers is exact."""
        wide = np.float64 if z.data.dtype == np.float32 else z.data.dtype
        with np.errstate(invalid="ignore"):
            data = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return interpreter.TensorHandle(data.astype(z.data.dtype), z.dtype.scalar)

    def run_assembly(self: Any, assembly: str, _: str, values: Any, *rest: object) -> Any:
        """Triton 3.6 runs none. Of ours there is one, a reciprocal."""
        assert "rcp" in assembly
        (x,) = values
        inverse = interpreter.TensorHandle(np.float32(1) / x.data, x.dtype.scalar)
        return SimpleNamespace(get_result=lambda _: inverse)

    reduce = interpreter.ReduceOps.apply_impl

    def reduce_at_once(self: Any, inputs: Any) -> Any:
        """Triton 3.6 calls a function of ours for one pair of numbers after the other."""
        if getattr(self.combine_fn, "__name__", "") == "larger_or_nan":
            return self.min_max(inputs[0], val_reduce_op=np.max)
        return reduce(self, inputs)

    interpreter.ReduceOps.apply_impl = reduce_at_once
    interpreter.InterpreterBuilder.create_inline_asm = run_assembly
    interpreter._convert_float = convert_as_hardware
    interpreter.InterpreterBuilder.create_fma = fused_multiply_add
