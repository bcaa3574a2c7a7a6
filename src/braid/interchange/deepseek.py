"""DeepSeek-V3, Kimi-K2 and the language model of Kimi-K2.5: latent attention, experts with shared ones, and one
depth of multi-token prediction."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from braid.architecture import LatentAttention, Mlp, Model, Moe
from braid.errors import ConfigError
from braid.interchange.family import (
    HEAD,
    ModelFamily,
    ends,
    head_copy,
    needed,
    read_model,
    untied,
    write_model,
)
from braid.interchange.llama import MLP, STACKED_EXPERTS
from braid.interchange.mamba import read_sigmoid_router, write_sigmoid_router
from braid.interchange.moves import Move, PairsApart, PerHead, Same, Then, joined
from braid.interchange.rope import read_rope, write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Copy, Depths, Shape, TableRow, always, rows
from braid.pattern import Kind, parse

LATENT_EPS = 1e-6
"""What the norms of the latents add to the variance, whatever config.json says for the others."""

# ---------------------------------------------------------------------------------------------- tables


def turned_queries(shape: Shape) -> Move:
    """For every head its channels without position, then those that turn."""
    latent = shape.latent_attention
    return PairsApart(latent.heads, latent.nope_dim, latent.rope_dim)


def latent_and_turned_key(shape: Shape) -> Move:
    """The latent of keys and values, then the one key that turns."""
    latent = shape.latent_attention
    return Then(joined(latent.kv_rank, latent.rope_dim), (Same(), PairsApart(1, 0, latent.rope_dim)))


def keys_and_values(shape: Shape) -> Move:
    """For every head its key, then its value."""
    latent = shape.latent_attention
    return PerHead(latent.heads, (latent.nope_dim, latent.v_dim))


def query_latent(shape: Shape) -> bool:
    return shape.latent_attention.q_rank is not None


def no_query_latent(shape: Shape) -> bool:
    return not query_latent(shape)


ATTENTION: tuple[TableRow, ...] = (
    *rows("input_layernorm.weight", "attention.norm.weight"),
    *rows("self_attn.q_a_proj.weight", "attention.q_down.weight", when=query_latent),
    *rows("self_attn.q_a_layernorm.weight", "attention.q_norm.weight", when=query_latent),
    *rows("self_attn.q_b_proj.weight", "attention.q_up.weight", move=turned_queries, when=query_latent),
    *rows("self_attn.q_proj.weight", "attention.q.weight", move=turned_queries, when=no_query_latent),
    TableRow(
        theirs="self_attn.kv_a_proj_with_mqa.weight",
        ours=("attention.kv_down.weight", "attention.k_rope.weight"),
        move=latent_and_turned_key,
    ),
    *rows("self_attn.kv_a_layernorm.weight", "attention.kv_norm.weight"),
    TableRow(
        theirs="self_attn.kv_b_proj.weight",
        ours=("attention.k_up.weight", "attention.v_up.weight"),
        move=keys_and_values,
    ),
    *rows("self_attn.o_proj.weight", "attention.o.weight"),
)
ROUTER: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight"),
    *rows("mlp.gate.weight", "moe.router.weight"),
    *rows("mlp.gate.e_score_correction_bias", "moe.router.bias"),
    *rows(
        "mlp.shared_experts.{}_proj.weight",
        "moe.shared.{}.weight",
        "gate up down",
        when=lambda m: m.moe.shared_ffn,
    ),
)
MOE_HUB: tuple[TableRow, ...] = (
    *ROUTER,
    *rows("mlp.experts.{expert}.{}_proj.weight", "moe.experts.{expert}.{}.weight", "gate up down"),
)
MOE_MEMORY = (*ROUTER, *STACKED_EXPERTS)


def depths(root: str = "model", head: str = HEAD) -> Depths:
    layer = f"{root}.layers.{{layer}}."
    return Depths(
        prefix=layer,
        rows=rows(
            f"{layer}{{}}.weight",
            "{}.weight",
            "enorm:embedding_norm hnorm:hidden_norm eh_proj:projection shared_head.norm:final_norm",
        ),
        copies=(
            Copy(theirs=f"{layer}embed_tokens.weight", of=f"{root}.embed_tokens.weight", when=always),
            Copy(theirs=f"{layer}shared_head.head.weight", of=head, when=untied),
        ),
        unread=rf"{re.escape(root)}\.layers\.{{layer}}\..*",
    )


def _adapter(
    name: str,
    moe: tuple[TableRow, ...],
    *,
    root: str = "model",
    head: str = HEAD,
    ignored: tuple[str, ...] = (),
) -> Adapter:
    """`root` stands before the names of everything but the head."""
    embedding = f"{root}.embed_tokens.weight"
    return Adapter(
        name=name,
        counting="pair",
        prefix=f"{root}.layers.{{layer}}.",
        ends=ends(embedding, rows(f"{root}.norm.weight", "final_norm.weight"), head),
        layers=MappingProxyType({Kind.LATENT_ATTENTION: ATTENTION, Kind.MLP: MLP, Kind.MOE: moe}),
        depths=depths(root, head),
        copies=head_copy(embedding, head),
        ignored=(rf"{re.escape(root)}\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", *ignored),
    )


# -------------------------------------------------------------------------------------------- settings


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.only("attention_bias", False, default=False)
    settings.only("attention_dropout", 0.0, 0, default=0.0)
    settings.only("rope_interleave", True, default=True)
    settings.only("scoring_func", "sigmoid", default="sigmoid")
    settings.only("topk_method", "noaux_tc", default="noaux_tc")
    settings.only("moe_layer_freq", 1, default=1)
    settings.unused("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")
    settings.unused("head_dim", "qk_head_dim")
    heads, layers = settings.integer("num_attention_heads", 128), settings.integer("num_hidden_layers")
    if settings.integer("num_key_value_heads", heads) != heads:
        settings.refuse("num_key_value_heads", None, "latent attention has as many as num_attention_heads")
    dense = min(settings.integer("first_k_dense_replace", 3), layers)
    return Model(
        pattern="[+-]" * dense + "[+E]" * (layers - dense),
        latent_attention=_read_attention(settings, heads),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 18432)),
        moe=read_moe(settings, experts=256, ffn=2048, groups=8, top_groups=4, scale=2.5),
        **read_model(settings),
    )


def read_moe(
    settings: Settings, *, experts: int, ffn: int, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> Moe:
    """The experts of DeepSeek-V3 and GLM-4.5, with the family's defaults."""
    ffn, top_k = settings.integer("moe_intermediate_size", ffn), settings.integer("num_experts_per_tok", 8)
    return Moe(
        experts=settings.integer("n_routed_experts", experts),
        top_k=top_k,
        ffn=ffn,
        shared_ffn=ffn * settings.integer("n_shared_experts", 1),
        aux_loss=0.0,
        **read_sigmoid_router(settings, top_k=top_k, groups=groups, top_groups=top_groups, scale=scale),
    )


def write_moe(shape: Model) -> dict[str, Any]:
    """Experts and MLPs, and which layers have them; of what a model does not have, nothing."""
    layout = parse(shape.pattern)
    settings: dict[str, Any] = {
        "num_hidden_layers": len(layout.layers) // 2,
        "first_k_dense_replace": sum(layer.kind is Kind.MLP for layer in layout.layers),
        "num_nextn_predict_layers": len(layout.mtp),
    }
    if shape.mlp is not None:
        settings["intermediate_size"] = shape.mlp.ffn
    if (moe := shape.moe) is not None:
        settings |= {**write_sigmoid_router(moe), "n_shared_experts": moe.shared_ffn // moe.ffn}
    return settings


def _read_attention(settings: Settings, heads: int) -> LatentAttention:
    rope = read_rope(settings)
    if rope.fraction != 1:
        settings.refuse("partial_rotary_factor", rope.fraction, "latent attention turns qk_rope_head_dim")
    return LatentAttention(
        heads=heads,
        q_rank=settings.maybe_integer("q_lora_rank", 1536),
        kv_rank=settings.integer("kv_lora_rank", 512),
        nope_dim=settings.integer("qk_nope_head_dim", 128),
        rope_dim=settings.integer("qk_rope_head_dim", 64),
        v_dim=settings.integer("v_head_dim", 128),
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        norm_eps=None if settings.number("rms_norm_eps", LATENT_EPS) == LATENT_EPS else LATENT_EPS,
    )


def _read_k25(settings: Settings) -> Model:
    """The language model of Kimi-K2.5, whose settings are an object within. Everything else is about vision."""
    settings.unused("ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk", "vision_config")
    settings.unused("video_placeholder", "image_token_id", "video_token_id")
    settings.unused("vision_start_token_id", "vision_end_token_id")
    settings.unused("projection_hidden_size", "projection_layer_norm_eps")
    text = settings.within("text_config")
    text.only("model_type", "kimi_k2", "deepseek_v3", default="kimi_k2")
    shape = _read(text)
    settings.repeats("tie_word_embeddings", shape.tied, "text_config.tie_word_embeddings")
    settings.note("vision_config: vision_tower and mm_projector are left out; braid has the language model")
    return shape


def _write_k25(shape: Model) -> dict[str, Any]:
    raise ConfigError(
        "a kimi_k25 has a vision tower, which braid leaves out\n"
        "  rule  files without it are no kimi_k25\n"
        "  set   the model type to kimi_k2, the language model by itself"
    )


def _write(shape: Model) -> dict[str, Any]:
    latent = needed(shape.latent_attention, "latent_attention")
    return {
        **write_model(shape),
        **write_moe(shape),
        "hidden_act": "silu",
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_parameters": write_rope(latent),
        "rope_interleave": True,
    }


FAMILIES = (
    *(
        ModelFamily(
            model_type=model_type,
            architecture="DeepseekV3ForCausalLM",
            hub=_adapter(model_type, MOE_HUB),
            memory=_adapter(model_type, MOE_MEMORY),
            read=_read,
            write=_write,
            depth="+E",
        )
        for model_type in ("deepseek_v3", "kimi_k2")
    ),
    ModelFamily(
        model_type="kimi_k25",
        architecture="KimiK25ForConditionalGeneration",
        also=("Kimi_K25ForConditionalGeneration",),
        hub=_adapter(
            "kimi_k25",
            MOE_HUB,
            root="language_model.model",
            head=f"language_model.{HEAD}",
            ignored=(r"(vision_tower|mm_projector)\..*",),
        ),
        memory=_adapter(
            "kimi_k25",
            MOE_MEMORY,
            root="model.language_model",
            ignored=(r"model\.(vision_tower|mm_projector)\..*",),
        ),
        read=_read_k25,
        write=_write_k25,
        depth="+E",
    ),
)
