"""Tables of a calibration, from the samples of `braid calibrate`.

Seconds that fall while a size grows are noise: they are raised to those of the smaller size. The spread of a
class is the error that 68 of 100 held-out measurements stay below: random products between the grid's, and for
curves half the error of each inner point that is predicted from its neighbours.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log, log2

from braid.nn.work import Kernel, Pass, Piece, Product
from braid.timing.calibration import (
    Calibration,
    KernelTable,
    Key,
    ProductTable,
    Source,
    load,
    missing,
    seconds,
    shipped,
)
from braid.timing.interpolation import Point, along, never_falling, never_falling_grid
from braid.timing.kernel_pieces import pieces_of
from braid.timing.peaks import PEAK_BANDWIDTH, PEAK_BF16_FLOPS, device_name, known_word
from braid.timing.samples import Sample, Samples
from braid.timing.step_models import MODELS, predicted, step_work

BY_FLOPS = frozenset({"attention", "ssd", "delta_rule"})
"""Kernels whose points are by operations; those of others by bytes."""
CONFIDENT = 0.68
LEAST_SPREAD = 0.03
SUSTAINED_SPREAD = 0.05


def calibration_of(samples: Samples, source: Source = "measured") -> Calibration:
    """The tables of all samples, without those of kernels that models count by products and bytes."""
    products, bandwidth = product_tables(samples), bandwidth_points(samples)
    fastest = max(_flops(table) for table in products if not table.format)
    word = known_word(samples.device)
    (optimizer,) = samples.of("optimizer")
    whole = Calibration(
        device=device_name(samples.device),
        name=samples.device,
        source=source,
        when=samples.when,
        versions=dict(samples.versions),
        peak_flops=fastest if word is None else PEAK_BF16_FLOPS[word],
        peak_bandwidth=max(size / s for size, s in bandwidth) if word is None else PEAK_BANDWIDTH[word],
        memory_bytes=samples.memory_bytes,
        products=products,
        kernels=kernel_tables(samples),
        bandwidth=bandwidth,
        launch_seconds=statistics.mean(each.seconds for each in samples.of("launch")),
        optimizer=float(optimizer.shape["bytes"]) / optimizer.seconds,
        sustained=1.0,
        contention=_contention(samples),
        host_link={each.name: float(each.shape["bytes"]) / each.seconds for each in samples.of("host_link")},
        collectives=collective_tables(samples),
        skipped=dict(samples.skipped),
    )
    whole = replace(whole, spread=_spread(whole, samples))
    return _with_steps(whole, samples)


def with_shipped_links(calibration: Calibration) -> Calibration:
    """With collectives, and the link to the host, of the shipped file of the same device, where none were
    measured."""
    if calibration.device not in shipped():
        return calibration
    other = load(calibration.device)
    if other.host_link and not calibration.host_link:
        source = f"not measured; shipped: {other.sources['host_link']}"
        sources = {**calibration.sources, "host_link": source}
        calibration = replace(calibration, host_link=other.host_link, sources=sources)
    if calibration.collectives:
        return calibration
    spread = {name: other.spread[name] for name in ("node", "network") if name in other.spread}
    return replace(
        calibration,
        collectives=other.collectives,
        contention=other.contention,
        spread={**calibration.spread, **spread},
        sources={
            **calibration.sources,
            "collectives": f"not measured; shipped: {other.sources['collectives']}",
        },
    )


def _flops(table: ProductTable) -> float:
    """The fastest of a table, operations per second."""
    last = 2 * table.m[-1] * table.n[-1] * table.k[-1] * table.groups
    return last / table.seconds[-1]


# ------------------------------------------------------------------------------------------- tables


def product_tables(samples: Samples) -> tuple[ProductTable, ...]:
    """A whole grid for each pass, number of groups and format."""
    grids: dict[tuple[str, int, str], dict[tuple[int, int, int], float]] = defaultdict(dict)
    for each in samples.of("product"):
        m, n, k, groups = (int(each.shape[name]) for name in ("m", "n", "k", "groups"))
        grids[each.pass_, groups, str(each.shape.get("format", ""))][m, n, k] = each.seconds
    return tuple(_product_table(*of, grid) for of, grid in grids.items())


def _product_table(
    pass_: str, groups: int, form: str, grid: Mapping[tuple[int, int, int], float]
) -> ProductTable:
    axes = [tuple(sorted({point[axis] for point in grid})) for axis in range(3)]
    points = [(m, n, k) for m in axes[0] for n in axes[1] for k in axes[2]]
    measured = never_falling_grid(axes, [grid[point] for point in points])
    m, n, k = axes
    return ProductTable(pass_=_pass(pass_), groups=groups, m=m, n=n, k=k, seconds=measured, format=form)


def _pass(name: str) -> Pass:
    match name:
        case "forward" | "backward" | "wgrad":
            return name
        case _:
            raise ValueError(f"pass {name!r} is none of forward, backward, wgrad")


def kernel_tables(samples: Samples) -> tuple[KernelTable, ...]:
    """A curve for each kernel, key and pass. `backward+wgrad` less `backward` is wgrad."""
    curves: dict[tuple[str, Key, Pass], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kernel, pass_, measured in _measured_kernels(samples):
        size = kernel.flops if kernel.name in BY_FLOPS else kernel.bytes
        curves[kernel.name, kernel.key, pass_][size].append(measured)
    return tuple(
        KernelTable(
            name=name,
            key=key,
            pass_=pass_,
            by="flops" if name in BY_FLOPS else "bytes",
            points=never_falling([(size, statistics.median(all_)) for size, all_ in curve.items()]),
        )
        for (name, key, pass_), curve in sorted(curves.items(), key=lambda item: str(item[0]))
    )


def _measured_kernels(samples: Samples) -> Iterable[tuple[Kernel, Pass, float]]:
    shapes: dict[tuple[str, tuple[tuple[str, object], ...]], dict[str, Sample]] = defaultdict(dict)
    for each in samples.of("kernel"):
        shapes[each.name, tuple(each.shape.items())][each.pass_] = each
    for (name, _), passes in shapes.items():
        found = {pass_: each.seconds for pass_, each in passes.items()}
        if "backward+wgrad" in found:
            found["wgrad"] = max(found["backward+wgrad"] - found["backward"], found["backward"] * 1e-3)
        for pass_, kernel in pieces_of(name, next(iter(passes.values())).shape).items():
            if pass_ in found:
                yield kernel, pass_, found[pass_]


def bandwidth_points(samples: Samples) -> tuple[Point, ...]:
    """Seconds by bytes: the median rate of all elementwise kernels, in classes of sizes."""
    classes: dict[int, list[Point]] = defaultdict(list)
    for each in samples.of("moved"):
        size = float(each.shape["bytes"])
        classes[round(log2(size))].append((size, each.seconds))
    points = []
    for group in classes.values():
        size = round(exp(statistics.mean(log(size) for size, _ in group)))
        rate = statistics.median(size / seconds for size, seconds in group)
        points.append((size, size / rate))
    return never_falling(points)


def collective_tables(samples: Samples) -> dict[str, dict[int, tuple[Point, ...]]]:
    curves: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for each in samples.of("collective"):
        point = (float(each.shape["bytes"]), each.seconds)
        curves[each.name][int(each.shape["ranks"])].append(point)
    return {
        op: {ranks: never_falling(points) for ranks, points in tables.items()} for op, tables in curves.items()
    }


def _contention(samples: Samples) -> dict[str, float]:
    found = {each.name: each.seconds for each in samples.of("contention")}
    return {"node": max(found["together"] / found["alone"], 1.0)} if len(found) == 2 else {}


# ------------------------------------------------------------------------------- spread and whole steps


def _spread(calibration: Calibration, samples: Samples) -> dict[str, float]:
    products = [
        log(seconds(Piece(_product(each)), _pass(each.pass_), calibration) / each.seconds)
        for each in samples.of("product", held_out=True)
    ]
    spread = {"products": _quantile(products), "memory": _left_out([calibration.bandwidth])}
    # Grids of experts are too coarse to leave points out.
    spread["grouped products"] = 2 * spread["products"]
    for name in sorted({table.name for table in calibration.kernels}):
        curves = [table.points for table in calibration.kernels if table.name == name]
        spread[name] = _left_out(curves)
    curves = [points for tables in calibration.collectives.values() for points in tables.values()]
    return spread | ({"node": _left_out(curves)} if curves else {})


def _product(sample: Sample) -> Product:
    m, n, k, groups = (int(sample.shape[name]) for name in ("m", "n", "k", "groups"))
    return Product(m, n, k, groups, format=str(sample.shape.get("format", "")))


def _left_out(curves: Sequence[Sequence[Point]]) -> float:
    """The error at inner points of curves that are predicted without them, halved: the gap is twice as wide."""
    errors = [
        0.5 * log(along([*points[:index], *points[index + 1 :]], points[index][0]) / points[index][1])
        for points in curves
        for index in range(1, len(points) - 1)
    ]
    return _quantile(errors)


def _quantile(errors: Sequence[float]) -> float:
    """The size of error that most stay below; 10 % if there are none to tell."""
    if not errors:
        return 0.1
    sizes = sorted(abs(error) for error in errors)
    return max(sizes[min(int(CONFIDENT * len(sizes)), len(sizes) - 1)], LEAST_SPREAD)


def _with_steps(calibration: Calibration, samples: Samples) -> Calibration:
    """The sustained factor, by whole steps that the host does not limit. What the host takes for a step, more
    than its launches, bounds the seconds of a launch."""
    steps, hosts = _by_name(samples, "step"), _by_name(samples, "host")
    ratios, launches = [], []
    for name in [each for each in steps if each in MODELS]:
        work, _ = step_work(MODELS[name])
        if missing(work, calibration):
            continue
        count = sum(piece.launches for pieces in work.passes().values() for piece in pieces)
        launches.append(hosts[name] / count)
        if hosts[name] < 0.9 * steps[name]:
            ratios.append(steps[name] / predicted(MODELS[name], calibration))
    least = min([calibration.launch_seconds, *launches])
    calibration = replace(calibration, launch_seconds=least)
    if not ratios:
        return calibration
    factor = statistics.median(ratios)
    spread = max([abs(log(ratio / factor)) for ratio in ratios] + [SUSTAINED_SPREAD])
    return replace(calibration, sustained=factor, spread={**calibration.spread, "sustained": spread})


def _by_name(samples: Samples, pass_: str) -> dict[str, float]:
    return {each.name: each.seconds for each in samples.of("step") if each.pass_ == pass_}
