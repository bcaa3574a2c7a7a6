"""The state of an optimizer comes with its weights, in any layout; main parameters are never narrowed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from braid.errors import CheckpointError
from braid.interchange import adapter_for, from_hf, reader_of, to_hf, to_ours, to_theirs
from braid.interchange.files import SafetensorsFolder
from braid.interchange.hub import family_of
from braid.interchange.megatron import reader
from braid.interchange.trained import Target, targets
from tests.interchange.layouts import EXPERTS, MOMENTS, WAYS, experts, megatron, mixture, optimized, same
from tests.interchange.test_convert import weights
from tests.interchange.test_names import SHAPE

BF16, FP32 = torch.bfloat16, torch.float32


def trained(**moe: object) -> tuple[object, dict[str, Tensor]]:
    """A model with what its optimizer holds, as a run saves it."""
    shape, ours = mixture(selection_bias=True, score="sigmoid", **moe)
    updated = [name for name, target in targets(shape, FP32).items() if target.updated]
    moments = optimized(ours, updated)
    return shape, ours | {f"optimizer.{m}.{name}": t for m in MOMENTS for name, t in moments[m].items()}


def files(shape, ours: dict[str, Tensor], ways: tuple[str, ...] = ("indexed",) * 4) -> dict[str, Tensor]:
    """The same under Megatron's names, put together by hand: narrow weights, and wide ones beside them."""
    model = {name: tensor for name, tensor in ours.items() if not name.startswith("optimizer.")}
    sets = {"fp32_param": {name: tensor for name, tensor in model.items() if not name.endswith("router.bias")}}
    sets |= {
        m: {n.removeprefix(f"optimizer.{m}."): t for n, t in ours.items() if f"optimizer.{m}." in n}
        for m in MOMENTS
    }
    theirs = {
        n: t if n.endswith("expert_bias") else t.to(BF16) for n, t in megatron(shape, model, ways).items()
    }
    for kind, tensors in sets.items():
        zeros = {name: tensors.get(name, tensor) for name, tensor in model.items()}
        held = megatron(shape, zeros, ways)
        theirs |= {f"optimizer.state.{kind}.{n}": t for n, t in held.items() if not n.endswith("expert_bias")}
    return theirs


# -------------------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("way", WAYS)
def test_moments_and_main_parameters_come_and_go_to_the_bit(way: str) -> None:
    shape, ours = trained()
    theirs = files(shape, ours, (way,) * 4) | {"optimizer.state.step": torch.tensor(7)}
    found = to_ours(theirs, reader(), shape, dtype=BF16)
    same(found.tensors, ours)
    assert found.updates == 7
    written = to_theirs(found.tensors, adapter_for("megatron", "indexed", experts=way), shape, updates=7)
    same(written, {name: tensor for name, tensor in theirs.items() if name.startswith("optimizer.")})


def weights_of(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in ours.items() if not name.startswith("optimizer.")}


def test_every_set_has_a_layout_of_its_own() -> None:
    shape, ours = trained()
    mixed = files(shape, ours, ("indexed",) * 4)
    other = files(shape, ours, ("packed", "grouped", "stacked", "sequential"))
    for kind in ("fp32_param", "exp_avg_sq"):
        mixed = {n: t for n, t in mixed.items() if f".{kind}." not in n}
        mixed |= {n: t for n, t in other.items() if f".{kind}." in n}
    same(to_ours(mixed, reader(), shape, dtype=BF16).tensors, ours)


@pytest.mark.parametrize("wrapped", ["{}", "module.{}", "module.module.{}"])
@pytest.mark.parametrize("chained", ["", "chained_1."])
def test_wrappers_before_a_name_do_not_matter(wrapped: str, chained: str) -> None:
    shape, ours = trained()
    theirs = {}
    for name, tensor in files(shape, ours).items():
        kind = next((f"optimizer.state.{k}." for k in ("fp32_param", *MOMENTS) if f".{k}." in name), "")
        theirs[(chained if kind else "") + kind + wrapped.format(name.removeprefix(kind))] = tensor
    same(to_ours(theirs, reader(), shape, dtype=BF16).tensors, ours)


def test_a_name_with_and_without_its_wrapper_is_one_too_many() -> None:
    shape, ours = trained()
    theirs = files(shape, ours)
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight2"
    with pytest.raises(CheckpointError, match=rf"twice    {name}: as {name} and as module\.{name}"):
        to_ours(theirs | {f"module.{name}": theirs[name]}, reader(), shape, dtype=BF16)


# ------------------------------------------------------------------------------------------- never narrow


def test_a_main_parameter_takes_the_place_of_its_weight() -> None:
    shape, ours = trained()
    found = to_ours(files(shape, ours), reader(), shape).tensors
    same(found, weights_of(ours))
    assert any(not torch.equal(tensor, tensor.to(BF16).float()) for tensor in found.values())


def test_weights_that_are_wide_need_no_main_parameters() -> None:
    shape, ours = trained()
    theirs = {name: tensor for name, tensor in files(shape, ours).items() if ".fp32_param." not in name}
    theirs |= megatron(shape, weights_of(ours), ["indexed"] * 4)
    same(to_ours(theirs, reader(), shape, dtype=BF16).tensors, ours)


def test_an_optimizer_does_not_go_on_from_narrow_weights() -> None:
    shape, ours = trained()
    theirs = files(shape, ours)
    lost = [f"decoder.layers.1.mlp.experts.linear_fc2.weight{number}" for number in range(EXPERTS)]
    for name in lost:
        del theirs[f"optimizer.state.fp32_param.{name}"]
    with pytest.raises(CheckpointError) as caught:
        to_ours(theirs, reader(), shape, dtype=BF16)
    assert str(caught.value).split("\n  ")[1:-1] == [
        f"narrow   {name}: has the dtype torch.bfloat16, and optimizer.state.fp32_param.{name} is not there"
        for name in lost
    ]
    assert str(caught.value).splitlines()[-1] == "  set   --no-optimizer, to import the weights alone"
    assert to_ours(theirs, reader(), shape).tensors["blocks.1.moe.experts.0.down.weight"].dtype == BF16


def test_a_run_in_float64_is_given_float64() -> None:
    shape, ours = trained()
    found = to_ours(files(shape, ours), reader(), shape, dtype=torch.float64).tensors
    same(found, {name: tensor.double() for name, tensor in ours.items()})


# ------------------------------------------------------------------------------------- what does not fit


def test_all_that_does_not_fit_is_told_at_once() -> None:
    shape, ours = trained()
    theirs = files(shape, ours)
    layer, moment = "decoder.layers.1.mlp.experts", "optimizer.state.exp_avg"
    del theirs[f"{layer}.linear_fc1.weight1"], theirs[f"{moment}.{layer}.linear_fc2.weight0"]
    theirs[f"{layer}.linear_fc1.weight{EXPERTS}"] = torch.zeros(2)
    theirs[f"optimizer.state.fp32_param.{layer}.linear_fc2.bias2"] = torch.zeros(2)
    theirs[f"{moment}.{layer}.linear_fc1.weight0"] = torch.zeros(3, 12)
    for name in experts(ours, 0, "linear_fc2", "bias", "indexed"):
        del theirs[name]
    theirs["decoder.layers.0.mlp.experts.linear_fc2.bias"] = torch.zeros(EXPERTS + 1, 12)
    with pytest.raises(CheckpointError) as caught:
        to_ours(theirs, reader(), shape, dtype=BF16)
    first, *faults, remedy = str(caught.value).split("\n  ")
    assert first == "megatron tensors do not fit the model's shape: 6 names"
    assert remedy.startswith("set   a config.json (for megatron, a --recipe) that describes these files")
    assert faults == [
        f"missing  {layer}.linear_fc1.weight1",
        f"extra    {layer}.linear_fc1.weight{EXPERTS}",
        "shape    decoder.layers.0.mlp.experts.linear_fc2.bias"
        " has the shape [4, 12], wanted [3] as its first dims",
        "shape    optimizer.state.fp32_param.blocks.1.moe.experts.2.down.bias: has [2], wanted [12]",
        f"missing  {moment}.{layer}.linear_fc2.weight0",
        f"shape    {moment}.{layer}.linear_fc1.weight0 has the shape [3, 12], wanted 8 rows",
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_weights_that_are_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    shape, ours = trained()
    theirs = files(shape, ours)
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight1"
    theirs[name] = theirs[name].to(dtype)
    with pytest.raises(CheckpointError, match=rf"dtype    {re.escape(name)}: is of none of float64, float32"):
        to_ours(theirs, reader(), shape)


@pytest.mark.parametrize("told", [torch.tensor([3, 4]), torch.tensor(-1), torch.tensor(2.5), torch.empty(0)])
def test_a_number_of_updates_is_one_whole_number(told: Tensor) -> None:
    shape, ours = trained()
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.step holds"):
        to_ours(files(shape, ours) | {"optimizer.state.step": told}, reader(), shape, dtype=BF16)


def test_a_checkpoint_without_the_optimizers_state_is_told() -> None:
    shape, ours = trained()
    lost = "optimizer.exp_avg.blocks.0.moe.experts.1.up.weight"
    left = {name: tensor for name, tensor in ours.items() if name != lost}
    with pytest.raises(CheckpointError, match=f"missing  {lost}"):
        to_theirs(left, adapter_for("megatron", "indexed"), shape, updates=1)


# ------------------------------------------------------------------------------------ folders of the hub


@pytest.mark.parametrize("form", ["hub", "memory", "packed"])
def test_a_folder_of_the_hub_may_hold_the_optimizer_too(form: str, tmp_path: Path) -> None:
    shape, ours = mixture(bias=False, shared_ffn=0)
    shape = replace(shape, attention=replace(shape.attention, qk_norm=True))
    ours |= {f"blocks.{b}.attention.{n}_norm.weight": torch.randn(6) for b in (0, 1) for n in "qk"}
    moments = optimized(ours, list(ours))
    every = ours | {f"optimizer.{m}.{name}": t for m in MOMENTS for name, t in moments[m].items()}
    to_hf(shape, every, tmp_path, model_type="qwen3_moe", form=form, dtype=BF16, updates=5)
    folder = SafetensorsFolder(tmp_path)
    assert {t.dtype for name, t in folder.items() if not name.startswith("optimizer.")} == {BF16}
    found = to_ours(folder, reader_of(family_of("qwen3_moe")), shape, dtype=BF16, outlines=folder.outlines())
    same(found.tensors, every)
    assert found.updates == 5
    same(from_hf(tmp_path)[1], ours)


def test_moments_of_a_weight_that_counts_from_one_are_its_own() -> None:
    """Qwen3-Next's norms are told as what they add to one. Their moments are not."""
    gated = replace(SHAPE.attention, gate=True, qk_norm=True)
    moe = replace(SHAPE.moe, shared_ffn=4, shared_gate=True)
    shape, ours = weights("[*E]", attention=gated, moe=moe, tied=False)
    ours = {name: tensor.float() for name, tensor in ours.items()}
    every = ours | {f"optimizer.{m}.{name}": torch.randn_like(t) for m in MOMENTS for name, t in ours.items()}
    state = to_theirs(every, adapter_for("qwen3_next"), shape, updates=1)
    norm = "model.norm.weight"
    assert torch.equal(state[f"optimizer.state.exp_avg.{norm}"], every["optimizer.exp_avg.final_norm.weight"])
    assert torch.equal(state[f"optimizer.state.fp32_param.{norm}"], ours["final_norm.weight"] - 1)


def test_targets_are_what_a_run_saves() -> None:
    shape, _ = mixture(selection_bias=True, score="sigmoid")
    for dtype in (BF16, FP32):
        found = targets(shape, dtype)
        assert found["blocks.0.moe.experts.1.up.weight"] == Target((4, 12), FP32, True)
        assert found["blocks.0.moe.router.bias"].updated is False
