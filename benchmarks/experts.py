"""The experts' MLP on a GPU: forward and backward with float32 accumulation, whole and product by product.

    python -m benchmarks.experts            # whole steps against the base, and what each product takes
    python -m benchmarks.experts --tune     # first tries every variant of every product, and writes winners

The base is `F.grouped_mm`, a compiled activation with gate and up as halves, and `main_grad.add_`. Floors are
of the chip: operations at 790 TFLOP/s, bytes at 4.3 TB/s."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from benchmarks import expert_kernels as ek
from benchmarks import machine
from benchmarks.expert_kernels import Data, Shape
from braid.kernels.grouped_mlp import fused
from braid.kernels.grouped_mlp.paths import Paths, Work, measured, nearest

SHAPES = (
    Shape(32768, 2048, 1024, 64),
    Shape(65536, 2048, 768, 128),
    Shape(32768, 4096, 1536, 16),
    Shape(262144, 2048, 1024, 64),
)
LOADS = ("balanced", "uneven", "zipf")
"""Of the experts: equal, a whole number of tiles for each, which suits the base best; within half of the mean;
and falling as one over the rank."""
CHECKS = (Shape(1705, 512, 256, 16), Shape(811, 528, 336, 16), Shape(811, 576, 320, 40))
"""Small problems with experts of all sizes: dims that are multiples of every tile, of none, and of 64."""
BOUND = 8e-3
THREADS = 14
STEPS, TURNS, ROUNDS, GROUP = 40, 3, 5, 8
"""Milliseconds of steps that a variant is timed for at a time, how often variants take turns, how often ours
and the base do, and how many steps are timed as one."""


def micro(function: Callable[[], object], *, milliseconds: int = 40) -> float:
    """Microseconds on the device, the median of what fits into so many milliseconds."""
    found: float = do_bench(function, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")
    return found * 1e3


def sustained(function: Callable[[], object], *, milliseconds: int = 120) -> float:
    """Microseconds of one of many runs without a pause, as in training: the median over groups of them. A chip
    that rests between runs has power to spare that it does not have in the long run."""

    def one_of(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            function()
        end.record()
        end.synchronize()
        taken: float = start.elapsed_time(end)
        return taken / times

    one_of(2)
    groups = max(3, round(milliseconds / (GROUP * one_of(2))))
    return 1e3 * median(one_of(GROUP) for _ in range(groups))


def host(function: Callable[[], object], times: int = 20) -> float:
    """Microseconds that the host takes to launch."""
    function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        function()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return taken / times * 1e6


# ------------------------------------------------------------------------------------------------ base


def base_activation(h: Tensor, p: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up * p[:, None]).to(h.dtype)


def base_gradient(da: Tensor, h: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h.float().chunk(2, -1)
    da = da.float()
    s = torch.sigmoid(gate)
    opened = gate * s
    d = da * p[:, None]
    return torch.cat([d * up * (s + opened * (1 - s)), d * opened], -1).to(h.dtype), (da * opened * up).sum(-1)


class Base:
    """What there is without kernels of our own."""

    def __init__(self) -> None:
        self.activation = torch.compile(base_activation, dynamic=False)
        self.gradient = torch.compile(base_gradient, dynamic=False)

    def products(self, d: Data) -> dict[str, Callable[[], object]]:
        ends = d.where.ends_E
        return {
            "fc1": lambda: self.activation(F.grouped_mm(d.x, d.w_in.transpose(1, 2), offs=ends), d.probs),
            "fc2": lambda: F.grouped_mm(d.a, d.w_down.transpose(1, 2), offs=ends),
            "dgrad2": lambda: self.gradient(F.grouped_mm(d.dy, d.w_down, offs=ends), d.h, d.probs),
            "dgrad1": lambda: F.grouped_mm(d.dh, d.w_in, offs=ends),
            "wgrad2": lambda: d.main_down.add_(F.grouped_mm(d.dy.t(), d.a, offs=ends)),
            "wgrad1": lambda: d.main_in.add_(F.grouped_mm(d.dh.t(), d.x, offs=ends)),
        }

    def step(self, d: Data) -> tuple[Tensor, ...]:
        ends = d.counts.cumsum(0).to(torch.int32)
        h = F.grouped_mm(d.x, d.w_in.transpose(1, 2), offs=ends)
        a = self.activation(h, d.probs)
        y = F.grouped_mm(a, d.w_down.transpose(1, 2), offs=ends)
        da = F.grouped_mm(d.dy, d.w_down, offs=ends)
        d.main_down.add_(F.grouped_mm(d.dy.t(), a, offs=ends))
        dh, dprobs = self.gradient(da, h, d.probs)
        d.main_in.add_(F.grouped_mm(dh.t(), d.x, offs=ends))
        return y, F.grouped_mm(dh, d.w_in, offs=ends), dprobs


def step(d: Data, paths: Paths, *, accumulate: bool = True) -> tuple[Tensor, ...]:
    """Forward and backward of ours."""
    how = fused.How(paths, ek.SWIGLU, d.where.tile_rows, d.launch)
    e, f2, c = d.w_in.shape
    of_experts = fused.ExpertWeights(d.w_in.view(e, f2 // 2, 2, c), d.w_down)
    y, kept = fused.forward(how, d.counts, d.x, d.probs, of_experts)
    found = fused.backward(how, d.dy, kept, of_experts)
    found.w_down_ECF.into(d.main_down, accumulate=accumulate)
    found.w_in_EFGC.into(d.main_in.view(e, f2 // 2, 2, c), accumulate=accumulate)
    assert found.x_NC is not None
    return y, found.x_NC, found.probs_N


# -------------------------------------------------------------------------------------------- checking


def check_all(kernels: list[str], log: dict[str, Any]) -> dict[str, list[Any]]:
    """The variants of each kernel that compile and are right, on small problems. Compiled side by side."""
    problems = []
    for number, shape in enumerate(CHECKS):
        generator = torch.Generator().manual_seed(7 + number)
        share = torch.rand(shape.experts, generator=generator)
        share[3] = share[-1] = 0
        chosen = share.multinomial(shape.rows, replacement=True, generator=generator)
        d = ek.data(shape, chosen.bincount(minlength=shape.experts), "cuda", torch.bfloat16)
        problems.append((d, {kernel: ek.expected(kernel, d) for kernel in kernels}))
    torch.cuda.synchronize()

    def check(kernel: str, variant: Any) -> tuple[float, float, str]:
        started, worst = time.time(), 0.0
        try:
            for d, wanted in problems:
                worst = max(worst, *(_errors(kernel, variant, d, wanted[kernel])))
        except Exception as failure:
            return float("nan"), time.time() - started, f"{type(failure).__name__}: {str(failure)[:160]}"
        return worst, time.time() - started, "" if worst < BOUND else "wrong"

    cases = [(kernel, variant) for kernel in kernels for variant in ek.CANDIDATES[kernel]]
    cases.sort(key=lambda case: case[0] not in ("dgrad2", "fc1"))  # the slowest to compile first

    def told(case: tuple[str, Any]) -> tuple[float, float, str]:
        worst, seconds, what = check(*case)
        print(f"  {case[0]} {ek.label(case[1])}: {worst:.1e} {seconds:.1f} s {what}", flush=True)
        return worst, seconds, what

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(told, cases))
    good: dict[str, list[Any]] = {kernel: [] for kernel in kernels}
    for (kernel, variant), (worst, seconds, what) in zip(cases, results, strict=True):
        log[f"{kernel} {ek.label(variant)}"] = {"error": worst, "seconds": round(seconds, 1), "problem": what}
        if not what:
            good[kernel].append(variant)
    return good


def _errors(kernel: str, variant: Any, d: Data, wanted: tuple[Tensor, ...]) -> list[float]:
    """How far a variant is off: infinitely, where it gives no number or does not repeat to the last bit."""
    found = []
    adds = kernel[0] == "w"
    for start, accumulate in (
        ((1.0, True), (float("nan"), False)) if adds and variant is not None else ((1.0, True),)
    ):
        one, other = (
            ek.run(kernel, variant, _with_buffers(d, start) if adds else d, accumulate=accumulate)
            for _ in range(2)
        )
        difference = ek.error(tuple(x.double() - (start if adds and accumulate else 0) for x in one), wanted)
        same = all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        found.append(difference if same and difference == difference else float("inf"))
    return found


def _with_buffers(d: Data, value: float) -> Data:
    return replace(d, main_in=torch.full_like(d.main_in, value), main_down=torch.full_like(d.main_down, value))


# --------------------------------------------------------------------------------------------- timing


def tune(loads: list[Data], paths: Paths, good: dict[str, list[Any]], log: dict[str, Any]) -> Paths:
    """Swap in every variant of every product, and keep what makes whole steps under all loads fastest. Under
    load the chip is as fast as its power allows, so that a product which is fastest by itself, after a rest,
    need not be the one that a step is fastest with."""
    for d in loads:  # warm, as in a long run
        sustained(partial(step, d, paths), milliseconds=400)
    for product, variants in good.items():
        ways = [way for way in variants if way is not None or product[0] != "w"]
        if not ways:
            print(f"  {product}: no way is right, {ek.label(getattr(paths, product))} stays", flush=True)
            continue
        names = (product, f"overwrite{product[-1]}") if product[0] == "w" else (product,)
        for name in names:
            tried = [replace(paths, **{name: way}) for way in ways]
            steps = [partial(step, paths=way, accumulate=name == product) for way in tried]
            found = sorted(zip(in_turns(steps, loads), ways, strict=True), key=lambda entry: sum(entry[0]))
            paths = replace(paths, **{name: found[0][1]})
            log[name] = {ek.label(way): [round(us) for us in times] for times, way in found}
            line = " | ".join(f"{_slashed(times)} {ek.label(way)}" for times, way in found)
            print(f"  {name}: {line}", flush=True)
    return paths


def in_turns(steps: Sequence[Callable[[Data], object]], loads: list[Data]) -> list[list[float]]:
    """Microseconds of each under each load. What ran before leaves the chip warmer or cooler, so every turn
    has an order of its own, and the median of all turns counts."""
    times: list[list[list[float]]] = [[[] for _ in loads] for _ in steps]
    orders = Random(0)
    for _ in range(TURNS):
        for which in orders.sample(range(len(steps)), len(steps)):
            for load, d in enumerate(loads):
                times[which][load].append(sustained(partial(steps[which], d), milliseconds=STEPS))
    return [[median(of_load) for of_load in of_step] for of_step in times]


def _slashed(times: list[float]) -> str:
    return "/".join(f"{us:.0f}" for us in times)


def measure(shape: Shape, d: Data, base: Base, paths: Paths) -> dict[str, Any]:
    """A whole step of ours and of the base, in turns, and each product by itself."""
    floors = shape.floors()
    floor = sum(floors[product] for product in ek.PRODUCTS)
    our_step, base_step = partial(step, d, paths), partial(base.step, d)
    sustained(our_step, milliseconds=200), sustained(base_step, milliseconds=200)
    pairs = [(sustained(base_step), sustained(our_step)) for _ in range(ROUNDS)]
    rested = [(micro(base_step, milliseconds=60), micro(our_step, milliseconds=60)) for _ in range(ROUNDS)]
    theirs, ours = map(median, zip(*pairs, strict=True))
    theirs_rested, ours_rested = map(median, zip(*rested, strict=True))
    return {
        "base": [round(times[0]) for times in pairs],
        "ours": [round(times[1]) for times in pairs],
        "overwriting": round(sustained(partial(our_step, accumulate=False))),
        "floor": round(floor),
        "gain": round(theirs / ours, 3),
        "of_floor": round(floor / ours, 3),
        "rested": {
            "base": [round(times[0]) for times in rested],
            "ours": [round(times[1]) for times in rested],
            "gain": round(theirs_rested / ours_rested, 3),
            "of_floor": round(floor / ours_rested, 3),
        },
        "host": [round(host(base_step)), round(host(our_step))],
        "products": {
            product: {
                "base": round(micro(base.products(d)[product])),
                "ours": round(micro(partial(ek.run, product, getattr(paths, product), d))),
                "floor": round(floors[product]),
                "path": ek.label(getattr(paths, product)),
            }
            for product in ek.PRODUCTS
        },
    }


def table(winners: dict[Work, Paths]) -> str:
    """`measured.json`, with a line for every product."""
    entries = []
    for work, paths in winners.items():
        ways = (f"{json.dumps(name)}: {json.dumps(way)}" for name, way in asdict(paths).items())
        lines = ",\n             ".join(ways)
        entries.append(f'  {{"work": {json.dumps(work._asdict())},\n   "paths": {{{lines}}}}}')
    return '{"shapes": [\n' + ",\n".join(entries) + "\n]}\n"


def main() -> None:
    asked = options()
    machine.needs_gpu()
    started, known = time.time(), measured()
    report: dict[str, Any] = {"machine": machine.describe(), "checks": {}, "shapes": {}}
    winners = {entry.work: entry.paths for entry in known}
    base = Base()
    good = check_all(list(asked.kernels), report["checks"]) if asked.tune else {}
    print(f"checked after {time.time() - started:.0f} s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    for number in asked.shapes:
        shape = SHAPES[number]
        work = Work(shape.rows // shape.experts, shape.hidden, shape.ffn)
        paths = nearest(known, work)
        entry: dict[str, Any] = {}
        print(f"{tuple(shape)}", flush=True)
        try:
            loads = ek.loads(shape, list(asked.loads))
            if asked.tune:
                paths = tune(loads, paths, good, entry.setdefault("steps", {}))
                winners[work] = paths
                (asked.out / "measured.json").write_text(table(winners))
            for load, d in zip(asked.loads, loads, strict=True):
                entry[load] = measure(shape, d, base, paths)
            del loads, d
        except Exception as failure:
            entry["failure"] = repr(failure)[:500]
            print(f"  FAILED: {failure!r}"[:500], flush=True)
        report["shapes"][str(tuple(shape))] = entry
        torch.cuda.empty_cache()
        (asked.out / "experts.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"  after {time.time() - started:.0f} s", flush=True)
    summary(report)
    if any("failure" in entry for entry in report["shapes"].values()):
        raise SystemExit("not everything could be measured")


def options() -> argparse.Namespace:
    """What was asked for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.experts", description=__doc__, formatter_class=form)
    numbers = tuple(range(len(SHAPES)))
    told = ", ".join(f"{number}: {tuple(shape)}" for number, shape in enumerate(SHAPES))
    parser.add_argument("--tune", action="store_true", help="try all variants, winners go to OUT/measured.json")
    parser.add_argument(
        "--shapes", type=int, nargs="+", choices=numbers, default=numbers,
        help=f"numbers of shapes, which are rows, hidden, ffn, experts; {told}; default all",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", nargs="+", choices=ek.PRODUCTS, default=ek.PRODUCTS, help="products to tune; default all"
    )
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=LOADS, help="how rows spread over experts; default all"
    )
    parser.add_argument("--out", type=Path, help="a folder for figures; default benchmarks/results")
    asked = parser.parse_args()
    if asked.out is None and (asked.shapes != numbers or asked.loads != LOADS):
        parser.error("a part of the shapes or loads would replace the figures of all: set --out")
    asked.out = asked.out or machine.RESULTS
    return asked


def summary(report: dict[str, Any]) -> None:
    """A short table, last."""
    print(f"{'shape':26} {'load':9} {'floor':>6} {'base':>12} {'ours':>12} {'gain':>6} {'of floor':>8}  host")
    for shape, entry in report["shapes"].items():
        for load in (load for load in LOADS if load in entry):
            f = entry[load]
            base, ours = ("/".join(map(str, f[name])) for name in ("base", "ours"))
            figures = f"{f['floor']:6} {base:>12} {ours:>12} {f['gain']:6} {f['of_floor']:8}  {f['host']}"
            print(f"{shape:26} {load:9} {figures}  rested {f['rested']}")
            for product, p in f.get("products", {}).items():
                figures = f"floor {p['floor']:5} base {p['base']:5} ours {p['ours']:5}  {p['path']}"
                print(f"    {product:8} {figures}")


if __name__ == "__main__":
    main()
