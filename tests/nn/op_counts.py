"""Ops that torch runs, and the bytes they read and write: what modules composed of them say of their work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = (
    "aten.promote_types",
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.empty_like",
    "aten._local_scalar_dense",
)


class OpCounter(TorchDispatchMode):
    """Counts ops that are kernels on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        storages = {each.untyped_storage()._cdata for each in given}
        views = made and not func._schema.is_mutable and {m.untyped_storage()._cdata for m in made} <= storages
        if not views and not str(func).startswith(ALLOCATIONS):
            self.ops.append((str(func), sum(map(_touched, (*given, *made)))))
        return out


def _touched(tensor: Tensor) -> int:
    """Bytes of its numbers, each once: a dim that is expanded is read once."""
    entries = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= size if stride else 1
    return entries * tensor.element_size()


@dataclass(frozen=True)
class Counts:
    launches: int
    bytes: int


def forward_and_backward(
    function: Callable[..., Any], *inputs: Tensor, without: tuple[str, ...] = ("none",)
) -> tuple[Counts, Counts]:
    """Counts of both passes, without ops of these names. Gradients of outputs are ones."""
    with OpCounter() as forward:
        made = function(*inputs)
    outputs = made if isinstance(made, tuple) else (made,)
    gradients = [torch.ones_like(output) for output in outputs]
    with OpCounter() as backward:
        torch.autograd.backward(outputs, gradients)
    counted = (
        [size for name, size in each.ops if not name.startswith(without)] for each in (forward, backward)
    )
    first, then = (Counts(len(sizes), sum(sizes)) for sizes in counted)
    return first, then
