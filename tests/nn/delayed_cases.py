"""One layer of every kind that can delay its weight gradients, small, with random weights and a forward."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels import attention, delta_rule, grouped_mlp, ssd
from braid.kernels.grouped_mlp import GroupedMlp, grouped
from braid.nn.attention import Attention
from braid.nn.delta_net import DeltaNet
from braid.nn.latent_attention import LatentAttention
from braid.nn.mamba2 import Mamba2
from braid.nn.mlp import Mlp
from braid.nn.moe.layer import Moe
from braid.nn.rotary import rotary_tables
from tests.nn import moe_cases

HIDDEN, ROWS, TOKENS, EPS = 24, 2, 9, 1e-5


class Case(NamedTuple):
    """A layer, and what it makes of an input of ROWS, TOKENS, HIDDEN."""

    layer: nn.Module
    forward: Callable[[Tensor], Tensor]


def case(kind: str, dtype: torch.dtype) -> Case:
    """A new one, the same every time."""
    made = KINDS[kind](dtype)
    generator = torch.Generator().manual_seed(len(kind))
    for parameter in made.layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def inputs(dtype: torch.dtype, count: int) -> list[Tensor]:
    """As leaves."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(ROWS, TOKENS, HIDDEN, generator=generator) for _ in range(count)]
    return [x.to(dtype).requires_grad_() for x in drawn]


def _attention(dtype: torch.dtype) -> Case:
    shape = architecture.Attention(heads=4, kv_heads=2, head_dim=6, qk_norm=True, bias=True, gate=True)
    layer = Attention(shape, HIDDEN, EPS, attention.REFERENCE.function, dtype=dtype)
    return Case(layer, lambda x: layer(x, _spans(), _rotary(shape.head_dim, dtype)))


def _latent_attention(dtype: torch.dtype) -> Case:
    shape = architecture.LatentAttention(heads=3, q_rank=9, kv_rank=7, nope_dim=5, rope_dim=6, v_dim=4)
    layer = LatentAttention(shape, HIDDEN, EPS, attention.REFERENCE.function, dtype=dtype)
    return Case(layer, lambda x: layer(x, _spans(), _rotary(shape.rope_dim, dtype)))


def _mamba2(dtype: torch.dtype) -> Case:
    shape = architecture.Mamba2(heads=4, head_dim=3, state=5, groups=2, bias=True)
    layer = Mamba2(shape, HIDDEN, EPS, ssd.REFERENCE.function, dtype=dtype)
    return Case(layer, layer)


def _delta_net(dtype: torch.dtype) -> Case:
    shape = architecture.DeltaNet(key_heads=2, value_heads=4, key_dim=4, value_dim=3)
    layer = DeltaNet(shape, HIDDEN, EPS, delta_rule.REFERENCE.function, dtype=dtype)
    return Case(layer, layer)


def _mlp(dtype: torch.dtype) -> Case:
    layer = Mlp(architecture.Mlp(ffn=13, bias=True), HIDDEN, dtype=dtype)
    return Case(layer, layer)


def _moe(dtype: torch.dtype) -> Case:
    return _experts(dtype, grouped_mlp.REFERENCE.function)


def _moe_grouped(dtype: torch.dtype) -> Case:
    return _experts(dtype, grouped.grouped_mlp)


def _experts(dtype: torch.dtype, kernel: GroupedMlp) -> Case:
    """With everything that a layer of experts can have. There are more experts than tokens can visit."""
    shape = architecture.Moe(
        experts=40, top_k=2, ffn=8, bias=True, latent=16, shared_ffn=11, shared_gate=True, aux_loss=0.0
    )
    layer = Moe(shape, HIDDEN, kernel, dtype=dtype)
    tokens = moe_cases.of_rows(ROWS, TOKENS)
    return Case(layer, lambda x: moe_cases.forward(layer, x.flatten(0, 1), tokens)[0].view_as(x))


def _spans() -> attention.Spans:
    return attention.spans_of(torch.zeros(ROWS, TOKENS), None, torch.device("cpu"))


def _rotary(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rotary_tables(torch.arange(TOKENS).expand(ROWS, TOKENS), channels, 50.0, dtype)


KINDS = MappingProxyType(
    {
        "attention": _attention,
        "latent attention": _latent_attention,
        "mamba2": _mamba2,
        "delta net": _delta_net,
        "mlp": _mlp,
        "moe": _moe,
        "moe, grouped": _moe_grouped,
    }
)
