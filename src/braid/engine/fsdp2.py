"""The one file that reaches into FSDP2 beyond what it offers: gradients that are not reduced yet, and hooks.

Both are needed because a schedule calls parts of a model, and not the model: FSDP2 is then told by explicit
actions what its hooks would find out. Gathering and releasing are public (`unshard`, `reshard`), and so are
the switches; summing the gradients of one unit is not. Torch 2.11 and 2.13 differ in what `_groups` reads, and
in nothing else of what is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

SETTLE = "_settle"
"""A method that is given to a root: it does nothing, but FSDP2 takes it for a forward."""


def sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Every module that FSDP2 looks after, the root among them."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


# ------------------------------------------------------------------------------------------ the root


def wake(root: FSDPModule) -> None:
    """Have FSDP2 find out who is the root before any other unit is used. On a GPU, a call of it without any
    argument fails in torch 2.11."""
    if SETTLE not in vars(root):
        setattr(root, SETTLE, _unchanged)
        register_fsdp_forward_method(root, SETTLE)  # type: ignore[arg-type]
    getattr(root, SETTLE)(None)


@torch.enable_grad()
def settle(root: FSDPModule) -> None:
    """Make the current stream wait for every reduction, and have FSDP2 forget the step: an empty backward
    through the root, which it takes for the last one."""
    set_switches(root, True)
    root.set_is_last_backward(True)
    getattr(root, SETTLE)(torch.zeros((), requires_grad=True)).backward()
    set_switches(root, False)


def set_switches(root: FSDPModule, on: bool) -> None:
    """Whether a backward reduces gradients and releases weights."""
    root.set_requires_gradient_sync(on)
    root.set_reshard_after_backward(on)


def _unchanged(x: Tensor | None) -> Tensor | None:
    return x if x is None else x * 1


# ------------------------------------------------------------------------------------- gradients


def flush(module: FSDPModule, *, reduce: bool) -> None:
    """Put a unit's gradients with those accumulated in the dtype of reduction; or sum both over ranks.

    A weight that nothing has used has zeros: all ranks must sum tensors of the same sizes, and of one dtype."""
    if reduce:
        weights = list(_weights(module))
        for weight in weights:
            if weight._unsharded_param.grad is None and weight.unsharded_accumulated_grad is None:
                weight._unsharded_param.grad = torch.zeros_like(weight._unsharded_param)
        if any(weight.unsharded_accumulated_grad is not None for weight in weights):
            for weight in weights:
                if weight.unsharded_accumulated_grad is None:
                    weight.to_accumulated_grad_if_needed()
    module.set_requires_gradient_sync(reduce, recurse=False)
    for group in reversed(_groups(module)):
        group.post_backward()
    module.set_requires_gradient_sync(False, recurse=False)


def owes(module: FSDPModule) -> bool:
    """Whether gradients wait for their reduction."""
    return any(
        weight._unsharded_param.grad is not None or weight.unsharded_accumulated_grad is not None
        for weight in _weights(module)
    )


def forget(module: FSDPModule) -> None:
    """Drop every gradient of a unit: as ops left it, accumulated, and reduced."""
    for weight in _weights(module):
        weight._unsharded_param.grad = weight.unsharded_accumulated_grad = weight.sharded_param.grad = None


class Accumulated:
    """The gradients that FSDP2 accumulates until it reduces them, for a wgrad store: its main gradients, of the
    weights that compute in a narrower dtype than that of reduction."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._found: dict[Tensor, _Accumulated] = {}

    def get(self, parameter: Tensor) -> _Accumulated | None:
        """A weight becomes known when it is gathered for the first time."""
        if parameter not in self._found:
            every = (weight for module in sharded_modules(self.root) for weight in _weights(module))
            self._found = {
                weight._unsharded_param: _Accumulated(weight)
                for weight in every
                if weight.reduce_dtype not in (None, weight._unsharded_param.dtype)
            }
        return self._found.get(parameter)


class _Accumulated:
    def __init__(self, weight: Any) -> None:
        self._weight = weight

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._weight.reduce_dtype
        return dtype

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = self._weight.unsharded_accumulated_grad
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._weight.unsharded_accumulated_grad = gradient


def _weights(module: FSDPModule) -> Iterator[Any]:
    """The weights of a unit that have a gradient and have been gathered before."""
    for group in _groups(module):
        for weight in group.fsdp_params:
            if hasattr(weight, "_unsharded_param") and weight._unsharded_param.requires_grad:
                yield weight


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # from torch 2.13 on
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


# ------------------------------------------------------------------------------------------- hooks


def take_hooks_off(root: nn.Module) -> None:
    """From now on a module is called as if it had never been sharded, however deep it lies. Hooks of others
    stay."""
    for module in sharded_modules(root):
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # type: ignore[attr-defined]
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[key]
