"""AdamW on main parameters: what the optimizer updates, in at least float32, whatever the model computes in.

A float32 or float64 parameter is its own main copy. A bfloat16 one has a float32 copy beside it: its gradients
are gathered there after every micro-batch, unless products have written them there themselves, and the new
weights are cast back after every update. Of a sharded parameter, the shard that this rank keeps is the main
copy, in the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braid.optim.shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state that AdamW keeps for every parameter, besides the number of updates."""


class AdamW:
    """Adam on every parameter, with decoupled weight decay on those named `decaying`."""

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
        """What is updated, by the parameter's name."""
        groups = [
            {"params": [t for name, t in self.main.items() if name in decaying], "weight_decay": weight_decay},
            {"params": [t for name, t in self.main.items() if name not in decaying], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for tensor in self.main.values():
            moments = {moment: torch.zeros_like(tensor, requires_grad=False) for moment in MOMENTS}
            self._adamw.state[tensor] = {"step": torch.zeros((), device=tensor.device), **moments}

    def mains(self) -> dict[Tensor, Tensor]:
        """The main copies that are apart, by the model's parameter: a wgrad store writes their gradients."""
        pairs = ((parameter, self.main[name]) for name, parameter in self._parameters.items())
        return {p: main for p, main in pairs if main is not p and not isinstance(p, DTensor)}

    def apart(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these parameters whose main copies are apart."""
        return tuple(name for name in names if self.main[name] is not self._parameters[name])

    def gather(self, names: Iterable[str] | None = None) -> None:
        """After a micro-batch: add the model's gradients to the main ones, where they are apart; of all
        parameters, or of some."""
        for name in self._parameters if names is None else names:
            parameter, main = self._parameters[name], self.main[name]
            if main is not parameter and parameter.grad is not None:
                gradient = local(parameter.grad)
                main.grad = gradient.to(main.dtype) if main.grad is None else main.grad.add_(gradient)
                parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the step so far; a parameter that nothing used has zeros."""
        for tensor in self.main.values():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return {name: tensor.grad for name, tensor in self.main.items() if tensor.grad is not None}

    def update(self, rate: float) -> None:
        """One step down the gradients, which are then gone."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self.gradients()
        self._adamw.step()
        self.publish()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        for tensor in self.main.values():
            tensor.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the main parameters into the model's, where they are apart."""
        for name, parameter in self._parameters.items():
            if self.main[name] is not parameter and not isinstance(parameter, DTensor):
                parameter.copy_(self.main[name])

    def moment(self, kind: str, name: str) -> Tensor:
        """One of `MOMENTS` of a parameter: the tensor itself, to save or to fill."""
        state: Tensor = self._adamw.state[self.main[name]][kind]
        return state

    @property
    def updates(self) -> int:
        """Updates made so far, which the bias correction counts."""
        return next((int(state["step"]) for state in self._adamw.state.values()), 0)

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(count)


def _main_copy(parameter: nn.Parameter) -> Tensor:
    """The parameter itself, what this rank keeps of it, or a float32 copy of one that is narrower."""
    if isinstance(parameter, DTensor):
        return local(parameter).requires_grad_()
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == wide else parameter.detach().to(wide).requires_grad_()
