"""Canonical names: one key set per block, and a place in memory for each key."""

from __future__ import annotations

from dataclasses import replace

import torch

from braid.model.names import regrouped_names, renamed
from braid.nn.init import initial
from tests.model.cases import SHAPE, build

ATTENTION = {f"attention.{name}.weight" for name in ("norm", "q", "k", "v", "o")}
MLP = {f"mlp.{name}.weight" for name in ("norm", "gate", "up", "down")}
MOE = {
    "moe.norm.weight",
    "moe.router.weight",
    *(f"moe.shared.{name}.weight" for name in ("gate", "up", "down")),
    *(f"moe.experts.{e}.{name}.weight" for e in range(5) for name in ("gate", "up", "down")),
}


def at(index: int, *sets: set[str]) -> set[str]:
    return {f"blocks.{index}.{name}" for each in sets for name in each}


def test_key_sets() -> None:
    ends = {"embedding.weight", "final_norm.weight"}
    assert build("*-").canonical().keys() == ends | at(0, ATTENTION) | at(1, MLP)
    assert build("[*-]|[*E]").canonical().keys() == ends | at(0, ATTENTION, MLP) | at(1, ATTENTION, MOE)
    untied = build("E", replace(SHAPE, tied=False)).canonical()
    assert untied.keys() == ends | {"head.weight"} | at(0, MOE)


def test_biases_and_head_norms_have_names() -> None:
    assert SHAPE.attention is not None
    assert SHAPE.mlp is not None
    shape = replace(
        SHAPE,
        norm="layer",
        attention=replace(SHAPE.attention, bias=True, qk_norm=True),
        mlp=replace(SHAPE.mlp, bias=True, activation="gelu"),
    )
    keys = build("[*-]", shape).canonical().keys()
    extra = {f"attention.{name}.bias" for name in ("norm", "q", "k", "v", "o")}
    extra |= {"attention.q_norm.weight", "attention.k_norm.weight"}
    extra |= {f"mlp.{name}.bias" for name in ("norm", "up", "down")}
    wanted = at(0, ATTENTION, MLP - {"mlp.gate.weight"}, extra)
    assert keys == wanted | {"embedding.weight", "final_norm.weight", "final_norm.bias"}


def test_sinks_and_the_bias_of_a_router_have_names() -> None:
    assert SHAPE.attention is not None
    assert SHAPE.moe is not None
    shape = replace(
        SHAPE,
        attention=replace(SHAPE.attention, sinks=True),
        moe=replace(SHAPE.moe, router_bias=True, selection_bias=True, score="sigmoid"),
    )
    keys = build("[*E]", shape).canonical().keys()
    extra = {"attention.sinks", "moe.router.logit_bias", "moe.router.bias"}
    assert keys == at(0, ATTENTION, MOE, extra) | {"embedding.weight", "final_norm.weight"}


def test_canonical_tensors_cover_every_number_once_and_go_both_ways() -> None:
    assert SHAPE.attention is not None
    model = build("[*-][*E]", replace(SHAPE, attention=replace(SHAPE.attention, heads=6)))
    parameters = model.tensors()
    tensors = model.canonical()
    covered = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for number, tensor in enumerate(tensors.values(), start=1):
        assert not tensor.read(covered[tensor.parameter]).any()
        value = torch.full(tensor.shape, float(number), dtype=torch.float64)
        tensor.write(covered[tensor.parameter], value)
        assert torch.equal(tensor.read(covered[tensor.parameter]), value)
    assert all(bool(values.all()) for values in covered.values())
    saved = {name: tensor.read(parameters[tensor.parameter]).clone() for name, tensor in tensors.items()}
    other = build("[*-][*E]", model.shape, seed=9)
    there = other.tensors()
    for name, tensor in other.canonical().items():
        tensor.write(there[tensor.parameter], saved[name])
    assert all(torch.equal(there[name], parameter) for name, parameter in parameters.items())


def test_initial_weights_go_by_name() -> None:
    one, other = build("[*-][*E]"), build("[*-E]", dtype=torch.float32)
    layers = (4, 3)
    for name, tensor in one.canonical().items():
        if name not in other.canonical():
            continue
        mine = tensor.read(one.get_parameter(tensor.parameter))
        twin = other.canonical()[name].read(other.get_parameter(tensor.parameter))
        if tensor.fill == "residual":
            mine, twin = mine * layers[0] ** 0.5, twin * layers[1] ** 0.5
        torch.testing.assert_close(mine.float(), twin, rtol=1e-6, atol=0.0)


def test_matrices_decay_and_nothing_else() -> None:
    assert SHAPE.attention is not None
    model = build("[*E]", replace(SHAPE, attention=replace(SHAPE.attention, bias=True, qk_norm=True)))
    still = {name for name, _ in model.named_parameters()} - model.decaying()
    layer = "stack.blocks.0.layers"
    assert still == {
        f"{layer}.attention.norm.weight",
        f"{layer}.attention.inner.qkv.bias",
        f"{layer}.attention.inner.o.bias",
        f"{layer}.attention.inner.q_norm.weight",
        f"{layer}.attention.inner.k_norm.weight",
        f"{layer}.moe.norm.weight",
        "final_norm.weight",
    }


def test_initial_weights_follow_the_layer_and_not_its_brackets() -> None:
    flat, *others = (build(pattern) for pattern in ("*-*E/*E", "[*-][*E]/*E", "[*-]|*E/*E", "*|[-]*|E/*E"))
    for other in others:
        names = regrouped_names(flat.layout, other.layout)
        assert names is not None
        there = other.canonical()
        assert {renamed(name, names) for name in flat.canonical()} == there.keys()
        for name, tensor in flat.canonical().items():
            twin = there[renamed(name, names)]
            assert torch.equal(
                tensor.read(flat.tensors()[tensor.parameter]), twin.read(other.tensors()[twin.parameter])
            )


def test_without_brackets_layers_are_drawn_by_their_own_names() -> None:
    """As in the first version of initial weights."""
    model = build("*-E/*E")
    for name, tensor in model.canonical().items():
        if tensor.fill in ("normal", "xavier"):
            value = initial(name, tensor, seed=1, std=SHAPE.init_std)
            assert torch.equal(tensor.read(model.tensors()[tensor.parameter]), value.to(torch.float64)), name
