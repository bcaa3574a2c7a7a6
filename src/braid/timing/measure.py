"""Measures what every model is made of: products, grouped products, memory traffic, launches, the optimizer.

Inputs of small products rotate through a large buffer: a layer's weights come from memory, not from the cache
that the last repetition has filled.

Shapes: M, N, K of a product, R rows, C channels, E groups.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.kernels import glu, grouped_mlp, optimizer, rms_norm, rotary
from braid.kernels.wgrad import write_product
from braid.timing.samples import Sample, Value
from braid.timing.stopwatch import Stopwatch

DTYPE = torch.bfloat16
PASSES = ("forward", "backward", "wgrad")
SLOTS = 16
"""Different places of its buffer that a product's factor rotates through, if so many fit."""
FIRST_MULTIPLE = 128
"""Sizes of held-out products are multiples of it, as channels of models are."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured. The default is for a GPU."""

    tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    channels: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    held_out: int = 60
    """Random products that only tell how far the table is off."""
    group_tokens: tuple[int, ...] = (32, 128, 512, 2048)
    """Rows of one expert."""
    group_channels: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    groups: tuple[int, ...] = (4, 16, 64)
    group_bytes: int = 2 * 2**30
    """Weights of all experts, at most: larger sizes of many experts are not measured."""
    group_rows: int = 2**17
    moved_rows: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    moved_channels: int = 4096
    parameters: int = 2**29
    launches: int = 500
    copied: int = 2**30
    """Bytes of a copy to the host or back."""


class Traffic(NamedTuple):
    """An elementwise function and the bytes that it reads and writes."""

    run: Callable[[], Any]
    bytes: int


class Pool:
    """Matrices of random numbers that rotate through one buffer."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.numbers = torch.empty(elements, dtype=DTYPE, device=device).normal_()
        self._turn = 0

    def take(self, rows: int, columns: int) -> Tensor:
        size = rows * columns
        places = min(SLOTS, len(self.numbers) // size)
        self._turn = (self._turn + 1) % places
        return self.numbers[self._turn * size :][:size].view(rows, columns)


def products(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Products of a linear layer over the grid: y = x Wᵀ, dx = dy W, and dW += dyᵀ x in float32."""
    largest = max(sizes.tokens[-1], sizes.channels[-1]) * sizes.channels[-1]
    left, right = (Pool(largest, watch.device) for _ in range(2))
    sums = torch.zeros(sizes.channels[-1] ** 2, device=watch.device)
    grid = itertools.product(sizes.tokens, sizes.channels, sizes.channels)
    held_out = list(_held_out(sizes))
    for index, (tokens, outputs, inputs) in enumerate(itertools.chain(grid, held_out)):
        is_held_out = index >= len(sizes.tokens) * len(sizes.channels) ** 2
        for pass_ in PASSES:
            m, n, k = product_shape(pass_, tokens, outputs, inputs)
            run = _product(pass_, (m, n, k), left, right, sums)
            shape: Mapping[str, Value] = {"m": m, "n": n, "k": k, "groups": 1}
            yield Sample(
                what="product", name="plain", shape=shape, pass_=pass_, seconds=watch.seconds(run),
                held_out=is_held_out,
            )  # fmt: skip


def product_shape(pass_: str, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    """m, n and k of the product of a pass: rows and columns of its result, and what it sums over."""
    match pass_:
        case "forward":
            return tokens, outputs, inputs
        case "backward":
            return tokens, inputs, outputs
        case _:
            return outputs, inputs, tokens


def _product(pass_: str, mnk: tuple[int, int, int], left: Pool, right: Pool, sums: Tensor) -> Callable[[], Any]:
    m, n, k = mnk
    match pass_:
        case "forward":
            return lambda: torch.mm(left.take(m, k), right.take(n, k).t())
        case "backward":
            return lambda: torch.mm(left.take(m, k), right.take(k, n))
        case _:
            out = sums[: m * n].view(m, n)
            return lambda: write_product(out, left.take(k, m), right.take(k, n), accumulate=True)


def _held_out(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Shapes of a layer between those of the grid."""
    draw = random.Random(0)

    def between(axis: tuple[int, ...]) -> int:
        multiple = min(FIRST_MULTIPLE, axis[0])
        drawn = axis[0] * (axis[-1] / axis[0]) ** draw.random()
        return max(axis[0], int(drawn) // multiple * multiple)

    for _ in range(sizes.held_out):
        yield between(sizes.tokens), between(sizes.channels), between(sizes.channels)


# ---------------------------------------------------------------------------------- grouped products


def grouped_products(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Products of experts, through the kernels that a run would use. Each number of groups has a whole grid."""
    for groups in sizes.groups:
        channels = [c for c in sizes.group_channels if groups * c * c * 2 <= sizes.group_bytes]
        tokens = [rows for rows in sizes.group_tokens if rows * groups <= sizes.group_rows]
        for rows, outputs, inputs in itertools.product(tokens, channels, channels):
            runs = _grouped(rows, outputs, inputs, groups, watch.device)
            for pass_, run in runs.items():
                m, n, k = product_shape(pass_, rows, outputs, inputs)
                shape: Mapping[str, Value] = {"m": m, "n": n, "k": k, "groups": groups}
                yield Sample(
                    what="product", name="grouped", shape=shape, pass_=pass_, seconds=watch.seconds(run)
                )


def _grouped(
    rows: int, outputs: int, inputs: int, groups: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """The three passes of one grouped product."""

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=device).normal_()

    x_RI, dy_RO = draw(rows * groups, inputs), draw(rows * groups, outputs)
    weight_EOI = draw(groups, outputs, inputs)
    counts_E = torch.full((groups,), rows, device=device)
    choice = grouped_mlp.choose(device, DTYPE, hidden=inputs, ffn=outputs, experts=groups)
    if choice.name == "fused":
        return _fused_grouped(x_RI, dy_RO, weight_EOI, counts_E)
    from braid.kernels.grouped_mlp.grouped import _GroupedMm

    multiply = _GroupedMm(counts_E.cumsum(0).to(torch.int32))
    return {
        "forward": lambda: multiply.outputs(x_RI, weight_EOI, None),
        "backward": lambda: multiply.x_grad((dy_RO,), weight_EOI),
        "wgrad": lambda: multiply.weight_grad((dy_RO,), x_RI, weight_EOI.shape),
    }


def _fused_grouped(
    x_RI: Tensor, dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor
) -> dict[str, Callable[[], Any]]:
    from braid.kernels.grouped_mlp.device import gemm, wgrad
    from braid.kernels.grouped_mlp.device.tiles import TileConfig, tiles
    from braid.kernels.grouped_mlp.tuned_table import Work, nearest, tuned_table
    from braid.kernels.launch import Launcher

    launch, tiling = Launcher(), TileConfig()
    made = tiles(launch, counts_E, len(x_RI), tiling.rows)
    groups, outputs, inputs = weight_EOI.shape
    kernel = nearest(tuned_table(), Work(len(x_RI) // groups, inputs, outputs))
    sums_EOI = torch.zeros(weight_EOI.shape, device=x_RI.device)
    return {
        "forward": lambda: gemm.grouped_gemm(launch, x_RI, weight_EOI, made, tiling, transposed=True),
        "backward": lambda: gemm.grouped_gemm(launch, dy_RO, weight_EOI, made, tiling, transposed=False),
        "wgrad": lambda: wgrad.weight_gradient(
            launch, dy_RO, x_RI, made, sums_EOI, kernel, tiling, accumulate=True
        ),
    }


def compile_grouped(device: torch.device) -> None:
    """Run grouped products once, so that their kernels are compiled."""
    for run in _grouped(128, 512, 512, 4, device).values():
        run()


# ------------------------------------------------------------------- memory, optimizer and launches


def moved(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Elementwise kernels by the bytes that they read and write."""
    for rows in sizes.moved_rows:
        for name, pass_, traffic in _elementwise(rows, sizes.moved_channels, watch.device):
            shape = {"rows": rows, "channels": sizes.moved_channels, "bytes": traffic.bytes}
            seconds = watch.seconds(traffic.run)
            yield Sample(what="moved", name=name, shape=shape, pass_=pass_, seconds=seconds)


def _elementwise(rows: int, channels: int, device: torch.device) -> Iterator[tuple[str, str, Traffic]]:
    heads, head_dim = channels // 128 or 1, min(channels, 128)
    x, dy = (torch.empty(rows, channels, dtype=DTYPE, device=device).normal_() for _ in range(2))
    size = x.numel() * x.element_size()
    yield "add", "forward", Traffic(lambda: x + dy, 3 * size)
    weight = torch.ones(channels, dtype=DTYPE, device=device)
    normalize = rms_norm.choose(device, DTYPE).function
    yield "rms_norm", "forward", Traffic(lambda: normalize(x, weight, 1e-5), 2 * size)
    yield "rms_norm", "backward", Traffic(_backward(lambda a: normalize(a, weight, 1e-5), x, dy), 3 * size)
    activation = glu.choose(device, DTYPE).function
    parts = 1 if activation.joined else 2
    width = 2 * channels // parts
    gate_up = [torch.empty(rows, width, dtype=DTYPE, device=device).normal_() for _ in range(parts)]
    yield "glu", "forward", Traffic(lambda: activation("swiglu", *gate_up), 3 * size)
    if activation.joined:
        yield (
            "glu",
            "backward",
            Traffic(_backward(lambda a: activation("swiglu", a), gate_up[0], dy), 5 * size),
        )
    angles = torch.rand(1, rows, 1, head_dim, device=device)
    rotate, cos, sin = rotary.choose(device, DTYPE).function, angles.cos(), angles.sin()
    x_BTHD = x.view(1, rows, heads, head_dim)
    yield "rotary", "forward", Traffic(lambda: rotate(x_BTHD, cos, sin, 1), 2 * size)


def compile_elementwise(device: torch.device) -> None:
    for _, _, traffic in _elementwise(64, 4096, device):
        traffic.run()


def _backward(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], Any]:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)


OPTIMIZER_BYTES = 34
"""Per parameter: AdamW reads and writes main parameter and moments, reads the gradient and writes the narrow
weight, 30 bytes; the gradient norm reads 4 more."""


def optimizer_step(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Gradient norm and AdamW over all parameters of a model."""
    count = 16
    each = sizes.parameters // count
    kernels = optimizer.choose(watch.device, DTYPE).function

    def draw() -> Tensor:
        return torch.empty(each, device=watch.device).normal_(std=1e-3)

    moments = [
        optimizer.Moments(draw(), draw(), draw().square_(), draw().to(DTYPE), weight_decay=0.1)
        for _ in range(count)
    ]
    gradients, step = [draw() for _ in range(count)], torch.zeros((), device=watch.device)
    scale = torch.ones((), device=watch.device)
    hyper = optimizer.Hyper((0.9, 0.95), 1e-8)

    def run() -> None:
        kernels.squares(gradients)
        kernels.adamw(moments, gradients, hyper, 1e-6, step, scale=scale)

    shape = {"parameters": each * count, "bytes": OPTIMIZER_BYTES * each * count}
    yield Sample(what="optimizer", name="adamw", shape=shape, seconds=watch.seconds(run))


def host_link(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Copies between the device and page-locked host memory."""
    there = torch.zeros(sizes.copied, dtype=torch.uint8, device=watch.device)
    here = torch.zeros(sizes.copied, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
    for name, to, of in (("to_host", here, there), ("to_device", there, here)):
        seconds = watch.seconds(partial(to.copy_, of, non_blocking=True))
        yield Sample(what="host_link", name=name, shape={"bytes": sizes.copied}, seconds=seconds)


def launches(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """What the host takes for a launch: of torch's own kernels, of a product, and of one of braid's kernels
    within autograd, in both directions."""
    x = torch.zeros(8, 128, dtype=DTYPE, device=watch.device)
    square = torch.zeros(128, 128, dtype=DTYPE, device=watch.device)
    weight = torch.ones(128, dtype=DTYPE, device=watch.device)
    normalize = rms_norm.choose(watch.device, DTYPE).function
    leaf = x.clone().requires_grad_()

    def both_ways() -> None:
        torch.autograd.grad(normalize(leaf, weight, 1e-5), leaf, x)

    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "add": (lambda: x + x, 1),
        "product": (lambda: torch.mm(x, square), 1),
        "rms_norm both ways": (both_ways, 2),
    }
    for name, (run, kernels) in runs.items():
        seconds = watch.host_seconds(run, sizes.launches) / kernels
        yield Sample(what="launch", name=name, shape={"launches": kernels}, seconds=seconds)
