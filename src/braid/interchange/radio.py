"""RADIO: a vision encoder, alone or inside a model that reads images.

A folder of type `radio` is an encoder without a projector. What files hold besides its weights are constants:
the norming of pixels, which config.json states too, and which class tokens make the summary, which braid does
not compute. A projection of patches of several frames (video) has no place in braid, which keeps it untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.architecture import Attention, Mlp
from braid.encoders import Encoder, Pixels, PositionTable, Projector
from braid.interchange.family import needed
from braid.interchange.moves import Move, Same, Stacked, joined
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, Shape, TableRow, named, rows
from braid.pattern import Kind, parse

MODEL_TYPE, ARCHITECTURE = "radio", "RadioModel"
LAYER_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
CLASS_TOKENS = 3
"""Of the prefix tokens of a model that was not imported: as many as RADIO has; the others are registers."""

# ---------------------------------------------------------------------------------------------- tables


def _fused(shape: Shape) -> Move:
    rows_each = shape.attention.heads * shape.attention.head_dim
    return joined(rows_each, rows_each, rows_each)


def _one_batch(shape: Shape) -> Move:
    """Theirs has a leading dim of 1."""
    return Stacked((1,), Same())


def _biased(shape: Shape) -> bool:
    return bool(shape.attention.bias)


def _plain(shape: Shape) -> bool:
    return bool(shape.mlp.activation != "swiglu")


def _gated(shape: Shape) -> bool:
    return not _plain(shape)


def _scaled(shape: Shape) -> bool:
    return shape.layer_scale is not None


def has_final_norm(shape: Shape) -> bool:
    return bool(shape.final_norm)


PARTS = "weight bias"
ATTENTION_ENDS: tuple[TableRow, ...] = (
    *rows("norm1.{}", "attention.norm.{}", PARTS),
    *rows("layer_scale1.lambda1", "attention.scale.weight", when=_scaled),
)
ATTENTION_HUB: tuple[TableRow, ...] = (
    *ATTENTION_ENDS,
    TableRow(theirs="attn.qkv.weight", ours=named("attention.{}.weight", "q k v"), move=_fused),
    TableRow(theirs="attn.qkv.bias", ours=named("attention.{}.bias", "q k v"), move=_fused, when=_biased),
    *rows("attn.proj.{}", "attention.o.{}", PARTS),
)
ATTENTION_MEMORY: tuple[TableRow, ...] = (
    *ATTENTION_ENDS,
    *rows("attention.{}_proj.weight", "attention.{}.weight", "q k v"),
    *rows("attention.{}_proj.bias", "attention.{}.bias", "q k v", when=_biased),
    *rows("attention.o_proj.{}", "attention.o.{}", PARTS),
)
MLP: tuple[TableRow, ...] = (
    *rows("norm2.{}", "mlp.norm.{}", PARTS),
    *rows("mlp.{}.weight", "mlp.{}.weight", "fc1:up fc2:down", when=_plain),
    *rows("mlp.{}.bias", "mlp.{}.bias", "fc1:up fc2:down", when=_plain),
    *rows("mlp.{}_proj.weight", "mlp.{}.weight", "gate up down", when=_gated),
    *rows("mlp.{}_proj.bias", "mlp.{}.bias", "gate up down", when=_gated),
    *rows("layer_scale2.lambda1", "mlp.scale.weight", when=_scaled),
)


def _has_prefix(shape: Shape) -> bool:
    return bool(shape.prefix)


def _adapter(layers: str, patches: Mapping[str, str], attention: tuple[TableRow, ...]) -> Adapter:
    return Adapter(
        name=MODEL_TYPE,
        counting="pair",
        prefix=layers,
        ends=(
            *rows(patches["weight"], "patches.weight"),
            *rows(patches["positions"], "patches.positions", move=_one_batch),
            *rows(patches["prefix"], "patches.prefix", when=_has_prefix),
        ),
        layers=MappingProxyType({Kind.ATTENTION: attention, Kind.MLP: MLP}),
    )


HUB = _adapter(
    "radio_model.model.blocks.{layer}.",
    {
        "weight": "radio_model.model.patch_generator.embedder.weight",
        "positions": "radio_model.model.patch_generator.pos_embed",
        "prefix": "radio_model.model.patch_generator.cls_token.token",
    },
    ATTENTION_HUB,
)
MEMORY = _adapter(
    "encoder.layer.{layer}.",
    {
        "weight": "embeddings.patch_projection.weight",
        "positions": "embeddings.position_embedding",
        "prefix": "embeddings.cls_register_token",
    },
    ATTENTION_MEMORY,
)
VIDEO = (
    "radio_model.model.patch_generator.video_embedder.weight",
    "embeddings.video_patch_projection.weight",
)
"""The projection of patches of several frames."""
SUMMARY = ("radio_model.summary_idxs", "summary_idxs")
MEAN = ("radio_model.input_conditioner.norm_mean", "input_conditioner.norm_mean")
STD = ("radio_model.input_conditioner.norm_std", "input_conditioner.norm_std")
"""Constants: in files, and in a state_dict."""

# -------------------------------------------------------------------------------------------- settings

ACTIVATIONS: Mapping[str, Any] = MappingProxyType({"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"})
"""GELU by erf, and its approximation by tanh."""
CLIP_MEAN, CLIP_STD = Pixels().mean, Pixels().std


def read_trunk(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """The fields of an `Encoder` but for its end: norm, group and projector. LayerScale is a part of the model
    only if files have it: transformers fills in ones."""
    hidden, heads = settings.integer("hidden_size", 1280), settings.integer("num_attention_heads", 16)
    if heads < 1 or hidden % max(heads, 1):
        settings.refuse("num_attention_heads", heads, f"must divide hidden_size = {hidden}")
        heads = 1
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"):
        settings.only(name, 0.0, 0, default=0.0)
    pixels, biased = _read_pixels(settings), settings.flag("qkv_bias", True)
    side = settings.integer("max_img_size", 2048) // max(pixels.patch, 1)
    # An image of another size is resized by whoever prepares it; a summary is not computed here.
    settings.unused("image_size", "summary_idxs", "video_temporal_patch_size", "video_patch_dim")
    settings.repeats("patch_dim", pixels.input, "num_channels x patch_size²")
    return {
        "pattern": "[*-]" * settings.integer("num_hidden_layers", 32),
        "hidden": hidden,
        "norm": "layer",
        "norm_eps": settings.number("layer_norm_eps", 1e-6),
        "init_std": settings.number("initializer_range", 0.02),
        "input": pixels.input,
        "input_bias": False,
        "pixels": pixels,
        "positions": PositionTable(rows=side, columns=side),
        "prefix": settings.integer("num_cls_tokens", 3) + settings.integer("num_registers", 7),
        "layer_scale": _read_layer_scale(settings, tensors),
        "attention": Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=settings.maybe_integer("head_dim") or hidden // heads,
            positions="none",
            bias=biased,
            o_bias=None if biased else True,
        ),
        "mlp": _read_mlp(settings, hidden),
    }


def _read_pixels(settings: Settings) -> Pixels:
    channels = settings.only("num_channels", 3, 1, default=3)
    return Pixels(
        patch=settings.integer("patch_size", 16),
        channels=channels,
        mean=_numbers(settings, "norm_mean", CLIP_MEAN, channels),
        std=_numbers(settings, "norm_std", CLIP_STD, channels),
    )


def _numbers(settings: Settings, name: str, default: Sequence[float], count: int) -> tuple[float, ...]:
    """One number of each channel."""
    given = settings.numbers(name, default)
    if len(given) != count:
        settings.refuse(name, list(given), f"must be {count} numbers, one of each channel")
    return tuple(given)


def _read_layer_scale(settings: Settings, tensors: Collection[str]) -> float | None:
    value = settings.number("layerscale_value", 1.0)
    if any(name.endswith(LAYER_SCALES) for name in tensors):
        return value
    if value != 1.0:
        settings.refuse("layerscale_value", value, "the files have no layer_scale tensors, so it must be 1.0")
    return None


def _read_mlp(settings: Settings, hidden: int) -> Mlp:
    ffn = int(hidden * settings.number("mlp_ratio", 4.0))
    if settings.flag("use_swiglu_ffn", False):
        settings.unused("hidden_act")
        return Mlp(ffn=_gated_ffn(ffn), activation="swiglu", bias=True)
    return Mlp(
        ffn=ffn,
        activation=ACTIVATIONS[settings.only("hidden_act", *ACTIVATIONS, default="gelu")],
        bias=True,
    )


def _gated_ffn(ffn: int) -> int:
    """SwiGLU has two thirds of the channels, rounded up to a multiple of 8."""
    return (int(ffn * 2 / 3) + 7) // 8 * 8


def write_trunk(shape: Encoder) -> dict[str, Any]:
    """The settings of an encoder. What they have no place for is found by reading them back."""
    attention, mlp = needed(shape.attention, "attention"), needed(shape.mlp, "mlp")
    pixels = needed(shape.pixels, "pixels")
    table = needed(shape.positions, "positions")
    gated = mlp.activation == "swiglu"
    words = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    classes = min(shape.prefix, CLASS_TOKENS)
    head_dim = {} if attention.heads * attention.head_dim == shape.hidden else {"head_dim": attention.head_dim}
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": sum(layer.kind is Kind.ATTENTION for layer in parse(shape.pattern).layers),
        "num_attention_heads": attention.heads,
        **head_dim,
        "qkv_bias": attention.bias,
        "mlp_ratio": _ratio(mlp.ffn * 3 // 2 if gated else mlp.ffn, shape.hidden),
        "use_swiglu_ffn": gated,
        "hidden_act": words.get(mlp.activation, "gelu"),
        "layer_norm_eps": shape.norm_eps,
        "layerscale_value": 1.0 if shape.layer_scale is None else shape.layer_scale,
        "initializer_range": shape.init_std,
        "num_channels": pixels.channels,
        "patch_size": pixels.patch,
        "max_img_size": table.rows * pixels.patch,
        "num_cls_tokens": classes,
        "num_registers": shape.prefix - classes,
        "summary_idxs": list(range(min(classes, 2))),
        "video_temporal_patch_size": None,
        "norm_mean": list(pixels.mean),
        "norm_std": list(pixels.std),
    }


def _ratio(ffn: int, hidden: int) -> float:
    """A number that `int(hidden * number)` makes ffn of."""
    ratio = ffn / hidden
    return ratio if int(hidden * ratio) == ffn else (ffn + 0.5) / hidden


def alone(fields: Mapping[str, Any]) -> Encoder:
    """An encoder whose rows are its features; its projector has no tensors in any file."""
    width = fields["hidden"]
    return Encoder(**fields, final_norm=False, group=1, projector=Projector(width=width, bias=False))


def norming(shape: Encoder) -> dict[str, Tensor]:
    """The norming of pixels as files hold it, in either form."""
    pixels = needed(shape.pixels, "pixels")
    both = ((MEAN, pixels.mean), (STD, pixels.std))
    return {name: torch.tensor(values).view(-1, 1, 1) for names, values in both for name in names}


def constants(shape: Encoder, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What files of such an encoder hold besides weights. `config` are the settings that are written."""
    pixels = norming(shape)
    summary = torch.tensor(config["summary_idxs"], dtype=torch.int64)
    return {SUMMARY[0]: summary, MEAN[0]: pixels[MEAN[0]], STD[0]: pixels[STD[0]]}
