"""A calibration of a made-up GPU, whose seconds follow a simple law: what interpolation is compared with."""

from __future__ import annotations

import itertools

from braid.nn.work import Product
from braid.timing.calibration import Calibration, KernelTable, ProductTable
from braid.timing.links import ring_share

PEAK, BANDWIDTH = 1000e12, 4e12
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
GROUPS = (4, 16, 64)


def law(m: int, n: int, k: int, groups: int = 1) -> float:
    """A launch, then operations at 80 % of the peak or bytes at the bandwidth."""
    moved = 2 * groups * (m * k + n * k + m * n)
    return 3e-6 + max(2 * m * n * k * groups / (0.8 * PEAK), moved / BANDWIDTH)


def table(pass_: str, groups: int) -> ProductTable:
    points = itertools.product(SIZES, repeat=3)
    return ProductTable(
        pass_=pass_, groups=groups, m=SIZES, n=SIZES, k=SIZES,
        seconds=tuple(law(m, n, k, groups) for m, n, k in points),
    )  # fmt: skip


def curve(name: str, by: str, pass_: str = "forward", **key: int | str) -> KernelTable:
    points = tuple((10.0**power, 1e-6 + 10.0**power * 2e-15) for power in (9, 10, 11, 12))
    return KernelTable(name=name, key=tuple(sorted(key.items())), pass_=pass_, by=by, points=points)


def calibration(**changed: object) -> Calibration:
    kernels = [
        curve("attention", "flops", pass_, causal=1, head_dim=dim, v_dim=dim, tokens=tokens)
        for pass_ in ("forward", "backward")
        for dim in (64, 128)
        for tokens in (1024, 4096)
    ]
    kernels += [curve("hyper_connection", "bytes", "wgrad", part="pre", streams=4)]
    fields: dict[str, object] = {
        "device": "h200", "name": "a made-up GPU", "source": "measured", "when": "2026-11-18",
        "versions": {"torch": "2.11"}, "peak_flops": PEAK, "peak_bandwidth": BANDWIDTH, "memory_bytes": 10**11,
        "products": tuple(table(p, g) for p in ("forward", "backward", "wgrad") for g in (1, *GROUPS)),
        "kernels": tuple(kernels),
        "bandwidth": tuple((2.0**p, 2e-6 + 2.0**p / 3.5e12) for p in range(16, 32, 2)),
        "launch_seconds": 5e-6, "optimizer": 3e12, "sustained": 1.1,
        "contention": {"node": 1.05}, "host_link": {"to_host": 5e10, "to_device": 4e10},
        "collectives": {
            op: {
                ranks: tuple((2.0**p, 8e-6 + ring_share(op, ranks) * 2.0**p / 5e11) for p in range(14, 30, 4))
                for ranks in (2, 8)
            }
            for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        },
        "spread": {"products": 0.03}, "sources": {"products": "a law"}, "skipped": {},
    }  # fmt: skip
    return Calibration(**{**fields, **changed})  # type: ignore[arg-type]


def product_law(product: Product) -> float:
    return law(product.m, product.n, product.k, product.groups)
