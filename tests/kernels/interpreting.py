"""Where Triton kernels are tested: on a GPU, or interpreted in a process of their own (`test_interpreted.py`).
Triton asks whether to interpret when it is first imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_kernels = pytest.mark.kernels
"""Tests that are skipped where there is neither (`conftest.py`), and those that are interpreted."""

if INTERPRETED:
    from triton.runtime import interpreter

    set_attribute = interpreter._LangPatchScope.set_attr

    def set_and_mend(scope: Any, of: object, name: str, value: object) -> None:
        """Triton 3.6 makes an index of an array with one entry, which numpy 2.4 no longer does."""
        set_attribute(scope, of, name, (lambda x: x.handle.data.item()) if name == "__index__" else value)

    interpreter._LangPatchScope.set_attr = set_and_mend  # type: ignore[method-assign]
