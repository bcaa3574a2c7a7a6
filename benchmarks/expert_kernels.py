"""Every way to run each product of the experts' MLP, what it must give, and how long it may take at best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.grouped_mlp.device import elementwise, rows, weights
from braid.kernels.grouped_mlp.device.rows import Formula
from braid.kernels.grouped_mlp.device.tiles import Tiles, tiles
from braid.kernels.grouped_mlp.device.variants import (
    KeeperVariant,
    RelayRowVariant,
    RelayVariant,
    RowVariant,
    WeightVariant,
)
from braid.kernels.grouped_mlp.sizes import TILE_ROWS
from braid.kernels.launch import Launcher

SWIGLU = Formula(kind="swiglu", alpha=1.0, limit=None, offset=0.0)
FLOPS, BYTES = 790e12, 4.3e12
"""What the chip does in a second, as measured."""
PRODUCTS = ("fc1", "fc2", "dgrad2", "dgrad1", "wgrad2", "wgrad1")


class Shape(NamedTuple):
    rows: int
    hidden: int
    ffn: int
    experts: int

    def floors(self) -> dict[str, float]:
        """Microseconds of each product: the larger of its operations and of its bytes. Weight gradients are
        added to float32."""
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
    """Random inputs of every product of one layer."""

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


def run(product: str, variant: Any, d: Data, *, accumulate: bool = True) -> tuple[Tensor, ...]:
    """One product, by one variant; None is `grouped_mm`, with a kernel for the activation where there is
    one."""
    ends = d.where.ends_E
    match product:
        case "fc1" if variant is None:
            h = F.grouped_mm(d.x, d.w_in.transpose(1, 2), offs=ends)
            return h, elementwise.activated(d.launch, h, d.probs, d.where, SWIGLU)
        case "fc1":
            return rows.multiply_activate(d.launch, d.x, d.w_in, d.probs, d.where, SWIGLU, variant)
        case "fc2" if variant is None:
            return (F.grouped_mm(d.a, d.w_down.transpose(1, 2), offs=ends),)
        case "fc2":
            return (rows.multiply(d.launch, d.a, d.w_down, d.where, variant, transposed=True),)
        case "dgrad2" if variant is None:
            da = F.grouped_mm(d.dy, d.w_down, offs=ends)
            return elementwise.activated_backward(d.launch, da, d.h, d.probs, d.where, SWIGLU)
        case "dgrad2":
            return rows.multiply_activate_backward(
                d.launch, d.dy, d.w_down, d.h, d.probs, d.where, SWIGLU, variant
            )
        case "dgrad1" if variant is None:
            return (F.grouped_mm(d.dh, d.w_in, offs=ends),)
        case "dgrad1":
            return (rows.multiply(d.launch, d.dh, d.w_in, d.where, variant, transposed=False),)
    grad, x, main = d.gradient_of(product)
    if variant is None:
        main.add_(F.grouped_mm(grad.t(), x, offs=ends))
    else:
        weights.weight_gradient(d.launch, grad, x, d.where, main, variant, accumulate=accumulate)
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


# -------------------------------------------------------------------------------------------- candidates

ROWS = (
    RowVariant(),
    RowVariant(stages=4, parts=4),
    RelayRowVariant(),
    RelayRowVariant(depth=32, stages=6),
    None,
)
WEIGHTS = (
    WeightVariant(),
    WeightVariant(stages=4),
    WeightVariant(leave="pointers", parts=2),
    RelayVariant(),
    KeeperVariant(),
    RelayVariant(takers=2, ahead=6),
)
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "fc1": ROWS,
    "fc2": ROWS,
    "dgrad2": (RowVariant(parts=4), *ROWS[2:]),
    "dgrad1": ROWS,
    "wgrad2": WEIGHTS,
    "wgrad1": WEIGHTS,
}


def label(variant: Any) -> str:
    """A variant in a few letters: its family, and what differs from the usual."""
    if variant is None:
        return "grouped_mm"
    families = {RelayVariant: "relay", RelayRowVariant: "relay", KeeperVariant: "keeper"}
    family = families.get(type(variant), "Triton")
    changed = {name: value for name, value in vars(variant).items() if value != getattr(type(variant)(), name)}
    return " ".join([family, *(f"{name}={value}" for name, value in changed.items())])
