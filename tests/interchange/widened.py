"""Float64 for code that computes in float32 whatever its inputs are: `widened` lets it mean float64 by that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Widened(TorchFunctionMode):
    """Lets every mention of float32 mean float64."""

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        wide = [_wide(value) for value in args]
        return function(*wide, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """For float64, a world in which transformers' float32 is float64."""
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
