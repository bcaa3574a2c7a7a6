"""FSDP2 internals: the only file that depends on private attributes of `torch.distributed.fsdp`.

The engine calls phases of a model instead of `model.forward`, so FSDP2's forward and backward hooks never see
the calls that they rely on; explicit ops replace them. Unsharding, resharding and the sync switches are public
API (`unshard`, `reshard`, `set_requires_gradient_sync`); reducing the gradients of a single unit and removing
hooks are not. Of the internals used here, torch 2.11 and 2.13 differ only in what `_param_groups` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

_ROOT_FORWARD = "_braid_root_forward"
"""A method added to the root module that FSDP2 treats as its forward."""


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """All FSDP modules, including the root."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


# ------------------------------------------------------------------------------------------ the root


def init_root(root: FSDPModule) -> None:
    """Trigger FSDP2's lazy initialisation from the root. The first module that runs becomes the root, so this
    must precede the first use of any unit."""
    if _ROOT_FORWARD not in vars(root):
        setattr(root, _ROOT_FORWARD, _identity)
        register_fsdp_forward_method(root, _ROOT_FORWARD)  # type: ignore[arg-type]
    # The argument is there because the pre-forward hook of torch 2.11 fails on CUDA without one.
    getattr(root, _ROOT_FORWARD)(None)


@torch.enable_grad()
def finalize_backward(root: FSDPModule) -> None:
    """Run FSDP2's root post-backward: the current stream waits for all reductions, and per-step state is reset.
    It is triggered by an empty backward through the root, flagged as the last one."""
    set_sync_and_reshard(root, True)
    root.set_is_last_backward(True)
    getattr(root, _ROOT_FORWARD)(torch.zeros((), requires_grad=True)).backward()
    set_sync_and_reshard(root, False)


def set_sync_and_reshard(root: FSDPModule, enabled: bool) -> None:
    """Whether post-backward reduces gradients and reshards parameters."""
    root.set_requires_gradient_sync(enabled)
    root.set_reshard_after_backward(enabled)


def _identity(x: Tensor | None) -> Tensor | None:
    return x if x is None else x * 1  # a new tensor, so that its backward runs the hooks on the input


# ------------------------------------------------------------------------------------- gradients


def post_backward(module: FSDPModule, *, reduce: bool) -> None:
    """Run FSDP2's post-backward for one unit: add its gradients to those accumulated in the reduce dtype, or
    reduce-scatter the sum of both.

    A parameter that this rank has not used gets a zero gradient: all ranks must pass tensors of the same sizes
    and dtype to the collective."""
    if reduce:
        params = list(_fsdp_params(module))
        for param in params:
            if param._unsharded_param.grad is None and param.unsharded_accumulated_grad is None:
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
        # FSDP2 takes the accumulated gradient of a parameter if there is one, else `.grad`, which has the
        # compute dtype. If some have accumulated, cast the others too, so that the collective sees one dtype.
        if any(param.unsharded_accumulated_grad is not None for param in params):
            for param in params:
                if param.unsharded_accumulated_grad is None:
                    param.to_accumulated_grad_if_needed()
    module.set_requires_gradient_sync(reduce, recurse=False)
    for group in reversed(_param_groups(module)):
        group.post_backward()
    module.set_requires_gradient_sync(False, recurse=False)


def has_unreduced_grads(module: FSDPModule) -> bool:
    return any(
        param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None
        for param in _fsdp_params(module)
    )


def unreduced_grads(module: FSDPModule) -> dict[str, list[Tensor]]:
    """The gradients of a unit that are not reduced yet, of this micro-batch and accumulated, by the parameter's
    name from the root."""
    return {
        param._param_fqn: [
            gradient
            for gradient in (param._unsharded_param.grad, param.unsharded_accumulated_grad)
            if gradient is not None
        ]
        for param in _fsdp_params(module)
    }


def clear_grads(module: FSDPModule) -> None:
    """Drop all gradients of a unit: unsharded, accumulated, and reduced."""
    for param in _fsdp_params(module):
        param._unsharded_param.grad = param.unsharded_accumulated_grad = param.sharded_param.grad = None


class AccumulatedGrads:
    """FSDP2's accumulated gradients as the main gradients that a wgrad store adds to: for parameters whose
    compute dtype is narrower than the reduce dtype."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._by_parameter: dict[Tensor, _AccumulatedGrad | None] = {}

    def get(self, parameter: Tensor) -> _AccumulatedGrad | None:
        # FSDP2 creates the unsharded parameter when it is first gathered, so look again on a miss; but only
        # once for one that is not narrower.
        if parameter not in self._by_parameter:
            params = (param for module in fsdp_modules(self.root) for param in _fsdp_params(module))
            found = {
                param._unsharded_param: _AccumulatedGrad(param)
                for param in params
                if param.reduce_dtype not in (None, param._unsharded_param.dtype)
            }
            self._by_parameter = {parameter: None, **self._by_parameter, **found}
        return self._by_parameter[parameter]


class _AccumulatedGrad:
    def __init__(self, param: Any) -> None:
        self._param = param

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._param.reduce_dtype
        return dtype

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = self._param.unsharded_accumulated_grad
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._param.unsharded_accumulated_grad = gradient


def _fsdp_params(module: FSDPModule) -> Iterator[Any]:
    """The `FSDPParam`s of a unit that require a gradient and have been unsharded at least once."""
    for group in _param_groups(module):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param") and param._unsharded_param.requires_grad:
                yield param


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.13
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


# ------------------------------------------------------------------------------------------- hooks


def remove_fsdp_hooks(root: nn.Module) -> None:
    """Remove FSDP2's forward hooks from all modules, so that calling one neither gathers nor reduces. Other
    hooks stay."""
    for module in fsdp_modules(root):
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # type: ignore[attr-defined]
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[key]
