"""The grouped MLP on a GPU: forward and backward with float32 accumulation, as a whole and matmul by matmul.

    python -m benchmarks.experts            # whole steps against the baseline, and each matmul alone
    python -m benchmarks.experts --tune     # autotune: first times the wgrad kernels, writes the tuned table

The baseline is `F.grouped_mm`, a compiled activation with gate and up as halves, and `main_grad.add_`. Every
kernel is checked against float64 first. Roofline times are for an H200: 790 TFLOP/s, 4.3 TB/s."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from benchmarks import expert_kernels as ek
from benchmarks import machine
from benchmarks.expert_kernels import Data, Shape
from braid.kernels.grouped_mlp import fused
from braid.kernels.grouped_mlp.tuned_table import FILE, Tuned, WgradKernel, Work, nearest, to_json, tuned_table

SHAPES = (
    Shape(32768, 2048, 1024, 64),
    Shape(65536, 2048, 768, 128),
    Shape(65536, 2048, 1024, 64),
    Shape(32768, 4096, 1536, 16),
    Shape(262144, 2048, 1024, 64),
)
LOADS = ("balanced", "uneven", "zipf")
"""How rows spread over experts: equally, in whole tiles, which suits the baseline best; between half and one
and a half of the mean; falling as one over the rank."""
CHECKS = (Shape(1705, 512, 256, 16), Shape(811, 528, 336, 16), Shape(811, 576, 320, 40))
"""Small problems with experts of all sizes: dims that are multiples of every tile, of none, and of 64."""
BOUND = 8e-3
"""The largest relative error; operands and most results are bfloat16."""
KERNELS: tuple[WgradKernel, ...] = get_args(WgradKernel)
TUNE_MS, TURNS, ROUNDS, GROUP = 80, 5, 5, 8
"""Milliseconds of steps per timing of a kernel, how often kernels take turns, how often we and the baseline do,
and how many steps are timed as one."""


def micro(function: Callable[[], object], *, milliseconds: int = 40) -> float:
    """Microseconds on the device, the median of what fits into so many milliseconds."""
    found: float = do_bench(function, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")
    return found * 1e3


def sustained(function: Callable[[], object], *, milliseconds: int = 120) -> float:
    """Microseconds of one of many runs without a pause, as in training: the median over groups of them. A GPU
    that was idle before a run clocks higher than its power limit allows in the long run."""

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


# -------------------------------------------------------------------------------------------- baseline


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
    """The same without kernels of our own."""

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


def step(d: Data, kernel: WgradKernel, *, accumulate: bool = True) -> tuple[Tensor, ...]:
    """Forward and backward of ours."""
    config = fused.FusedConfig(ek.SWIGLU, kernel, ek.TILING, d.launch)
    e, f2, c = d.w_in.shape
    weights = fused.ExpertWeights(d.w_in.view(e, f2 // 2, 2, c), d.w_down)
    y, saved = fused.forward(config, d.counts, d.x, d.probs, weights)
    found = fused.backward(config, d.dy, saved, weights)
    found.w_down_ECF.into(d.main_down, accumulate=accumulate)
    found.w_in_EFGC.into(d.main_in.view(e, f2 // 2, 2, c), accumulate=accumulate)
    assert found.x_NC is not None
    return y, found.x_NC, found.probs_N


# -------------------------------------------------------------------------------------------- checking


def check() -> dict[str, float]:
    """The relative error of every kernel against float64, the worst of several small problems."""
    errors: dict[str, float] = {}
    for number, shape in enumerate(CHECKS):
        generator = torch.Generator().manual_seed(7 + number)
        share = torch.rand(shape.experts, generator=generator)
        share[3] = share[-1] = 0
        chosen = share.multinomial(shape.rows, replacement=True, generator=generator)
        d = ek.data(shape, chosen.bincount(minlength=shape.experts), "cuda", torch.bfloat16)
        for product in ek.PRODUCTS:
            wanted = ek.expected(product, d)
            for kernel in KERNELS if product[0] == "w" else KERNELS[:1]:
                name = name_of(product, kernel)
                errors[name] = max(errors.get(name, 0.0), *_errors(product, kernel, d, wanted))
    wrong = {name: error for name, error in errors.items() if not error < BOUND}
    if wrong:
        raise SystemExit(f"wrong: {wrong}")
    return errors


def name_of(product: str, kernel: WgradKernel) -> str:
    """A matmul and the kernel that runs it."""
    return f"{product}, {f'wgrad {kernel}' if product[0] == 'w' else 'gemm warp-specialised'}"


def _errors(product: str, kernel: WgradKernel, d: Data, wanted: tuple[Tensor, ...]) -> list[float]:
    """Of accumulating and of writing. Infinite, where a result is no number or does not repeat to the last bit;
    what is written must not depend on what the output held."""
    found = []
    adds = product[0] == "w"
    for held, accumulate in ((1.0, True), (float("nan"), False)) if adds else ((0.0, True),):
        one, other = (ek.run(product, _with_buffers(d, held), kernel, accumulate=accumulate) for _ in range(2))
        difference = ek.error(tuple(x.double() - (held if accumulate else 0) for x in one), wanted)
        same = all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        found.append(difference if same and difference == difference else float("inf"))
    return found


def _with_buffers(d: Data, value: float) -> Data:
    return replace(d, main_in=torch.full_like(d.main_in, value), main_down=torch.full_like(d.main_down, value))


# --------------------------------------------------------------------------------------------- timing


def tune(loads: list[Data]) -> tuple[WgradKernel, dict[str, list[int]]]:
    """Autotune: the wgrad kernel with the fastest whole steps over all loads. Whole steps, because under load
    the GPU is limited by power, and the kernel that is fastest after a pause need not be the fastest in a
    step."""
    for d in loads:  # as warm as in a long run
        sustained(partial(step, d, KERNELS[0]), milliseconds=400)
    times = in_turns([partial(step, kernel=kernel) for kernel in KERNELS], loads)
    best = min(zip(times, KERNELS, strict=True), key=lambda each: sum(each[0]))[1]
    return best, {kernel: [round(us) for us in of] for kernel, of in zip(KERNELS, times, strict=True)}


def in_turns(steps: Sequence[Callable[[Data], object]], loads: list[Data]) -> list[list[float]]:
    """Microseconds of each under each load. What ran before leaves the GPU warmer or cooler, so every turn has
    an order of its own, and the median of all turns counts."""
    times: list[list[list[float]]] = [[[] for _ in loads] for _ in steps]
    orders = Random(0)
    for _ in range(TURNS):
        for which in orders.sample(range(len(steps)), len(steps)):
            for load, d in enumerate(loads):
                times[which][load].append(sustained(partial(steps[which], d), milliseconds=TUNE_MS))
    return [[median(of_load) for of_load in of_step] for of_step in times]


def measure(shape: Shape, d: Data, base: Base, kernel: WgradKernel) -> dict[str, Any]:
    """A whole step of ours and of the baseline, in turns, and each matmul alone."""
    floors = shape.floors()
    floor = sum(floors[product] for product in ek.PRODUCTS)
    our_step, base_step = partial(step, d, kernel), partial(base.step, d)
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
                "ours": round(micro(partial(ek.run, product, d, kernel))),
                "floor": round(floors[product]),
                "kernel": name_of(product, kernel).partition(", ")[2],
            }
            for product in ek.PRODUCTS
        },
    }


def main() -> None:
    asked = options()
    machine.needs_gpu()
    started, rows = time.time(), {row.work: row for row in tuned_table()}
    report: dict[str, Any] = {"machine": machine.describe(), "errors": check(), "shapes": {}}
    print(f"checked after {time.time() - started:.0f} s: {report['errors']}", flush=True)
    base = Base()
    asked.out.mkdir(parents=True, exist_ok=True)
    for shape in (SHAPES[number] for number in asked.shapes):
        print(f"{tuple(shape)}", flush=True)
        work = Work(shape.rows // shape.experts, shape.hidden, shape.ffn)
        entry: dict[str, Any] = {}
        loads = ek.loads(shape, list(asked.loads))
        if asked.tune:
            best, entry["tune"] = tune(loads)
            rows[work] = Tuned(work, best)
            (asked.out / FILE).write_text(to_json(tuple(sorted(rows.values()))))
            print(f"  wgrad: {best}, {entry['tune']}", flush=True)
        kernel = nearest(tuple(rows.values()), work)
        for load, d in zip(asked.loads, loads, strict=True):
            entry[load] = measure(shape, d, base, kernel)
        del loads, d
        report["shapes"][str(tuple(shape))] = entry
        torch.cuda.empty_cache()
        (asked.out / "experts.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"  after {time.time() - started:.0f} s", flush=True)
    summary(report)


def options() -> argparse.Namespace:
    """What was asked for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.experts", description=__doc__, formatter_class=form)
    numbers = tuple(range(len(SHAPES)))
    known = ", ".join(f"{number}: {tuple(shape)}" for number, shape in enumerate(SHAPES))
    parser.add_argument("--tune", action="store_true", help=f"autotune wgrad, and write OUT/{FILE}")
    parser.add_argument(
        "--shapes", type=int, nargs="+", choices=numbers, default=numbers,
        help=f"numbers of shapes, which are rows, hidden, ffn, experts; {known}; default all",
    )  # fmt: skip
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
                figures = f"floor {p['floor']:5} base {p['base']:5} ours {p['ours']:5}  {p['kernel']}"
                print(f"    {product:8} {figures}")


if __name__ == "__main__":
    main()
