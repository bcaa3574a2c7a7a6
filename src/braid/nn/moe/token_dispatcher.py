"""Choice of the token dispatcher for expert parallelism, with the reason that is reported to the user."""

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

DispatcherName = Literal["auto", "all_to_all", "all_gather", "deep_ep"]
"""`auto` chooses by topology."""


def choose(
    shape: architecture.Moe, hidden: int, groups: Groups = Groups(), asked: DispatcherName = "auto"
) -> KernelChoice[Dispatcher]:
    """The dispatcher for all MoE layers of a model; local if every rank has all experts."""
    arguments: dict[str, Any] = {
        "group": groups.ep_etp,
        "dispatch_group": groups.dispatch,
        "local_experts": shape.experts // groups.ep.size,
        "etp": groups.etp.size,
    }
    if groups.ep_etp.size == 1:
        return _choice("local", AllToAll(**arguments), "every rank has all experts")
    if asked == "deep_ep":
        return _choice("deep_ep", DeepEp(**arguments, channels=shape.latent or hidden), "requested")
    if asked == "all_gather":
        return _choice("all_gather", AllGather(**arguments), "requested")
    if asked == "all_to_all":
        return _choice("all_to_all", AllToAll(**arguments), "requested")
    if groups.ep.size == 1:
        reason = "every rank has a shard of every expert, so all-to-all would send a token once per slot"
        return _choice("all_gather", AllGather(**arguments), reason)
    return _choice("all_to_all", AllToAll(**arguments), "a token is sent only to ranks that have its experts")


def problems(
    at: str, asked: DispatcherName, shape: architecture.Moe, device: torch.device, dtype: torch.dtype
) -> Iterator[Problem]:
    """Why the dispatcher of field `at` cannot be used."""
    if asked != "deep_ep":
        return
    for wrong, rule in (
        (device.type != "cuda", f"DeepEP needs GPUs, not {device.type}"),
        (dtype != torch.bfloat16, f"DeepEP carries bfloat16, not {str(dtype).removeprefix('torch.')}"),
        (shape.pad_to_capacity, "DeepEP cannot pad to capacity"),
    ):
        if wrong:
            yield Problem(field=at, value=asked, rule=rule, remedy="all_to_all")


def _choice(name: str, dispatcher: Dispatcher, reason: str) -> KernelChoice[Dispatcher]:
    return KernelChoice(op="dispatch", name=name, function=dispatcher, reason=reason)
