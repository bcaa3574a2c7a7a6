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
    Fault(
        name="advice-times-a-shorter-step",
        file="timing/advice.py",
        old="load=prediction.load_factor, micro_batches=self.run.train.micro_batches)",
        new="load=prediction.load_factor)",
        kind="dropped term",
        why="every change of a long pipeline seems to save most of the step",
    ),
    Fault(
        name="advice-leaves-rows-to-chance",
        file="timing/advice.py",
        old="count = run.train.micro_batches * new // old",
        new="count = run.train.micro_batches * old // new",
        kind="swapped",
        why="a shorter pipeline is advised with micro-batches four times as large",
    ),
    Fault(
        name="numbers-that-are-none",
        file="timing/files.py",
        old="return abs(value) < 2**63  # not so for nan either",
        new="return True",
        kind="accepted input",
        why="a calibration with an overflown figure gives a time",
    ),
    Fault(
        name="calibration-of-another-device",
        file="timing/predict.py",
        old="if given is None or given.device == own.device:",
        new="if given is None or given.device:",
        kind="accepted input",
        why="a plan for H100 is timed by the kernels of another GPU",
    ),
    Fault(
        name="racks-filled-unevenly",
        file="timing/links.py",
        old="size = next((size for size in sizes if world % size == 0), None)",
        new="size = next(iter(sizes))",
        kind="wrong group",
        why="experts that fit a rack seem to lie on two, and their tokens to pass the network",
    ),
    Fault(
        name="bounds-hold-twice-what-is-alive",
        file="timing/search/bounds.py",
        old="running = alive.counts @ kept + usage.shared",
        new="running = 2 * alive.counts @ kept + usage.shared",
        kind="missing scale",
        why="meshes that fit are never proposed",
    ),
    Fault(
        name="replays-wait-for-gradients-twice",
        file="timing/search/pipeline.py",
        old="done = begin + backward[b] + exchange_b[b]",
        new="done = begin + 1.2 * (backward[b] + exchange_b[b]) + computed",
        kind="missing scale",
        why="meshes with a pipeline look slower than they can be, and are dropped",
    ),
    Fault(
        name="fixed-values-are-searched",
        file="timing/search/choices.py",
        old="return values if name not in self.fixed else",
        new="return values if True else",
        kind="accepted input",
        why="--fix has no effect",
    ),
)
