"""OLMo Hybrid: gated delta nets with negative eigenvalues, and attention with post-norm, in turn.

A layer with a delta net norms the inputs of its mixer and MLP; a layer with attention norms their outputs, and
its queries and keys over all heads.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from braid.architecture import Attention, DeltaNet, Mlp, Model
from braid.errors import ConfigError
from braid.interchange.family import ModelFamily, ends, head_copy, needed, read_model, write_model
from braid.interchange.llama import EMBEDDING, PROJECTIONS
from braid.interchange.moves import Channelwise, Move
from braid.interchange.qwen3_next import SYMBOLS, WORDS, convolved
from braid.interchange.rope import Rope, read_rope, write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Shape, TableRow, named, rows
from braid.pattern import Kind, parse

GATE_NORM_EPS = 1e-5
"""What the norm before the output gate adds to the variance, whatever config.json says for the others."""

# ---------------------------------------------------------------------------------------------- tables


def _keys_convolved(shape: Shape) -> Move:
    return Channelwise((shape.delta_net.key_heads * shape.delta_net.key_dim,))


def _values_convolved(shape: Shape) -> Move:
    return Channelwise((shape.delta_net.value_heads * shape.delta_net.value_dim,))


SEPARATE_CONVOLUTIONS: tuple[TableRow, ...] = (
    *rows("linear_attn.{}_conv1d.weight", "delta_net.conv.{}.weight", "q k", move=_keys_convolved),
    *rows("linear_attn.v_conv1d.weight", "delta_net.conv.v.weight", move=_values_convolved),
)
JOINED_CONVOLUTION = (
    TableRow(
        theirs="linear_attn.conv1d.weight", ours=named("delta_net.conv.{}.weight", "q k v"), move=convolved
    ),
)


def _adapter(first: str, second: str, convolutions: tuple[TableRow, ...]) -> Adapter:
    """`first` and `second` are the norms before the mixer and before the MLP of a layer with a delta net.
    transformers' class has one name for the latter and for the norm after attention."""
    attention = (
        *rows(f"{second}.weight", "attention.norm.weight"),
        *rows(f"{PROJECTIONS}.weight", "attention.{}.weight", "q k v o"),
        *rows(f"{PROJECTIONS}.bias", "attention.{}.bias", "q k v o", when=lambda m: m.attention.bias),
        *rows("self_attn.{}.weight", "attention.{}.weight", "q_norm k_norm"),
    )
    delta_net = (
        *rows(f"{first}.weight", "delta_net.norm.weight"),
        *rows("linear_attn.{}_proj.weight", "delta_net.{}.weight", "q k v a b g:z o"),
        *convolutions,
        *rows("linear_attn.{}", "delta_net.{}", "A_log dt_bias"),
        *rows("linear_attn.o_norm.weight", "delta_net.gate_norm.weight"),
    )
    mlp = (
        *rows(f"{second}.weight", "mlp.norm.weight", after=Kind.DELTA_NET),
        *rows("post_feedforward_layernorm.weight", "mlp.norm.weight", after=Kind.ATTENTION),
        *rows("mlp.{}_proj.weight", "mlp.{}.weight", "gate up down"),
    )
    return Adapter(
        name="olmo_hybrid",
        counting="pair",
        prefix="model.layers.{layer}.",
        ends=ends(EMBEDDING, rows("model.norm.weight", "final_norm.weight")),
        layers=MappingProxyType({Kind.ATTENTION: attention, Kind.DELTA_NET: delta_net, Kind.MLP: mlp}),
        copies=head_copy(EMBEDDING),
    )


# -------------------------------------------------------------------------------------------- settings

INITIALIZATION = (
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
)
PADDING = 100_277
"""The id of padding where a config.json has none; transformers builds no model whose vocabulary ends before."""


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.unused(*INITIALIZATION)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads", 30)
    return Model(
        pattern="".join(f"[{mixer}-]" for mixer in _read_mixers(settings)),
        norm_position="attention_post",
        attention=_read_attention(settings, hidden, heads),
        delta_net=_read_delta_net(settings, hidden, heads),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 11008)),
        **read_model(settings),
    )


def _read_mixers(settings: Settings) -> str:
    layers, words = settings.integer("num_hidden_layers", 32), settings.names("layer_types")
    if words is None:
        words = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)]
        words[-1:] = words[-1:] if "full_attention" in words else ["full_attention"]
    if len(words) != layers or set(words) - set(SYMBOLS):
        settings.refuse("layer_types", words, f"braid has {layers} out of {' and '.join(SYMBOLS)}")
    return "".join(SYMBOLS.get(word, "G") for word in words)


def _read_attention(settings: Settings, hidden: int, heads: int) -> Attention:
    settings.only("attention_dropout", 0.0, 0, None, default=0.0)
    kv_heads, wide = settings.maybe_integer("num_key_value_heads"), settings.maybe_integer("head_dim")
    rope = _read_rope(settings)
    return Attention(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // max(heads, 1) if wide is None else wide,
        positions="none" if rope is None else "rope",
        rope_base=Attention.rope_base if rope is None else rope.base,
        rope_scaling=None if rope is None else rope.scaling,
        qk_norm=True,
        qk_norm_over="all",
        bias=settings.flag("attention_bias", False),
    )


def _read_rope(settings: Settings) -> Rope | None:
    """None for attention without positions, which the released models have: `rope_theta` is null."""
    given = settings.table("rope_parameters")
    if "rope_theta" in given and given["rope_theta"] is None:
        for name in sorted(given.keys() - {"rope_theta", "rope_type"}):
            settings.refuse(f"rope_parameters.{name}", given[name], "unknown where rope_theta is null")
        return None
    rope = read_rope(settings)
    if rope.fraction != 1:
        settings.refuse("partial_rotary_factor", rope.fraction, "all channels turn in this family")
    return rope


def _read_delta_net(settings: Settings, hidden: int, heads: int) -> DeltaNet:
    key_heads = settings.maybe_integer("linear_num_key_heads") or heads
    key_dim = settings.maybe_integer("linear_key_head_dim") or int(0.75 * hidden / max(key_heads, 1))
    return DeltaNet(
        key_heads=key_heads,
        value_heads=settings.maybe_integer("linear_num_value_heads") or heads,
        key_dim=key_dim,
        value_dim=settings.maybe_integer("linear_value_head_dim") or 2 * key_dim,
        conv=settings.integer("linear_conv_kernel_dim", 4),
        negative_eigenvalues=settings.flag("linear_allow_neg_eigval", True),
        gate_norm_eps=GATE_NORM_EPS,
    )


def _write(shape: Model) -> dict[str, Any]:
    mixers = [layer.kind for layer in parse(shape.pattern).layers if layer.kind.is_mixer]
    if set(mixers) != set(WORDS):
        raise ConfigError(
            f"the pattern {shape.pattern!r} cannot be written as olmo_hybrid\n"
            "  rule  transformers requires both kinds of its layers, G and *"
        )
    attention, net = needed(shape.attention, "attention"), needed(shape.delta_net, "delta_net")
    none = {"rope_theta": None, "rope_type": "default"}
    own: dict[str, Any] = {"pad_token_id": None} if shape.vocab <= PADDING else {}
    if attention.head_dim != shape.hidden // attention.heads:
        own["head_dim"] = attention.head_dim
    return {
        **write_model(shape),
        **own,
        "hidden_act": "silu",
        "num_hidden_layers": len(mixers),
        "layer_types": [WORDS[kind] for kind in mixers],
        "intermediate_size": needed(shape.mlp, "mlp").ffn,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "attention_bias": attention.bias,
        "rope_parameters": none if attention.positions == "none" else write_rope(attention),
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_conv_kernel_dim": net.conv,
        "linear_allow_neg_eigval": net.negative_eigenvalues,
    }


FAMILIES = (
    ModelFamily(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        hub=_adapter("attention_layer_norm", "feedforward_layer_norm", SEPARATE_CONVOLUTIONS),
        memory=_adapter("input_layernorm", "post_attention_layernorm", JOINED_CONVOLUTION),
        read=_read,
        write=_write,
    ),
)
