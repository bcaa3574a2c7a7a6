"""Attention on packed rows beside whole rows, on one GPU: is it right, and does it cost what its pairs cost?

    python -m benchmarks.attention              errors against float64, then milliseconds of each launch
    python -m benchmarks.attention --tune       tile sizes and the order of programs, beside the usual ones

16,384 tokens: four whole rows, or documents of 16 to some 9,000 tokens, 1,500 in the mean. `share` is the
number of pairs of a query and a key that it sees, over that of whole rows; TFLOP/s count 4 · pairs · channels
forward and 2.5 times as many backward, though these kernels compute 3.5 times as many. `sdpa` is what torch
takes for whole rows: its backward is not deterministic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import machine
from braid.kernels.attention import Attend, reference, sdpa, spans_of
from braid.kernels.attention.device import hopper, hopper_dk_dv, hopper_dk_dv_wide, hopper_dq, hopper_forward
from braid.kernels.attention.fused import FusedAttention
from braid.kernels.attention.packed import PackedInputs
from braid.kernels.attention.spans import Spans

ROWS, TOKENS = 4, 4096
CUDA = torch.device("cuda")


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


SHAPES = (Heads(16, 8, 128, 128), Heads(32, 8, 64, 64), Heads(16, 16, 192, 128), Heads(16, 2, 256, 256))
CUTS = (5, 6, 20, 300, 301, 560)
CHECKS = tuple(
    (heads, cuts, window, sinks)
    for heads in (*SHAPES, Heads(4, 2, 80, 80), Heads(4, 4, 160, 96), Heads(4, 2, 24, 40))
    for cuts, window, sinks in ((CUTS, None, False), (CUTS, 100, True), ((), None, False))
)


def documents(seed: int) -> Tensor:
    """Rows that are packed with documents; seed 0 stands for whole rows."""
    generator, lengths, left = torch.Generator().manual_seed(seed), list[int](), TOKENS * ROWS
    if not seed:
        return torch.arange(ROWS)[:, None].expand(ROWS, TOKENS)
    while left > 0:
        length = 16 + int(torch.empty(1).exponential_(1 / 1500, generator=generator))
        lengths.append(min(length, left))
        left -= lengths[-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(1, -1)


def inputs(heads: Heads, rows: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and the gradient of the output; k and v are slices of one tensor, as in a layer."""
    generator = torch.Generator(CUDA).manual_seed(1)
    widths = (
        (heads.heads, heads.qk_dim),
        (heads.kv_heads, heads.qk_dim + heads.v_dim),
        (heads.heads, heads.v_dim),
    )
    q, kv, dy = (
        torch.randn(rows, tokens, *width, device=CUDA, generator=generator).to(dtype) for width in widths
    )
    return [q, kv[..., : heads.qk_dim], kv[..., heads.qk_dim :], dy]


def _attend(attend: Attend, given: list[Tensor], spans: Spans) -> Tensor:
    """Of q, k and v, and of sinks if there are any."""
    q, k, v, *sinks = given
    return attend(q, k, v, spans, None, *sinks)


# ------------------------------------------------------------------------------------------------ errors


def errors(fused: FusedAttention, heads: Heads, cuts: tuple[int, ...], window: int | None, sinks: bool) -> Any:
    """Of the output and every gradient against float64, and whether a second run gives the same bits."""
    rows, tokens = 2, 700
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    for cut in cuts:
        ids[0, cut:] += 1
    spans = spans_of(ids, window, CUDA)
    *given, dy = inputs(heads, rows, tokens)
    given += [torch.randn(heads.heads, device=CUDA, dtype=dy.dtype)] if sinks else []
    wide = [x.double().requires_grad_() for x in given]
    y = _attend(reference.attend, wide, spans)
    expected = (y, *torch.autograd.grad(y, wide, dy.double()))
    runs = []
    for _ in range(2):
        here = [x.detach().requires_grad_() for x in given]
        y = _attend(fused, here, spans)
        runs.append((y, *torch.autograd.grad(y, here, dy)))
    worst = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(runs[0], expected, strict=True))
    return {"worst": worst, "same_bits": all(torch.equal(a, b) for a, b in zip(*runs, strict=True))}


def check(fused: FusedAttention, log: dict[str, Any]) -> Iterator[str]:
    def run(case: Any) -> Any:
        try:
            return errors(fused, *case)
        except Exception as failure:
            return repr(failure)[:200]

    with ThreadPoolExecutor(12) as pool:
        for (heads, cuts, window, sinks), found in zip(CHECKS, pool.map(run, CHECKS), strict=True):
            name = f"{tuple(heads)} window={window} sinks={sinks} documents={len(cuts) + 2}"
            log[name] = found
            right = isinstance(found, dict) and found["worst"] < 1e-2 and found["same_bits"]
            yield f"{'right' if right else 'WRONG'} {name} {found}"


# ------------------------------------------------------------------------------------------------- times


def median(run: Callable[[], Any]) -> float:
    return float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def launches(fused: FusedAttention, heads: Heads, spans: Spans, tuned: dict[str, dict[str, int]]) -> Any:
    """Milliseconds of each launch."""
    q, k, v, dy = (x.flatten(0, 1) for x in inputs(heads, *spans.runs_BT.shape))
    given = PackedInputs(q_NQD=q, k_NKD=k, v_NKV=v, tiles=spans.tiles, scale=heads.qk_dim**-0.5)
    of_keys, launch = hopper_dk_dv_wide if hopper.is_wide(given) else hopper_dk_dv, fused.launch
    y, lse = hopper_forward.forward(launch, given, None)
    made = given.new_gradients()
    hopper_dq.launch_dq(launch, given, y, lse, dy, made)
    runs = {
        "forward": lambda: hopper_forward.forward(launch, given, None, **tuned.get("forward", {})),
        "dq": lambda: hopper_dq.launch_dq(launch, given, y, lse, dy, made, **tuned.get("dq", {})),
        "dk_dv": lambda: of_keys.launch_dk_dv(launch, given, lse, dy, made, **tuned.get("dk_dv", {})),
    }
    wanted = tuned or runs
    times = {name: median(runs[name]) for name in wanted}
    return {**times, "sum": sum(times.values())}


def both(attend: Attend, heads: Heads, spans: Spans) -> float:
    """Milliseconds of forward and backward under autograd."""
    *given, dy = inputs(heads, *spans.runs_BT.shape)
    here = [x.detach().requires_grad_() for x in given]
    return median(lambda: torch.autograd.grad(_attend(attend, here, spans), here, dy))


def host_milliseconds(fused: FusedAttention, heads: Heads) -> float:
    """Of a new set of documents: tables and the launches of forward and backward, before the device is waited
    for. The median of eight sets."""
    *given, dy = inputs(heads, 1, ROWS * TOKENS)
    here, taken = [x.detach().requires_grad_() for x in given], []
    for seed in range(1, 9):
        ids = documents(seed)
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch.autograd.grad(_attend(fused, here, spans_of(ids, None, CUDA)), here, dy)
        taken.append(time.perf_counter() - started)
    return sorted(taken)[4] * 1e3


def pairs(spans: Spans) -> int:
    lengths = torch.bincount(spans.runs_BT.flatten())
    return int((lengths * (lengths + 1) // 2).sum())


def measure(fused: FusedAttention, log: dict[str, Any]) -> Iterator[str]:
    sets = {name: spans_of(documents(seed), None, CUDA) for seed, name in enumerate(("whole", "a", "b", "c"))}
    for heads in SHAPES:
        yield f"{tuple(heads)}  ms: forward, dq, dk and dv, sum (TFLOP/s of each way) | with autograd | sdpa"
        for name, spans in sets.items():
            times, seen = launches(fused, heads, spans, {}), pairs(spans)
            flops = 2 * seen * heads.heads * (heads.qk_dim + heads.v_dim) / 1e9
            times |= {"share": seen / pairs(sets["whole"]), "autograd": both(fused, heads, spans)}
            times["sdpa"] = both(sdpa.attend, heads, spans)
            log[f"{tuple(heads)} {name}"] = times
            rates = (flops / times["forward"], 2.5 * flops / (times["dq"] + times["dk_dv"]))
            launched = "".join(f"{times[key]:8.3f}" for key in ("forward", "dq", "dk_dv", "sum"))
            others = f"{times['autograd']:.3f} | {times['sdpa']:.3f}"
            yield f"{name:6} share {times['share']:.2f}{launched} ({rates[0]:.0f}, {rates[1]:.0f}) | {others}"
    log["host_ms"] = host_milliseconds(fused, SHAPES[0])
    yield f"host, new documents: {log['host_ms']:.2f} ms"


CANDIDATES: dict[str, tuple[dict[str, int], ...]] = {
    "forward": ({"GROUP": 1}, {"GROUP": 8}, {"GROUP": 16}, {"GROUP": 8, "programs": 132}),
    "dq": ({"GROUP": 1}, {"GROUP": 8}, {"GROUP": 16}, {"GROUP": 8, "programs": 132}),
    "dk_dv": ({"GROUP": 1}, {"GROUP": 2}, {"GROUP": 8}, {"STAGES": 2}, {"STAGES": 4}),
}


def tune(fused: FusedAttention, log: dict[str, Any]) -> Iterator[str]:
    heads, sets = SHAPES[0], {seed: spans_of(documents(seed), None, CUDA) for seed in range(4)}
    jobs = [(kind, tuned) for kind, each in CANDIDATES.items() for tuned in ({}, *each)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: launches(fused, heads, sets[1], {job[0]: job[1]}), jobs))
    for kind, tuned in jobs:
        times = [launches(fused, heads, spans, {kind: tuned})["sum"] for spans in sets.values()]
        log[f"{kind} {tuned}"] = times
        yield f"{kind:8}{tuned or 'usual'!s:16}" + "".join(f"{each:8.3f}" for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other tile sizes and orders")
    asked = parser.parse_args()
    machine.needs_gpu()
    origin, log, started = machine.describe(), dict[str, Any](), time.perf_counter()
    fused = FusedAttention(hopper=True)
    steps = (tune,) if asked.tune else (check, measure)
    for step in steps:
        for line in step(fused, log):
            print(f"[{time.perf_counter() - started:4.0f}] {line}", flush=True)
    print("written to", machine.write("attention_tune" if asked.tune else "attention", log, origin))


if __name__ == "__main__":
    main()
