"""DeepSeek-V4 as far as braid has it: experts, hyper-connections and multi-token prediction, around the latent
attention of DeepSeek-V3.

V4's own attention (windows with sinks, compressed and sparse attention) cannot be built, nor its hash routing,
so that a published config.json is refused. Everything else has V4's names: those of the release in files, and
those of transformers in a state_dict. Where V4 names nothing, latent attention has the names that V3 has on the
same side, and the layers of a depth have transformers' names under the release's `mtp.{depth}.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from braid.architecture import Glu, HyperConnections, LatentAttention, Model, Moe
from braid.interchange import deepseek
from braid.interchange.family import ModelFamily, ends, head_copy, needed, read_model, tied, untied, write_model
from braid.interchange.llama import EMBEDDING, STACKED_EXPERTS
from braid.interchange.rope import read_rope, write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Copy, Depths, Shape, TableRow, rows
from braid.pattern import Kind, parse

# ---------------------------------------------------------------------------------------------- tables

PARTS = "fn:weight scale:alpha base:bias"
"""What a hyper-connection has, in their words and ours."""

WIDE = r"(.*\.)?(connection|exit|router)\.\w+"
"""Our names of what is float32 in a bfloat16 model, and stays it in files."""


def _shared(shape: Shape) -> bool:
    return bool(shape.moe.shared_ffn)


def _learned_exit(shape: Shape) -> bool:
    return bool(shape.hyper.exit == "learned")


def _exit(theirs: str) -> tuple[TableRow, ...]:
    return rows(theirs, "exit.{}", PARTS, when=_learned_exit)


def _renamed(table: tuple[TableRow, ...], names: Mapping[str, str]) -> tuple[TableRow, ...]:
    return tuple(replace(row, theirs=names[row.theirs]) for row in table)


RELEASED = MappingProxyType(
    {
        "input_layernorm.weight": "attn_norm.weight",
        "self_attn.q_a_proj.weight": "attn.wq_a.weight",
        "self_attn.q_a_layernorm.weight": "attn.q_norm.weight",
        "self_attn.q_b_proj.weight": "attn.wq_b.weight",
        "self_attn.q_proj.weight": "attn.wq.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attn.wkv_a.weight",
        "self_attn.kv_a_layernorm.weight": "attn.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attn.wkv_b.weight",
        "self_attn.o_proj.weight": "attn.wo.weight",
    }
)
"""Latent attention in the words of transformers, and in those that DeepSeek itself has for it."""

ATTENTION_HUB: tuple[TableRow, ...] = (
    *_renamed(deepseek.ATTENTION, RELEASED),
    *rows("hc_attn_{}", "attention.connection.{}", PARTS),
)
ATTENTION_MEMORY: tuple[TableRow, ...] = (
    *deepseek.ATTENTION,
    *rows("attn_hc.{}", "attention.connection.{}", PARTS),
)
MOE_HUB: tuple[TableRow, ...] = (
    *rows("ffn_norm.weight", "moe.norm.weight"),
    *rows("hc_ffn_{}", "moe.connection.{}", PARTS),
    *rows("ffn.gate.{}", "moe.router.{}", "weight bias"),
    *rows("ffn.shared_experts.{}.weight", "moe.shared.{}.weight", "w1:gate w3:up w2:down", when=_shared),
    *rows("ffn.experts.{expert}.{}.weight", "moe.experts.{expert}.{}.weight", "w1:gate w3:up w2:down"),
)
MOE_MEMORY: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight"),
    *rows("ffn_hc.{}", "moe.connection.{}", PARTS),
    *rows("mlp.gate.{}", "moe.router.{}", "weight e_score_correction_bias:bias"),
    *rows("mlp.shared_experts.{}_proj.weight", "moe.shared.{}.weight", "gate up down", when=_shared),
    *STACKED_EXPERTS,
)
DEPTH = "mtp.{depth}."
DEPTHS = Depths(
    prefix=DEPTH,
    rows=(
        *rows(
            f"{DEPTH}{{}}.weight",
            "{}.weight",
            "enorm:embedding_norm hnorm:hidden_norm e_proj:embedding_projection h_proj:hidden_projection "
            "norm:final_norm",
        ),
        *_exit(f"{DEPTH}hc_head_{{}}"),
    ),
    unread=r"mtp\..*",
)
"""transformers leaves depths unread, so that the release's names are the only ones."""

HUB = Adapter(
    name="deepseek_v4",
    counting="pair",
    prefix="layers.{layer}.",
    ends=(
        *rows("embed.weight", "embedding.weight"),
        *rows("norm.weight", "final_norm.weight"),
        *rows("head.weight", "head.weight", when=untied),
        *_exit("hc_head_{}"),
    ),
    layers=MappingProxyType({Kind.LATENT_ATTENTION: ATTENTION_HUB, Kind.MOE: MOE_HUB}),
    depths=DEPTHS,
    copies=(Copy(theirs="head.weight", of="embed.weight", when=tied),),
    hyper=True,
    wide=WIDE,
)
MEMORY = Adapter(
    name="deepseek_v4",
    counting="pair",
    prefix="model.layers.{layer}.",
    ends=(
        *ends(EMBEDDING, rows("model.norm.weight", "final_norm.weight")),
        *_exit("model.hc_head.hc_{}"),
    ),
    layers=MappingProxyType({Kind.LATENT_ATTENTION: ATTENTION_MEMORY, Kind.MOE: MOE_MEMORY}),
    depths=DEPTHS,
    copies=head_copy(EMBEDDING),
    hyper=True,
    wide=WIDE,
)

# -------------------------------------------------------------------------------------------- settings

LATENT = "latent_attention"
"""What a layer with latent attention is called among V4's `layer_types`. transformers has no such layer, and
says so, rather than reading a model whose attention it would make up."""
COMPRESSED = MappingProxyType(
    {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
)
"""Layers by how many tokens they make one of."""
HASH_LAYERS = 3
"""How many layers have hash routing where a file does not say."""
LACKING = MappingProxyType(
    {
        "sliding_window": "braid's latent attention sees every token before it, and has no sinks",
        "num_key_value_heads": "braid has no attention whose keys are its values",
        "index_topk": "braid has no indexer, which chooses what a token sees",
        "o_groups": "braid has one output projection for all heads",
    }
)
"""What comes with V4's own attention."""
FOLLOWING = (
    "compress_rates",
    "compress_rope_theta",
    "head_dim",
    "index_head_dim",
    "index_n_heads",
    "o_lora_rank",
    "partial_rotary_factor",
    "q_lora_rank",
    "qk_rope_head_dim",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Settings of V4's own attention that say nothing without it."""
SCORES: Mapping[str, Literal["sigmoid", "sqrt_softplus"]] = MappingProxyType(
    {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
)


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, default=False)
    for name in ("attention_dropout", "router_jitter_noise"):
        settings.only(name, 0.0, 0, default=0.0)
    settings.unused("num_nextn_predict_layers")
    if (dtype := settings.maybe_text("expert_dtype")) is not None:
        settings.refuse("expert_dtype", dtype, "braid reads no such experts: dequantise them to bfloat16 first")
    layers = settings.integer("num_hidden_layers")
    _refuse_hash_routing(settings, layers)
    return Model(
        pattern="[+E]" * layers,
        latent_attention=_read_attention(settings, layers),
        moe=_read_moe(settings),
        hyper=HyperConnections(
            streams=settings.integer("hc_mult", 4),
            sinkhorn_steps=settings.integer("hc_sinkhorn_iters", 20),
            eps=settings.number("hc_eps", 1e-6),
        ),
        **read_model(settings),
    )


def _refuse_hash_routing(settings: Settings, layers: int) -> None:
    rule = "braid chooses experts by their scores, not by a table of token ids"
    kinds = settings.names("mlp_layer_types")
    count = settings.integer("num_hash_layers", 0 if kinds is not None else HASH_LAYERS)
    if kinds is None and count:
        settings.refuse("num_hash_layers", count, rule)
    elif kinds is not None and set(kinds) != {"moe"}:
        settings.refuse("mlp_layer_types", sorted(set(kinds)), f"braid has 'moe': {rule}")
    elif kinds is not None and len(kinds) != layers:
        settings.refuse("mlp_layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")


def _read_attention(settings: Settings, layers: int) -> LatentAttention:
    kinds, ratios = settings.names("layer_types"), settings.integers("compress_ratios")
    if kinds is None or set(kinds) != {LATENT}:
        return _refuse_attention(settings, kinds, ratios)
    if len(kinds) != layers:
        settings.refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
    settings.only("rope_interleave", True, default=True)
    rope = read_rope(settings)
    if rope.fraction != 1:
        settings.refuse("partial_rotary_factor", rope.fraction, "latent attention turns qk_rope_head_dim")
    return LatentAttention(
        heads=settings.integer("num_attention_heads"),
        q_rank=settings.maybe_integer("q_lora_rank"),
        kv_rank=settings.integer("kv_lora_rank"),
        nope_dim=settings.integer("qk_nope_head_dim"),
        rope_dim=settings.integer("qk_rope_head_dim"),
        v_dim=settings.integer("v_head_dim"),
        rope_base=rope.base,
        rope_scaling=rope.scaling,
    )


def _refuse_attention(settings: Settings, kinds: list[str] | None, ratios: list[int]) -> LatentAttention:
    """Tell which attention it is that braid does not have, and give one that stands in for it."""
    if kinds is None and ratios:
        found = sorted({COMPRESSED.get(ratio, f"{ratio} tokens in one") for ratio in ratios})
        name, told = "compress_ratios", f"{sorted(set(ratios))} ({', '.join(found)})"
    else:
        name, told = "layer_types", "none given" if kinds is None else ", ".join(sorted(set(kinds)))
    settings.refuse(name, told, f"braid has {LATENT!r}, that of DeepSeek-V3, and none of V4's own")
    for lacking, rule in LACKING.items():
        value = settings.maybe_integer(lacking)
        if value is not None:
            settings.refuse(lacking, value, rule)
    settings.unused(*FOLLOWING, "num_attention_heads")
    return LatentAttention(heads=1, q_rank=None, kv_rank=1, nope_dim=1, rope_dim=2, v_dim=1)


def _read_moe(settings: Settings) -> Moe:
    settings.only("topk_method", "noaux_tc", default="noaux_tc")
    ffn, limit = settings.integer("moe_intermediate_size"), settings.number("swiglu_limit", 10.0)
    return Moe(
        experts=settings.integer("n_routed_experts"),
        top_k=settings.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * settings.integer("n_shared_experts", 1),
        glu=Glu(limit=limit or None),
        score=SCORES[settings.only("scoring_func", *SCORES, default="sqrtsoftplus")],
        normalize_top_k=settings.flag("norm_topk_prob", True),
        scale=settings.number("routed_scaling_factor", 1.5),
        selection_bias=True,
        aux_loss=0.0,
    )


def _write(shape: Model) -> dict[str, Any]:
    latent, moe = needed(shape.latent_attention, "latent_attention"), needed(shape.moe, "moe")
    hyper, layout = needed(shape.hyper, "hyper"), parse(shape.pattern)
    layers = len(layout.layers) // 2
    return {
        **write_model(shape),
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "layer_types": [LATENT] * layers,
        "mlp_layer_types": ["moe"] * layers,
        "num_attention_heads": latent.heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_parameters": write_rope(latent),
        "rope_interleave": True,
        "num_experts_per_tok": moe.top_k,
        "n_routed_experts": moe.experts,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.scale,
        "scoring_func": "sigmoid" if moe.score == "sigmoid" else "sqrtsoftplus",
        "swiglu_limit": moe.glu.limit or 0.0,
        "hc_mult": hyper.streams,
        "hc_sinkhorn_iters": hyper.sinkhorn_steps,
        "hc_eps": hyper.eps,
        "num_nextn_predict_layers": len(layout.mtp),
    }


FAMILIES = (
    ModelFamily(
        model_type="deepseek_v4",
        architecture="DeepseekV4LatentForCausalLM",
        also=("DeepseekV4ForCausalLM",),
        hub=HUB,
        memory=MEMORY,
        read=_read,
        write=_write,
        depth="+E",
    ),
)
