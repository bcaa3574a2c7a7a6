"""Published vision encoders, as modules of a run: `Module(model=radio_h(width=run.model.hidden), ...)`.

RADIO (C-RADIO, arXiv 2312.06709 and 2412.07679): ViTs with cropped positions, class and register tokens.
`width` is the hidden size of the language model that reads them. Images become one row per 2 x 2 patches,
projected by an MLP with squared ReLU behind an RMSNorm, as in Nemotron vision-language models. There the trunk
has a norm behind its last layer; RADIO as published has none: `replace(radio_h(...), final_norm=False)`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from braid.architecture import Attention, Mlp
from braid.encoders import Encoder, Pixels, PositionTable, Projector

GROUP = 4
"""Pixel shuffle: 2 x 2 patches make a row."""


def radio_h(*, width: int) -> Encoder:
    """RADIO-H: 32 layers of width 1,280 (ViT-H), 652 million weights in the trunk."""
    return _radio(width, layers=32, hidden=1280, heads=16, mlp=Mlp(ffn=5120, activation="gelu_tanh", bias=True))


def radio_g(*, width: int) -> Encoder:
    """RADIO-g: 40 layers of width 1,536 with SwiGLU, norms on the outputs of layers."""
    mlp = Mlp(ffn=4096, activation="swiglu", bias=True)
    return replace(_radio(width, layers=40, hidden=1536, heads=24, mlp=mlp), norm_position="post")


def radio_from(folder: Path | str, *, width: int) -> Encoder:
    """The encoder of a Hugging Face folder of type `radio`, by its config.json: for a run whose module starts
    from it (`--init-modules`)."""
    from braid.interchange.composite import described  # loads torch
    from braid.interchange.files import SafetensorsFolder

    found = described(Path(folder), SafetensorsFolder(Path(folder)).weight_map()).shape
    return replace(found, group=GROUP, projector=_projector(width, found.hidden))


def radio_g_gelu(*, width: int) -> Encoder:
    """RADIO-g with plain MLPs: 40 layers of width 1,536."""
    return _radio(width, layers=40, hidden=1536, heads=24, mlp=Mlp(ffn=6144, activation="gelu_tanh", bias=True))


def _radio(width: int, *, layers: int, hidden: int, heads: int, mlp: Mlp) -> Encoder:
    pixels = Pixels()
    head_dim = hidden // heads
    return Encoder(
        pattern="[*-]" * layers,
        hidden=hidden,
        norm="layer",
        norm_eps=1e-6,
        input=pixels.input,
        input_bias=False,
        pixels=pixels,
        positions=PositionTable(rows=128, columns=128, jitter=True),
        prefix=10,
        group=GROUP,
        attention=Attention(heads=heads, kv_heads=heads, head_dim=head_dim, positions="none", bias=True),
        mlp=mlp,
        projector=_projector(width, hidden),
    )


def _projector(width: int, hidden: int) -> Projector:
    return Projector(width=width, ffn=4 * GROUP * hidden, activation="relu2", bias=False, norm="rms")
