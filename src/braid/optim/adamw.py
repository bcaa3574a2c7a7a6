"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on main parameters in at least float32.

A float32 or float64 parameter is its own main copy. A bfloat16 parameter has a separate float32 main copy:
gradients accumulate there after every micro-batch, unless wgrad kernels have written them there directly, and
weights are cast back after every update. For a parameter sharded by FSDP2, the main copy is this rank's shard,
in the same memory. `kernels.optimizer` computes the update. Matrices may be left to `Muon`, which says in which
direction they move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braid.kernels.optimizer import PLAIN, Hyper, Moments, OptimizerKernels
from braid.optim.muon import MOMENT, Muon
from braid.optim.shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer state of a parameter, besides the step count of all of them."""

ALL_MOMENTS = (*MOMENTS, MOMENT)
"""The same, of any optimizer."""


class _Group(NamedTuple):
    """Parameters of one learning rate and number of steps."""

    names: list[str]
    share: float
    """Factor on the learning rate."""
    step: Tensor
    """Steps taken so far, 0-D. On the device, which may skip a step."""


class AdamW:
    """AdamW on main parameters, but for those of `muon`; weight decay applies to those in `decaying`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        decaying: Collection[str],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        kernels: OptimizerKernels = PLAIN,
        lr_shares: Mapping[str, float] = MappingProxyType({}),
        device: torch.device | None = None,
        muon: Muon | None = None,
    ) -> None:
        """`lr_shares` are factors on the learning rate, 1 for parameters that are not listed. `device` is that
        of the parameters, in case that there are none."""
        self.kernels = kernels
        self._parameters = dict(parameters)
        self.main: dict[str, Tensor] = {name: _main_copy(p) for name, p in parameters.items()}
        """Main parameters by name."""
        self._hyper = Hyper(betas, eps)
        self._decay = {name: weight_decay if name in decaying else 0.0 for name in parameters}
        self._moments = {
            name: {moment: torch.zeros_like(tensor, requires_grad=False) for moment in self._kinds(name, muon)}
            for name, tensor in self.main.items()
        }
        self.muon = muon
        self._device = next((tensor.device for tensor in self.main.values()), device)
        self._shares = {name: lr_shares.get(name, 1.0) for name in self.main}
        self._groups: list[_Group] = []
        self.set_updates(0)

    def set_updates(self, updates: int, own: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the number of steps taken so far, for Adam's bias correction. `own` are those of parameters that
        joined later."""
        base = (1.0, updates)
        names: dict[tuple[float, int], list[str]] = {base: []}
        for name in self.main:
            if self.muon is not None and name in self.muon.names:
                continue  # no bias correction, so no count
            names.setdefault((self._shares[name], own.get(name, updates)), []).append(name)
        self._groups = [
            _Group(each, share, torch.full((), float(count), device=self._device))
            for (share, count), each in names.items()
        ]

    def main_copies(self) -> dict[Tensor, Tensor]:
        """Separate main copies by model parameter; a wgrad store accumulates into their gradients."""
        pairs = ((parameter, self.main[name]) for name, parameter in self._parameters.items())
        return {p: main for p, main in pairs if main is not p and not isinstance(p, DTensor)}

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Every parameter with its main copy, which may be the parameter itself."""
        return ((name, parameter, self.main[name]) for name, parameter in self._parameters.items())

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

    @torch.no_grad()
    def update(self, rate: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Apply an optimizer step, update the model's parameters and clear the gradients. `scale`, a 0-D tensor
        on the device, multiplies all gradients: see `gradients.clip_scale`. If `skip`, a 0-D bool, is set, all
        stays as it is but for the gradients."""
        gradients = self.gradients()
        if self.muon is not None:
            self._update_by_muon(self.muon, gradients, rate, scale, skip)
        for names, share, step in self._groups:
            parameters = [
                Moments(
                    main=self.main[name].detach(),
                    exp_avg=self._moments[name]["exp_avg"],
                    exp_avg_sq=self._moments[name]["exp_avg_sq"],
                    narrow=self._narrow_copy(name),
                    weight_decay=self._decay[name],
                )
                for name in names
            ]
            given = (parameters, [gradients[name] for name in names], self._hyper, share * rate, step)
            if names:
                self.kernels.adamw(*given, scale=scale, skip=skip)
            else:
                step += 1 if skip is None else ~skip
        self.zero_grad()

    def _update_by_muon(
        self,
        muon: Muon,
        gradients: Mapping[str, Tensor],
        rate: float,
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        if scale is not None:
            for name in muon.names:
                gradients[name].mul_(scale)
        muon.directions({name: self._moments[name][MOMENT] for name in sorted(muon.names)}, gradients, skip)
        for name in muon.names:
            own, main = rate * self._shares[name], self.main[name].detach()
            moved = main * (1 - own * self._decay[name]) - own * gradients[name]
            main.copy_(moved if skip is None else torch.where(skip, main, moved))
            narrow = self._narrow_copy(name)
            if narrow is not None:
                narrow.copy_(main)

    def _narrow_copy(self, name: str) -> Tensor | None:
        """The model's parameter, if its main copy is separate."""
        parameter = self._parameters[name]
        separate = self.main[name] is not parameter and not isinstance(parameter, DTensor)
        return parameter.detach() if separate else None

    def zero_grad(self) -> None:
        for tensor in self.main.values():
            tensor.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Cast separate main copies into the model's parameters."""
        for name, main in self.main.items():
            narrow = self._narrow_copy(name)
            if narrow is not None:
                narrow.copy_(main)

    @staticmethod
    def _kinds(name: str, muon: Muon | None) -> tuple[str, ...]:
        return MOMENTS if muon is None or name not in muon.names else (MOMENT,)

    def moments(self, name: str) -> Mapping[str, Tensor]:
        """The optimizer state of a parameter by kind, by reference: checkpoints read it and write to it."""
        return self._moments[name]

    def moment(self, kind: str, name: str) -> Tensor:
        """One of them."""
        return self._moments[name][kind]

    @property
    def updates(self) -> int:
        """Steps taken so far, for Adam's bias correction."""
        return int(self._groups[0].step)

    def own_updates(self) -> dict[str, int]:
        """The number of steps of each parameter that has taken another number of them."""
        counts = [(group.names, int(group.step)) for group in self._groups]
        return {name: count for names, count in counts for name in names if count != counts[0][1]}


def _main_copy(parameter: nn.Parameter) -> Tensor:
    """The parameter itself, its local shard, or a float32 copy if its dtype is narrower."""
    if isinstance(parameter, DTensor):
        return local(parameter).requires_grad_()
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if parameter.dtype == wide else parameter.detach().to(wide).requires_grad_()
