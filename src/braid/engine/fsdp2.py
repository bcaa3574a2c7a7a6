"""FSDP2 internals: the only file that depends on private attributes of `torch.distributed.fsdp`.

The engine calls phases of a model instead of `model.forward`, so FSDP2's forward and backward hooks never see
the calls that they rely on; explicit ops replace them. Unsharding, resharding and the sync switches are public
API (`unshard`, `reshard`, `set_requires_gradient_sync`); reducing the gradients of a single unit and removing
hooks are not. Of the internals used here, torch 2.11 and 2.13 differ only in what `_param_groups` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from braid.distributed.collectives import Group
from braid.kernels.precision.formats import VALUES

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
                unused = param._unsharded_param
                unused.grad = torch.zeros_like(unused, dtype=unused.grad_dtype)
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
                if param.reduce_dtype not in (None, param._unsharded_param.grad_dtype)
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


# --------------------------------------------------------------------------------- quantised weights


class ValueGather:
    """All-gathers e4m3 values in the place of a parameter, as bytes. FSDP2 asks a shard that has the attributes
    of its extension what to gather; the unsharded Parameter is then e4m3, with gradients in the dtype that it
    would have otherwise."""

    def __init__(self, param: Any, family: str) -> None:
        """`family` is that of the ranks that the parameter is sharded over."""
        self._param, self._family = param, family
        self.values: Tensor | None = None
        """Those of this rank's shard, while a step runs."""
        shard = param._sharded_local_tensor
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._gathered, self._unsharded
        param._init_extensions()

    @property
    def whole(self) -> torch.Size:
        """The size of the unsharded parameter."""
        size: torch.Size = self._param._orig_size
        return size

    @property
    def dim(self) -> int:
        """The sharded dim."""
        dim: int = self._param.fsdp_placement.dim
        return dim

    @property
    def start(self) -> int:
        """Where this rank's shard begins along it."""
        return min(self.group.rank * self._param.padded_sharded_param_size[self.dim], self.whole[self.dim])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the parameter would be gathered."""
        dtype: torch.dtype = self._param.param_dtype or self._param.orig_dtype
        return dtype

    @property
    def shard(self) -> Tensor:
        """This rank's shard, in the dtype in which it would be gathered."""
        shard: Tensor = self._param._sharded_local_tensor
        return shard.detach().to(self.dtype)

    @cached_property
    def group(self) -> Group:
        """The ranks that the parameter is sharded over."""
        mesh = self._param.mesh_info
        size, rank = mesh.shard_mesh_size, mesh.shard_mesh_rank
        return Group(name=self._family, size=size, rank=rank, handle=mesh.shard_process_group)

    def put(self, values: Tensor) -> None:
        """Set the values of this rank's shard. FSDP2 pads shards to the size of the first."""
        self.values = values.new_zeros(self._param.padded_sharded_param_size)
        self.values.narrow(self.dim, 0, values.shape[self.dim]).copy_(values)

    def set_grad_dtype(self) -> None:
        """To be called when the parameter has been gathered: the first time creates it."""
        parameter = self._param._unsharded_param
        if parameter.requires_grad and parameter.grad_dtype != self.dtype:
            parameter.grad_dtype = self.dtype

    def _gathered(
        self, mesh: object, outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], None]:
        assert self.values is not None, "a quantised weight is gathered outside of a step"
        return (self.values.view(torch.uint8),), None

    def _unsharded(
        self,
        gathered: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # The bytes are the parameter: FSDP2 frees and allocates their storage itself.
        return None if out is not None else (gathered[0].view(VALUES), ())


def gather_values(module: FSDPModule, of: nn.Module, name: str, family: str) -> ValueGather | None:
    """Gather the values of a parameter of a submodule; None if it is in the unit of another FSDP module."""
    for group in _param_groups(module):
        for param in group.fsdp_params:
            if param._module_info.module is of and param._module_info.param_name == name:
                return ValueGather(param, family)
    return None


# ------------------------------------------------------------------------------------------- hooks


def remove_fsdp_hooks(root: nn.Module) -> None:
    """Remove FSDP2's forward hooks from all modules, so that calling one neither gathers nor reduces. Other
    hooks stay."""
    for module in fsdp_modules(root):
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # type: ignore[attr-defined]
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[key]
