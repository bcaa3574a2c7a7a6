"""Qwen3.5: the layers of Qwen3-Next with unfused projections; the language model of a model with vision.

Published files hold the language model under `model.language_model.` beside a vision tower, and its settings in
`text_config`. braid reads the language model out of them, and writes it the way transformers saves the class
for text alone: names without the prefix, settings without `text_config`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from braid.architecture import Mlp, Model, Moe
from braid.interchange.family import ModelFamily, needed, read_model, write_model
from braid.interchange.moves import Move, joined
from braid.interchange.qwen3_next import (
    ATTENTION,
    MLP,
    MOE_HUB,
    MOE_MEMORY,
    adapter,
    convolved,
    from_one,
    read_delta_net,
    read_gated_attention,
    read_mixers,
    write_mixers,
)
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Shape, TableRow, folded, named, rows
from braid.pattern import parse

# ---------------------------------------------------------------------------------------------- tables


def _qkv(shape: Shape) -> Move:
    """All queries, then all keys, then all values."""
    net = shape.delta_net
    keys = net.key_heads * net.key_dim
    return joined(keys, keys, net.value_heads * net.value_dim)


DELTA_NET: tuple[TableRow, ...] = (
    *rows("input_layernorm.weight", "delta_net.norm.weight", move=from_one),
    TableRow(theirs="linear_attn.in_proj_qkv.weight", ours=named("delta_net.{}.weight", "q k v"), move=_qkv),
    *rows("linear_attn.in_proj_{}.weight", "delta_net.{}.weight", "z b a"),
    TableRow(
        theirs="linear_attn.conv1d.weight",
        ours=named("delta_net.conv.{}.weight", "q k v"),
        move=convolved,
    ),
    *rows("linear_attn.{}", "delta_net.{}", "A_log dt_bias"),
    *rows("linear_attn.norm.weight", "delta_net.gate_norm.weight"),
    *rows("linear_attn.out_proj.weight", "delta_net.o.weight"),
)


def _beside_vision(text: Adapter) -> Adapter:
    """The same in the files of a model with vision; its other tensors are no part of the language model."""

    def moved(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    return replace(
        text,
        prefix=moved(text.prefix),
        ends=tuple(replace(row, theirs=moved(row.theirs)) for row in text.ends),
        copies=tuple(replace(copy, of=moved(copy.of)) for copy in text.copies),
        ignored=(*text.ignored, r"model\.visual\..*"),
    )


def _with_others(hub: Adapter, memory: Adapter) -> Adapter:
    """The table of files that hold the language model alone, which also reads it beside vision."""
    spellings = (hub,) if hub == memory else (hub, memory, folded(memory))
    return replace(hub, others=tuple(_beside_vision(each) for each in spellings))


_DENSE = adapter("qwen3_5", ATTENTION=ATTENTION, DELTA_NET=DELTA_NET, MLP=MLP)
_MOE_HUB = adapter("qwen3_5_moe", ATTENTION=ATTENTION, DELTA_NET=DELTA_NET, MOE=MOE_HUB)
_MOE_MEMORY = adapter("qwen3_5_moe", ATTENTION=ATTENTION, DELTA_NET=DELTA_NET, MOE=MOE_MEMORY)

# -------------------------------------------------------------------------------------------- settings

VISION = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
MROPE = ("mrope_interleaved", "mrope_section")
"""Which channels turn by which axis of an image. A token of text has the same position on every axis."""


def _read(settings: Settings, feed_forward: str) -> dict[str, Any]:
    """The fields that both families have; every layer has the same kind of feed-forward network."""
    settings.only("hidden_act", "silu", default="silu")
    settings.neutral("attn_output_gate", True, why="attention has an output gate in this family")
    settings.neutral("mlp_only_layers", [], None)
    settings.neutral("mtp_use_dedicated_embeddings", False)
    # The dtype in which an inference engine keeps the state of a delta net: braid's is float32 or better.
    settings.unused("mamba_ssm_dtype", "mtp_num_hidden_layers")
    return {
        "pattern": "".join(f"[{mixer}{feed_forward}]" for mixer in read_mixers(settings)),
        "delta_net": read_delta_net(settings),
        **read_model(settings),
    }


def _write(shape: Model) -> dict[str, Any]:
    depths = len(parse(shape.pattern).mtp)
    return {**write_model(shape), **write_mixers(shape), "mtp_num_hidden_layers": depths}


def _read_dense(settings: Settings) -> Model:
    return Model(
        attention=read_gated_attention(settings, kv_heads=4, inert=MROPE),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 12288)),
        **_read(settings, "-"),
    )


def _write_dense(shape: Model) -> dict[str, Any]:
    return {**_write(shape), "intermediate_size": needed(shape.mlp, "mlp").ffn}


def _read_moe(settings: Settings) -> Model:
    settings.unused("intermediate_size")
    settings.neutral("norm_topk_prob", True, why="the scores of the selected experts sum to 1 in this family")
    settings.neutral("decoder_sparse_step", 1, why="every layer has experts in this family")
    return Model(
        attention=read_gated_attention(settings, kv_heads=2, inert=MROPE),
        moe=Moe(
            experts=settings.integer("num_experts", 256),
            top_k=settings.integer("num_experts_per_tok", 8),
            ffn=settings.integer("moe_intermediate_size", 512),
            shared_ffn=settings.integer("shared_expert_intermediate_size", 512),
            shared_gate=True,
            aux_loss=0.0,
        ),
        **_read(settings, "E"),
    )


def _write_moe(shape: Model) -> dict[str, Any]:
    moe = needed(shape.moe, "moe")
    return {
        **_write(shape),
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "shared_expert_intermediate_size": moe.shared_ffn,
    }


def _family(model_type: str, architecture: str, hub: Adapter, memory: Adapter, **own: Any) -> ModelFamily:
    """A family under the `model_type` of the model with vision; `architecture` is that of its classes."""
    return ModelFamily(
        model_type=model_type,
        text_type=f"{model_type}_text",
        vision=VISION,
        architecture=f"{architecture}ForCausalLM",
        also=(f"{architecture}ForConditionalGeneration",),
        hub=_with_others(hub, memory),
        memory=memory,
        depths_setting="mtp_num_hidden_layers",
        **own,
    )


FAMILIES = (
    _family("qwen3_5", "Qwen3_5", _DENSE, _DENSE, read=_read_dense, write=_write_dense, depth="*-"),
    _family("qwen3_5_moe", "Qwen3_5Moe", _MOE_HUB, _MOE_MEMORY, read=_read_moe, write=_write_moe, depth="*E"),
)
