"""Mamba2 and Nemotron-H: one mixer, MLP or mixture in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from braid.architecture import Attention, Mamba2, Mlp, Model, Moe
from braid.errors import ConfigError
from braid.interchange.family import ModelFamily, ends, head_copy, needed, read_model, write_model
from braid.interchange.moves import Channelwise, Move, joined
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Depths, Shape, TableRow, named, rows
from braid.pattern import Kind, parse

# ---------------------------------------------------------------------------------------------- tables


def _projected(shape: Shape) -> Move:
    """z, x, B, C and dt, one below the other."""
    inner, states, heads = _channels(shape.mamba2)
    return joined(inner, inner, states, states, heads)


def _convolved(shape: Shape) -> Move:
    inner, states, _ = _channels(shape.mamba2)
    return Channelwise((inner, states, states))


def _conv_biases(shape: Shape) -> Move:
    inner, states, _ = _channels(shape.mamba2)
    return joined(inner, states, states)


def _channels(mamba2: Mamba2) -> tuple[int, int, int]:
    return mamba2.heads * mamba2.head_dim, mamba2.groups * mamba2.state, mamba2.heads


def mamba2_rows(mixer: str, norm: str) -> tuple[TableRow, ...]:
    """A Mamba-2 layer, under a family's names of its mixer and of the norm before it."""
    return (
        *rows(f"{norm}.weight", "mamba2.norm.weight"),
        TableRow(
            theirs=f"{mixer}.in_proj.weight", ours=named("mamba2.{}.weight", "z x B C dt"), move=_projected
        ),
        TableRow(
            theirs=f"{mixer}.in_proj.bias",
            ours=named("mamba2.{}.bias", "z x B C dt"),
            move=_projected,
            when=lambda m: m.mamba2.bias,
        ),
        TableRow(
            theirs=f"{mixer}.conv1d.weight", ours=named("mamba2.conv.{}.weight", "x B C"), move=_convolved
        ),
        TableRow(
            theirs=f"{mixer}.conv1d.bias",
            ours=named("mamba2.conv.{}.bias", "x B C"),
            move=_conv_biases,
            when=lambda m: m.mamba2.conv_bias,
        ),
        *rows(f"{mixer}.{{}}", "mamba2.{}", "A_log D dt_bias"),
        *rows(f"{mixer}.norm.weight", "mamba2.gate_norm.weight"),
        *rows(f"{mixer}.out_proj.weight", "mamba2.o.weight"),
        *rows(f"{mixer}.out_proj.bias", "mamba2.o.bias", when=lambda m: m.mamba2.bias),
    )


MAMBA2 = mamba2_rows("mixer", "norm")
ATTENTION: tuple[TableRow, ...] = (
    *rows("norm.weight", "attention.norm.weight"),
    *rows("mixer.{}_proj.weight", "attention.{}.weight", "q k v o"),
)
MLP: tuple[TableRow, ...] = (
    *rows("norm.weight", "mlp.norm.weight"),
    *rows("mixer.{}_proj.weight", "mlp.{}.weight", "up down"),
    *rows("mixer.{}_proj.bias", "mlp.{}.bias", "up down", when=lambda m: m.mlp.bias),
)
ROUTER: tuple[TableRow, ...] = (
    *rows("norm.weight", "moe.norm.weight"),
    *rows("mixer.gate.weight", "moe.router.weight"),
    *rows("mixer.gate.e_score_correction_bias", "moe.router.bias"),
    *rows("mixer.shared_experts.{}_proj.weight", "moe.shared.{}.weight", "up down"),
    *rows(
        "mixer.{}_latent_proj.weight",
        "moe.latent.{}.weight",
        "fc1:down fc2:up",
        when=lambda m: m.moe.latent,
    ),
)
MOE_HUB: tuple[TableRow, ...] = (
    *ROUTER,
    *rows("mixer.experts.{expert}.{}_proj.weight", "moe.experts.{expert}.{}.weight", "up down"),
)
MOE_MEMORY: tuple[TableRow, ...] = (
    *ROUTER,
    *rows("mixer.experts.{}_proj", "moe.experts.{expert}.{}.weight", "up down"),
)


DEPTH = "*E"
DEPTHS = Depths(
    prefix="mtp.layers.{inner}.",
    rows=(
        *rows(
            "mtp.layers.0.{}.weight",
            "{}.weight",
            "enorm:embedding_norm hnorm:hidden_norm eh_proj:projection",
        ),
        *rows(f"mtp.layers.{len(DEPTH) - 1}.final_layernorm.weight", "final_norm.weight"),
    ),
    unread=r"mtp\..*",
)


def _adapter(
    name: str, root: str, layers: Mapping[Kind, tuple[TableRow, ...]], depths: Depths | None = None
) -> Adapter:
    embedding = f"{root}.embeddings.weight"
    return Adapter(
        name=name,
        counting="layer",
        prefix=f"{root}.layers.{{layer}}.",
        ends=ends(embedding, rows(f"{root}.norm_f.weight", "final_norm.weight")),
        layers=MappingProxyType(layers),
        copies=head_copy(embedding),
        depths=depths,
    )


# -------------------------------------------------------------------------------------------- settings

SYMBOLS = MappingProxyType(
    {
        "linear_attention": "M",
        "mamba": "M",
        "full_attention": "*",
        "attention": "*",
        "mlp": "-",
        "moe": "E",
    }
)
"""What Nemotron-H calls its layers, older words included."""
WORDS = MappingProxyType({"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"})
TRAINING_ONLY = (
    "chunk_size",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_rank",
)
"""Settings of both families for initial weights, speed and precision."""


def _limit(value: object) -> float | None:
    """A limit of the time step; infinity, which is written in several ways, is none."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str):
        value = float(value)
    if not isinstance(value, int | float):
        raise ValueError(value)
    return None if value == float("inf") else float(value)


class MixerSettings(NamedTuple):
    """The settings of a Mamba-2 mixer in families whose inner channels are `expand` times the hidden ones."""

    expand: str
    heads: str
    head_dim: str
    numbers: Mapping[str, tuple[str, int]]
    """Fields of `Mamba2`, each with the setting and its default."""
    flags: Mapping[str, tuple[str, bool]]


MAMBA2_SETTINGS = MixerSettings(
    expand="expand",
    heads="num_heads",
    head_dim="head_dim",
    numbers={"state": ("state_size", 128), "groups": ("n_groups", 8), "conv": ("conv_kernel", 4)},
    flags={"bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True)},
)


def read_mixer(settings: Settings, names: MixerSettings, heads: int, head_dim: int) -> Mamba2:
    low, high = read_limits(settings)
    fields: dict[str, Any] = {field: settings.integer(*each) for field, each in names.numbers.items()}
    fields |= {field: settings.flag(*each) for field, each in names.flags.items()}
    return Mamba2(heads=heads, head_dim=head_dim, dt_min=low, dt_max=high, norm_per_group=False, **fields)


def write_mixer(shape: Model, names: MixerSettings) -> dict[str, Any]:
    mamba2 = needed(shape.mamba2, "mamba2")
    inner = mamba2.heads * mamba2.head_dim
    if inner % shape.hidden:
        raise ConfigError(
            f"mamba2 has {mamba2.heads} x {mamba2.head_dim} inner channels\n"
            f"  rule  this family has a whole multiple of model.hidden ({shape.hidden})"
        )
    sizes = {names.heads: mamba2.heads, names.head_dim: mamba2.head_dim, names.expand: inner // shape.hidden}
    fields = vars(mamba2)
    return {
        **sizes,
        **{name: fields[field] for field, (name, _) in {**names.numbers, **names.flags}.items()},
        "time_step_limit": [mamba2.dt_min, written_limit(mamba2.dt_max)],
    }


def _read_mamba2(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.unused(*TRAINING_ONLY, "time_step_min", "time_step_init_scheme", "time_step_scale")
    settings.neutral("rms_norm", True)
    if "norm_before_gate" in settings:
        settings.unused("norm_before_gate")
        settings.note("norm_before_gate is ignored, as transformers ignores it: the gate comes before the norm")
    heads, head_dim = settings.integer("num_heads", 128), settings.integer("head_dim", 64)
    hidden, expand = settings.integer("hidden_size"), settings.integer("expand", 2)
    if hidden * expand != heads * head_dim:
        settings.refuse("expand", expand, "hidden_size x expand must be num_heads x head_dim")
    settings.repeats("intermediate_size", heads * head_dim, "num_heads x head_dim")
    return Model(
        pattern="M" * settings.integer("num_hidden_layers"),
        mamba2=read_mixer(settings, MAMBA2_SETTINGS, heads, head_dim),
        **read_model(settings, eps="layer_norm_epsilon", default_eps=1e-5),
    )


def read_limits(settings: Settings) -> tuple[float, float | None]:
    given = settings.pair("time_step_limit", (0.0, float("inf")))
    try:
        low, high = (_limit(value) for value in given)
    except ValueError:
        settings.refuse("time_step_limit", given, "must be two numbers")
        return 0.0, None
    return low or 0.0, high


def _write_mamba2(shape: Model) -> dict[str, Any]:
    return {
        **write_model(shape, eps="layer_norm_epsilon"),
        **write_mixer(shape, MAMBA2_SETTINGS),
        "hidden_act": "silu",
        "num_hidden_layers": len(parse(shape.pattern).layers),
    }


def written_limit(limit: float | None) -> object:
    return {"__float__": "Infinity"} if limit is None else limit


def _read_nemotron_h(settings: Settings) -> Model:
    pattern = _read_pattern(settings)
    settings.only("mamba_hidden_act", "silu", default="silu")
    settings.only("attention_bias", False, default=False)
    settings.only("sliding_window", None, default=None)
    for name in ("attention_dropout", "hidden_dropout"):
        settings.only(name, 0.0, 0, default=0.0)
    settings.unused(*TRAINING_ONLY, "expand", "num_hidden_layers", "mamba_proj_bias")
    settings.unused("rope_theta", "partial_rotary_factor")  # attention has no RoPE
    settings.unused("use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "num_query_groups")
    settings.unused("moe_shared_expert_overlap", "n_shared_experts", "rms_norm_eps")
    _check_depth(settings)
    eps = settings.number("layer_norm_epsilon", 1e-5)
    settings.repeats("norm_eps", eps, "layer_norm_epsilon")
    activation = settings.only("mlp_hidden_act", "relu2", default="relu2")
    bias = settings.flag("mlp_bias", False)
    if bias and "E" in pattern:
        settings.refuse("mlp_bias", True, "braid has no biases in shared experts and latent projections")
    return Model(
        pattern=pattern,
        attention=_read_attention(settings),
        mamba2=_read_nemotron_mamba2(settings),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 21504), activation=activation, bias=bias),
        moe=_read_moe(settings, activation),
        **read_model(settings, eps="layer_norm_epsilon", default_eps=1e-5),
    )


def _read_nemotron_mamba2(settings: Settings) -> Mamba2:
    """The time step is clamped to `time_step_limit`, as in NVIDIA's own code and in vLLM. transformers ignores
    that and clamps from below at `time_step_min`, which is followed where a file has no limit."""
    state, groups = settings.integer("ssm_state_size", 128), settings.integer("n_groups", 8)
    settings.repeats("mamba_state_dim", state, "ssm_state_size")
    settings.repeats("mamba_num_groups", groups, "n_groups")
    lowest = settings.number("time_step_min", 0.001)
    low, high = read_limits(settings) if "time_step_limit" in settings else (lowest, None)
    return Mamba2(
        heads=settings.integer("mamba_num_heads", 128),
        head_dim=settings.integer("mamba_head_dim", 64),
        state=state,
        groups=groups,
        conv=settings.integer("conv_kernel", 4),
        dt_min=low,
        dt_max=high,
        bias=settings.flag("use_bias", False),
        conv_bias=settings.flag("use_conv_bias", True),
    )


def _read_pattern(settings: Settings) -> str:
    words, text = settings.names("layers_block_type"), settings.maybe_text("hybrid_override_pattern")
    if words is None and text is None:
        settings.refuse("layers_block_type", None, "must be given, or hybrid_override_pattern")
    symbols = list(text or "") if words is None else [SYMBOLS.get(word, word) for word in words]
    foreign = sorted(set(symbols) - set(WORDS))
    if foreign:
        settings.refuse("layers_block_type", foreign, f"braid has {', '.join(SYMBOLS)}")
    return "".join(symbol for symbol in symbols if symbol in WORDS)


def _check_depth(settings: Settings) -> None:
    """Refuse layers of an MTP depth for which braid has no names."""
    depths = settings.integer("num_nextn_predict_layers", 0)
    words, text = settings.names("mtp_layers_block_type"), settings.maybe_text("mtp_hybrid_override_pattern")
    pattern = text if words is None else "".join(SYMBOLS.get(word, word) for word in words)
    if depths and pattern not in (None, DEPTH):
        settings.refuse("mtp_layers_block_type", words or text, "braid has one attention layer, then experts")


def _read_attention(settings: Settings) -> Attention:
    heads = settings.integer("num_attention_heads", 32)
    older = settings.maybe_integer("attention_head_dim")
    return Attention(
        heads=heads,
        kv_heads=settings.integer("num_key_value_heads", 8),
        head_dim=settings.integer("head_dim", 128 if older is None else older),
        positions="none",
    )


def _read_moe(settings: Settings, activation: Any) -> Moe:
    top_k = settings.integer("num_experts_per_tok", 2)
    return Moe(
        experts=settings.integer("n_routed_experts", 8),
        top_k=top_k,
        ffn=settings.integer("moe_intermediate_size", 7688),
        activation=activation,
        latent=settings.maybe_integer("moe_latent_size") or 0,
        shared_ffn=settings.integer("moe_shared_expert_intermediate_size", 7688),
        aux_loss=0.0,
        **read_sigmoid_router(settings, top_k=top_k),
    )


def read_sigmoid_router(
    settings: Settings, *, top_k: int, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> dict[str, Any]:
    """The router that Nemotron-H and DeepSeek share: sigmoid scores, a bias on the choice, groups."""
    groups, top_groups = settings.integer("n_group", groups), settings.integer("topk_group", top_groups)
    if groups > 1 and top_k != 2 * top_groups:
        settings.refuse("topk_group", top_groups, "braid has half of num_experts_per_tok")
    return {
        "score": "sigmoid",
        "selection_bias": True,
        "groups": groups,
        "top_groups": top_groups,
        "normalize_top_k": settings.flag("norm_topk_prob", True),
        "scale": settings.number("routed_scaling_factor", scale),
    }


def write_sigmoid_router(moe: Moe) -> dict[str, Any]:
    return {
        "num_experts_per_tok": moe.top_k,
        "n_routed_experts": moe.experts,
        "moe_intermediate_size": moe.ffn,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.scale,
    }


def _write_nemotron_h(shape: Model) -> dict[str, Any]:
    settings = {
        **write_model(shape, eps="layer_norm_epsilon"),
        "layers_block_type": [WORDS[layer.kind.value] for layer in parse(shape.pattern).layers],
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "num_nextn_predict_layers": len(parse(shape.pattern).mtp),
        "mtp_layers_block_type": [WORDS[symbol] for symbol in DEPTH],
    }
    if shape.attention is not None:
        settings |= {
            "num_attention_heads": shape.attention.heads,
            "num_key_value_heads": shape.attention.kv_heads,
            "head_dim": shape.attention.head_dim,
        }
    if shape.mamba2 is not None:
        settings |= {
            "mamba_num_heads": shape.mamba2.heads,
            "mamba_head_dim": shape.mamba2.head_dim,
            "ssm_state_size": shape.mamba2.state,
            "n_groups": shape.mamba2.groups,
            "conv_kernel": shape.mamba2.conv,
            "time_step_limit": [shape.mamba2.dt_min, written_limit(shape.mamba2.dt_max)],
            **({"time_step_min": shape.mamba2.dt_min} if shape.mamba2.dt_min else {}),
            "use_bias": shape.mamba2.bias,
            "use_conv_bias": shape.mamba2.conv_bias,
        }
    if shape.mlp is not None:
        settings |= {"intermediate_size": shape.mlp.ffn, "mlp_bias": shape.mlp.bias}
    if shape.moe is not None:
        settings |= write_sigmoid_router(shape.moe)
        settings["moe_shared_expert_intermediate_size"] = shape.moe.shared_ffn
        settings["moe_latent_size"] = shape.moe.latent or None
    return settings


_MAMBA2 = _adapter("mamba2", "backbone", {Kind.MAMBA2: MAMBA2})
_MIXERS = MappingProxyType({Kind.MAMBA2: MAMBA2, Kind.ATTENTION: ATTENTION, Kind.MLP: MLP})

FAMILIES = (
    ModelFamily(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        hub=_MAMBA2,
        memory=_MAMBA2,
        read=_read_mamba2,
        write=_write_mamba2,
    ),
    ModelFamily(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        hub=_adapter("nemotron_h", "backbone", {**_MIXERS, Kind.MOE: MOE_HUB}, DEPTHS),
        memory=_adapter("nemotron_h", "model", {**_MIXERS, Kind.MOE: MOE_MEMORY}, DEPTHS),
        read=_read_nemotron_h,
        write=_write_nemotron_h,
        depth=DEPTH,
    ),
)
