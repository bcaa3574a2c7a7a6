"""Attention and MLP as modules: against formulas on their canonical weights, outputs and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels import attention as attention_kernels
from braid.nn.attention import Attention
from braid.nn.init import initialize
from braid.nn.mlp import Mlp
from braid.nn.rotary import rotary_tables

CPU = torch.device("cpu")
HIDDEN, TOKENS, EPS = 11, 37, 1e-5


def canonical_weights(module: Attention | Mlp) -> dict[str, Tensor]:
    """The module's weights by name, all of them random, as leaves of their own."""
    parameters = dict(module.named_parameters())
    initialize(parameters, module.canonical(), seed=1, std=0.5, layers=1)
    for number, (name, tensor) in enumerate(module.canonical().items()):
        generator = torch.Generator().manual_seed(number)
        if not name.endswith("weight") or len(tensor.shape) == 1:
            value = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            tensor.write(parameters[tensor.parameter], value)
    return {
        name: tensor.read(parameters[tensor.parameter]).detach().clone().requires_grad_()
        for name, tensor in module.canonical().items()
    }


def assert_same(module: nn.Module, weights: dict[str, Tensor], actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    probe = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    actual.backward(probe)
    expected.backward(probe)
    for name, tensor in module.canonical().items():  # type: ignore[operator]
        grad = tensor.read(module.get_parameter(tensor.parameter).grad)
        torch.testing.assert_close(
            grad, weights[name].grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def plain_attention(shape: architecture.Attention, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """One head at a time, positions 0 to T - 1, one document."""

    def projected(name: str, head: int) -> Tensor:
        rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        y = x @ w[f"{name}.weight"][rows].T
        return y + w[f"{name}.bias"][rows] if shape.bias else y

    def normed(y: Tensor, name: str, head: int) -> Tensor:
        if shape.qk_norm_over == "head":
            return y / (y.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}_norm.weight"]
        heads = shape.heads if name == "q" else shape.kv_heads
        every = torch.cat([projected(name, each) for each in range(heads)], -1)
        weight = w[f"{name}_norm.weight"].unflatten(0, (heads, -1))[head]
        return y / (every.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight

    def placed(name: str, head: int) -> Tensor:
        y = projected(name, head)
        if shape.qk_norm:
            y = normed(y, name, head)
        if shape.positions == "none":
            return y
        half = shape.head_dim // 2
        pairs = torch.complex(y[..., :half], y[..., half:])
        frequencies = [shape.rope_base ** (-2 * i / shape.head_dim) for i in range(half)]
        angles = torch.outer(torch.arange(TOKENS).double(), torch.tensor(frequencies, dtype=torch.float64))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    hidden = (distance < 0) | (distance >= (shape.window or TOKENS))
    outputs = []
    for head in range(shape.heads):
        kv_head = head // (shape.heads // shape.kv_heads)
        q, k = placed("q", head), placed("k", kv_head)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(shape.head_dim)).masked_fill(hidden, float("-inf"))
        outputs.append(scores.softmax(-1) @ projected("v", kv_head))
    y = torch.cat(outputs, -1) @ w["o.weight"].T
    return y + w["o.bias"] if shape.bias else y


@pytest.mark.parametrize(
    "shape",
    [
        architecture.Attention(heads=3, kv_heads=3, head_dim=10, rope_base=64.0),
        architecture.Attention(heads=6, kv_heads=3, head_dim=10, rope_base=64.0, qk_norm=True, bias=True),
        architecture.Attention(heads=3, kv_heads=1, head_dim=10, positions="none", window=5, bias=True),
        architecture.Attention(
            heads=6, kv_heads=3, head_dim=10, rope_base=64.0, qk_norm=True, qk_norm_over="all", bias=True
        ),
    ],
    ids=["plain", "grouped, normed, biased", "one key, no positions, window", "normed over all heads"],
)
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_attention_is_its_formula(shape: architecture.Attention, kernel: str) -> None:
    choices = (attention_kernels.choose(CPU, torch.float64), attention_kernels.REFERENCE)
    (attend,) = (choice.function for choice in choices if choice.name == kernel)
    module = Attention(shape, HIDDEN, EPS, attend, dtype=torch.float64)
    weights = canonical_weights(module)
    x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    rotary = rotary_tables(positions, shape.head_dim, shape.rope_base, torch.float64)
    spans = attention_kernels.spans_of(torch.zeros(2, TOKENS), shape.window, CPU)
    actual = module(x, spans, rotary if shape.positions == "rope" else None)
    assert_same(module, weights, actual, plain_attention(shape, weights, x))


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_is_its_formula(activation: architecture.Activation, bias: bool) -> None:
    module = Mlp(architecture.Mlp(ffn=7, activation=activation, bias=bias), HIDDEN, dtype=torch.float64)
    weights = canonical_weights(module)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def projected(name: str, y: Tensor) -> Tensor:
        return y @ weights[f"{name}.weight"].T + (weights[f"{name}.bias"] if bias else 0)

    up = projected("up", x)
    if activation == "swiglu":
        gate = projected("gate", x)
        inner = gate * gate.sigmoid() * up
    elif activation == "relu2":
        inner = up.clamp(min=0) ** 2
    else:
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3))
        inner = up * (1 + (tanh if activation == "gelu_tanh" else torch.erf(up / 2**0.5))) / 2
    assert_same(module, weights, module(x), projected("down", inner))
