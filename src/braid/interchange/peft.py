"""Adapters of LoRA in peft's format.

peft has one A and one B for each linear layer of transformers, and for each parameter that holds the experts
of a layer. Where one of theirs holds several of ours, such as gate and up, our adapters are one of a larger
rank: A's lie one below the other, B's in blocks beside zeros, and the product is the same.

Shapes: I channels in, O channels out, R rank of theirs, E experts (1 without them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import Trunk
from braid.interchange.moves import Move, Stacked, Transposed
from braid.interchange.tables import Adapter, NameLink, links
from braid.lora import DOWN, UP, Lora
from braid.pattern import Kind, parse

PREFIX = "base_model.model."
"""What peft puts before the name of a module."""

ONCE_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Modules that peft takes for experts of an older transformers wherever they are in a model with experts, MLPs
and shared experts included. By the names of their parameters they are what they are."""

FUSED = MappingProxyType({"mamba2": "out_proj", "nemotron_h": "out_proj"})
"""The module of a family that peft refuses: kernels of training read its weight and would miss the adapter."""


class PeftAdapter(NamedTuple):
    """One of peft's."""

    theirs: str
    """The parameter of transformers that it adapts."""
    down: Tensor
    """A: [E·R, I], the experts one below the other."""
    up: Tensor
    """B: [O, R·E], the experts in turn."""
    joined: int
    """How many of our adapters it holds for each expert."""
    experts: bool
    """Whether the parameter holds experts."""

    @property
    def module(self) -> str:
        return self.theirs.rpartition(".")[0]


def fit(
    table: Adapter, shape: Trunk, stored: Mapping[str, Tensor], rows: Mapping[str, int]
) -> tuple[list[PeftAdapter], list[str]]:
    """The adapters of `stored`, and lines on those that have no place. `rows` of our weights, by name."""
    wanted = {f"{name.removesuffix(f'.{UP}')}.weight" for name in stored if name.endswith(f".{UP}")}
    fitted, lost = list[PeftAdapter](), list[str]()
    for link in links(table, shape):
        if wanted.isdisjoint(link.ours):
            continue
        wanted -= set(link.ours)
        if link.theirs.split(".")[-2] == FUSED.get(table.name):
            lost.append(f"{link.theirs} is one that peft refuses: leave {', '.join(link.ours)} out")
        elif _keeps_inputs(link, rows):
            fitted.append(_fit(link, stored, rows))
        else:
            lost.append(f"{link.theirs} has other inputs than {', '.join(link.ours)}")
    return fitted, [*lost, *(f"{table.name} has no {name}" for name in sorted(wanted))]


def tensors(adapters: Iterable[PeftAdapter]) -> dict[str, Tensor]:
    """adapter_model.safetensors. Where several parameters of a module have adapters, that of the last is around
    the module, that of the one before within it, and so on."""
    modules: dict[str, list[PeftAdapter]] = {}
    for adapter in adapters:
        modules.setdefault(adapter.module, []).append(adapter)
    found = dict[str, Tensor]()
    for module, inside in modules.items():
        for depth, adapter in enumerate(reversed(inside)):
            at = PREFIX + module + ".base_layer" * depth
            found |= {f"{at}.lora_A.weight": adapter.down, f"{at}.lora_B.weight": adapter.up}
    return found


def config(adapters: Iterable[PeftAdapter], lora: Lora, shape: Trunk) -> dict[str, Any]:
    """adapter_config.json."""
    mixture = Kind.MOE in parse(shape.pattern).kinds()
    modules, parameters, joined = list[str](), list[str](), dict[str, int]()
    for adapter in adapters:
        by_parameter = adapter.experts or (mixture and adapter.module.rpartition(".")[2] in ONCE_EXPERTS)
        name = adapter.theirs if by_parameter else adapter.module
        (parameters if by_parameter else modules).append(name)
        if adapter.joined > 1:
            joined[name] = adapter.joined
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": {name: count * lora.rank for name, count in joined.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in joined.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
    }


# ---------------------------------------------------------------------------------------- one of theirs


def _fit(link: NameLink, stored: Mapping[str, Tensor], rows: Mapping[str, int]) -> PeftAdapter:
    """The adapters of what one of theirs holds."""
    experts, move = _of_one_expert(link)
    each = len(link.ours) // experts
    parts = [link.ours[start : start + each] for start in range(0, len(link.ours), each)]
    joined = [_joined(part, move, stored, rows) for part in parts]
    return PeftAdapter(
        theirs=link.theirs,
        down=torch.cat([down_RI for down_RI, _ in joined]).contiguous(),
        up=torch.stack([up_OR for _, up_OR in joined], -1).flatten(1).contiguous(),
        joined=sum(_name(name, UP) in stored for name in parts[0]),
        experts=isinstance(link.move, Stacked),
    )


def _joined(
    ours: Sequence[str], move: Move, stored: Mapping[str, Tensor], rows: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """One A and one B whose product is, in the rows of each of ours, that of its own."""
    adapted = [name for name in ours if _name(name, UP) in stored]
    down_RI = torch.cat([stored[_name(name, DOWN)] for name in adapted])
    rank, ups = len(down_RI) // len(adapted), []
    for name in ours:
        up_OR = down_RI.new_zeros(rows[name], len(down_RI))
        if name in adapted:
            start = adapted.index(name) * rank
            up_OR[:, start : start + rank] = stored[_name(name, UP)]
        ups.append(up_OR)
    return down_RI, move.to_theirs(ups)


def _of_one_expert(link: NameLink) -> tuple[int, Move]:
    """How many experts one of theirs holds, and how the rows of ours lie among the outputs of one. peft knows
    which experts are [inputs, outputs]."""
    if not isinstance(link.move, Stacked):
        return 1, link.move
    inner = link.move.inner
    return prod(link.move.dims), inner.inner if isinstance(inner, Transposed) else inner


def _keeps_inputs(link: NameLink, rows: Mapping[str, int]) -> bool:
    """Whether their matrix has the inputs of ours, and the outputs in some order: tried with whole numbers."""
    experts, move = _of_one_expert(link)
    whole = link.move.inner if isinstance(link.move, Stacked) else link.move
    start, ups = 0, []
    for name in link.ours[: len(link.ours) // experts]:
        ups.append(torch.tensor([[start + row, 1] for row in range(rows[name])]))
        start += rows[name]
    down_RI = torch.tensor([[1, 2, 0], [0, 1, 1]])
    theirs, moved = whole.to_theirs([up_OR @ down_RI for up_OR in ups]), move.to_theirs(ups)
    if move is not whole:
        theirs = theirs.t()
    return moved.dim() == 2 and theirs.shape == (len(moved), 3) and torch.equal(theirs, moved @ down_RI)


def _name(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('.weight')}.{kind}"
