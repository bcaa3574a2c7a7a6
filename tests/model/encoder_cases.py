"""Small encoders and items that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from braid import architecture, kernels, pattern
from braid.distributed.collectives import Groups
from braid.encoders import Encoder, PositionTable, Projector
from braid.model.encoder import EncoderModel, Items
from braid.nn.moe import token_dispatcher

ENCODER = Encoder(
    pattern="*-",
    hidden=12,
    input=7,
    group=2,
    projector=Projector(width=20, ffn=9, norm="rms"),
    init_std=0.3,
    attention=architecture.Attention(heads=4, kv_heads=4, head_dim=6),
    latent_attention=architecture.LatentAttention(
        heads=4, q_rank=8, kv_rank=6, nope_dim=4, rope_dim=4, v_dim=5
    ),
    mamba2=architecture.Mamba2(heads=4, head_dim=3, state=5),
    delta_net=architecture.DeltaNet(key_heads=4, value_heads=4, key_dim=3, value_dim=5),
    mlp=architecture.Mlp(ffn=8),
    moe=architecture.Moe(experts=4, top_k=2, ffn=6, shared_ffn=8, aux_loss=0.1, z_loss=0.1),
)
"""Heads and channels split over four ranks."""
HYPER = replace(ENCODER, hyper=architecture.HyperConnections(streams=2, sinkhorn_steps=3))
IMAGES = replace(
    ENCODER,
    norm="layer",
    attention=architecture.Attention(heads=4, kv_heads=4, head_dim=6, positions="none"),
    mlp=architecture.Mlp(ffn=8, activation="gelu_tanh", bias=True),
    positions=PositionTable(rows=5, columns=3, jitter=True),
    prefix=3,
    layer_scale=0.6,
    final_norm=False,
    group=4,
    projector=Projector(width=20, ffn=9, activation="relu2", bias=False, norm="layer"),
)
"""2 x 2 patches in a row."""
LENGTHS = (4, 2, 10, 6)
GRIDS = ((2, 2), (4, 6), (2, 4), (6, 2))
"""Items of two dimensions."""


def build(
    text: str, shape: Encoder = ENCODER, groups: Groups = Groups(), dtype: torch.dtype = torch.float64
) -> EncoderModel:
    layout = pattern.joined(pattern.parse(text))
    shape = replace(shape, pattern=text)
    chosen = kernels.choose(shape, layout.kinds(), torch.device("cpu"), dtype)
    dispatcher = None
    if shape.moe is not None:
        dispatcher = token_dispatcher.choose(shape.moe, shape.hidden, groups, "auto").function
    model = EncoderModel(shape, layout, chosen, groups=groups, dispatcher=dispatcher, dtype=dtype)
    model.initialize(1, prefix="modules.vision.")
    return model


def items(
    lengths: Sequence[int] = LENGTHS,
    numbers: int = 7,
    dtype: torch.dtype = torch.float64,
    grids: Sequence[tuple[int, int]] | None = None,
) -> Items:
    """Items whose patches depend on their sample alone; samples have two each."""
    samples = [5 + place // 2 for place in range(len(lengths))]
    chosen = [
        torch.randn(length, numbers, dtype=dtype, generator=torch.Generator().manual_seed(place))
        for place, length in enumerate(lengths)
    ]
    patches = torch.cat([torch.zeros(0, numbers, dtype=dtype), *chosen])
    return Items(
        patches_NI=patches,
        lengths=tuple(lengths),
        grids=[(1, length) for length in lengths] if grids is None else grids,
        samples=samples,
        numbers=[place % 2 for place in range(len(lengths))],
        step=3,
        seed=4,
    )


def pictures(grids: Sequence[tuple[int, int]] = GRIDS, dtype: torch.dtype = torch.float64) -> Items:
    """Items of two dimensions."""
    return items([rows * columns for rows, columns in grids], dtype=dtype, grids=grids)


def probe(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def gradients(model: EncoderModel) -> dict[str, Tensor]:
    """Every canonical tensor's gradient, zero where there is none."""
    tensors = model.tensors()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in tensors.items()}
    return {name: tensor.read(grads[tensor.parameter]) for name, tensor in model.canonical().items()}
