"""Faults in predictions of time: calibration and links."""

from __future__ import annotations

from scripts.mutants.mutant import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="products-faster-than-the-peak",
        file="timing/calibration.py",
        old="return max(measured, operations / calibration.peak_flops)",
        new="return measured",
        kind="dropped term",
        why="a plan promises more than the device can do",
    ),
    Fault(
        name="far-kernels-count-as-measured",
        file="timing/calibration.py",
        old="if max(mine, its) / min(mine, its) > NEAR:",
        new="if max(mine, its) / min(mine, its) > 100 * NEAR:",
        kind="accepted input",
        why="a plan gives a time for kernels that nobody measured",
    ),
    Fault(
        name="one-nic-for-a-node",
        file="timing/links.py",
        old="bandwidth = min(cluster.node_bandwidth, span.per_node * cluster.network)",
        new="bandwidth = min(cluster.node_bandwidth, cluster.network)",
        kind="missing scale",
        why="collectives over nodes look eight times slower, and meshes that are best are never proposed",
    ),
)
