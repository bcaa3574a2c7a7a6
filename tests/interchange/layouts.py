"""Experts in the files of others, put together by hand: what braid's tables are compared against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from braid.architecture import Model
from braid.interchange import adapter_for, convert
from tests.interchange.test_convert import weights
from tests.interchange.test_names import SHAPE

EXPERTS, FFN = 3, 4
PLACES = [(linear, leaf) for linear in ("linear_fc1", "linear_fc2") for leaf in ("weight", "bias")]
WAYS = ("stacked", "each", "grouped", "packed", "indexed", "sequential")
MOMENTS = ("exp_avg", "exp_avg_sq")


def mixture(pattern: str = "[*E][*E]", **moe: object) -> tuple[Model, dict[str, Tensor]]:
    """A model with biased experts, and random weights of it."""
    chosen = {"experts": EXPERTS, "top_k": 2, "ffn": FFN, "shared_ffn": 2, "bias": True, **moe}
    shape, ours = weights(pattern, tied=False, moe=replace(SHAPE.moe, **chosen))
    assert isinstance(shape, Model)
    return shape, {name: tensor.float() for name, tensor in ours.items()}


def fused(ours: Mapping[str, Tensor], expert: str, linear: str, leaf: str, interleave: int = 0) -> Tensor:
    """One expert's rows of one linear: gate above up, or blocks of them in turn."""
    if linear == "linear_fc2":
        return ours[f"{expert}.down.{leaf}"]
    up = ours[f"{expert}.up.{leaf}"]
    if f"{expert}.gate.{leaf}" not in ours:
        return up
    gate, blocks = ours[f"{expert}.gate.{leaf}"], []
    for start in range(0, len(up), interleave or len(up)):
        stop = start + (interleave or len(up))
        blocks += [gate[start:stop], up[start:stop]]
    return torch.cat(blocks)


def experts(
    ours: Mapping[str, Tensor], layer: int, linear: str, leaf: str, way: str, interleave: int = 0
) -> dict[str, Tensor]:
    """All experts of a layer as Megatron's files hold them; nothing of what the model does not have."""
    numbers = range(EXPERTS)
    stem, prefix = f"blocks.{layer}.moe.experts", f"decoder.layers.{layer}.mlp.experts"
    if f"{stem}.0.down.{leaf}" not in ours:
        return {}
    rows = [fused(ours, f"{stem}.{number}", linear, leaf, interleave) for number in numbers]
    match way:
        case "stacked":
            return {f"{prefix}.experts.{linear}.{leaf}": torch.stack(rows)}
        case "grouped":
            return {f"{prefix}.{linear}.{leaf}": torch.stack(rows)}
        case "packed":
            return {f"{prefix}.{linear}.{leaf}": torch.cat(rows)}
        case "indexed":
            return {f"{prefix}.{linear}.{leaf}{number}": rows[number] for number in numbers}
        case "sequential":
            return {f"{prefix}.local_experts.{number}.{linear}.{leaf}": rows[number] for number in numbers}
    names = {n: f"{prefix}.experts.{n}.{linear}.{leaf}" for n in numbers}
    if linear == "linear_fc2" or f"{stem}.0.gate.{leaf}" not in ours:
        return {names[number]: rows[number] for number in numbers}
    halves = {n: row.chunk(2) for n, row in zip(numbers, rows, strict=True)}
    return {names[n] + end: half for n in numbers for end, half in zip(("_w", "_v"), halves[n], strict=True)}


def megatron(
    shape: Model, ours: Mapping[str, Tensor], ways: Sequence[str], interleave: int = 0
) -> dict[str, Tensor]:
    """A whole model under Megatron's names; `ways` says how each of `PLACES` is held."""
    others = convert(ours, adapter_for("megatron", "indexed"), shape, "to_theirs")
    theirs = {name: others[name] for name in others if ".mlp.experts." not in name}
    layers = {name.split(".")[1] for name in ours if ".moe.experts." in name and name.startswith("blocks.")}
    for layer in map(int, layers):
        for (linear, leaf), way in zip(PLACES, ways, strict=True):
            theirs |= experts(ours, layer, linear, leaf, way, interleave)
        shared = f"decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight"
        if "each" in ways and f"blocks.{layer}.moe.shared.gate.weight" in ours:
            theirs[f"{shared}_w"], theirs[f"{shared}_v"] = theirs.pop(shared).chunk(2)
    return theirs


def optimized(ours: Mapping[str, Tensor], updated: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Random moments of the tensors that an optimizer updates."""
    drawn = {moment: {name: torch.randn_like(ours[name]) for name in updated} for moment in MOMENTS}
    return {
        moment: {n: t.square() if moment == "exp_avg_sq" else t for n, t in drawn[moment].items()}
        for moment in drawn
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name
