"""Granite 4: a Mamba-2 layer or attention, then experts with a shared MLP, or that MLP alone, in every layer.

    x = embedding_multiplier · embed(tokens)
    x ← x + residual_multiplier · layer(norm(x))     attention scores are times attention_multiplier
    logits = head(norm(x)) / logits_scaling

Gate and up of a gated MLP are one tensor, `input_linear`, and all experts of a layer are too.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from braid.architecture import Attention, Mlp, Model, Moe
from braid.interchange.bamba import MAMBA2, MIXER_SETTINGS, read_mamba2
from braid.interchange.family import ModelFamily, head_copy, read_model, write_model
from braid.interchange.llama import ATTENTION, EMBEDDING, ENDS, gate_and_up, read_attention, write_attention
from braid.interchange.mamba import write_mixer
from braid.interchange.moves import joined
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Shape, TableRow, rows
from braid.pattern import Kind, parse

# ---------------------------------------------------------------------------------------------- tables

EXPERTS = tuple(f"moe.experts.{{expert}}.{name}.weight" for name in ("gate", "up"))
MLP: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "mlp.norm.weight"),
    TableRow(
        theirs="shared_mlp.input_linear.weight",
        ours=("mlp.gate.weight", "mlp.up.weight"),
        move=lambda m: joined(m.mlp.ffn, m.mlp.ffn),
    ),
    *rows("shared_mlp.output_linear.weight", "mlp.down.weight"),
)


def _has_shared(shape: Shape) -> bool:
    return bool(shape.moe.shared_ffn)


def _moe(router: str, gate_up: str, down: str) -> tuple[TableRow, ...]:
    """Experts under the names of files, or of transformers' state_dict."""
    return (
        *rows("post_attention_layernorm.weight", "moe.norm.weight"),
        *rows(f"block_sparse_moe.{router}", "moe.router.weight"),
        TableRow(theirs=f"block_sparse_moe.{gate_up}", ours=EXPERTS, move=gate_and_up),
        *rows(f"block_sparse_moe.{down}", "moe.experts.{expert}.down.weight"),
        TableRow(
            theirs="shared_mlp.input_linear.weight",
            ours=("moe.shared.gate.weight", "moe.shared.up.weight"),
            move=lambda m: joined(m.moe.shared_ffn, m.moe.shared_ffn),
            when=_has_shared,
        ),
        *rows("shared_mlp.output_linear.weight", "moe.shared.down.weight", when=_has_shared),
    )


def _adapter(moe: tuple[TableRow, ...]) -> Adapter:
    layers = {Kind.MAMBA2: MAMBA2, Kind.ATTENTION: ATTENTION, Kind.MLP: MLP, Kind.MOE: moe}
    return Adapter(
        name="granitemoehybrid",
        counting="pair",
        prefix="model.layers.{layer}.",
        ends=ENDS,
        layers=MappingProxyType(layers),
        copies=head_copy(EMBEDDING),
    )


# -------------------------------------------------------------------------------------------- settings

SYMBOLS = MappingProxyType({"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"})
WORDS = MappingProxyType({Kind.MAMBA2: "linear_attention", Kind.ATTENTION: "full_attention"})


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.neutral("normalization_function", "rmsnorm")
    settings.unused("init_method")
    experts, top_k = settings.integer("num_local_experts", 8), settings.integer("num_experts_per_tok", 2)
    ffn, shared = (
        settings.integer("intermediate_size", 11008),
        settings.integer("shared_intermediate_size", 1024),
    )
    return Model(
        pattern="".join(f"[{mixer}{'E' if experts else '-'}]" for mixer in _read_mixers(settings)),
        attention=_read_attention(settings),
        mamba2=read_mamba2(settings),
        mlp=Mlp(ffn=shared),
        # The softmax over the chosen logits alone is the softmax over all, normalized over the chosen.
        moe=Moe(experts=experts, top_k=top_k, ffn=ffn, shared_ffn=shared, aux_loss=0.0),
        embedding_scale=settings.number("embedding_multiplier", 1.0),
        residual_scale=settings.number("residual_multiplier", 1.0),
        logits_scale=settings.number("logits_scaling", 1.0),
        **read_model(settings),
    )


def _read_mixers(settings: Settings) -> str:
    layers = settings.integer("num_hidden_layers")
    words = settings.names("layer_types") or ["linear_attention"] * layers
    if len(words) != layers or set(words) - set(SYMBOLS):
        settings.refuse("layer_types", words, f"braid has {layers} out of {', '.join(SYMBOLS)}")
    return "".join(SYMBOLS.get(word, "M") for word in words)


def _read_attention(settings: Settings) -> Attention:
    rope = settings.only("position_embedding_type", "rope", "nope", None, default=None) == "rope"
    positions: Literal["rope", "none"] = "rope" if rope else "none"
    bias = settings.flag("attention_bias", False)
    attention = read_attention(settings, heads=32, head_dim=None, positions=positions, bias=bias)
    scale = settings.number("attention_multiplier", 1.0)
    usual = attention.head_dim > 0 and scale == attention.score_scale
    return attention if usual else replace(attention, scale=scale)


def _write(shape: Model) -> dict[str, Any]:
    """What the pattern does not use is left to the family's defaults."""
    mixers = [layer.kind for layer in parse(shape.pattern).layers if layer.kind.is_mixer]
    settings = {
        **write_model(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(mixers),
        "layer_types": [WORDS[kind] for kind in mixers],
        "embedding_multiplier": shape.embedding_scale,
        "residual_multiplier": shape.residual_scale,
        "logits_scaling": shape.logits_scale,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    if (attention := shape.attention) is not None:
        settings |= {
            **write_attention(shape),
            "position_embedding_type": "rope" if attention.positions == "rope" else None,
            "attention_bias": attention.bias,
            "attention_multiplier": attention.score_scale,
        }
    if shape.mamba2 is not None:
        settings |= write_mixer(shape, MIXER_SETTINGS)
    if shape.mlp is not None:
        settings |= {"intermediate_size": shape.mlp.ffn, "shared_intermediate_size": shape.mlp.ffn}
    if (moe := shape.moe) is not None:
        settings |= {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.ffn,
            "shared_intermediate_size": moe.shared_ffn,
        }
    return settings


FAMILIES = (
    ModelFamily(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        hub=_adapter(_moe("router.layer.weight", "input_linear.weight", "output_linear.weight")),
        memory=_adapter(_moe("router.weight", "experts.gate_up_proj", "experts.down_proj")),
        read=_read,
        write=_write,
    ),
)
