"""Bamba: a Mamba-2 layer or attention, then an MLP, in every layer (https://hf.co/blog/bamba)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from braid.architecture import Mamba2, Mlp, Model
from braid.interchange.family import ModelFamily, ends, head_copy, needed, read_model, write_model
from braid.interchange.llama import ATTENTION, EMBEDDING, read_attention, write_attention
from braid.interchange.mamba import MixerSettings, mamba2_rows, read_mixer, write_mixer
from braid.interchange.rope import write_rope
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, TableRow, rows
from braid.pattern import Kind, parse

MAMBA2 = mamba2_rows("mamba", "input_layernorm")
MLP: tuple[TableRow, ...] = (
    *rows("pre_ff_layernorm.weight", "mlp.norm.weight"),
    *rows("feed_forward.{}_proj.weight", "mlp.{}.weight", "gate up down"),
    *rows("feed_forward.{}_proj.bias", "mlp.{}.bias", "gate up down", when=lambda m: m.mlp.bias),
)
ADAPTER = Adapter(
    name="bamba",
    counting="pair",
    prefix="model.layers.{layer}.",
    ends=ends(EMBEDDING, rows("model.final_layernorm.weight", "final_norm.weight")),
    layers=MappingProxyType({Kind.MAMBA2: MAMBA2, Kind.ATTENTION: ATTENTION, Kind.MLP: MLP}),
    copies=head_copy(EMBEDDING),
)
ROPE_FRACTION = 0.5
MIXER_SETTINGS = MixerSettings(
    expand="mamba_expand",
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    numbers={"state": ("mamba_d_state", 256), "groups": ("mamba_n_groups", 1), "conv": ("mamba_d_conv", 4)},
    flags={"bias": ("mamba_proj_bias", False), "conv_bias": ("mamba_conv_bias", True)},
)
"""Those of Bamba and of Granite 4."""


def read_mamba2(settings: Settings) -> Mamba2:
    """The Mamba-2 layer of Bamba and of Granite 4, whose settings have the same names."""
    settings.unused("mamba_chunk_size")
    heads, expand = settings.integer("mamba_n_heads", 128), settings.integer("mamba_expand", 2)
    inner = expand * settings.integer("hidden_size")
    head_dim = inner // max(heads, 1)
    if settings.is_auto("mamba_d_head"):
        settings.unused("mamba_d_head")
    else:
        head_dim = settings.integer("mamba_d_head")
    if heads * head_dim != inner:
        rule = f"mamba_n_heads x mamba_d_head must be mamba_expand x hidden_size, here {inner}"
        settings.refuse("mamba_d_head", head_dim, rule)
    return read_mixer(settings, MIXER_SETTINGS, heads, head_dim)


def _read(settings: Settings) -> Model:
    settings.only("hidden_act", "silu", default="silu")
    settings.unused("num_logits_to_keep", "z_loss_coefficient", "use_mamba_kernels")
    layers = settings.integer("num_hidden_layers")
    attending = settings.integers("attn_layer_indices")
    outside = [number for number in attending if not 0 <= number < layers]
    if outside:
        settings.refuse("attn_layer_indices", attending, f"layers are numbered from 0 to {layers - 1}")
    return Model(
        pattern="".join("[*-]" if number in attending else "[M-]" for number in range(layers)),
        attention=read_attention(
            settings,
            heads=32,
            kv_heads=8,
            head_dim=None,
            fraction=ROPE_FRACTION,
            bias=settings.flag("attention_bias", False),
        ),
        mamba2=read_mamba2(settings),
        mlp=Mlp(ffn=settings.integer("intermediate_size", 14336), bias=settings.flag("mlp_bias", False)),
        **read_model(settings, default_eps=1e-5),
    )


def _write(shape: Model) -> dict[str, Any]:
    """Without attention layers, its settings are left to the family's defaults; so are those of Mamba-2."""
    mixers = [layer.kind for layer in parse(shape.pattern).layers if layer.kind.is_mixer]
    mlp = needed(shape.mlp, "mlp")
    settings = {
        **write_model(shape),
        "hidden_act": "silu",
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [number for number, kind in enumerate(mixers) if kind is Kind.ATTENTION],
        "intermediate_size": mlp.ffn,
        "mlp_bias": mlp.bias,
    }
    if (attention := shape.attention) is not None:
        settings |= write_attention(shape)
        settings["attention_bias"] = attention.bias
        fraction = {"partial_rotary_factor": attention.rope_fraction}
        settings["rope_parameters"] = {**write_rope(attention), **fraction}
    return settings if shape.mamba2 is None else {**settings, **write_mixer(shape, MIXER_SETTINGS)}


FAMILIES = (
    ModelFamily(
        model_type="bamba",
        architecture="BambaForCausalLM",
        hub=ADAPTER,
        memory=ADAPTER,
        read=_read,
        write=_write,
    ),
)
