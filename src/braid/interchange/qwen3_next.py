"""Qwen3-Next: gated delta nets and gated attention, mixtures with a gated shared expert."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from braid.architecture import Attention, DeltaNet, Model, Moe
from braid.interchange.family import ModelFamily, ends, head_copy, read_model, write_model
from braid.interchange.llama import (
    EMBEDDING,
    STACKED_EXPERTS,
    read_attention,
    read_mlp,
    sparse_pattern,
    write_attention,
    write_sparse,
)
from braid.interchange.moves import Channelwise, FromOne, Move, PerHead
from braid.interchange.rope import write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Depths, Shape, TableRow, named, rows
from braid.pattern import Kind, parse

# ---------------------------------------------------------------------------------------------- tables


def from_one(shape: Shape) -> Move:
    return FromOne()


def _query_and_gate(shape: Shape) -> Move:
    """For every head its query, then its gate."""
    return PerHead(shape.attention.heads, (shape.attention.head_dim, shape.attention.head_dim))


def _qkvz(shape: Shape) -> Move:
    """For every key head its query and key, then value and z of the value heads that it serves."""
    net = shape.delta_net
    values = net.value_heads // net.key_heads * net.value_dim
    return PerHead(net.key_heads, (net.key_dim, net.key_dim, values, values))


def _ba(shape: Shape) -> Move:
    net = shape.delta_net
    served = net.value_heads // net.key_heads
    return PerHead(net.key_heads, (served, served))


def convolved(shape: Shape) -> Move:
    net = shape.delta_net
    keys = net.key_heads * net.key_dim
    return Channelwise((keys, keys, net.value_heads * net.value_dim))


ATTENTION: tuple[TableRow, ...] = (
    *rows("input_layernorm.weight", "attention.norm.weight", move=from_one),
    TableRow(
        theirs="self_attn.q_proj.weight",
        ours=named("attention.{}.weight", "q gate"),
        move=_query_and_gate,
    ),
    TableRow(
        theirs="self_attn.q_proj.bias",
        ours=named("attention.{}.bias", "q gate"),
        move=_query_and_gate,
        when=lambda m: m.attention.bias,
    ),
    *rows("self_attn.{}_proj.weight", "attention.{}.weight", "k v o"),
    *rows("self_attn.{}_proj.bias", "attention.{}.bias", "k v", when=lambda m: m.attention.bias),
    *rows("self_attn.o_proj.bias", "attention.o.bias", when=lambda m: m.attention.has_o_bias),
    *rows("self_attn.{}.weight", "attention.{}.weight", "q_norm k_norm", move=from_one),
)
DELTA_NET: tuple[TableRow, ...] = (
    *rows("input_layernorm.weight", "delta_net.norm.weight", move=from_one),
    TableRow(
        theirs="linear_attn.in_proj_qkvz.weight",
        ours=named("delta_net.{}.weight", "q k v z"),
        move=_qkvz,
    ),
    TableRow(theirs="linear_attn.in_proj_ba.weight", ours=named("delta_net.{}.weight", "b a"), move=_ba),
    TableRow(
        theirs="linear_attn.conv1d.weight",
        ours=named("delta_net.conv.{}.weight", "q k v"),
        move=convolved,
    ),
    *rows("linear_attn.{}", "delta_net.{}", "A_log dt_bias"),
    *rows("linear_attn.norm.weight", "delta_net.gate_norm.weight"),
    *rows("linear_attn.out_proj.weight", "delta_net.o.weight"),
)
MLP: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "mlp.norm.weight", move=from_one),
    *rows("mlp.{}_proj.weight", "mlp.{}.weight", "gate up down"),
)
ROUTER: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight", move=from_one),
    *rows("mlp.gate.weight", "moe.router.weight"),
    *rows("mlp.shared_expert.{}_proj.weight", "moe.shared.{}.weight", "gate up down"),
    *rows("mlp.shared_expert_gate.weight", "moe.shared_gate.weight"),
)
MOE_HUB: tuple[TableRow, ...] = (
    *ROUTER,
    *rows("mlp.experts.{expert}.{}_proj.weight", "moe.experts.{expert}.{}.weight", "gate up down"),
)
MOE_MEMORY = (*ROUTER, *STACKED_EXPERTS)
DEPTHS = Depths(
    prefix="mtp.layers.{depth}.",
    rows=(
        *rows(
            "mtp.{}.weight",
            "{}.weight",
            "pre_fc_norm_embedding:embedding_norm pre_fc_norm_hidden:hidden_norm norm:final_norm",
            move=from_one,
        ),
        *rows("mtp.fc.weight", "projection.weight"),
    ),
    unread=r"mtp\..*",
)


def adapter(name: str, **layers: tuple[TableRow, ...]) -> Adapter:
    """A table over the skeleton that Qwen3-Next and Qwen3.5 share."""
    return Adapter(
        name=name,
        counting="pair",
        prefix="model.layers.{layer}.",
        ends=ends(EMBEDDING, rows("model.norm.weight", "final_norm.weight", move=from_one)),
        layers=MappingProxyType({Kind[kind]: table for kind, table in layers.items()}),
        depths=DEPTHS,
        copies=head_copy(EMBEDDING),
    )


def _qwen3_next(moe: tuple[TableRow, ...]) -> Adapter:
    return adapter("qwen3_next", ATTENTION=ATTENTION, DELTA_NET=DELTA_NET, MLP=MLP, MOE=moe)


# -------------------------------------------------------------------------------------------- settings

SYMBOLS = MappingProxyType({"linear_attention": "G", "full_attention": "*"})
WORDS = MappingProxyType({Kind.DELTA_NET: "linear_attention", Kind.ATTENTION: "full_attention"})


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.unused("num_nextn_predict_layers")
    settings.neutral("use_sliding_window", False)
    if "use_sliding_window" in settings:
        settings.unused("sliding_window", "max_window_layers")
    pattern = sparse_pattern(settings, read_mixers(settings))
    return Model(
        pattern=pattern,
        attention=read_gated_attention(settings, kv_heads=2),
        delta_net=read_delta_net(settings),
        mlp=read_mlp(settings, pattern),
        moe=Moe(
            experts=settings.integer("num_experts", 512),
            top_k=settings.integer("num_experts_per_tok", 10),
            ffn=settings.integer("moe_intermediate_size", 512),
            normalize_top_k=settings.flag("norm_topk_prob", True),
            shared_ffn=settings.integer("shared_expert_intermediate_size", 512),
            shared_gate=True,
            aux_loss=0.0,
        ),
        **read_model(settings),
    )


def read_gated_attention(settings: Settings, *, kv_heads: int, inert: tuple[str, ...] = ()) -> Attention:
    """`inert` are entries of rope_parameters without effect."""
    return read_attention(
        settings,
        heads=16,
        kv_heads=kv_heads,
        head_dim=256,
        fraction=0.25,
        inert=inert,
        qk_norm=True,
        gate=True,
        bias=settings.flag("attention_bias", False),
    )


def read_delta_net(settings: Settings) -> DeltaNet:
    return DeltaNet(
        key_heads=settings.integer("linear_num_key_heads", 16),
        value_heads=settings.integer("linear_num_value_heads", 32),
        key_dim=settings.integer("linear_key_head_dim", 128),
        value_dim=settings.integer("linear_value_head_dim", 128),
        conv=settings.integer("linear_conv_kernel_dim", 4),
    )


def read_mixers(settings: Settings) -> str:
    layers, interval = settings.integer("num_hidden_layers"), settings.integer("full_attention_interval", 4)
    words = settings.names("layer_types")
    if words is None:
        every = max(interval, 1)
        words = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    if len(words) != layers or set(words) - set(SYMBOLS):
        settings.refuse("layer_types", words, f"braid has {layers} out of {' and '.join(SYMBOLS)}")
    return "".join(SYMBOLS.get(word, "G") for word in words)


def _write(shape: Model) -> dict[str, Any]:
    settings = {**write_model(shape), **write_sparse(shape), **write_mixers(shape)}
    if shape.moe is not None:
        settings["shared_expert_intermediate_size"] = shape.moe.shared_ffn
    return settings


def write_mixers(shape: Model) -> dict[str, Any]:
    """Layers, attention and delta nets; what the pattern does not use is left to the family's defaults."""
    mixers = [layer.kind for layer in parse(shape.pattern).layers if layer.kind.is_mixer]
    settings: dict[str, Any] = {
        "hidden_act": "silu",
        "num_hidden_layers": len(mixers),
        "layer_types": [WORDS[kind] for kind in mixers],
    }
    if (attention := shape.attention) is not None:
        settings |= write_attention(shape)
        settings["attention_bias"] = attention.bias
        settings["rope_parameters"] = {
            **write_rope(attention),
            "partial_rotary_factor": attention.rope_fraction,
        }
    if (net := shape.delta_net) is not None:
        settings |= {
            "linear_num_key_heads": net.key_heads,
            "linear_num_value_heads": net.value_heads,
            "linear_key_head_dim": net.key_dim,
            "linear_value_head_dim": net.value_dim,
            "linear_conv_kernel_dim": net.conv,
        }
    return settings


FAMILIES = (
    ModelFamily(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        hub=_qwen3_next(MOE_HUB),
        memory=_qwen3_next(MOE_MEMORY),
        read=_read,
        write=_write,
        depth="*E",
    ),
)
