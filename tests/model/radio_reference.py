"""transformers' RADIO beside an encoder with the same weights, tiny: what both make of the same images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from braid import kernels, pattern
from braid.architecture import Attention, Mlp
from braid.encoders import Encoder, Pixels, PositionTable, Projector
from braid.model.encoder import EncoderModel, Items
from braid.patch_grid import patch_places

if TYPE_CHECKING:
    from transformers import RadioConfig, RadioModel

SMALL: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "mlp_ratio": 2.0,
    "patch_size": 2,
    "max_img_size": 10,
    "num_cls_tokens": 2,
    "num_registers": 1,
    "layerscale_value": 0.7,
}
"""A table of 5 x 5 positions."""
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

LAYER = {
    "norm1": "attention.norm",
    "attention.q_proj": "attention.q",
    "attention.k_proj": "attention.k",
    "attention.v_proj": "attention.v",
    "attention.o_proj": "attention.o",
    "norm2": "mlp.norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""Modules of a layer, with the weight and the bias of each."""


def radio(**changes: Any) -> RadioModel:
    """A small model with random weights everywhere."""
    from transformers import RadioConfig, RadioModel  # takes seconds to load

    model = RadioModel(RadioConfig(**SMALL | changes)).double().eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, 0.5 * (weight.ndim == 1), 0.4, generator=generator)
    return model


def encoder_of(config: RadioConfig, *, group: int = 1, **changes: Any) -> Encoder:
    """The shape of a model of transformers. Its projector passes joined features on as they are."""
    hidden, heads, side = (
        config.hidden_size,
        config.num_attention_heads,
        config.max_img_size // config.patch_size,
    )
    ffn = int(hidden * config.mlp_ratio)
    mlp = Mlp(ffn=ffn, activation=ACTIVATIONS[config.hidden_act], bias=True)  # type: ignore[arg-type]
    if config.use_swiglu_ffn:
        mlp = Mlp(ffn=(int(ffn * 2 / 3) + 7) // 8 * 8, activation="swiglu", bias=True)
    pixels = Pixels(patch=config.patch_size)
    fields: dict[str, Any] = {
        "pattern": "[*-]" * config.num_hidden_layers,
        "hidden": hidden,
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "input": pixels.input,
        "input_bias": False,
        "pixels": pixels,
        "positions": PositionTable(rows=side, columns=side),
        "prefix": config.num_cls_tokens + config.num_registers,
        "layer_scale": config.layerscale_value,
        "final_norm": False,
        "group": group,
        "attention": Attention(
            heads=heads, kv_heads=heads, head_dim=hidden // heads, positions="none", bias=True
        ),
        "mlp": mlp,
        "projector": Projector(width=group * hidden, bias=False),
    }
    return Encoder(**fields | changes)


def named(model: RadioModel) -> dict[str, str]:
    """Names of transformers' parameters by those of an encoder."""
    at = "embeddings"
    names = {
        "patches.weight": f"{at}.patch_projection.weight",
        "patches.positions": f"{at}.position_embedding",
        "patches.prefix": f"{at}.cls_register_token",
    }
    known = dict(model.named_parameters())
    for layer in range(model.config.num_hidden_layers):
        theirs, ours = f"encoder.layer.{layer}", f"blocks.{layer}"
        for there, here in LAYER.items():
            for part in ("weight", "bias"):
                if f"{theirs}.{there}.{part}" in known:
                    names[f"{ours}.{here}.{part}"] = f"{theirs}.{there}.{part}"
        names[f"{ours}.attention.scale.weight"] = f"{theirs}.layer_scale1.lambda1"
        names[f"{ours}.mlp.scale.weight"] = f"{theirs}.layer_scale2.lambda1"
    return names


def beside(model: RadioModel, shape: Encoder) -> EncoderModel:
    """An encoder with the weights of a model of transformers."""
    layout = pattern.joined(pattern.parse(shape.pattern))
    chosen = kernels.choose(shape, layout.kinds(), torch.device("cpu"), torch.float64)
    built = EncoderModel(shape, layout, chosen, dtype=torch.float64)
    built.initialize(1)
    places, tensors, given = built.canonical(), built.tensors(), dict(model.named_parameters())
    names = named(model)
    assert set(names) == {name for name in places if name.split(".")[0] in ("patches", "blocks")}
    assert set(names.values()) == set(given)
    for name, theirs in names.items():
        places[name].write(tensors[places[name].parameter], given[theirs].detach().view(places[name].shape))
    passed = places["projector.out.weight"]
    if not shape.projector.ffn:
        passed.write(tensors[passed.parameter], torch.eye(shape.projector.width, dtype=torch.float64))
    return built


def gradients_of(model: RadioModel) -> dict[str, Tensor]:
    """Gradients of transformers' parameters, by the names of an encoder."""
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: grads[theirs].squeeze(0) for name, theirs in named(model).items()}  # type: ignore[union-attr]


def images(grids: Sequence[tuple[int, int]], patch: int = 2, seed: int = 0) -> list[Tensor]:
    """Random images of so many patches, channels first."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, rows * patch, columns * patch, dtype=torch.float64, generator=generator)
        for rows, columns in grids
    ]


def row_by_row(image: Tensor, patch: int = 2) -> Tensor:
    """The patches of an image in reading order, each (channel, y, x)."""
    channels, height, width = image.shape
    cut = image.view(channels, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch)


def order(grid: tuple[int, int], block: int) -> Tensor:
    """For every patch that is packed, its number in reading order."""
    y_N, x_N = patch_places(*grid, block)
    return torch.from_numpy(y_N * grid[1] + x_N)


def items_of(shape: Encoder, pictures: Sequence[Tensor], *, training: bool = False) -> Items:
    """Images as an encoder reads them, normed as its pixels say."""
    patch, block = shape.pixels.patch, shape.block  # type: ignore[union-attr]
    grids = [(image.shape[1] // patch, image.shape[2] // patch) for image in pictures]
    mean, std = (torch.tensor(each).double().view(3, 1, 1) for each in (shape.pixels.mean, shape.pixels.std))  # type: ignore[union-attr]
    cut = [
        row_by_row((image - mean) / std, patch)[order(grid, block)]
        for image, grid in zip(pictures, grids, strict=True)
    ]
    return Items(
        patches_NI=torch.cat(cut),
        lengths=[len(each) for each in cut],
        grids=grids,
        samples=list(range(len(cut))),
        numbers=[0] * len(cut),
        training=training,
    )
