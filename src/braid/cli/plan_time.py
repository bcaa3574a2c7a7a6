"""The step time of a plan: seconds with their range, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import rich.console

from braid.cli.args import print_table
from braid.errors import ConfigError, Problem

if TYPE_CHECKING:
    from braid.planning.plan import Plan
    from braid.timing.predict import Prediction

LABELS = MappingProxyType(
    {
        "products": "matrix products",
        "attention": "attention",
        "scans": "scans of Mamba-2 and delta nets",
        "memory": "memory traffic: norms, activations, permutations",
        "host": "the host, which starts kernels more slowly than they run",
        "optimizer": "gradient norm and optimizer",
        "bubble": "bubble: waiting for other stages",
        "tp": "tensor parallelism",
        "cp": "context parallelism",
        "pp": "messages between stages",
        "ep": "tokens to experts and back",
        "ep_etp": "tokens to experts and back",
        "dp_cp": "weights and gradients",
        "edp": "weights and gradients of experts",
        "ends": "gradients of an embedding on both ends",
    }
)
"""What the parts of a step mean; other families go by their names."""


def time_problems(cluster: str | None, calibration: str | None) -> Iterator[Problem]:
    if calibration is not None and cluster is None:
        yield Problem(
            field="calibration",
            value=calibration,
            rule="--calibration needs --cluster, for the links between devices",
            remedy="--cluster NAME, or no calibration",
        )


def predicted(plan: Plan, cluster: str | None, calibration: str | None, load: float) -> Prediction:
    """The prediction for a cluster, by its name or file."""
    from braid.timing.calibration import load as load_calibration
    from braid.timing.links import clusters, load_cluster
    from braid.timing.predict import predict

    if cluster is None:
        known = ", ".join(clusters())
        raise ConfigError(
            f"--time needs --cluster, for the speed of devices and links: {known}, or a file (FILE.json)"
        )
    known_device = None if calibration is None else load_calibration(calibration)
    return predict(plan, load_cluster(cluster), known_device, load_factor=load)


def print_time(prediction: Prediction, console: rich.console.Console) -> None:
    plan, cluster, calibration = prediction.plan, prediction.cluster, prediction.calibration
    spread = f"{span_text(prediction.low)} to {span_text(prediction.high)}"
    console.print(
        f"a step takes {span_text(prediction.seconds)} ({spread}): "
        f"{prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1%}",
        style="bold",
    )
    console.print(
        f"{plan.world:,} x {calibration.name}, {cluster.domain} to a fast domain, "
        f"{8e-9 * cluster.nic_bandwidth:,.0f} Gb/s each between them; calibration {calibration.source}"
    )
    if prediction.narrowed_by:
        console.print(f"to narrow the range, {prediction.narrowed_by}")
    console.print()
    several = len(prediction.step.stations) > 1
    where = f", on a rank of stage {prediction.step.limiting}, which computes longest" if several else ""
    console.print(f"where the time goes{where}", style="bold")
    rows = [
        [
            name,
            LABELS.get(name, f"collectives over {name}"),
            span_text(seconds),
            f"{seconds / prediction.seconds:.1%}",
        ]
        for name, seconds in prediction.parts.items()
        if seconds > 0.0005 * prediction.seconds
    ]
    print_table(["part", "", "time", "share"], rows, console)


def span_text(seconds: float) -> str:
    """A time with three digits: `19.9 s`, `412 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def time_json(prediction: Prediction) -> dict[str, Any]:
    """The same in seconds."""
    return {
        "cluster": prediction.cluster.name,
        "calibration": {"device": prediction.calibration.device, "source": prediction.calibration.source},
        "seconds": prediction.seconds,
        "low": prediction.low,
        "high": prediction.high,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "limited_by": prediction.limited_by,
        "stage": prediction.step.limiting,
        "stages": [dict(parts) for parts in prediction.step.stations],
    }
