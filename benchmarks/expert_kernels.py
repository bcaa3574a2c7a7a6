"""The six matmuls of the grouped MLP one by one: inputs, kernel, result in float64, roofline time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from braid.kernels.grouped_mlp.device import gemm, wgrad
from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.grouped_mlp.device.tiles import TileConfig, Tiles, tiles
from braid.kernels.grouped_mlp.sizes import TILE_ROWS
from braid.kernels.grouped_mlp.tuned_table import WgradKernel
from braid.kernels.launch import Launcher

SWIGLU, TILING = FusedActivation(kind="swiglu"), TileConfig()
FLOPS, BYTES = 790e12, 4.3e12
"""What an H200 does in a second, as measured."""
PRODUCTS = ("fc1", "fc2", "dgrad2", "dgrad1", "wgrad2", "wgrad1")


class Shape(NamedTuple):
    rows: int
    hidden: int
    ffn: int
    experts: int

    def floors(self) -> dict[str, float]:
        """Roofline microseconds of each matmul: the larger of its operations and of its bytes. Weight gradients
        are accumulated in float32."""
        n, c, f, e = self
        one, two = e * c * 2 * f, e * c * f
        product, narrow = 2 * n * c * f, 2 * n * f
        work = {
            "fc1": (2 * product, 2 * (n * c + one) + 3 * narrow),
            "fc2": (product, 2 * (n * c + two) + narrow),
            "dgrad2": (product, 2 * (n * c + two) + 5 * narrow),
            "dgrad1": (2 * product, 2 * (n * c + one) + 2 * narrow),
            "wgrad2": (product, 2 * n * c + narrow + 8 * two),
            "wgrad1": (2 * product, 2 * n * c + 2 * narrow + 8 * one),
        }
        return {name: max(flops / FLOPS, moved / BYTES) * 1e6 for name, (flops, moved) in work.items()}


@dataclass(frozen=True)
class Data:
    """Random inputs of every matmul of one layer."""

    x: Tensor
    probs: Tensor
    w_in: Tensor
    w_down: Tensor
    dy: Tensor
    h: Tensor
    dh: Tensor
    a: Tensor
    da: Tensor
    main_in: Tensor
    main_down: Tensor
    counts: Tensor
    where: Tiles
    launch: Launcher

    def gradient_of(self, product: str) -> tuple[Tensor, Tensor, Tensor]:
        """Output gradients, inputs and the buffer of a weight gradient."""
        return (self.dh, self.x, self.main_in) if product == "wgrad1" else (self.dy, self.a, self.main_down)


def counts_of(shape: Shape, load: str) -> Tensor:
    """Rows of each expert: equal; or within half of the mean, or falling as one over the rank, where the two
    smallest have none, in any order."""
    generator = torch.Generator().manual_seed(1)
    shares = {
        "balanced": torch.ones(shape.experts),
        "uneven": torch.linspace(1.5, 0.5, shape.experts),
        "zipf": 1 / torch.arange(1.0, shape.experts + 1),
    }
    share = shares[load]
    if load != "balanced":
        share[-2:] = 0
        share = share[torch.randperm(shape.experts, generator=generator)]
    counts = (share / share.sum() * shape.rows).long()
    counts[counts.argmax()] += shape.rows - counts.sum()
    return counts


def data(shape: Shape, counts: Tensor, device: str, dtype: torch.dtype) -> Data:
    n, c, f, e = shape
    torch.manual_seed(0)

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype) * scale

    counts, launch = counts.to(device), Launcher()
    return Data(
        x=draw(n, c),
        probs=torch.rand(n, device=device),
        w_in=draw(e, 2 * f, c, scale=c**-0.5),
        w_down=draw(e, c, f, scale=f**-0.5),
        dy=draw(n, c),
        h=draw(n, 2 * f),
        dh=draw(n, 2 * f),
        a=draw(n, f),
        da=draw(n, f),
        main_in=torch.zeros(e, 2 * f, c, device=device),
        main_down=torch.zeros(e, c, f, device=device),
        counts=counts,
        where=tiles(launch, counts, n, TILE_ROWS),
        launch=launch,
    )


def loads(shape: Shape, names: list[str]) -> list[Data]:
    """The same rows, spread over the experts in several ways."""
    d = data(shape, counts_of(shape, names[0]), "cuda", torch.bfloat16)
    others = [counts_of(shape, name).to("cuda") for name in names[1:]]
    return [
        d,
        *(replace(d, counts=counts, where=tiles(d.launch, counts, shape.rows, TILE_ROWS)) for counts in others),
    ]


def run(
    product: str, d: Data, kernel: WgradKernel = "warp-specialised", *, accumulate: bool = True
) -> tuple[Tensor, ...]:
    """One matmul with its epilogue; `kernel` is for wgrad."""
    match product:
        case "fc1":
            return gemm.grouped_gemm_activation(d.launch, d.x, d.w_in, d.probs, d.where, SWIGLU, TILING)
        case "fc2":
            return (gemm.grouped_gemm(d.launch, d.a, d.w_down, d.where, TILING, transposed=True),)
        case "dgrad2":
            return gemm.grouped_gemm_activation_backward(
                d.launch, d.dy, d.w_down, d.h, d.probs, d.where, SWIGLU, TILING
            )
        case "dgrad1":
            return (gemm.grouped_gemm(d.launch, d.dh, d.w_in, d.where, TILING, transposed=False),)
    grad, x, main = d.gradient_of(product)
    wgrad.weight_gradient(d.launch, grad, x, d.where, main, kernel, TILING, accumulate=accumulate)
    return (main,)


def expected(product: str, d: Data) -> tuple[Tensor, ...]:
    """The same in float64."""
    counts = d.counts.tolist()

    def times(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([part.double() @ w.double() for part, w in zip(x.split(counts), weight, strict=True)])

    def activated(h: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, p = h[:, 0::2].double(), h[:, 1::2].double(), d.probs.double()[:, None]
        s = torch.sigmoid(gate)
        opened = gate * s
        dh = torch.stack([da * p * up * (s + opened * (1 - s)), da * p * opened], -1).flatten(1)
        return dh, opened * up * p, (da * opened * up).sum(1)

    match product:
        case "fc1":
            h = times(d.x, d.w_in.transpose(1, 2))
            return h, activated(h, d.da.double())[1]
        case "fc2":
            return (times(d.a, d.w_down.transpose(1, 2)),)
        case "dgrad2":
            return activated(d.h, times(d.dy, d.w_down))
        case "dgrad1":
            return (times(d.dh, d.w_in),)
    grad, x, _ = d.gradient_of(product)
    parts = zip(grad.split(counts), x.split(counts), strict=True)
    return (torch.stack([g.double().t() @ y.double() for g, y in parts]),)


def error(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest relative error of several tensors; NaN where one of them is not finite."""
    errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(actual, wanted, strict=True)]
    return max(errors, key=lambda e: float("inf") if e != e else e)
