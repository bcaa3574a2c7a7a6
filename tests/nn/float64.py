"""Other people's modules in float64: transformers asks for float32 in its norms, rotary tables and softmax,
which would hide differences that are smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


@contextmanager
def float32_means_float64() -> Iterator[None]:
    """Code that runs within, and asks torch for float32, works in float64. For oracles alone: braid's own code
    runs outside."""
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
