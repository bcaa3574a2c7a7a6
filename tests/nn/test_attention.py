"""Grouped-query attention: as in the models people use, documents apart, and a cache that changes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from braid import architecture
from tests.nn.attention_cases import (
    EPS,
    HIDDEN,
    PARTS,
    Tensors,
    assert_cached_equals_full,
    assert_equals_theirs,
    assert_packed_equals_separate,
    build,
    normal,
    run,
)
from tests.nn.float64 import float32_means_float64

PLAIN = architecture.Attention(heads=6, kv_heads=3, head_dim=10, rope_base=50.0)
YARN = architecture.Yarn(factor=5.0, original_tokens=19, beta_fast=3.0, beta_slow=0.2)
LLAMA_3 = architecture.Yarn(
    factor=5.0, original_tokens=19, beta_fast=3.0, beta_slow=0.2, ramp="rotations", mscale=0.0
)
MODELS = {
    "qwen3": replace(PLAIN, qk_norm=True),
    "qwen3, biased, yarn": replace(PLAIN, heads=5, kv_heads=5, qk_norm=True, bias=True, rope_scaling=YARN),
    "qwen3_next": replace(PLAIN, heads=3, kv_heads=1, qk_norm=True, gate=True, rope_fraction=0.4),
    "qwen3_next, biased": replace(PLAIN, qk_norm=True, gate=True, rope_fraction=0.4, bias=True),
    "mixtral, windowed": replace(PLAIN, heads=5, kv_heads=1, window=7),
    "llama, long": replace(PLAIN, bias=True, rope_scaling=LLAMA_3),
    "qwen2": replace(PLAIN, bias=True, o_bias=False),
    "granite": replace(PLAIN, scale=0.07),
    "gpt_oss": replace(PLAIN, bias=True, sinks=True, window=7, rope_scaling=replace(YARN, truncate=False)),
    "gpt_oss, full": replace(PLAIN, heads=5, kv_heads=1, sinks=True),
}
TITLES = {
    "granite": "Granite",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_next": "Qwen3Next",
    "mixtral": "Mixtral",
    "llama": "Llama",
    "gpt_oss": "GptOss",
}
every_model = pytest.mark.parametrize(("model", "shape"), MODELS.items(), ids=MODELS.keys())
every_shape = pytest.mark.parametrize(
    "shape",
    [*MODELS.values(), replace(PLAIN, positions="none", window=4, qk_norm=True, gate=True, sinks=True)],
    ids=[*MODELS.keys(), "no positions, gate, sinks"],
)


def rope_parameters(shape: architecture.Attention) -> dict[str, Any]:
    """The rotary positions in transformers' words."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_base, "partial_rotary_factor": shape.rope_fraction}
    if (scaling := shape.rope_scaling) is None:
        return rope
    rope |= {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_tokens}
    if scaling.ramp == "rotations":
        low, high = scaling.beta_slow, scaling.beta_fast
        return rope | {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
    rope |= {"rope_type": "yarn", "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return rope | {"truncate": scaling.truncate}


def from_theirs(theirs: Tensors, shape: architecture.Attention) -> Tensors:
    """Their tensors under our names. Qwen3-Next has each head's query and gate in one projection."""
    ours = {name.replace("_proj.", "."): tensor for name, tensor in theirs.items()}
    if not shape.gate:
        return ours
    for kind in ("weight", "bias") if shape.bias else ("weight",):
        both = ours[f"q.{kind}"].unflatten(0, (shape.heads, 2, shape.head_dim))
        ours[f"q.{kind}"], ours[f"gate.{kind}"] = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
    return ours


@pytest.mark.parametrize("rows", [[[37]], [[37]] * 3, [[20, 17], [1, 36]]], ids=["one", "three", "packed"])
@every_model
def test_equals_transformers(model: str, shape: architecture.Attention, rows: Sequence[Sequence[int]]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers import masking_utils

    family = model.partition(",")[0]
    title = TITLES[family]
    config = getattr(transformers, f"{title}Config")(
        hidden_size=HIDDEN,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention_bias=shape.bias,
        rms_norm_eps=EPS,
        sliding_window=shape.window,
        rope_parameters=rope_parameters(shape),
        attention_multiplier=shape.score_scale,
        attn_implementation="eager",
    )
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with float32_means_float64():
        theirs = getattr(modeling, f"{title}Attention")(config, layer_idx=0)
        rotary = getattr(modeling, f"{title}RotaryEmbedding")(config)
    full, windowed = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    mask_of = full if shape.window is None else windowed
    module = build(shape)
    from_zero = {"q_norm.weight", "k_norm.weight"} if family == "qwen3_next" else ()
    assert_equals_theirs(
        module, theirs, rotary, mask_of, lambda tensors: from_theirs(tensors, shape), rows, from_zero
    )


@every_shape
def test_packed_documents_equal_separate_ones(shape: architecture.Attention) -> None:
    assert_packed_equals_separate(build(shape))


@pytest.mark.parametrize("parts", PARTS, ids=["prefill", "token by token", "in parts", "at once"])
@every_shape
def test_cached_equals_full(shape: architecture.Attention, parts: Sequence[int]) -> None:
    assert_cached_equals_full(build(shape), 3, parts)


def test_a_gate_of_zeros_halves_the_output() -> None:
    gated, plain = build(replace(PLAIN, gate=True)), build(PLAIN)
    for name, tensor in gated.canonical().items():
        place = gated.get_parameter(tensor.parameter)
        if name == "gate.weight":
            tensor.write(place, torch.zeros(tensor.shape))
        else:
            other = plain.canonical()[name]
            tensor.write(place, other.read(plain.get_parameter(other.parameter)))
    x = normal(1, 9, HIDDEN, seed=1)
    torch.testing.assert_close(run(gated, x, [[9]]), run(plain, x, [[9]]) / 2, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (replace(PLAIN, rope_fraction=0.5), "at.rope_fraction"),
        (replace(PLAIN, rope_fraction=float("nan")), "at.rope_fraction"),
        (replace(PLAIN, rope_fraction=float("inf")), "at.rope_fraction"),
        (replace(PLAIN, rope_fraction=0.1), "at.rope_fraction"),
        (replace(PLAIN, rope_fraction=1.2), "at.rope_fraction"),
        (replace(PLAIN, rope_base=1.0, rope_scaling=YARN), "at.rope_base"),
        (replace(PLAIN, rope_scaling=replace(YARN, factor=0.5)), "at.rope_scaling.factor"),
        (replace(PLAIN, rope_scaling=replace(YARN, beta_fast=0.1)), "at.rope_scaling.beta_fast"),
        (replace(PLAIN, window=4, window_pattern=""), "at.window_pattern"),
        (replace(PLAIN, window=4, window_pattern="LL"), "at.window_pattern"),
        (replace(PLAIN, window=4, window_pattern="SX"), "at.window_pattern"),
        (replace(PLAIN, window_pattern="SL"), "at.window_pattern"),
    ],
)
def test_a_shape_that_breaks_a_rule_is_a_problem(shape: architecture.Attention, field: str) -> None:
    assert [problem.field for problem in shape.problems("at")] == [field]


def test_shapes_of_models_have_no_problems() -> None:
    assert not [problem for shape in MODELS.values() for problem in shape.problems("at")]
