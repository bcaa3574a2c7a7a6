"""GPT-OSS: attention with sinks, sliding window and full in turn, then experts with biases, in every layer.

transformers stores experts as [experts, inputs, outputs], with gate and up in alternating columns. The released
files hold the same in MXFP4, with rows of outputs: `quantized.Mxfp4` transposes what it widens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from braid.architecture import Attention, Glu, Model, Moe, Yarn
from braid.interchange.family import ModelFamily, needed, read_model, write_model
from braid.interchange.llama import ATTENTION, adapter, read_attention, write_attention
from braid.interchange.moves import Move, PerHead, Transposed
from braid.interchange.settings import Settings
from braid.interchange.tables import Shape, TableRow, named, rows
from braid.interchange.windows import read_windows, write_layer_types
from braid.pattern import parse

# ---------------------------------------------------------------------------------------------- tables


def _alternating(shape: Shape) -> Move:
    """Gate and up in turn, channel by channel."""
    return PerHead(shape.moe.ffn, (1, 1))


_EXPERTS: tuple[TableRow, ...] = (
    TableRow(
        theirs="mlp.experts.gate_up_proj",
        ours=named("moe.experts.{expert}.{}.weight", "gate up"),
        move=lambda m: Transposed(_alternating(m)),
    ),
    TableRow(
        theirs="mlp.experts.gate_up_proj_bias",
        ours=named("moe.experts.{expert}.{}.bias", "gate up"),
        move=_alternating,
    ),
    *rows("mlp.experts.down_proj", "moe.experts.{expert}.down.weight", move=lambda m: Transposed()),
    *rows("mlp.experts.down_proj_bias", "moe.experts.{expert}.down.bias"),
)
_MOE: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight"),
    *rows("mlp.router.{}", "moe.router.{}", "weight bias:logit_bias"),
    *_EXPERTS,
)
_GPT_OSS = adapter("gpt_oss", ATTENTION=(*ATTENTION, *rows("self_attn.sinks", "attention.sinks")), MOE=_MOE)

# ---------------------------------------------------------------------------------------------- settings

YARN = Yarn(factor=32.0, original_tokens=4096, truncate=False)
"""What transformers takes for this family where a file says nothing about rotary positions."""


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    layers = settings.integer("num_hidden_layers", 36)
    top_k = settings.integer("num_experts_per_tok", 4)
    settings.repeats("experts_per_token", top_k, "num_experts_per_tok")
    attention = _read_attention(settings, layers)
    if attention.rope_scaling is not None:
        original = attention.rope_scaling.original_tokens
        settings.repeats("initial_context_length", original, "original_max_position_embeddings")
    glu = Glu(
        alpha=settings.number("swiglu_alpha", 1.702), limit=settings.number("swiglu_limit", 7.0), offset=1.0
    )
    return Model(
        pattern="[*E]" * layers,
        attention=attention,
        moe=Moe(
            experts=settings.integer("num_local_experts", 128),
            top_k=top_k,
            ffn=settings.integer("intermediate_size", 2880),
            glu=glu,
            bias=True,
            softmax_after_top_k=True,
            router_bias=True,
            aux_loss=0.0,
        ),
        **read_model(settings, default_eps=1e-5),
    )


def _read_attention(settings: Settings, layers: int) -> Attention:
    kinds = settings.names("layer_types")
    if kinds is None:
        kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    attention = read_attention(
        settings,
        heads=64,
        kv_heads=8,
        head_dim=64,
        base=150_000.0,
        bias=settings.flag("attention_bias", True),
        sinks=True,
        **read_windows(settings, kinds, settings.maybe_integer("sliding_window", 128), layers),
    )
    if "rope_parameters" in settings or "rope_scaling" in settings:
        return attention
    return replace(attention, rope_scaling=YARN)


def _write(shape: Model) -> dict[str, Any]:
    attention, moe = needed(shape.attention, "attention"), needed(shape.moe, "moe")
    layers = len(parse(shape.pattern).layers) // 2
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "attention_bias": attention.bias,
        "sliding_window": attention.window,
        "layer_types": write_layer_types(attention, layers),
        "intermediate_size": moe.ffn,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "swiglu_alpha": moe.glu.alpha,
        "swiglu_limit": moe.glu.limit,
    }


FAMILIES = (
    ModelFamily(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        hub=_GPT_OSS,
        memory=_GPT_OSS,
        read=_read,
        write=_write,
    ),
)
