"""Writes the calibrations and clusters that braid ships, from one H200's measurements and public tables.

    python -m scripts.shipped_devices [FILE]    by default benchmarks/results/h200.samples.json, which `braid
                                                calibrate` wrote on an H200

Tables of other devices are the H200's, scaled: products by the share of peak that public measurements reach at
the same number of operations, kernels by that share or by memory bandwidth. The public tables are

    [a] github.com/stas00/ml-engineering, compute/accelerator and network: peaks, memory, links
    [b] github.com/ai-dynamo/aiconfigurator 095f58a, systems: measured products, and NCCL within a node
    [c] NVIDIA's data sheets: PCIe 4 x16 (A100), 32 GB/s each way; PCIe 5 x16 (H100, H200, B200), 64 GB/s
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from braid.timing import samples
from braid.timing.calibration import Calibration, KernelTable, ProductTable, to_json
from braid.timing.interpolation import Point, never_falling, never_falling_grid
from braid.timing.links import Cluster, cluster_to_json, ring_share
from braid.timing.peaks import PEAK_BANDWIDTH, PEAK_BF16_FLOPS
from braid.timing.tables import calibration_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "braid" / "timing"
SAMPLES = ROOT / "benchmarks" / "results" / "h200.samples.json"
GFLOP = (2.0, 8.0, 32.0, 128.0, 512.0, 8192.0)
"""Operations of one product at which `Device.shares` are given: the middles of [b]'s classes."""
MIB = (1, 8, 64, 512)
RANKS = (2, 4, 8)
SUSTAINED_SPREAD = 0.18
"""Of devices that nobody measured. With that of products it makes a range whose ends are 1.27 times faster and
slower; two thirds of published bf16 steps are no further off (`python -m benchmarks.published_steps`)."""
SMALLEST = 2**14
"""Bytes of a call that takes no longer than the shortest."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What public tables say of a device."""

    name: str
    memory: float
    """Bytes."""
    shares: tuple[float, ...]
    """Median share of peak of bf16 products with m >= 512, n, k >= 1,024, by operations [b]."""
    bus: str
    """Whose NCCL table it has."""
    hopper: bool = False
    """Whether it runs the kernels that were measured; others are not written for it."""
    pcie: float | None = 64e9
    """Bytes per second of its PCIe link each way [c]; None: it has another link to the host, which nobody has
    measured."""


DEVICES: tuple[Device, ...] = (
    Device(name="A100", memory=80e9, shares=(0.43, 0.56, 0.69, 0.82, 0.84, 0.83), bus="A100", pcie=32e9),
    Device(name="H100", memory=80e9, shares=(0.36, 0.59, 0.70, 0.76, 0.77, 0.74), bus="H100", hopper=True),
    Device(name="B200", memory=180e9, shares=(0.24, 0.45, 0.61, 0.64, 0.66, 0.64), bus="B200"),
    Device(name="GB200", memory=186e9, shares=(0.23, 0.42, 0.58, 0.62, 0.63, 0.60), bus="B200", pcie=None),
)
H200_PCIE = 64e9
H200_HOST_LINK = {"to_host": 55.5e9, "to_device": 55.3e9}
"""Bytes per second, measured by benchmarks.offload_gpu."""
H200_SHARES = (0.39, 0.61, 0.72, 0.77, 0.78, 0.71)

BUS_GB = {
    "A100": {
        "all_reduce": (47, 115, 197, 222), "all_gather": (34, 100, 167, 205),
        "reduce_scatter": (39, 92, 179, 213), "all_to_all": (36, 108, 169, 203),
    },
    "H100": {
        "all_reduce": (72, 186, 362, 445), "all_gather": (54, 164, 282, 335),
        "reduce_scatter": (63, 168, 293, 336), "all_to_all": (59, 177, 265, 315),
    },
    "B200": {
        "all_reduce": (61, 205, 422, 704), "all_gather": (49, 166, 427, 617),
        "reduce_scatter": (45, 168, 431, 613), "all_to_all": (49, 212, 423, 563),
    },
}  # fmt: skip
"""NCCL bus bandwidth of 8 GPUs of a node by the bytes of the whole buffer [b]."""
SHORTEST = {"A100": 12e-6, "H100": 12e-6, "B200": 18e-6}
"""Seconds of a call of few bytes: the middle of 7 to 16 us (H100), or 11 to 25 us (B200) [b]; A100 as H100."""

LINKS_SOURCE = "NCCL within a node of 8 {bus} [b], same bus bandwidth for 2 and 4; shortest call [b]"
NETWORK = (
    "links and NICs: [a], [b]; share of the NIC: DeepEP's README, 43 to 47 of 50 GB/s; latencies between nodes "
    "are an estimate"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, nargs="?", default=SAMPLES)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    h200 = h200_of(samples.load(given.samples))
    written = {"h200": h200} | {each.name.lower(): scaled(h200, each) for each in DEVICES}
    for name, calibration in written.items():
        (given.folder / "devices" / f"{name}.json").write_text(to_json(calibration))
    for cluster in CLUSTERS:
        (given.folder / "clusters" / f"{cluster.name}.json").write_text(cluster_to_json(cluster))


# ------------------------------------------------------------------------------------------ devices


def h200_of(measured: samples.Samples) -> Calibration:
    """The H200's own measurements, with links of the H100, whose NVLink it has."""
    found = calibration_of(measured, source="shipped")
    tables = "measured by `braid calibrate` on one H200"
    sources = dict.fromkeys(("products", "kernels", "bandwidth", "launch_seconds", "optimizer"), tables)
    sources["sustained"] = "whole steps on one H200"
    sources["host_link"] = "copies of 1 GiB on one H200, PCIe 5 x16 (benchmarks/results/offload_gpu.json)"
    return replace(
        found,
        collectives=collectives("H100"),
        contention={"node": 1.0, "network": 1.0},
        host_link=found.host_link or H200_HOST_LINK,
        spread={**found.spread, "node": 0.10, "network": 0.25},
        sources={**sources, "collectives": LINKS_SOURCE.format(bus="H100"), "contention": "not measured"},
    )


def scaled(h200: Calibration, device: Device) -> Calibration:
    """The H200's tables as another device would have them."""
    memory = PEAK_BANDWIDTH[device.name] / PEAK_BANDWIDTH["H200"]
    speed = product_speed(device, GFLOP[4] * 1e9)
    origin = f"{device.name}: the H200's tables, "
    kernels = origin + "by share of peak (attention, scans) or memory bandwidth (others)"
    if not device.hopper:
        kernels += "; kernels written for Hopper are assumed to have equals"
    wider = 1.0 if device.hopper else 2.0
    classes = {name: max(1.5 * share, 0.1 * wider) for name, share in h200.spread.items()}
    return replace(
        h200,
        device=device.name.lower(),
        name=f"NVIDIA {device.name}",
        peak_flops=PEAK_BF16_FLOPS[device.name],
        peak_bandwidth=PEAK_BANDWIDTH[device.name],
        memory_bytes=int(device.memory),
        versions={},
        products=tuple(_scaled_products(table, device) for table in h200.products),
        kernels=tuple(_scaled_kernel(table, speed, memory) for table in h200.kernels),
        bandwidth=tuple((size, seconds / memory) for size, seconds in h200.bandwidth),
        optimizer=h200.optimizer * memory,
        host_link=host_link(device),
        collectives=collectives(device.bus),
        spread={**classes, "products": 0.08, "sustained": SUSTAINED_SPREAD, "node": 0.10, "network": 0.25},
        sources={
            "products": origin + "by share of peak at equal operations [b]",
            "kernels": kernels,
            "bandwidth": origin + "by peak bandwidth [a]",
            "optimizer": origin + "by peak bandwidth [a]",
            "launch_seconds": "measured on the H200's host",
            "sustained": "as on the H200; spread: two thirds of published steps, benchmarks.published_steps",
            "collectives": LINKS_SOURCE.format(bus=device.bus),
            "contention": "not measured",
            **host_link_source(device),
        },
        skipped={},
    )


def host_link(device: Device) -> dict[str, float]:
    """What the H200's copies reach of its PCIe link."""
    if device.pcie is None:
        return {}
    return {way: rate * device.pcie / H200_PCIE for way, rate in H200_HOST_LINK.items()}


def host_link_source(device: Device) -> dict[str, str]:
    if device.pcie is None:
        return {}
    same = "measured on the H200, which has the same link: PCIe 5 x16 [c]"
    half = "half of what was measured on the H200: PCIe 4 x16 has half the rate of PCIe 5 [c]"
    return {"host_link": same if device.pcie == H200_PCIE else half}


def product_speed(device: Device, flops: float) -> float:
    """How many times the H200's speed a device reaches in products of so many operations."""
    peaks = PEAK_BF16_FLOPS[device.name] / PEAK_BF16_FLOPS["H200"]
    return peaks * share_at(device.shares, flops) / share_at(H200_SHARES, flops)


def share_at(shares: tuple[float, ...], flops: float) -> float:
    """The share of peak, linear in the logarithm of operations."""
    place = [log(each * 1e9) for each in GFLOP]
    at = min(max(log(flops), place[0]), place[-1])
    after = next(index for index in range(1, len(place)) if at <= place[index])
    part = (at - place[after - 1]) / (place[after] - place[after - 1])
    return (1 - part) * shares[after - 1] + part * shares[after]


def _scaled_products(table: ProductTable, device: Device) -> ProductTable:
    axes = (table.m, table.n, table.k)
    sizes = [(m, n, k) for m in table.m for n in table.n for k in table.k]
    seconds = [
        measured / product_speed(device, 2.0 * m * n * k * table.groups)
        for (m, n, k), measured in zip(sizes, table.seconds, strict=True)
    ]
    return replace(table, seconds=never_falling_grid(axes, seconds))


def _scaled_kernel(table: KernelTable, speed: float, memory: float) -> KernelTable:
    faster = speed if table.by == "flops" else memory
    return replace(table, points=tuple((size, seconds / faster) for size, seconds in table.points))


def collectives(bus: str) -> dict[str, Mapping[int, tuple[Point, ...]]]:
    """Seconds by op, ranks and bytes."""
    tables: dict[str, Mapping[int, tuple[Point, ...]]] = {}
    for op, rates in BUS_GB[bus].items():
        by_ranks = {}
        for ranks in RANKS:
            sizes = [mib * 2.0**20 for mib in MIB]
            points = [
                (size, ring_share(op, ranks) * size / (rate * 1e9))
                for size, rate in zip(sizes, rates, strict=True)
            ]
            by_ranks[ranks] = never_falling([(float(SMALLEST), SHORTEST[bus]), *points])
        tables[op] = by_ranks
    return tables


# ----------------------------------------------------------------------------------------- clusters


def _machines(name: str, device: str, node: float, latency: float, nic: float) -> Cluster:
    return Cluster(
        name=name, device=device, ranks_per_node=8, domain=8, node_bandwidth=node, node_latency=latency,
        nic_bandwidth=nic, nic_latency=10e-6, source=NETWORK,
    )  # fmt: skip


CLUSTERS = (
    _machines("a100-ib", "a100", 300e9, 7e-6, 25e9),
    _machines("h100-ib", "h100", 450e9, 7e-6, 50e9),
    _machines("h800-ib", "h100", 160e9, 7e-6, 50e9),
    _machines("h200-ib", "h200", 450e9, 7e-6, 50e9),
    _machines("b200-ib", "b200", 900e9, 11e-6, 50e9),
    replace(
        _machines("gb200-nvl72", "gb200", 900e9, 11e-6, 50e9),
        ranks_per_node=4,
        domain=72,
        source=NETWORK + "; 72 GPUs with NVLink, 4 to a tray, one 400 Gb/s adapter to a GPU",
    ),
)

if __name__ == "__main__":
    main()
