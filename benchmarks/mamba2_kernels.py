"""The kernels of a Mamba-2 layer on a GPU: scan, convolution with SiLU, gated norm in both orders, whole layer.

    python -m benchmarks.mamba2_kernels

Four rows of 4096 tokens, 64 heads of 64 channels, 8 groups, state 128, bfloat16, packed documents. All of it is
first checked against float64: an error is the norm of the difference over that of the truth, and its ratio to
that of the plain implementation in the same dtype. Floors are bytes at 4.3 TB/s, each tensor once. The input of
the convolution and the gates are slices, as in a layer; "both" includes copying their gradients into the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import machine
from braid.architecture import Mamba2 as Shape
from braid.kernels import causal_conv, gated_norm, ssd
from braid.nn.cost import Workload
from braid.nn.mamba2 import Mamba2

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
ROWS, TOKENS, GROUPS, HEADS, HEAD_DIM, STATE, HIDDEN = 4, 4096, 8, 64, 64, 128, 2048
PARTS = [HEADS // GROUPS * HEAD_DIM, STATE, STATE]
BYTES_PER_MS = 4.3e9
"""What the chip moves in a millisecond, as measured."""


class Op(NamedTuple):
    """An op with its inputs, in all implementations."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: list[Tensor]
    forward_bytes: int
    backward_bytes: int


def documents() -> Tensor:
    """Rows of few and of many documents."""
    lengths = ([100, 1, 3000, 995], [4096], [2048, 2048], [7] * 585 + [1])
    return torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]).to(DEVICE)


def draw(*sizes: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(sizes, device=DEVICE).to(dtype)


def ops() -> dict[str, Op]:
    boundaries, width = documents(), sum(PARTS)
    x, b, c = (draw(ROWS, TOKENS, *sizes) for sizes in ((HEADS, HEAD_DIM), (GROUPS, STATE), (GROUPS, STATE)))
    dt = torch.exp(torch.rand(ROWS, TOKENS, HEADS, device=DEVICE) * 4.6 - 6.9)
    a = -1 - 15 * torch.rand(HEADS, device=DEVICE)
    big, small = x.numel() * 2, b.numel() * 2
    scan, conv, norm = (op.choose(DEVICE, DTYPE).function for op in (ssd, causal_conv, gated_norm))

    def scanned(implementation: Any) -> Callable[..., Any]:
        return lambda *inputs: implementation(*inputs, boundaries)[0]

    def convolved(implementation: Any) -> Callable[..., Any]:
        return lambda x, weight, bias: implementation(x[..., :width], weight, bias, boundaries, PARTS)

    def normed(implementation: Any, gate_first: bool) -> Callable[..., Any]:
        return lambda y, z, weight: implementation(
            y, z[..., -y.shape[-1] :], weight, 1e-5, gate_first=gate_first
        )

    inner = HEADS * HEAD_DIM // GROUPS
    gates = [draw(ROWS, TOKENS, GROUPS, inner), draw(ROWS, TOKENS, GROUPS, inner + 776)]
    heads = [draw(ROWS, TOKENS, 32, 128), draw(ROWS, TOKENS, 32, 256)]
    taps = [draw(ROWS, TOKENS, GROUPS, width + 520), draw(GROUPS * width, 4), draw(GROUPS * width)]
    plain_norm = gated_norm.PLAIN
    return {
        "ssd": Op(
            scanned(scan), scanned(ssd.REFERENCE.function),
            [x, dt, a, b, c, draw(HEADS, dtype=torch.float32)], 2 * big + 2 * small, 3 * big + 4 * small,
        ),
        "causal_conv": Op(
            convolved(conv), convolved(causal_conv.PLAIN), taps, 2 * (big + 2 * small), 3 * (big + 2 * small)
        ),
        "gated_norm, gate first": Op(
            normed(norm, True), normed(plain_norm, True), [*gates, draw(GROUPS, inner)], 3 * big, 5 * big
        ),
        "gated_norm, norm first": Op(
            normed(norm, False), normed(plain_norm, False), [*heads, draw(128)], 3 * big, 5 * big
        ),
    }  # fmt: skip


def both_ways(function: Callable[..., Any], inputs: list[Tensor], probes: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    found = function(*leaves)
    results = list(found) if isinstance(found, tuple) else [found]
    probes = [probe.to(result) for probe, result in zip(probes, results, strict=True)]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, leaves, probes)]


def probes_of(op: Op) -> list[Tensor]:
    with torch.no_grad():
        found = op.fused(*op.inputs)
    return [torch.randn_like(result) for result in (found if isinstance(found, tuple) else [found])]


def check(op: Op) -> dict[str, float]:
    """Largest error, and largest ratio to that of the plain implementation; and whether bits repeat."""
    probes = probes_of(op)
    ours, again, plain = (both_ways(f, op.inputs, probes) for f in (op.fused, op.fused, op.plain))
    truth = both_ways(op.plain, [tensor.double() for tensor in op.inputs], probes)
    errors, theirs = (
        [((a.double() - t).norm() / t.norm()).item() for a, t in zip(found, truth, strict=True)]
        for found in (ours, plain)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "not the same bits"
    assert max(errors) < 6e-3, errors
    return {"error": max(errors), "times plain": max(a / b for a, b in zip(errors, theirs, strict=True))}


def measure(op: Op) -> dict[str, float]:
    """Medians in milliseconds, and floors."""
    probes = probes_of(op)
    figures = {}
    for name, function in (("", op.fused), ("plain ", op.plain)):
        leaves = [tensor.detach().requires_grad_() for tensor in op.inputs]

        def whole(function: Any = function, leaves: Any = leaves) -> Any:
            return torch.autograd.grad(function(*leaves), leaves, probes)

        with torch.no_grad():
            forward = do_bench(lambda function=function: function(*op.inputs), rep=50, return_mode="median")
        figures[f"{name}forward"] = forward
        figures[f"{name}both"] = do_bench(whole, rep=50, return_mode="median")
    figures["floor forward"] = op.forward_bytes / BYTES_PER_MS
    figures["floor both"] = (op.forward_bytes + op.backward_bytes) / BYTES_PER_MS
    return figures


def layer(*, fused: bool) -> dict[str, float]:
    """A whole layer: milliseconds for both directions, and MiB that forward keeps, measured and by `cost`."""
    shape = Shape(heads=HEADS, head_dim=HEAD_DIM, state=STATE, groups=GROUPS)
    scan = ssd.choose(DEVICE, DTYPE).function if fused else ssd.REFERENCE.function
    around: dict[str, Any] = {}
    if fused:
        around = {
            op: k.choose(DEVICE, DTYPE).function for op, k in (("conv", causal_conv), ("gate", gated_norm))
        }
    module = Mamba2(shape, HIDDEN, 1e-5, scan, device=DEVICE, dtype=DTYPE, **around)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x, boundaries = draw(ROWS, TOKENS, HIDDEN).requires_grad_(), documents()
    grad = torch.randn_like(x)
    before = torch.cuda.memory_allocated()
    y = module(x, boundaries)
    kept = torch.cuda.memory_allocated() - before
    del y
    milliseconds = do_bench(lambda: module(x, boundaries).backward(grad), rep=100, return_mode="median")
    figures = {"both": milliseconds, "kept MiB": kept / 2**20}
    if fused:
        figures["estimated MiB"] = module.cost(Workload(rows=ROWS, tokens=TOKENS, dtype=DTYPE)).kept / 2**20
    return figures


def main() -> None:
    machine.needs_gpu()
    torch.manual_seed(0)
    origin, figures = machine.describe(), dict[str, Any]()
    for name, op in ops().items():
        figures[name] = {**check(op), **measure(op)}
        print(
            f"{name:24s} " + "  ".join(f"{key} {value:.3g}" for key, value in figures[name].items()), flush=True
        )
    for fused in (True, False):
        name = f"layer, {'fused' if fused else 'plain'}"
        figures[name] = layer(fused=fused)
        print(
            f"{name:24s} " + "  ".join(f"{key} {value:.4g}" for key, value in figures[name].items()), flush=True
        )
    machine.write("mamba2_kernels", figures, origin)


if __name__ == "__main__":
    main()
