"""The experts' MLP on a GPU: forward and backward with float32 accumulation, whole and product by product.

    python -m benchmarks.experts            # whole steps against the base, and what each product takes
    python -m benchmarks.experts --tune     # every variant of every kernel: checked, timed, winners written

The base is `F.grouped_mm`, a compiled activation with gate and up as halves, and `main_grad.add_`. Floors are
of the chip: operations at 790 TFLOP/s, bytes at 4.3 TB/s."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
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
LOADS = ("balanced", "zipf")
CHECKS = (Shape(1705, 512, 256, 16), Shape(811, 528, 336, 16))
"""Small problems with experts of all sizes: dims that are multiples of every tile, and dims of none."""
BOUND = 8e-3
THREADS = 14


def micro(function: Callable[[], object], *, milliseconds: int = 40) -> float:
    """Microseconds on the device, the median of what fits into so many milliseconds."""
    found: float = do_bench(function, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")
    return found * 1e3


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
            "forward": lambda: self.activation(d.h, d.probs),
            "backward": lambda: self.gradient(d.da, d.h, d.probs),
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
    how = fused.How(paths, ek.SWIGLU, d.where.tile_rows)
    e, f2, c = d.w_in.shape
    of_experts = fused.Weights(d.w_in.view(e, f2 // 2, 2, c), d.w_down)
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


def tune(
    shape: Shape, loads: list[Data], base: Base, good: dict[str, list[Any]], log: dict[str, Any]
) -> dict[str, Any]:
    """Time every variant under every load; the winner of each kernel by the mean."""
    winners: dict[str, Any] = {}
    floors = shape.floors()
    for kernel, variants in good.items():
        found: list[tuple[float, list[float], Any]] = []
        for variant in variants:
            try:
                times = [micro(partial(ek.run, kernel, variant, d)) for d in loads]
                found.append((sum(times) / len(times), times, variant))
            except Exception as failure:
                print(f"FAILED {kernel} {ek.label(variant)}: {str(failure)[:160]}", flush=True)
        found.sort(key=lambda entry: entry[0])
        best = winners[kernel] = found[0][2]
        usual = [micro(base.products(d)[kernel]) for d in loads]
        overwriting = {}
        if kernel[0] == "w":
            first = [
                (sum(micro(partial(ek.run, kernel, v, d, accumulate=False)) for d in loads) / len(loads), v)
                for _, _, v in found
            ]
            first.sort(key=lambda entry: entry[0])
            winners[f"overwrite{kernel[-1]}"] = first[0][1]
            overwriting = {ek.label(v): round(us) for us, v in first[:3]}
        log[kernel] = {
            "floor": round(floors[kernel]),
            "base": [round(us) for us in usual],
            "variants": {ek.label(variant): [round(us) for us in times] for _, times, variant in found},
            "overwriting": overwriting,
            "full_size_difference": whole_difference(kernel, best, loads[-1]),
            "host": round(host(partial(ek.run, kernel, best, loads[0]))),
        }
        line = " | ".join(f"{_slashed(times)} {ek.label(variant)}" for _, times, variant in found[:6])
        print(f"  {kernel}: floor {floors[kernel]:.0f} base {_slashed(usual)} | {line}", flush=True)
        print(f"      {log[kernel]['full_size_difference']:.1e} host {log[kernel]['host']} {overwriting or ''}")
    return winners


def whole_difference(kernel: str, variant: Any, d: Data) -> float:
    """How far a variant is from `grouped_mm`, at full size."""
    if kernel in ("forward", "backward"):
        return 0.0
    d.main_in.zero_(), d.main_down.zero_()
    ours = tuple(x.clone() for x in ek.run(kernel, variant, d))
    d.main_in.zero_(), d.main_down.zero_()
    return max(
        ((x.float() - y.float()).norm() / y.float().norm()).item()
        for x, y in zip(ours, ek.run(kernel, None, d), strict=True)
    )


def _slashed(times: list[float]) -> str:
    return "/".join(f"{us:.0f}" for us in times)


def measure(shape: Shape, load: str, base: Base, paths: Paths, *, products: bool) -> dict[str, Any]:
    """A whole step of ours and of the base; each product where asked."""
    (d,) = ek.loads(shape, [load])
    floors = shape.floors()
    floor = sum(floors[product] for product in ek.PRODUCTS)
    our_step, base_step = partial(step, d, paths), partial(base.step, d)
    whole = partial(micro, milliseconds=120)
    ours, theirs = whole(our_step), whole(base_step)
    ours_again, theirs_again = whole(our_step), whole(base_step)
    figures: dict[str, Any] = {
        "base": [round(theirs), round(theirs_again)],
        "ours": [round(ours), round(ours_again)],
        "overwriting": round(whole(partial(our_step, accumulate=False))),
        "floor": round(floor),
        "gain": round((theirs + theirs_again) / (ours + ours_again), 3),
        "of_floor": round(2 * floor / (ours + ours_again), 3),
        "host": [round(host(base_step)), round(host(our_step))],
    }
    if products:
        chosen = asdict(paths)
        figures["products"] = {
            product: {
                "base": round(micro(base.products(d)[product])),
                "ours": round(micro(partial(ek.run, product, getattr(paths, product), d))),
                "floor": round(floors[product]),
                "path": "grouped_mm" if chosen[product] is None else ek.label(getattr(paths, product)),
            }
            for product in ek.PRODUCTS
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try every variant, write the winners")
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    parser.add_argument("--kernels", nargs="*", choices=ek.KERNELS, default=list(ek.KERNELS))
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", str(machine.RESULTS))))
    asked = parser.parse_args()
    started, table = time.time(), measured()
    report: dict[str, Any] = {"machine": machine.describe(), "checks": {}, "shapes": {}}
    winners: list[dict[str, Any]] = []
    base = Base()
    good = check_all(asked.kernels, report["checks"]) if asked.tune else {}
    if asked.tune:
        print(f"checked after {time.time() - started:.0f} s", flush=True)
    for number in asked.shapes:
        shape = SHAPES[number]
        work = Work(shape.rows // shape.experts, shape.hidden, shape.ffn)
        paths = nearest(table, work)
        entry: dict[str, Any] = {}
        print(f"{tuple(shape)}", flush=True)
        try:
            if asked.tune:
                best = tune(shape, ek.loads(shape, asked.loads), base, good, entry.setdefault("kernels", {}))
                paths = Paths(**{name: best.get(name, value) for name, value in vars(paths).items()})
                winners.append({"work": work._asdict(), "paths": asdict(paths)})
            for load in asked.loads:
                entry[load] = measure(shape, load, base, paths, products=not asked.tune)
        except Exception as failure:
            entry["failure"] = repr(failure)[:500]
            print(f"  FAILED: {failure!r}"[:500], flush=True)
        report["shapes"][str(tuple(shape))] = entry
        torch.cuda.empty_cache()
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / ("experts_tune.json" if asked.tune else "experts.json")).write_text(
            json.dumps(report, indent=1)
        )
        if asked.tune:
            (asked.out / "measured.json").write_text(json.dumps({"shapes": winners}, indent=1) + "\n")
        print(f"  after {time.time() - started:.0f} s", flush=True)
    summary(report)


def summary(report: dict[str, Any]) -> None:
    """A short table, last."""
    print(f"{'shape':26} {'load':9} {'floor':>6} {'base':>12} {'ours':>12} {'gain':>6} {'of floor':>8}  host")
    for shape, entry in report["shapes"].items():
        for load in (load for load in LOADS if load in entry):
            f = entry[load]
            base, ours = ("/".join(map(str, f[name])) for name in ("base", "ours"))
            figures = f"{f['floor']:6} {base:>12} {ours:>12} {f['gain']:6} {f['of_floor']:8}  {f['host']}"
            print(f"{shape:26} {load:9} {figures}")
            for product, p in f.get("products", {}).items():
                figures = f"floor {p['floor']:5} base {p['base']:5} ours {p['ours']:5}  {p['path']}"
                print(f"    {product:8} {figures}")


if __name__ == "__main__":
    main()
