"""Mamba-2 against transformers, packed documents against separate ones, generation against whole rows."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braid.architecture import Mamba2 as Shape
from braid.kernels import ssd
from braid.nn.init import initialize
from braid.nn.mamba2 import Mamba2, Mamba2Cache

HIDDEN = 12
SHAPE = Shape(heads=6, head_dim=4, state=5, groups=3)
SHAPES = {
    "one group": replace(SHAPE, heads=3, groups=1),
    "three groups": SHAPE,
    "norm over all": replace(SHAPE, norm_per_group=False),
    "biases and limits": replace(SHAPE, bias=True, dt_min=0.3, dt_max=0.9),
    "no conv bias, two taps": replace(SHAPE, conv_bias=False, conv=2),
    "one tap": replace(SHAPE, conv=1),
}


def build(shape: Shape) -> Mamba2:
    """A layer in float64 whose every parameter matters: wide weights, time steps on both sides of any limit."""
    layer = Mamba2(shape, HIDDEN, 1e-5, ssd.REFERENCE.function, dtype=torch.float64)
    initialize(dict(layer.named_parameters()), layer.canonical(), seed=3, std=0.4, layers=1)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    layer.scalars.dt_bias.data += 3.0
    return layer


def hidden(rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    return torch.randn(rows, tokens, HIDDEN, generator=generator, dtype=torch.float64)


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        error = ((ours[name] - tensor).norm() / tensor.norm().clamp(min=1e-9)).item()
        assert error < bound, f"{name}: {error}"


def gradients(layer: nn.Module, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of the outputs: for every parameter and the input."""
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * probe).sum(), [*leaves, x])
    return dict(zip([*names, "input"], grads, strict=True))


def canonical(layer: Mamba2, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter (weights, gradients) under their canonical names."""
    return {name: place.read(tensors[place.parameter]) for name, place in layer.canonical().items()}


# ------------------------------------------------------------------------------------------ transformers


def theirs_from(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors as transformers' mixers name and order them."""
    names = {"A_log": "A_log", "D": "D", "dt_bias": "dt_bias", "norm.weight": "gate_norm.weight"}
    named = {name: tensors[ours] for name, ours in names.items()}
    for kind in ("weight", "bias"):
        if f"z.{kind}" in tensors:
            named[f"in_proj.{kind}"] = torch.cat(
                [tensors[f"{part}.{kind}"] for part in ("z", "x", "B", "C", "dt")]
            )
            named[f"out_proj.{kind}"] = tensors[f"o.{kind}"]
        if f"conv.x.{kind}" in tensors:
            named[f"conv1d.{kind}"] = torch.cat([tensors[f"conv.{part}.{kind}"] for part in ("x", "B", "C")])
    named["conv1d.weight"] = named["conv1d.weight"].unsqueeze(1)
    return named


def mamba2_mixer(shape: Shape) -> tuple[types.ModuleType, nn.Module]:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = modeling.Mamba2Config(
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        hidden_size=HIDDEN,
        expand=shape.heads * shape.head_dim // HIDDEN,
        state_size=shape.state,
        n_groups=shape.groups,
        conv_kernel=shape.conv,
        use_bias=shape.bias,
        use_conv_bias=shape.conv_bias,
        time_step_limit=(shape.dt_min, float("inf") if shape.dt_max is None else shape.dt_max),
        layer_norm_epsilon=1e-5,
        num_hidden_layers=1,
        chunk_size=8,
    )
    return modeling, modeling.Mamba2Mixer(config, 0)


def nemotron_mixer(shape: Shape) -> tuple[types.ModuleType, nn.Module]:
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = modeling.NemotronHConfig(
        mamba_num_heads=shape.heads,
        mamba_head_dim=shape.head_dim,
        hidden_size=HIDDEN,
        ssm_state_size=shape.state,
        n_groups=shape.groups,
        conv_kernel=shape.conv,
        use_bias=shape.bias,
        use_conv_bias=shape.conv_bias,
        time_step_min=shape.dt_min,
        layer_norm_epsilon=1e-5,
        layers_block_type=["mamba"],
        chunk_size=8,
    )
    return modeling, modeling.NemotronHMamba2Mixer(config, 0)


def in_float64(patch: pytest.MonkeyPatch, modeling: types.ModuleType) -> None:
    """Where transformers asks for float32, let it have float64."""
    patch.setattr(modeling, "torch", types.SimpleNamespace(**(vars(torch) | {"float32": torch.float64})))
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


CASES = [
    (mamba2_mixer, replace(SHAPE, heads=3, groups=1, norm_per_group=False)),
    (mamba2_mixer, replace(SHAPE, norm_per_group=False)),
    (mamba2_mixer, replace(SHAPE, norm_per_group=False, bias=True, dt_min=0.3, dt_max=0.9, conv=3)),
    (nemotron_mixer, replace(SHAPE, heads=3, groups=1)),
    (nemotron_mixer, SHAPE),
    (nemotron_mixer, replace(SHAPE, bias=True, conv_bias=False, dt_min=0.3)),
]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("mixer", "shape"), CASES)
def test_equals_transformers(mixer: Any, shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(shape)
    modeling, theirs = mixer(shape)
    theirs.double().load_state_dict(theirs_from(canonical(layer, dict(layer.named_parameters()))))
    in_float64(monkeypatch, modeling)
    x = hidden(rows, 37).requires_grad_()
    y, expected = layer(x), theirs(x)
    assert_near({"y": y}, {"y": expected}, 1e-12)
    grads, expected_grads = gradients(layer, y, x), gradients(theirs, expected, x)
    ours = theirs_from(canonical(layer, grads)) | {"input": grads["input"]}
    assert_near(ours, expected_grads, 1e-11)


# --------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_packed_equals_separate_documents(shape: Shape) -> None:
    layer = build(shape)
    rows = ((1, 2, 30, 4), (20, 17))
    x = hidden(2, 37).requires_grad_()
    documents_BT = torch.stack(
        [torch.cat([torch.full((n,), i % 2) for i, n in enumerate(lengths)]) for lengths in rows]
    )
    separate = torch.stack(
        [
            torch.cat([layer(piece[None])[0] for piece in row.split(cut)])
            for row, cut in zip(x, rows, strict=True)
        ]
    )
    packed = layer(x, documents_BT)
    assert_near({"y": packed}, {"y": separate}, 1e-12)
    assert_near(gradients(layer, packed, x), gradients(layer, separate, x), 1e-12)


# -------------------------------------------------------------------------------------------- generation


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("cuts", [[20] + [1] * 5, [1] * 25, [2, 3, 1, 19]], ids=("prefill", "tokens", "pieces"))
def test_cached_equals_whole(shape: Shape, cuts: list[int]) -> None:
    layer, x = build(shape), hidden(3, 25)
    cache = layer.new_cache(3, x.device, x.dtype)
    pieces = [layer(piece, cache=cache) for piece in x.split(cuts, 1)]
    assert_near({"y": torch.cat(pieces, 1)}, {"y": layer(x)}, 1e-12)


def test_the_state_of_a_bfloat16_cache_is_float32() -> None:
    layer = Mamba2(SHAPE, HIDDEN, 1e-5, ssd.REFERENCE.function, dtype=torch.bfloat16)
    cache: Mamba2Cache = layer.new_cache(1, torch.device("cpu"), torch.bfloat16)
    assert (cache.conv_BEP.dtype, cache.state_BHDN.dtype) == (torch.bfloat16, torch.float32)


# ----------------------------------------------------------------------------------------- initial weights


def test_initial_time_steps_decays_and_taps_are_in_their_ranges() -> None:
    layer = Mamba2(replace(SHAPE, heads=300), HIDDEN, 1e-5, ssd.REFERENCE.function)
    initialize(dict(layer.named_parameters()), layer.canonical(), seed=1, std=0.02, layers=1)
    steps, rates = nn.functional.softplus(layer.scalars.dt_bias), layer.scalars.A_log.exp()
    assert 1e-3 * 0.99 < steps.min() < 2e-3
    assert 0.05 < steps.max() < 0.1 * 1.01
    assert 0.99 < rates.min() < 2
    assert 15 < rates.max() < 16.01
    assert 0.4 < layer.conv.weight.abs().max() <= 0.5
    assert (layer.scalars.D == 1).all()


def test_every_number_has_one_canonical_place() -> None:
    layer = build(SHAPES["biases and limits"])
    counts = {name: torch.zeros_like(parameter) for name, parameter in layer.named_parameters()}
    for place in layer.canonical().values():
        place.write(counts[place.parameter], place.read(counts[place.parameter]) + 1)
    assert all((count == 1).all() for count in counts.values())


def test_bfloat16_is_near_float64() -> None:
    layer, x = build(SHAPE), hidden(2, 37)
    exact = layer(x)
    rounded = layer.to(torch.bfloat16)(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert_near({"y": rounded.double()}, {"y": exact}, 3e-2)


def test_limits_that_exclude_every_time_step_are_a_problem() -> None:
    (problem,) = replace(SHAPE, dt_min=0.5, dt_max=0.5).problems("model.mamba2")
    assert problem.field == "model.mamba2.dt_max"
    assert not list(replace(SHAPE, dt_min=0.5, dt_max=0.6).problems("model.mamba2"))
