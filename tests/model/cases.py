"""Small models and batches that the tests of this room share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from braid import architecture, kernels, pattern
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel

SHAPE = architecture.Model(
    pattern="",
    hidden=20,
    vocab=17,
    init_std=0.3,
    attention=architecture.Attention(heads=3, kv_heads=3, head_dim=10),
    mlp=architecture.Mlp(ffn=13),
    moe=architecture.Moe(experts=5, top_k=2, ffn=7, shared_ffn=6, aux_loss=0.0),
)
"""Odd sizes throughout."""


def build(
    text: str, shape: architecture.Model = SHAPE, dtype: torch.dtype = torch.float64, seed: int = 1
) -> LanguageModel:
    shape = replace(shape, pattern=text)
    chosen = kernels.choose(shape, pattern.parse(text).kinds(), torch.device("cpu"), dtype)
    model = LanguageModel(shape, pattern.parse(text), chosen, dtype=dtype)
    model.initialize(seed)
    return model


def batch(rows: Sequence[Sequence[int]], vocab: int = 17, seed: int = 0) -> MicroBatch:
    """One row per list of document lengths; rows are filled up with padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = max(sum(row) for row in rows)
    shape = (len(rows), tokens)
    positions = torch.zeros(shape, dtype=torch.int64)
    documents = torch.full(shape, -1)
    for b, row in enumerate(rows):
        start = 0
        for number, length in enumerate(row):
            positions[b, start : start + length] = torch.arange(length)
            documents[b, start : start + length] = number
            start += length
    return MicroBatch(
        tokens_BT=torch.randint(0, vocab, shape, generator=generator),
        labels_BT=torch.randint(0, vocab, shape, generator=generator),
        loss_mask_BT=(torch.rand(shape, generator=generator) < 0.8) & (documents >= 0),
        positions_BT=positions,
        documents_BT=documents,
        sample_B=torch.arange(len(rows)) + 100,
        step=3,
        seed=4,
    )


def part(whole: MicroBatch, rows: slice, tokens: slice = slice(None)) -> MicroBatch:
    """Some rows of a batch, or some tokens of them."""
    return replace(
        whole,
        tokens_BT=whole.tokens_BT[rows, tokens],
        labels_BT=whole.labels_BT[rows, tokens],
        loss_mask_BT=whole.loss_mask_BT[rows, tokens],
        positions_BT=whole.positions_BT[rows, tokens],
        documents_BT=whole.documents_BT[rows, tokens],
        sample_B=whole.sample_B[rows],
    )


def canonical_grads(model: LanguageModel) -> dict[str, Tensor]:
    """Every canonical tensor's gradient, zero where there is none."""
    parameters = model.tensors()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    return {name: tensor.read(grads[tensor.parameter]) for name, tensor in model.canonical().items()}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Relative to each tensor's norm, with an absolute floor."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name] - tensor).norm() / tensor.norm().clamp(min=1e-6)
        assert error.item() < bound, f"{name}: {error.item():.2e}"
