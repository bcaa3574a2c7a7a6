"""Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral: softmax attention, then an MLP or experts, in every
layer."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from braid.architecture import Attention, Mlp, Model, Moe
from braid.interchange.family import ModelFamily, ends, head_copy, needed, read_model, write_model
from braid.interchange.moves import Move, joined
from braid.interchange.rope import read_rope, write_rope
from braid.interchange.settings import MISSING, Missing, Settings
from braid.interchange.tables import Adapter, Shape, TableRow, rows
from braid.interchange.windows import read_windows, write_layer_types
from braid.pattern import Kind, parse

# ---------------------------------------------------------------------------------------------- tables

EMBEDDING = "model.embed_tokens.weight"
PROJECTIONS = "self_attn.{}_proj"
ENDS = ends(EMBEDDING, rows("model.norm.weight", "final_norm.weight"))
ROTARY_TABLES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Old files hold the rotary frequencies, which follow from the configuration."""

ATTENTION: tuple[TableRow, ...] = (
    *rows("input_layernorm.weight", "attention.norm.weight"),
    *rows(f"{PROJECTIONS}.weight", "attention.{}.weight", "q k v o"),
    *rows(f"{PROJECTIONS}.bias", "attention.{}.bias", "q k v", when=lambda m: m.attention.bias),
    *rows("self_attn.o_proj.bias", "attention.o.bias", when=lambda m: m.attention.has_o_bias),
    *rows("self_attn.{}.weight", "attention.{}.weight", "q_norm k_norm", when=lambda m: m.attention.qk_norm),
)
MLP: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "mlp.norm.weight"),
    *rows("mlp.{}_proj.weight", "mlp.{}.weight", "gate up down"),
    *rows("mlp.{}_proj.bias", "mlp.{}.bias", "gate up down", when=lambda m: m.mlp.bias),
)
ROUTER: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight"),
    *rows("mlp.gate.weight", "moe.router.weight"),
)
MOE_HUB: tuple[TableRow, ...] = (
    *ROUTER,
    *rows("mlp.experts.{expert}.{}_proj.weight", "moe.experts.{expert}.{}.weight", "gate up down"),
)


def gate_and_up(shape: Shape) -> Move:
    """All of gate, then all of up."""
    return joined(shape.moe.ffn, shape.moe.ffn)


STACKED_EXPERTS: tuple[TableRow, ...] = (
    TableRow(
        theirs="mlp.experts.gate_up_proj",
        ours=("moe.experts.{expert}.gate.weight", "moe.experts.{expert}.up.weight"),
        move=gate_and_up,
    ),
    *rows("mlp.experts.down_proj", "moe.experts.{expert}.down.weight"),
)
MOE_MEMORY = (*ROUTER, *STACKED_EXPERTS)
MIXTRAL_HUB: tuple[TableRow, ...] = (
    *rows("post_attention_layernorm.weight", "moe.norm.weight"),
    *rows("block_sparse_moe.gate.weight", "moe.router.weight"),
    *rows(
        "block_sparse_moe.experts.{expert}.{}.weight",
        "moe.experts.{expert}.{}.weight",
        "w1:gate w3:up w2:down",
    ),
)


def adapter(name: str, **layers: tuple[TableRow, ...]) -> Adapter:
    """A table over the skeleton that these families share."""
    return Adapter(
        name=name,
        counting="pair",
        prefix="model.layers.{layer}.",
        ends=ENDS,
        layers=MappingProxyType({Kind[kind]: table for kind, table in layers.items()}),
        copies=head_copy(EMBEDDING),
        ignored=ROTARY_TABLES,
    )


# ---------------------------------------------------------------------------------------------- settings


def read_attention(
    settings: Settings,
    *,
    heads: int | Missing = MISSING,
    kv_heads: int | None = None,
    head_dim: int | None,
    base: float = 1e4,
    fraction: float | None = None,
    inert: tuple[str, ...] = (),
    **fields: Any,
) -> Attention:
    """The family's defaults apply to what a file does not set: without `kv_heads` there are as many as heads,
    without `head_dim` the hidden channels are divided by heads. `fraction` is the share of channels that RoPE
    rotates; None is for families that rotate all. `inert` are entries of rope_parameters without effect."""
    heads, hidden = settings.integer("num_attention_heads", heads), settings.integer("hidden_size")
    rope = read_rope(settings, base=base, fraction=1.0 if fraction is None else fraction, inert=inert)
    if fraction is None and rope.fraction != 1:
        settings.refuse("partial_rotary_factor", rope.fraction, "all channels turn in this family")
    settings.only("attention_dropout", 0.0, 0, None, default=0.0)
    kv_heads = settings.maybe_integer("num_key_value_heads", kv_heads)
    wide = settings.maybe_integer("head_dim", head_dim)
    return Attention(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // max(heads, 1) if wide is None else wide,
        rope_base=rope.base,
        rope_fraction=rope.fraction,
        rope_scaling=rope.scaling,
        **fields,
    )


def write_attention(shape: Model) -> dict[str, Any]:
    attention = needed(shape.attention, "attention")
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": write_rope(attention),
    }


def _read_llama(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.neutral("is_llama_config", True, False)
    settings.neutral("rope_interleaved", False)
    return Model(
        pattern="[*-]" * settings.integer("num_hidden_layers"),
        attention=read_attention(settings, head_dim=None, bias=settings.flag("attention_bias", False)),
        mlp=Mlp(ffn=settings.integer("intermediate_size"), bias=settings.flag("mlp_bias", False)),
        **read_model(settings),
    )


def _write_llama(shape: Model) -> dict[str, Any]:
    attention = needed(shape.attention, "attention")
    mlp = needed(shape.mlp, "mlp")
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(parse(shape.pattern).layers) // 2,
        "intermediate_size": mlp.ffn,
        "attention_bias": attention.bias,
        "mlp_bias": mlp.bias,
    }


def _read_mistral(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    return Model(
        pattern="[*-]" * settings.integer("num_hidden_layers"),
        attention=read_attention(
            settings, kv_heads=8, head_dim=None, window=settings.maybe_integer("sliding_window", 4096)
        ),
        mlp=Mlp(ffn=settings.integer("intermediate_size")),
        **read_model(settings),
    )


def _write_mistral(shape: Model) -> dict[str, Any]:
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(parse(shape.pattern).layers) // 2,
        "intermediate_size": needed(shape.mlp, "mlp").ffn,
        "sliding_window": needed(shape.attention, "attention").window,
    }


def _read_qwen2(settings: Settings) -> Model:
    """Qwen2 and Qwen2.5: queries, keys and values have biases, the output projection has none."""
    settings.neutral("use_mrope", False)
    return _read_qwen(settings, kv_heads=32, head_dim=None, bias=True, o_bias=False)


def _read_qwen3(settings: Settings) -> Model:
    bias = settings.flag("attention_bias", False)
    return _read_qwen(settings, kv_heads=32, head_dim=128, qk_norm=True, bias=bias)


def _read_qwen(settings: Settings, **attention: Any) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    layers = settings.integer("num_hidden_layers")
    return Model(
        pattern="[*-]" * layers,
        attention=read_attention(settings, **_qwen_windows(settings, layers), **attention),
        mlp=Mlp(ffn=settings.integer("intermediate_size")),
        **read_model(settings),
    )


def _qwen_windows(settings: Settings, layers: int) -> dict[str, Any]:
    """Which layers have a window: those in `layer_types`, or all from `max_window_layers` on."""
    window = settings.maybe_integer("sliding_window", 4096)
    first, used = settings.integer("max_window_layers", 28), settings.flag("use_sliding_window", False)
    kinds = settings.names("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if used and n >= first else "full_attention" for n in range(layers)]
    return read_windows(settings, kinds, window if used else None, layers)


def _write_qwen3(shape: Model) -> dict[str, Any]:
    return {**_write_qwen2(shape), "attention_bias": needed(shape.attention, "attention").bias}


def _write_qwen2(shape: Model) -> dict[str, Any]:
    attention, layers = needed(shape.attention, "attention"), len(parse(shape.pattern).layers) // 2
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "intermediate_size": needed(shape.mlp, "mlp").ffn,
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
        "layer_types": write_layer_types(attention, layers),
    }


def sparse_pattern(settings: Settings, mixers: str) -> str:
    """The pattern of a model in which some layers have a mixture and the others an MLP."""
    step, dense = settings.integer("decoder_sparse_step", 1), settings.integers("mlp_only_layers")
    if step < 1:
        settings.refuse("decoder_sparse_step", step, "must be 1 or more")
    sparse = [n not in dense and (n + 1) % max(step, 1) == 0 for n in range(len(mixers))]
    return "".join(f"[{mixer}{'E' if here else '-'}]" for mixer, here in zip(mixers, sparse, strict=True))


def dense_layers(shape: Model) -> list[int]:
    """Numbers of the layers that have an MLP."""
    feed_forward = [layer for layer in parse(shape.pattern).layers if not layer.kind.is_mixer]
    return [number for number, layer in enumerate(feed_forward) if layer.kind is Kind.MLP]


def read_mlp(settings: Settings, pattern: str) -> Mlp | None:
    """The MLP of the layers without a mixture; None where every layer has one."""
    ffn = settings.maybe_integer("intermediate_size")
    if "-" not in pattern:
        return None
    if ffn is None:
        settings.refuse("intermediate_size", None, "must be given where layers have an MLP")
    return Mlp(ffn=ffn or 1)


def _read_qwen3_moe(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.unused("max_window_layers")
    settings.neutral("qkv_bias", False)
    settings.neutral("use_qk_norm", True, why="queries and keys have norms in this family")
    settings.neutral("shared_expert_intermediate_size", 0, None, why="there is no shared expert in this family")
    window = settings.maybe_integer("sliding_window", 4096)
    experts = settings.maybe_integer("num_local_experts")
    named = settings.integer("num_experts", 128 if experts is None else experts)
    if experts not in (None, named):
        settings.refuse("num_local_experts", experts, f"num_experts says {named}")
    pattern = sparse_pattern(settings, "*" * settings.integer("num_hidden_layers"))
    return Model(
        pattern=pattern,
        attention=read_attention(
            settings,
            kv_heads=4,
            head_dim=None,
            qk_norm=True,
            bias=settings.flag("attention_bias", False),
            window=window if settings.flag("use_sliding_window", False) else None,
        ),
        mlp=read_mlp(settings, pattern),
        moe=Moe(
            experts=named,
            top_k=settings.integer("num_experts_per_tok", 8),
            ffn=settings.integer("moe_intermediate_size", 768),
            normalize_top_k=settings.flag("norm_topk_prob", False),
            aux_loss=0.0,
        ),
        **read_model(settings),
    )


def _write_qwen3_moe(shape: Model) -> dict[str, Any]:
    attention = needed(shape.attention, "attention")
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(parse(shape.pattern).layers) // 2,
        **write_sparse(shape),
        "attention_bias": attention.bias,
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
    }


def write_sparse(shape: Model) -> dict[str, Any]:
    """Which layers have experts, and which; a model without any says nothing about them."""
    settings: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers(shape)}
    if shape.mlp is not None:
        settings["intermediate_size"] = shape.mlp.ffn
    if shape.moe is not None:
        settings |= {
            "num_experts": shape.moe.experts,
            "num_experts_per_tok": shape.moe.top_k,
            "moe_intermediate_size": shape.moe.ffn,
            "norm_topk_prob": shape.moe.normalize_top_k,
        }
    return settings


def _read_mixtral(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    jitter = settings.number("router_jitter_noise", 0.0)
    if jitter:
        settings.note(f"router_jitter_noise = {jitter:g}: trained as moe.jitter, on the router's input alone")
    return Model(
        pattern="[*E]" * settings.integer("num_hidden_layers"),
        attention=read_attention(
            settings, kv_heads=8, head_dim=None, base=1e6, window=settings.maybe_integer("sliding_window")
        ),
        moe=Moe(
            experts=settings.integer("num_local_experts", 8),
            top_k=settings.integer("num_experts_per_tok", 2),
            ffn=settings.integer("intermediate_size"),
            aux_loss=0.0,
            jitter=jitter,
        ),
        **read_model(settings, default_eps=1e-5),
    )


def _write_mixtral(shape: Model) -> dict[str, Any]:
    attention = needed(shape.attention, "attention")
    moe = needed(shape.moe, "moe")
    return {
        **write_model(shape),
        **write_attention(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(parse(shape.pattern).layers) // 2,
        "intermediate_size": moe.ffn,
        "sliding_window": attention.window,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_jitter_noise": moe.jitter,
    }


_LLAMA = adapter("llama", ATTENTION=ATTENTION, MLP=MLP)
_MISTRAL = adapter("mistral", ATTENTION=ATTENTION, MLP=MLP)
_QWEN2 = adapter("qwen2", ATTENTION=ATTENTION, MLP=MLP)
_QWEN3 = adapter("qwen3", ATTENTION=ATTENTION, MLP=MLP)

FAMILIES = (
    ModelFamily(
        model_type="llama",
        architecture="LlamaForCausalLM",
        hub=_LLAMA,
        memory=_LLAMA,
        read=_read_llama,
        write=_write_llama,
    ),
    ModelFamily(
        model_type="mistral",
        architecture="MistralForCausalLM",
        hub=_MISTRAL,
        memory=_MISTRAL,
        read=_read_mistral,
        write=_write_mistral,
    ),
    ModelFamily(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        hub=_QWEN2,
        memory=_QWEN2,
        read=_read_qwen2,
        write=_write_qwen2,
    ),
    ModelFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        hub=_QWEN3,
        memory=_QWEN3,
        read=_read_qwen3,
        write=_write_qwen3,
    ),
    ModelFamily(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        hub=adapter("qwen3_moe", ATTENTION=ATTENTION, MLP=MLP, MOE=MOE_HUB),
        memory=adapter("qwen3_moe", ATTENTION=ATTENTION, MLP=MLP, MOE=MOE_MEMORY),
        read=_read_qwen3_moe,
        write=_write_qwen3_moe,
    ),
    ModelFamily(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        hub=adapter("mixtral", ATTENTION=ATTENTION, MOE=MIXTRAL_HUB),
        memory=adapter("mixtral", ATTENTION=ATTENTION, MOE=MOE_MEMORY),
        read=_read_mixtral,
        write=_write_mixtral,
    ),
)
