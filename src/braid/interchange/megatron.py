"""Megatron's distributed checkpoints: keys with a layer index, and without one.

The index is that of the block, so a grouped pattern has the keys of a plain transformer; only the final norm
has another name where nothing is grouped. Transformers whose layers are all alike may be saved without an
index: the layer is then the first dim of every tensor. Norms go by the projection that they are fused with.

Experts are told in one of several ways, see `Experts`. The rows of gate and up may alternate in blocks, which
no file tells: whoever converts has to know.

There is no config.json here: the shape comes from whoever converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from braid.errors import ConfigError
from braid.interchange.deepseek import (
    keys_and_values,
    latent_and_turned_key,
    no_query_latent,
    query_latent,
    turned_queries,
)
from braid.interchange.family import untied
from braid.interchange.moves import Channelwise, Move, PerHead, joined
from braid.interchange.tables import Adapter, Depths, Shape, TableRow, always, named, rows
from braid.pattern import Kind, parse

Form = Literal["indexed", "hybrid", "stacked"]
"""`indexed` is a transformer's, `hybrid` tells MTP by symbols, `stacked` has no layer index."""

Experts = Literal["stacked", "each", "grouped", "packed", "indexed", "sequential"]
"""How files hold the experts of a layer. Distributed checkpoints have `stacked`, with experts as the first dim,
or `each`, with names of their own. The others are state_dicts': one parameter, [experts, outputs, inputs] or
[experts * outputs, inputs]; one parameter per expert; one module per expert."""

EXPERT_NAMES: Mapping[Experts, str] = MappingProxyType(
    {
        "stacked": "mlp.experts.experts.LINEAR.LEAF",
        "each": "mlp.experts.experts.{expert}.LINEAR.LEAF",
        "grouped": "mlp.experts.LINEAR.LEAF",
        "packed": "mlp.experts.LINEAR.LEAF",
        "indexed": "mlp.experts.LINEAR.LEAF{expert}",
        "sequential": "mlp.experts.local_experts.{expert}.LINEAR.LEAF",
    }
)


def _grouped(shape: Shape) -> bool:
    return any(block.grouped for block in parse(shape.pattern).blocks)


def _flat(shape: Shape) -> bool:
    return not _grouped(shape)


def _norm(theirs: str, ours: str, when: Callable[[Shape], bool] = always) -> tuple[TableRow, ...]:
    """The weight of a norm, and its bias where the model's norms have one."""
    return (
        *rows(f"{theirs}weight", f"{ours}.weight", when=when),
        *rows(f"{theirs}bias", f"{ours}.bias", when=lambda m: m.norm == "layer" and when(m)),
    )


# ----------------------------------------------------------------------------------------------- moves


def _qkv(shape: Shape) -> Move:
    """For every key-value head: the query heads it serves, their gates if any, its key, its value."""
    attention = shape.attention
    wide = attention.heads // attention.kv_heads * attention.head_dim
    queries = (wide, wide) if attention.gate else (wide,)
    return PerHead(attention.kv_heads, (*queries, attention.head_dim, attention.head_dim))


def _into(ffn: int, activation: str, interleave: int) -> Move:
    """Gate and up one below the other, or in alternating blocks of rows; up alone where there is no gate."""
    if activation != "swiglu":
        return joined(ffn)
    if interleave and ffn % interleave:
        raise ConfigError(
            f"model.moe.ffn = {ffn} and an interleave of {interleave} do not fit\n"
            "  rule  gate and up alternate in whole blocks of rows\n"
            "  set   the block size with which the checkpoint was trained"
        )
    return PerHead(ffn // interleave, (interleave, interleave)) if interleave else joined(ffn, ffn)


def _fc1(
    theirs: str,
    ours: str,
    kind: Literal["mlp", "moe"],
    *,
    ffn: Callable[[Shape], int] = lambda m: m.moe.ffn,
    when: Callable[[Shape], bool] = always,
    leaf: str = "weight",
    apart: bool = False,
    interleave: int = 0,
) -> tuple[TableRow, ...]:
    """The projection into the ffn: two of ours where the activation has a gate, and two of theirs where they
    have them `apart`."""

    def gated(shape: Shape) -> bool:
        return bool(getattr(shape, kind).activation == "swiglu" and when(shape))

    def plain(shape: Shape) -> bool:
        return bool(getattr(shape, kind).activation != "swiglu" and when(shape))

    def move(shape: Shape) -> Move:
        return _into(ffn(shape), getattr(shape, kind).activation, interleave)

    alone = TableRow(theirs=theirs, ours=(f"{ours}.up.{leaf}",), move=move, when=plain)
    if apart:
        return (alone, *rows(f"{theirs}_{{}}", f"{ours}.{{}}.{leaf}", "w:gate v:up", when=gated))
    return (alone, TableRow(theirs=theirs, ours=named(f"{ours}.{{}}.{leaf}", "gate up"), move=move, when=gated))


def _taps(channels: Callable[[Shape], int]) -> Callable[[Shape], Move]:
    return lambda shape: Channelwise((channels(shape),))


# ---------------------------------------------------------------------------------------------- tables


def _qkv_rows(leaf: str, when: Callable[[Shape], bool]) -> tuple[TableRow, ...]:
    def gated(shape: Shape) -> bool:
        return bool(shape.attention.gate and when(shape))

    def plain(shape: Shape) -> bool:
        return bool(not shape.attention.gate and when(shape))

    theirs, ours = f"self_attention.linear_qkv.{leaf}", f"attention.{{}}.{leaf}"
    return (
        TableRow(theirs=theirs, ours=named(ours, "q k v"), move=_qkv, when=plain),
        TableRow(theirs=theirs, ours=named(ours, "q gate k v"), move=_qkv, when=gated),
    )


ATTENTION: tuple[TableRow, ...] = (
    *_norm("self_attention.linear_qkv.layer_norm_", "attention.norm"),
    *_qkv_rows("weight", always),
    *_qkv_rows("bias", lambda m: m.attention.bias),
    *rows("self_attention.linear_proj.weight", "attention.o.weight"),
    *rows("self_attention.linear_proj.bias", "attention.o.bias", when=lambda m: m.attention.has_o_bias),
    *rows(
        "self_attention.{}.weight",
        "attention.{}.weight",
        "q_layernorm:q_norm k_layernorm:k_norm",
        when=lambda m: m.attention.qk_norm,
    ),
    *rows("self_attention.core_attention.softmax_offset", "attention.sinks", when=lambda m: m.attention.sinks),
)
LATENT_ATTENTION: tuple[TableRow, ...] = (
    *_norm("input_layernorm.", "attention.norm"),
    *rows("self_attention.linear_q_down_proj.weight", "attention.q_down.weight", when=query_latent),
    *rows("self_attention.linear_q_up_proj.layer_norm_weight", "attention.q_norm.weight", when=query_latent),
    *rows(
        "self_attention.linear_q_up_proj.weight",
        "attention.q_up.weight",
        move=turned_queries,
        when=query_latent,
    ),
    *rows(
        "self_attention.linear_q_proj.weight", "attention.q.weight", move=turned_queries, when=no_query_latent
    ),
    TableRow(
        theirs="self_attention.linear_kv_down_proj.weight",
        ours=("attention.kv_down.weight", "attention.k_rope.weight"),
        move=latent_and_turned_key,
    ),
    *rows("self_attention.linear_kv_up_proj.layer_norm_weight", "attention.kv_norm.weight"),
    TableRow(
        theirs="self_attention.linear_kv_up_proj.weight",
        ours=("attention.k_up.weight", "attention.v_up.weight"),
        move=keys_and_values,
    ),
    *rows("self_attention.linear_proj.weight", "attention.o.weight"),
)
MAMBA2: tuple[TableRow, ...] = (
    *_norm("mixer.in_proj.layer_norm_", "mamba2.norm"),
    *rows("mixer.in_proj.weight.{}", "mamba2.{}.weight", "z x B C dt"),
    *rows(
        "mixer.conv1d.weight.x",
        "mamba2.conv.x.weight",
        move=_taps(lambda m: m.mamba2.heads * m.mamba2.head_dim),
    ),
    *rows(
        "mixer.conv1d.weight.{}",
        "mamba2.conv.{}.weight",
        "B C",
        move=_taps(lambda m: m.mamba2.groups * m.mamba2.state),
    ),
    *rows("mixer.conv1d.bias.{}", "mamba2.conv.{}.bias", "x B C", when=lambda m: m.mamba2.conv_bias),
    *rows("mixer.{}", "mamba2.{}", "A_log D dt_bias"),
    *rows("mixer.norm.weight", "mamba2.gate_norm.weight"),
    *rows("mixer.out_proj.weight", "mamba2.o.weight"),
)
DELTA_NET: tuple[TableRow, ...] = (
    *_norm("self_attention.in_proj.layer_norm_", "delta_net.norm"),
    *rows("self_attention.in_proj.weight.{}", "delta_net.{}.weight", "query:q key:k value:v z beta:b alpha:a"),
    *rows(
        "self_attention.conv1d.weight.{}",
        "delta_net.conv.{}.weight",
        "query:q key:k",
        move=_taps(lambda m: m.delta_net.key_heads * m.delta_net.key_dim),
    ),
    *rows(
        "self_attention.conv1d.weight.value",
        "delta_net.conv.v.weight",
        move=_taps(lambda m: m.delta_net.value_heads * m.delta_net.value_dim),
    ),
    *rows("self_attention.{}", "delta_net.{}", "A_log dt_bias"),
    *rows("self_attention.out_norm.weight", "delta_net.gate_norm.weight"),
    *rows("self_attention.out_proj.weight", "delta_net.o.weight"),
)


def _mlp(apart: bool) -> tuple[TableRow, ...]:
    def ffn(shape: Shape) -> int:
        return int(shape.mlp.ffn)

    def biased(shape: Shape) -> bool:
        return bool(shape.mlp.bias)

    return (
        *_norm("mlp.linear_fc1.layer_norm_", "mlp.norm"),
        *_fc1("mlp.linear_fc1.weight", "mlp", "mlp", ffn=ffn, apart=apart),
        *_fc1("mlp.linear_fc1.bias", "mlp", "mlp", ffn=ffn, when=biased, leaf="bias", apart=apart),
        *rows("mlp.linear_fc2.weight", "mlp.down.weight"),
        *rows("mlp.linear_fc2.bias", "mlp.down.bias", when=biased),
    )


def _experts(experts: Experts, interleave: int) -> tuple[TableRow, ...]:
    def biased(shape: Shape) -> bool:
        return bool(shape.moe.bias)

    def name(linear: str, leaf: str) -> str:
        return EXPERT_NAMES[experts].replace("LINEAR", linear).replace("LEAF", leaf)

    apart, ours = experts == "each", "moe.experts.{expert}"
    table = (
        *_fc1(name("linear_fc1", "weight"), ours, "moe", apart=apart, interleave=interleave),
        *_fc1(
            name("linear_fc1", "bias"),
            ours,
            "moe",
            when=biased,
            leaf="bias",
            apart=apart,
            interleave=interleave,
        ),
        *rows(name("linear_fc2", "weight"), f"{ours}.down.weight"),
        *rows(name("linear_fc2", "bias"), f"{ours}.down.bias", when=biased),
    )
    return tuple(replace(row, folded=True) for row in table) if experts == "packed" else table


def _moe(experts: Experts, interleave: int) -> tuple[TableRow, ...]:
    def shared(shape: Shape) -> bool:
        return bool(shape.moe.shared_ffn)

    return (
        *_norm("pre_mlp_layernorm.", "moe.norm"),
        *rows("mlp.router.weight", "moe.router.weight"),
        *rows("mlp.router.expert_bias", "moe.router.bias", when=lambda m: m.moe.selection_bias),
        *rows("mlp.router.bias", "moe.router.logit_bias", when=lambda m: m.moe.router_bias),
        *_experts(experts, interleave),
        *_fc1(
            "mlp.shared_experts.linear_fc1.weight",
            "moe.shared",
            "moe",
            ffn=lambda m: int(m.moe.shared_ffn),
            when=shared,
            apart=experts == "each",
        ),
        *rows("mlp.shared_experts.linear_fc2.weight", "moe.shared.down.weight", when=shared),
        *rows("mlp.shared_experts.gate_weight", "moe.shared_gate.weight", when=lambda m: m.moe.shared_gate),
        *rows(
            "mlp.{}_latent_proj.weight",
            "moe.latent.{}.weight",
            "fc1:down fc2:up",
            when=lambda m: m.moe.latent,
        ),
    )


ENDS: tuple[TableRow, ...] = (
    *rows("embedding.word_embeddings.weight", "embedding.weight"),
    *_norm("decoder.final_layernorm.", "final_norm", when=_grouped),
    *_norm("decoder.final_norm.", "final_norm", when=_flat),
    *rows("output_layer.weight", "head.weight", when=untied),
)
DEPTH_ROWS: tuple[TableRow, ...] = (
    *_norm("mtp.layers.{depth}.enorm.", "embedding_norm"),
    *_norm("mtp.layers.{depth}.hnorm.", "hidden_norm"),
    *rows("mtp.layers.{depth}.eh_proj.weight", "projection.weight"),
    *_norm("mtp.layers.{depth}.final_layernorm.", "final_norm"),
)
FIXED = (
    ("norm_position", "pre"),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("logits_scale", 1.0),
    ("attention.qk_norm_over", "head"),
    ("delta_net.negative_eigenvalues", False),
)
"""What Megatron's layers have no setting for: the norms of its names are fused with the next projection."""
FIXED_RULE = """\
rule  whoever loads these names builds Megatron's layers, with norms before projections and without factors
set   the model type to a Hugging Face family that has them, such as granitemoehybrid or olmo_hybrid"""
DEPTH_LAYERS: Mapping[Form, str] = MappingProxyType(
    {
        "indexed": "mtp.layers.{depth}.transformer_layer.",
        "hybrid": "mtp.layers.{depth}.mtp_model_layer.layers.{inner}.",
        "stacked": "mtp.layers.{depth}.transformer_layer.",
    }
)


def adapter(form: Form = "indexed", experts: Experts = "stacked", *, interleave: int = 0) -> Adapter:
    """The table of one spelling. With `interleave`, gate and up of routed experts alternate in blocks of so
    many rows."""
    apart = experts == "each"
    if interleave < 0:
        raise ConfigError(f"an interleave of {interleave} is no number of rows: set 0 for none, or 1 or more")
    if apart and interleave:
        raise ConfigError(
            f"experts of the layout 'each' have no interleave, not one of {interleave}\n"
            "  rule  files with one tensor for gate and one for up have no rows that alternate\n"
            f"  set   another layout: {', '.join(name for name in EXPERT_NAMES if name != experts)}"
        )
    layers: Mapping[Kind, tuple[TableRow, ...]] = {
        Kind.ATTENTION: ATTENTION,
        Kind.LATENT_ATTENTION: LATENT_ATTENTION,
        Kind.MAMBA2: MAMBA2,
        Kind.DELTA_NET: DELTA_NET,
        Kind.MLP: _mlp(apart),
        Kind.MOE: _moe(experts, interleave),
    }
    return Adapter(
        name=f"megatron ({form})",
        counting="block",
        prefix="decoder.layers." if form == "stacked" else "decoder.layers.{layer}.",
        ends=ENDS,
        layers=MappingProxyType(layers),
        depths=Depths(prefix=DEPTH_LAYERS[form], rows=DEPTH_ROWS, unread=r"mtp\..*"),
        fixed=FIXED,
        fixed_rule=FIXED_RULE,
        ignored=(r".*\._extra_state\d*(/.*)?",),
        wrapper="module.",
    )


def reader(*, interleave: int = 0) -> Adapter:
    """The table that tells from names, and from nothing else, which spelling files have."""
    ways = [experts for experts in EXPERT_NAMES if not (interleave and experts == "each")]
    first, *others = (adapter(form, way, interleave=interleave) for form in DEPTH_LAYERS for way in ways)
    return replace(first, name="megatron", others=tuple(others))
