"""Which token dispatcher a run uses, and why: decided once, told to the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from braid import architecture
from braid.distributed.collectives import Groups
from braid.errors import Problem
from braid.kernels.choice import KernelChoice
from braid.nn.moe.all_gather import AllGather
from braid.nn.moe.all_to_all import AllToAll
from braid.nn.moe.deep_ep import DeepEp
from braid.nn.moe.dispatch_plan import Dispatcher

Asked = Literal["auto", "all_to_all", "all_gather", "deep_ep"]
"""A dispatcher by name; `auto` leaves the choice to braid."""


def choose(
    shape: architecture.Moe, hidden: int, groups: Groups = Groups(), asked: Asked = "auto"
) -> KernelChoice[Dispatcher]:
    """The dispatcher for all layers of a model. A process that has all experts needs none."""
    arguments: dict[str, Any] = {
        "group": groups.ep_etp,
        "travel": groups.travel,
        "held": shape.experts // groups.ep.size,
        "slices": groups.etp.size,
    }
    if groups.ep_etp.size == 1:
        return _choice("local", AllToAll(**arguments), "every rank has all experts")
    if asked == "deep_ep":
        return _choice("deep_ep", DeepEp(**arguments, channels=shape.latent or hidden), "it was asked for")
    if asked == "all_gather":
        return _choice("all_gather", AllGather(**arguments), "it was asked for")
    if asked == "all_to_all":
        return _choice("all_to_all", AllToAll(**arguments), "it was asked for")
    if groups.ep.size == 1:
        reason = "every rank has a slice of every expert, so a token need not travel once for each of its slots"
        return _choice("all_gather", AllGather(**arguments), reason)
    return _choice("all_to_all", AllToAll(**arguments), "a token need not travel to ranks without its experts")


def problems(
    at: str, asked: Asked, shape: architecture.Moe, device: torch.device, dtype: torch.dtype
) -> Iterator[Problem]:
    """What keeps a run from using the dispatcher that it asks for in the field `at`."""
    if asked != "deep_ep":
        return
    for wrong, rule in (
        (device.type != "cuda", f"DeepEP works on GPUs, not on {device.type}"),
        (dtype != torch.bfloat16, f"DeepEP carries bfloat16, not {str(dtype).removeprefix('torch.')}"),
        (shape.pad_to_capacity, "DeepEP cannot pad to capacity"),
    ):
        if wrong:
            yield Problem(field=at, value=asked, rule=rule, remedy="all_to_all")


def _choice(name: str, dispatcher: Dispatcher, reason: str) -> KernelChoice[Dispatcher]:
    return KernelChoice(op="dispatch", name=name, function=dispatcher, reason=reason)
