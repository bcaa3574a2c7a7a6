"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on main parameters in at least float32.

A float32 or float64 parameter is its own main copy. A bfloat16 parameter has a separate float32 main copy:
gradients accumulate there after every micro-batch, unless wgrad kernels have written them there directly, and
weights are cast back after every update. For a parameter sharded by FSDP2, the main copy is this rank's shard,
in the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braid.optim.shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer state of a parameter, besides its step count."""


class AdamW:
    """torch's fused AdamW on main parameters; weight decay applies to those in `decaying`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        decaying: Collection[str],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._parameters = dict(parameters)
        self.main: dict[str, Tensor] = {name: _main_copy(p) for name, p in parameters.items()}
        """Main parameters by name."""
        groups = [
            {"params": [t for name, t in self.main.items() if name in decaying], "weight_decay": weight_decay},
            {"params": [t for name, t in self.main.items() if name not in decaying], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for tensor in self.main.values():
            moments = {moment: torch.zeros_like(tensor, requires_grad=False) for moment in MOMENTS}
            self._adamw.state[tensor] = {"step": torch.zeros((), device=tensor.device), **moments}

    def main_copies(self) -> dict[Tensor, Tensor]:
        """Separate main copies by model parameter; a wgrad store accumulates into their gradients."""
        pairs = ((parameter, self.main[name]) for name, parameter in self._parameters.items())
        return {p: main for p, main in pairs if main is not p and not isinstance(p, DTensor)}

    def with_main_copy(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these parameters that have a separate main copy."""
        return tuple(name for name in names if self.main[name] is not self._parameters[name])

    def accumulate_grads(self, names: Iterable[str] | None = None) -> None:
        """Add the model's gradients of a micro-batch to the main gradients and clear them; for `names`, or all
        parameters. Does nothing for parameters that are their own main copy."""
        for name in self._parameters if names is None else names:
            parameter, main = self._parameters[name], self.main[name]
            if main is not parameter and parameter.grad is not None:
                gradient = local(parameter.grad)
                main.grad = gradient.to(main.dtype) if main.grad is None else main.grad.add_(gradient)
                parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The main gradients of the step so far; zeros for parameters without one."""
        for tensor in self.main.values():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return {name: tensor.grad for name, tensor in self.main.items() if tensor.grad is not None}

    def update(self, rate: float, *, scale: Tensor | None = None, apply: Tensor | None = None) -> None:
        """Apply an optimizer step, update the model's parameters and clear the gradients. Gradients are
        multiplied by `scale` first. If `apply` is false, weights, moments and step counts stay as they are.
        Both are 0-D tensors on the device, which decides without the host."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        gradients = self.gradients()
        if scale is not None and (scale.is_cuda or bool(scale != 1)):
            torch._foreach_mul_(list(gradients.values()), scale)
        # torch's name for it: GradScaler sets this attribute when scaled gradients overflow.
        vars(self._adamw)["found_inf"] = None if apply is None else (~apply).float()
        self._adamw.step()
        self.copy_to_model()
        self.zero_grad()

    def zero_grad(self) -> None:
        for tensor in self.main.values():
            tensor.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Cast separate main copies into the model's parameters."""
        for name, parameter in self._parameters.items():
            if self.main[name] is not parameter and not isinstance(parameter, DTensor):
                parameter.copy_(self.main[name])

    def moment(self, kind: str, name: str) -> Tensor:
        """One of `MOMENTS` of a parameter, by reference: checkpoints read it and write to it."""
        state: Tensor = self._adamw.state[self.main[name]][kind]
        return state

    @property
    def updates(self) -> int:
        """Steps taken so far, for Adam's bias correction."""
        return next((int(state["step"]) for state in self._adamw.state.values()), 0)

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(count)


def _main_copy(parameter: nn.Parameter) -> Tensor:
    """The parameter itself, its local shard, or a float32 copy if its dtype is narrower."""
    if isinstance(parameter, DTensor):
        return local(parameter).requires_grad_()
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == wide else parameter.detach().to(wide).requires_grad_()
