"""Measures products in fp8_block and what quantises their operands, on GPUs whose tensor cores take it.

The backward of a layer is the product of its forward with a transposed copy of the weight: both operands have
the axis that is summed over last. So each measurement stands for both passes.

Shapes: M, N, K of a product, R rows, C channels, E groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from braid.kernels.precision.dense import FORM, HOPPER
from braid.nn.precision_work import QUANTISED_BYTES, Quantiser
from braid.timing.samples import Sample, Value
from braid.timing.stopwatch import Stopwatch

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    tokens: tuple[int, ...] = (512, 2048, 8192, 32768)
    channels: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    group_tokens: tuple[int, ...] = (128, 512, 2048, 4096)
    """Rows of one expert."""
    group_channels: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    groups: tuple[int, ...] = (4, 16, 64)
    group_bytes: int = 2 * 2**30
    """Weights of all experts in bfloat16, at most."""
    group_rows: int = 2**18
    quantised_rows: tuple[int, ...] = (256, 2048, 16384)
    quantised_channels: int = 8192


def low_precision(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """All samples. Raises on a device without such kernels."""
    if watch.device.type != "cuda" or torch.cuda.get_device_capability(watch.device)[0] != HOPPER:
        raise ValueError("products in fp8_block are emulated on this device")
    yield from products(sizes, watch)
    torch.cuda.empty_cache()
    yield from grouped_products(sizes, watch)
    torch.cuda.empty_cache()
    yield from quantisers(sizes, watch)


def _draw(device: torch.device, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=DTYPE, device=device).normal_()


def _sample(m: int, n: int, k: int, groups: int, pass_: str, seconds: float) -> Sample:
    shape: Mapping[str, Value] = {"m": m, "n": n, "k": k, "groups": groups, "format": FORM.name}
    name = "plain" if groups == 1 else "grouped"
    return Sample(what="product", name=name, shape=shape, pass_=pass_, seconds=seconds)


def products(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Of a linear layer over the grid; weight gradients are added in float32."""
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.products import multiply, weight_gradient
    from braid.kernels.precision.device.rows import quantize_rows
    from braid.kernels.precision.device.weights import quantize_weight

    launch = Launcher()
    for m, n, k in itertools.product(sizes.tokens, sizes.channels, sizes.channels):
        a = quantize_rows(launch, _draw(watch.device, m, k), by_channels=True).by_channels
        b = quantize_weight(launch, _draw(watch.device, n, k), transposed=False).whole
        assert a is not None
        assert b is not None
        seconds = watch.seconds(partial(multiply, a, b, DTYPE))
        for pass_ in ("forward", "backward"):
            yield _sample(m, n, k, 1, pass_, seconds)
    for tokens, outputs, inputs in itertools.product(sizes.tokens, sizes.channels, sizes.channels):
        dy, x = (_draw(watch.device, tokens, channels) for channels in (outputs, inputs))
        grad, rows = (quantize_rows(launch, each, by_tokens=True).by_tokens for each in (dy, x))
        assert grad is not None
        assert rows is not None
        sums = torch.zeros(outputs, inputs, device=watch.device)
        seconds = watch.seconds(partial(weight_gradient, grad, rows, sums, accumulate=True))
        yield _sample(outputs, inputs, tokens, 1, "wgrad", seconds)


def grouped_products(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """Of experts. Their weight gradients are in bfloat16."""
    from braid.kernels.grouped_mlp.device import fp8_gemm
    from braid.kernels.grouped_mlp.device.tiles import TileConfig, tiles
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.rows import quantize_rows
    from braid.kernels.precision.device.weights import quantize_weight

    launch = Launcher()
    for groups in sizes.groups:
        channels = [c for c in sizes.group_channels if groups * c * c * 2 <= sizes.group_bytes]
        tokens = [rows for rows in sizes.group_tokens if rows * groups <= sizes.group_rows]
        for m, n, k in itertools.product(tokens, channels, channels):
            x = quantize_rows(launch, _draw(watch.device, m * groups, k), by_channels=True).by_channels
            weight = quantize_weight(launch, _draw(watch.device, groups, n, k), transposed=False).whole
            assert x is not None
            assert weight is not None
            counts = torch.full((groups,), m, device=watch.device)
            made = tiles(launch, counts, m * groups, TileConfig().rows)
            product = partial(fp8_gemm.grouped_gemm, launch, x, weight, made, DTYPE)
            seconds = watch.seconds(product)
            for pass_ in ("forward", "backward"):
                yield _sample(m, n, k, groups, pass_, seconds)


def quantisers(sizes: Sizes, watch: Stopwatch) -> Iterator[Sample]:
    """By the bytes that they must move."""
    for rows in sizes.quantised_rows:
        for name, run in _quantisers(rows, sizes.quantised_channels, watch.device).items():
            size = QUANTISED_BYTES[name] * rows * sizes.quantised_channels
            shape: Mapping[str, Value] = {"of": name, "bytes": size}
            yield Sample(what="kernel", name="quantise", shape=shape, seconds=watch.seconds(run))


def _quantisers(rows: int, channels: int, device: torch.device) -> dict[Quantiser, Callable[[], Any]]:
    """For so many elements each; those of an activation are its ffn channels."""
    from braid.kernels.grouped_mlp.device.activation import FusedActivation
    from braid.kernels.launch import Launcher
    from braid.kernels.precision.device.activation import activation_backward, activation_forward
    from braid.kernels.precision.device.rows import quantize_rows
    from braid.kernels.precision.device.weights import quantize_weight

    launch, swiglu = Launcher(), FusedActivation(kind="swiglu")
    x, h = _draw(device, rows, channels), _draw(device, rows, 2 * channels)

    def backward(by_tokens: bool) -> Callable[[], Any]:
        return lambda: activation_backward(launch, swiglu, h, x, by_channels=True, by_tokens=by_tokens)

    return {
        "rows": lambda: quantize_rows(launch, x, by_channels=True),
        "tokens": lambda: quantize_rows(launch, x, by_tokens=True),
        "both": lambda: quantize_rows(launch, x, by_channels=True, by_tokens=True),
        "weight": lambda: quantize_weight(launch, x),
        "activation": lambda: activation_forward(launch, swiglu, h),
        "activation backward": backward(by_tokens=False),
        "activation backward, by tokens": backward(by_tokens=True),
    }
