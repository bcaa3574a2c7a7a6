"""Tiny random models of transformers, and what they and braid compute from the same weights.

transformers computes norms, rotary tables, routers and scans in float32 whatever the model's dtype; `widened`
makes a comparison in float64 one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from braid import architecture, kernels, pattern
from braid.interchange import adapter_for, convert, family_of, shape_of
from braid.interchange.moves import FromOne, Same
from braid.interchange.tables import Adapter, TableRow
from braid.model.language import LanguageModel
from tests.interchange.widened import widened
from tests.model.cases import batch, canonical_grads

TINY: Mapping[str, Any] = {"vocab_size": 17, "hidden_size": 30, "initializer_range": 0.2}
HEADS: Mapping[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
LINEAR_HEADS: Mapping[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}
STATE: Mapping[str, Any] = {"n_groups": 3, "chunk_size": 8}
MULTIPLIED: Mapping[str, Any] = {
    "embedding_multiplier": 3,
    "attention_multiplier": 0.07,
    "residual_multiplier": 0.3,
    "logits_scaling": 1.7,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 7,
    "mamba_chunk_size": 8,
}

CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {**TINY, **HEADS, "intermediate_size": 41, "num_hidden_layers": 2}),
    "llama, biases, llama3 rope": (
        "Llama",
        {
            **TINY,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 6,
            "intermediate_size": 41,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 500.0,
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2": ("Qwen2", {**TINY, **HEADS, "intermediate_size": 41, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {**TINY, **HEADS, "intermediate_size": 41, "num_hidden_layers": 2}),
    "qwen3, window": (
        "Qwen3",
        {
            **TINY,
            **HEADS,
            "intermediate_size": 41,
            "num_hidden_layers": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **TINY,
            **HEADS,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3, window in the last layers": (
        "Qwen3",
        {
            **TINY,
            **HEADS,
            "intermediate_size": 41,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **TINY,
            **HEADS,
            "intermediate_size": 13,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "swiglu_limit": 0.9,
            "rope_parameters": {
                "rope_theta": 100.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt_oss, no biases, full first": (
        "GptOss",
        {
            **TINY,
            **HEADS,
            "intermediate_size": 30,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mistral, window": (
        "Mistral",
        {**TINY, **HEADS, "intermediate_size": 41, "num_hidden_layers": 2, "sliding_window": 7},
    ),
    "mixtral": (
        "Mixtral",
        {**TINY, **HEADS, "intermediate_size": 41, "num_local_experts": 5, "num_hidden_layers": 2},
    ),
    "mamba2": (
        "Mamba2",
        {**TINY, **STATE, "num_hidden_layers": 2, "state_size": 7, "num_heads": 6, "head_dim": 10},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **TINY,
            **HEADS,
            **STATE,
            "intermediate_size": 41,
            "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 7,
            "ssm_state_size": 5,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 11,
            "moe_shared_expert_intermediate_size": 9,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h, latent experts": (
        "NemotronH",
        {
            **TINY,
            **HEADS,
            **STATE,
            "intermediate_size": 41,
            "layers_block_type": ["mamba", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 7,
            "ssm_state_size": 5,
            "use_bias": True,
            "use_conv_bias": False,
            "n_routed_experts": 6,
            "num_experts_per_tok": 4,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 11,
            "moe_shared_expert_intermediate_size": 9,
            "moe_latent_size": 8,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **TINY,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "intermediate_size": 41,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_d_state": 7,
            "mamba_chunk_size": 8,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.34},
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **TINY,
            **MULTIPLIED,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "attention_bias": True,
            "intermediate_size": 11,
            "shared_intermediate_size": 9,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    "granitemoehybrid, no experts, rope": (
        "GraniteMoeHybrid",
        {
            **TINY,
            **MULTIPLIED,
            **HEADS,
            "position_embedding_type": "rope",
            "intermediate_size": 41,
            "shared_intermediate_size": 41,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 2,
            "layer_types": ["attention", "mamba"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **TINY,
            **HEADS,
            "head_dim": 16,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 9,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            **LINEAR_HEADS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [2],
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **TINY,
            **HEADS,
            **LINEAR_HEADS,
            "head_dim": 16,
            "intermediate_size": 41,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **TINY,
            **HEADS,
            **LINEAR_HEADS,
            "head_dim": 16,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 9,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
        },
    ),
    # transformers 5.22 cuts the convolution of its files into three equal parts, whatever queries, keys and
    # values have: here they have as many channels.
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            **TINY,
            **LINEAR_HEADS,
            "linear_key_head_dim": 14,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 41,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        },
    ),
    "olmo_hybrid, rope": (
        "OlmoHybrid",
        {
            **TINY,
            **LINEAR_HEADS,
            "linear_key_head_dim": 14,
            "linear_allow_neg_eigval": False,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "intermediate_size": 41,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "tie_word_embeddings": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **TINY,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 13,
            "kv_lora_rank": 9,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 6,
            "v_head_dim": 5,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3, yarn": (
        "DeepseekV3",
        {
            **TINY,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": None,
            "kv_lora_rank": 9,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 8,
            "v_head_dim": 5,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_theta": 100.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 0.8,
                "mscale_all_dim": 1.2,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **TINY,
            **HEADS,
            "head_dim": 12,
            "attention_bias": True,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe, normed queries": (
        "Glm4Moe",
        {
            **TINY,
            **HEADS,
            "use_qk_norm": True,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.4},
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    "kimi_k2, beta_fast = beta_slow, eps of its own": (
        "DeepseekV3",
        {
            **TINY,
            "intermediate_size": 41,
            "moe_intermediate_size": 11,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 13,
            "kv_lora_rank": 9,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 8,
            "v_head_dim": 5,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "rope_theta": 50.0,
                "rope_type": "yarn",
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
            },
        },
    ),
}
"""Name of a case -> (class of transformers, configuration). Odd sizes and head counts throughout."""

EAGER = ("Mamba2", "GptOss")
"""Classes without SDPA."""

BOUNDS: Mapping[torch.dtype, float] = {torch.float64: 1e-11, torch.float32: 1e-3}
"""Worst relative error of logits and gradients: what the docs promise and tests hold. The bound of float32 is
wide because gradients of random models cancel; float64 is what tells a difference of meaning from rounding."""

FLOOR = 1e-4
"""The length of the shortest gradient that an error is relative to, as a fraction of that of the longest."""

DOCUMENTS: Mapping[str, Sequence[Sequence[int]]] = {
    "one row": [[37]],
    "three rows": [[37], [37], [37]],
    "packed": [[11, 1, 25], [20, 17], [37]],
}
"""Lengths of the documents in each row."""


# ---------------------------------------------------------------------------------------- their side


def their_model(case: str, dtype: torch.dtype) -> nn.Module:
    """A random model of transformers: every weight is drawn, also those that start as ones or zeros."""
    import transformers

    name, settings = CONFIGS[case]
    with widened(dtype), torch.random.fork_rng():
        torch.manual_seed(3)
        kind = getattr(transformers, f"{name}ForCausalLM")
        config = kind.config_class(**settings)
        # Other implementations of attention and experts round to float32, or take nothing wider.
        config._attn_implementation = "eager" if name in EAGER else "sdpa"
        config._experts_implementation = "eager"
        model = kind(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    for tensor in [*model.parameters(), *_routing_biases(model)]:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.data.add_(0.1 * noise.to(tensor.dtype))
    return model


def _routing_biases(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def model_type(case: str) -> str:
    return case.partition(",")[0]


# ------------------------------------------------------------------------------------------ our side


def our_shape(case: str, theirs: nn.Module) -> architecture.Model:
    """What braid makes of the configuration, as it would be in config.json."""
    # transformers ignores `time_step_limit` of Nemotron-H, which braid honours where a file has it.
    config = {name: value for name, value in theirs.config.to_diff_dict().items() if name != "time_step_limit"}
    return shape_of(family_of(model_type(case)), config)


def our_model(shape: architecture.Model, weights: Mapping[str, Tensor], dtype: torch.dtype) -> LanguageModel:
    chosen = kernels.choose(shape, pattern.parse(shape.pattern).kinds(), torch.device("cpu"), dtype)
    model = LanguageModel(shape, pattern.parse(shape.pattern), chosen, dtype=dtype)
    parameters = model.tensors()
    assert model.canonical().keys() == weights.keys()
    for name, tensor in model.canonical().items():
        tensor.write(parameters[tensor.parameter], weights[name])
    return model


def linear(adapter: Adapter) -> Adapter:
    """The table for gradients: a norm that counts from one has the gradient of one that counts from zero."""

    def without(row: TableRow) -> TableRow:
        return replace(row, move=lambda m: Same() if row.move(m) == FromOne() else row.move(m))

    layers = {kind: tuple(map(without, table)) for kind, table in adapter.layers.items()}
    return replace(adapter, layers=layers, ends=tuple(map(without, adapter.ends)))


# ---------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far braid is from transformers, relative to the length of what is compared."""

    logits: float
    gradients: float
    """The worst over all parameters."""
    worst: str
    """Their name of the parameter with the worst gradient."""


def compare(case: str, documents: str, dtype: torch.dtype) -> Parity:
    """Logits and the gradient of every parameter, from the same weights and tokens."""
    theirs = their_model(case, dtype)
    shape, adapter = our_shape(case, theirs), adapter_for(model_type(case), "memory")
    weights = convert(theirs.state_dict(), adapter, shape, "to_ours")
    ours = our_model(shape, weights, dtype)

    given = batch(DOCUMENTS[documents])
    logits = ours.logits(ours.prepare(given))
    losses = ours(given)
    losses.share(int(losses.token_count)).backward()
    with widened(dtype):
        rows = zip(DOCUMENTS[documents], given.tokens_BT, strict=True)
        expected = torch.stack([_their_row(theirs, lengths, tokens_T) for lengths, tokens_T in rows])
        labels = given.labels_BT.where(given.loss_mask_BT, -100)
        nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    grads = convert(canonical_grads(ours), linear(adapter), shape, "to_theirs")
    wanted = {name: gradient(parameter) for name, parameter in theirs.named_parameters()}
    biases = {name for name, _ in theirs.named_buffers()}
    assert grads.keys() - biases == wanted.keys()
    # A key bias without positions has a gradient of zero, of which both sides compute the rounding.
    floor = FLOOR * max(float(gradient.norm()) for gradient in wanted.values())
    errors = {name: error(grads[name], gradient, floor) for name, gradient in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    return Parity(logits=error(logits, expected), gradients=errors[worst], worst=worst)


def _their_row(model: nn.Module, lengths: Sequence[int], tokens_T: Tensor) -> Tensor:
    """Logits of a row: each of its documents by itself."""
    documents = tokens_T.split(list(lengths))
    return torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def error(actual: Tensor, expected: Tensor, floor: float = 1e-6) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=floor))
