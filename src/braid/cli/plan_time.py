"""The step time of a plan: seconds with their range, and where they go."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import rich.console

from braid.cli.args import print_table
from braid.cli.plan_tables import Table, size_text
from braid.errors import ConfigError, Problem

if TYPE_CHECKING:
    from braid.config import Run
    from braid.planning.estimate.weights import Counted
    from braid.planning.plan import Plan
    from braid.timing.advice import TimeAdvice
    from braid.timing.predict import Prediction
    from braid.timing.split import SplitByTime

LABELS = MappingProxyType(
    {
        "products": "matrix products",
        "attention": "softmax attention",
        "scans": "scans of Mamba-2 and delta nets",
        "memory": "norms, activations, permutations: memory traffic",
        "host": "starting kernels, as far as that is slower than they run",
        "host_link": "waiting for activations on their way to the host and back",
        "optimizer": "gradient norm and optimizer",
        "bubble": "waiting for other stages",
        "tp": "tensor parallelism",
        "cp": "context parallelism",
        "pp": "messages between stages",
        "ep": "tokens to experts and back",
        "ep_etp": "tokens to experts and back",
        "dp_cp": "weights and gradients",
        "edp": "weights and gradients of experts",
        "slab": "numbers of tokens per expert",
        "ends": "gradients of an embedding on both ends",
    }
)
"""What the parts of a step mean; other families go by their names."""


SHOWN = 0.0005
"""Parts with a smaller share of the step are left out of the table."""


def clusters_to_choose() -> str:
    """What `--cluster` may be."""
    from braid.timing.links import clusters

    return f"{', '.join(clusters())}, or a file (FILE.json)"


def refuse_no_cluster(options: Sequence[str]) -> None:
    """`--cluster` without a name lists the names."""
    for option, after in pairwise([*options, "--"]):
        if option == "--cluster" and after.startswith("--"):
            raise ConfigError(f"--cluster has no name behind it: give {clusters_to_choose()}")


def time_problems(cluster: str | None, calibration: str | None) -> Iterator[Problem]:
    if calibration is not None and cluster is None:
        yield Problem(
            field="calibration",
            value=calibration,
            rule="--calibration needs --cluster, for the links between devices",
            remedy=f"no calibration, or --cluster to one of {clusters_to_choose()}",
        )


def split_problems(run: Run, cluster: str | None, *, searched: bool) -> Iterator[Problem]:
    """Why the pipeline of a run cannot be cut by time. A search has pipelines of its own."""
    if cluster is None:
        yield Problem(
            field="split-by-time",
            value=True,
            rule="needs --cluster, for the speed of devices and links",
            remedy=f"neither, to place `|` by FLOPs, or --cluster to one of {clusters_to_choose()}",
        )
    if run.modules:
        rule = "cuts the pipeline of a run without modules"
        yield Problem(field="split-by-time", value=True, rule=rule, remedy="`|` in model.pattern")
    elif run.mesh.pp == 1 and not searched:
        rule = "cuts a pipeline, but mesh.pp is 1"
        yield Problem(field="split-by-time", value=True, rule=rule, remedy="mesh.pp to 2 or more")


def decided_offload(
    run: Run, world: int, cluster: str | None, calibration: str | None, *, load: float, device: str
) -> tuple[Run, tuple[str, ...]]:
    """A run whose offload is as much as hides on this cluster, if it says `auto`, with what was decided; its
    copies stand where they have to there."""
    if not run.train.offload:
        return run, ()
    from braid.timing.calibration import load as load_calibration
    from braid.timing.links import load_cluster
    from braid.timing.offload import decided, with_times
    from braid.timing.predict import calibration_for

    known = None if calibration is None else load_calibration(calibration)
    machines = None if cluster is None else load_cluster(cluster)
    found = decided(run, world, machines, known, load=load, device=device)
    if machines is None:
        return found.run, found.reasons
    return with_times(found.run, world, calibration_for(machines, known)), found.reasons


def cut_on(
    run: Run, world: int, cluster: str, calibration: str | None, *, load: float, limit: int | None, device: str
) -> SplitByTime:
    """The run with its pipeline cut by time on a cluster, by its name or file."""
    from braid.timing.calibration import load as load_calibration
    from braid.timing.links import load_cluster
    from braid.timing.split import split_by_time

    known = None if calibration is None else load_calibration(calibration)
    return split_by_time(run, world, load_cluster(cluster), known, load=load, limit=limit, device=device)


def cut_lines(cut: SplitByTime, cluster: str) -> list[str]:
    """Where a pipeline was cut, what that saves, and how to train with it."""
    saved = f"{span_text(cut.seconds)} of a micro-batch, {span_text(cut.before)} before"
    saved += "" if cut.before_fits else ", which does not fit into memory"
    fits = "" if cut.fits else "; no cut was found that fits into memory"
    return [
        f"pattern: {cut.run.model.pattern}, cut by predicted time on {cluster}: the slowest rank computes "
        f"{saved}{fits}",
        f"to train with it: {shlex.join(['--model.pattern', cut.run.model.pattern or ''])}",
    ]


def cut_json(cut: SplitByTime) -> dict[str, Any]:
    """The same; `pattern` is what to train with."""
    return {
        "pattern": cut.run.model.pattern,
        "seconds": cut.seconds,
        "before": cut.before,
        "before_fits": cut.before_fits,
        "fits": cut.fits,
    }


def predicted(
    plan: Plan,
    cluster: str | None,
    calibration: str | None,
    load: float,
    counted: Sequence[Sequence[Counted]] | None,
) -> Prediction:
    """The prediction for a cluster, by its name or file."""
    from braid.timing.calibration import load as load_calibration
    from braid.timing.links import load_cluster
    from braid.timing.predict import predict

    if cluster is None:
        raise ConfigError(
            f"--time and --advise need --cluster, for the speed of devices and links: {clusters_to_choose()}"
        )
    known_device = None if calibration is None else load_calibration(calibration)
    return predict(plan, load_cluster(cluster), known_device, load_factor=load, counted=counted)


def print_time(prediction: Prediction, console: rich.console.Console) -> None:
    headline, *lines = time_lines(prediction)
    console.print(headline, style="bold")
    for line in lines:
        console.print(line)
    console.print()
    console.print(where_title(prediction), style="bold")
    print_table(*time_table(prediction), console)


def time_lines(prediction: Prediction) -> list[str]:
    """The time of a step with its range, the cluster, what would narrow the range."""
    plan, cluster, calibration = prediction.plan, prediction.cluster, prediction.calibration
    spread = f"{span_text(prediction.low)} to {span_text(prediction.high)}"
    lines = [
        f"a step takes {span_text(prediction.seconds)} ({spread}): "
        f"{prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1%}",
        f"{plan.world:,} x {calibration.name}, {cluster.domain} to a fast domain, "
        f"{8e-9 * cluster.nic_bandwidth:,.0f} Gb/s each between them; calibration {calibration.source}",
    ]
    return lines + [f"to narrow the range, {each}" for each in [prediction.narrowed_by] if each]


def where_title(prediction: Prediction) -> str:
    several = len(prediction.step.stations) > 1
    where = f", on a rank of stage {prediction.step.limiting}, which computes longest" if several else ""
    return f"where the time goes{where}"


def time_table(prediction: Prediction) -> Table:
    """The parts of a step, the largest first; they add up to it."""
    rows = [
        [name, part_label(name), span_text(seconds), f"{seconds / prediction.seconds:.1%}"]
        for name, seconds in prediction.parts.items()
        if seconds > SHOWN * prediction.seconds
    ]
    return ["part", "", "time", "share"], rows


def part_label(name: str) -> str:
    return LABELS.get(name, f"collectives over {name}")


@dataclass(frozen=True, kw_only=True)
class FasterPlans:
    """Changes that save time."""

    limit: int | None
    """Bytes that a rank may use."""
    changes: tuple[TimeAdvice, ...]


def advice_lines(faster: FasterPlans, prediction: Prediction) -> list[str]:
    """A sentence for each change."""
    from braid.timing.advice import LEAST_GAIN

    if not faster.changes:
        return [f"none that was tried saves {LEAST_GAIN:.1%} of the step or more"]
    lines = [_sentence(each, prediction, faster.limit) for each in faster.changes]
    now = faster.changes[0].peak - faster.changes[0].cost
    if faster.limit is not None and now > faster.limit:
        lines.append(f"as planned it needs {size_text(now)}, which does not fit into {size_text(faster.limit)}")
    return lines


def _sentence(each: TimeAdvice, prediction: Prediction, limit: int | None) -> str:
    share = each.gain / prediction.seconds
    saves = f"{each.options} saves {span_text(each.gain)} of the step ({share:.1%})"
    needs = "as much memory as now"
    if each.cost:
        more = "more" if each.cost > 0 else "less"
        needs = f"{size_text(abs(each.cost))} {more} memory, {size_text(each.peak)} on the fullest rank"
    if each.fits is False and limit is not None:
        return f"{saves}, but does not fit into {size_text(limit)}: {needs}"
    return f"{saves}: {needs}"


def span_text(seconds: float) -> str:
    """A time with three digits: `19.9 s`, `412 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def time_json(prediction: Prediction, faster: FasterPlans | None) -> dict[str, Any]:
    """The same in seconds and bytes."""
    found = {
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
    if faster is not None:
        found["advice"] = [{"options": each.options, **asdict(each)} for each in faster.changes]
    return found
