"""Latent attention: DeepSeek-V3's own, documents apart, and a cache of latents that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

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
)
from tests.nn.float64 import float32_means_float64

YARN = architecture.Yarn(
    factor=5.0, original_tokens=19, beta_fast=3.0, beta_slow=0.2, mscale=0.7, mscale_all_dim=1.3
)
SHAPES = {
    "latent queries": architecture.LatentAttention(
        heads=3, q_rank=9, kv_rank=7, nope_dim=5, rope_dim=6, v_dim=4, rope_base=50.0
    ),
    "plain queries": architecture.LatentAttention(
        heads=5, q_rank=None, kv_rank=9, nope_dim=4, rope_dim=6, v_dim=13, rope_base=50.0
    ),
    "yarn": architecture.LatentAttention(
        heads=5, q_rank=8, kv_rank=6, nope_dim=3, rope_dim=8, v_dim=11, rope_base=50.0, rope_scaling=YARN
    ),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def from_deepseek(theirs: Tensors, shape: architecture.LatentAttention) -> Tensors:
    """DeepSeek's tensors under our names. Their rotary pairs lie side by side, ours half a head apart."""

    def halves(rows: Tensor) -> Tensor:
        return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], -2)

    def heads(name: str, first: int) -> tuple[Tensor, Tensor]:
        weight = theirs[name].unflatten(0, (shape.heads, -1))
        return weight[:, :first], weight[:, first:]

    q = "q_proj.weight" if shape.q_rank is None else "q_b_proj.weight"
    plain, rope = heads(q, shape.nope_dim)
    k_up, v_up = heads("kv_b_proj.weight", shape.nope_dim)
    down = theirs["kv_a_proj_with_mqa.weight"]
    ours = {
        "q.weight" if shape.q_rank is None else "q_up.weight": torch.cat([plain, halves(rope)], 1).flatten(
            0, 1
        ),
        "kv_down.weight": down[: shape.kv_rank],
        "kv_norm.weight": theirs["kv_a_layernorm.weight"],
        "k_rope.weight": halves(down[shape.kv_rank :]),
        "k_up.weight": k_up.flatten(0, 1),
        "v_up.weight": v_up.flatten(0, 1),
        "o.weight": theirs["o_proj.weight"],
    }
    if shape.q_rank is None:
        return ours
    latent = {"q_down.weight": theirs["q_a_proj.weight"], "q_norm.weight": theirs["q_a_layernorm.weight"]}
    return ours | latent


@pytest.mark.parametrize("rows", [[[37]], [[37]] * 3, [[20, 17], [1, 36]]], ids=["one", "three", "packed"])
@every_shape
def test_equals_deepseek(shape: architecture.LatentAttention, rows: Sequence[Sequence[int]]) -> None:
    pytest.importorskip("transformers")
    from transformers.masking_utils import create_causal_mask
    from transformers.models.deepseek_v3 import DeepseekV3Config, modeling_deepseek_v3

    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_base}
    if (yarn := shape.rope_scaling) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_tokens,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=shape.kv_rank,
        qk_nope_head_dim=shape.nope_dim,
        qk_rope_head_dim=shape.rope_dim,
        v_head_dim=shape.v_dim,
        rms_norm_eps=EPS,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    with float32_means_float64():
        theirs = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)
        rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    module = build(shape)
    assert_equals_theirs(
        module, theirs, rotary, create_causal_mask, lambda tensors: from_deepseek(tensors, shape), rows
    )


@every_shape
def test_packed_documents_equal_separate_ones(shape: architecture.LatentAttention) -> None:
    assert_packed_equals_separate(build(shape))


@pytest.mark.parametrize("parts", PARTS, ids=["prefill", "token by token", "in parts", "at once"])
@pytest.mark.parametrize("rows", [1, 3])
@every_shape
def test_absorbed_form_equals_plain_form(
    shape: architecture.LatentAttention, rows: int, parts: Sequence[int]
) -> None:
    assert_cached_equals_full(build(shape), rows, parts)


def test_a_cache_keeps_latent_and_rotated_key_alone() -> None:
    module = build(SHAPES["yarn"])
    cache = module.new_cache(2, torch.device("cpu"), torch.bfloat16)
    (store,) = vars(cache).values()
    assert store.data_BP_.shape == (2, 0, 1, 6 + 8)
    assert store.data_BP_.dtype == torch.bfloat16


def test_flops_count_every_product() -> None:
    shape = SHAPES["latent queries"]
    weights = sum(parameter.numel() for parameter in build(shape).parameters() if parameter.dim() > 1)
    scores, reads = 5 + 6, 4
    assert build(shape).flops(10) == 10 * 2 * weights + 50 * 2 * 3 * (scores + reads)
