"""Hyper-connections on a GPU: one sublayer around an identity branch, four streams, bfloat16, 8192 tokens.

    python -m benchmarks.hyper_connection           # checked against float64, then timed beside torch
    python -m benchmarks.hyper_connection --tune    # every variant of every kernel, or of those that are named

Eager and compiled torch run `reference`. Floors are of the chip: bytes at 4.3 TB/s, each tensor read and
written as often as two kernels into and out of the branch and a pass for the weight's gradient need."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import machine
from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.device import gradients, mapping, projection, streams
from braid.kernels.hyper_connection.device.gradients import GradientVariant, WeightVariant
from braid.kernels.hyper_connection.device.projection import ProjectionVariant
from braid.kernels.hyper_connection.device.streams import StreamVariant
from braid.kernels.hyper_connection.fused import USUAL, Fused
from braid.kernels.hyper_connection.reference import Form, Mappings, Parameters

FORM = Form(steps=20, eps=1e-6, norm_eps=1e-5)
BYTES = 4.3e12
"""What the chip moves in a second, as measured."""
STREAMS, TOKENS = 4, 8192
CHANNELS = (4096, 2560)
CHECKS = (
    (1, 4, 128),
    (67, 4, 200),
    (300, 4, 1024),
    (131, 2, 72),
    (50, 1, 136),
    (33, 3, 61),
    (70, 5, 104),
    (19, 8, 96),
    (257, 8, 520),
)
"""Small problems: tokens, streams, channels; multiples of every tile, and of none."""
REPEATS = 5
"""So often the same must come, to the last bit."""
BOUNDS = {"mappings": 2e-5, "outputs": 6e-3, "gradients": 2e-2}
THREADS = 14
PATIENCE = 85.0
"""Seconds after which no further compilation by torch begins."""


class Case(NamedTuple):
    """Inputs of one sublayer, and the gradient of its result."""

    x: Tensor
    parameters: Parameters
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, *self.parameters)


def case(tokens: int, count: int, channels: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
    """Random inputs, with mappings that differ from token to token."""
    generator = torch.Generator(device="cuda").manual_seed(seed + tokens + channels)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    rows, width = count * (count + 2), count * channels
    return Case(
        draw(tokens, count, channels).to(dtype).requires_grad_(),
        Parameters(
            (draw(rows, width) * width**-0.5).requires_grad_(),
            torch.tensor([0.7, 0.9, 1.1], device="cuda", requires_grad=True),
            (draw(rows) * 0.3).requires_grad_(),
        ),
        draw(tokens, count, channels).to(dtype),
    )


def sublayer(implementation: Any) -> Callable[[Tensor, Parameters], Tensor]:
    """A hyper-connection around a branch that gives back what it is given."""

    def run(x: Tensor, parameters: Parameters) -> Tensor:
        entered = implementation.pre(x, parameters, FORM)
        out: Tensor = implementation.post(entered, entered.branch_NC)
        return out

    return run


def both_ways(function: Callable[..., Tensor], c: Case) -> tuple[Tensor, ...]:
    """The result, and all gradients."""
    out = function(c.x, c.parameters)
    return out, *torch.autograd.grad(out, c.leaves, c.grad)


# ---------------------------------------------------------------------------------------------- checking


def truth(c: Case) -> tuple[tuple[Tensor, ...], Mappings]:
    """The same in float64."""
    wide = Case(
        c.x.detach().double().requires_grad_(),
        Parameters(*(p.detach().double().requires_grad_() for p in c.parameters)),
        c.grad.double(),
    )
    with torch.no_grad():
        made = reference.mappings(wide.x, wide.parameters, FORM)
    return both_ways(sublayer(reference), wide), made


def error(actual: Tensor, wanted: Tensor) -> float:
    """Relative, of all entries together; not a number where one is not."""
    return ((actual.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def errors(fused: Fused, c: Case) -> dict[str, float]:
    """The largest of each kind; and whether the same comes every time, to the last bit."""
    wanted, made = truth(c)
    entered = fused.pre(c.x, c.parameters, FORM)
    found = both_ways(sublayer(fused), c)
    again = [both_ways(sublayer(fused), c) for _ in range(REPEATS - 1)]
    exit_ = check_exit(fused, c)
    alike = all(torch.equal(*pair) for other in again for pair in zip(found, other, strict=True))
    return {
        "mappings": worst((entered.post_NS, entered.res_NSS), (made.post_NS, made.res_NSS)),
        "outputs": worst((found[0],), (wanted[0],)),
        "gradients": worst((*found[1:], *exit_[0]), (*wanted[1:], *exit_[1])),
        "repeats": float(alike),
    }


def checked(shape: tuple[int, int, int]) -> dict[str, float] | str:
    """The errors of a problem, or why it does not run; backward stays in this thread, with what it compiles."""
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return errors(Fused.of(shape[1], torch.bfloat16), case(*shape))
    except Exception as failure:
        return told(failure)


def told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure)[:300]}"


def check_exit(fused: Fused, c: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The result and the gradients of an exit; ours, and in float64."""
    count = c.x.shape[1]

    def run(implementation: Any, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        weight, alpha, bias = c.parameters
        given = (c.x, weight[:count], alpha[:1], bias[:count])
        leaves = [(g.detach() if dtype is None else g.detach().to(dtype)).requires_grad_() for g in given]
        out = implementation.contract(leaves[0], Parameters(*leaves[1:]), FORM)
        return out, *torch.autograd.grad(out, leaves, c.grad[:, 0].to(out.dtype))

    return run(fused, None), run(reference, torch.float64)


def worst(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    found = [error(one, other) for one, other in zip(actual, wanted, strict=True)]
    return max(found, key=lambda e: float("inf") if e != e else e)


def right(found: dict[str, float]) -> bool:
    return found["repeats"] == 1.0 and all(found[kind] < bound for kind, bound in BOUNDS.items())


# ------------------------------------------------------------------------------------------------ timing


def milliseconds(function: Callable[[], object], budget: int = 100) -> float:
    """On the device, the median."""
    found: float = do_bench(function, warmup=budget // 4, rep=budget, return_mode="median")
    return found


def floors(channels: int) -> dict[str, float]:
    """Milliseconds of two kernels forward, and of two and a pass for the weight backward: see the module."""
    unit = TOKENS * channels * 2 / BYTES * 1e3
    forward = (3 * STREAMS + 2) * unit
    return {"forward": forward, "both": forward + (7 * STREAMS + 3) * unit}


def timed(function: Callable[..., Tensor], c: Case) -> dict[str, float]:
    return {
        "forward": milliseconds(lambda: function(c.x, c.parameters)),
        "both": milliseconds(lambda: both_ways(function, c)),
    }


class Work(NamedTuple):
    """Everything that the kernels of one sublayer are given."""

    c: Case
    projected: projection.Projected
    made: Mappings
    known: mapping.Known
    reached: mapping.ToStreams
    branch: Tensor


def work(channels: int) -> Work:
    c = case(TOKENS, STREAMS, channels)
    x, (weight, alpha, bias), _ = c
    x = x.detach()
    sizes = {"streams": STREAMS, "channels": channels}
    projected = projection.project(x.flatten(1), weight, USUAL.project)
    made, known = mapping.map_forward(projected, alpha, bias, FORM, **sizes)
    reached, _, _ = mapping.map_backward(made, known, alpha, bias, FORM, **sizes)
    return Work(c, projected, made, known, reached, streams.aggregate(x, made.pre_NS, USUAL.aggregate))


def kernel(name: str, variant: Any, w: Work) -> Callable[[], Any]:
    """One kernel, by one variant."""
    (x, (weight, alpha, bias), grad), made = w.c, w.made
    x, weight = x.detach(), weight.detach()
    sizes = {"streams": STREAMS, "channels": x.shape[2]}
    match name:
        case "project":
            return lambda: projection.project(x.flatten(1), weight, variant)
        case "map":
            return lambda: mapping.map_forward(w.projected, alpha, bias, FORM, **sizes)
        case "aggregate":
            return lambda: streams.aggregate(x, made.pre_NS, variant)
        case "mix":
            return lambda: streams.mix(x, w.branch, None, made.post_NS, made.res_NSS, variant)
        case "mix_backward":
            return lambda: streams.mix_backward(grad, x, w.branch, None, made.post_NS, variant)
        case "aggregate_backward":
            return lambda: streams.aggregate_backward(w.branch, x, variant)
        case "map_backward":
            return lambda: mapping.map_backward(made, w.known, alpha, bias, FORM, **sizes)
        case "gradients":
            mappings = (made.pre_NS, made.res_NSS, w.reached)
            return lambda: gradients.gradients(x, grad, w.branch, *mappings, weight, variant)
    assert name == "weight_gradient"
    return lambda: gradients.weight_gradient(x.flatten(1), w.reached.sums_NM, weight, variant)


UNITS = {
    "project": STREAMS,
    "map": 0,
    "aggregate": STREAMS + 1,
    "mix": 2 * STREAMS + 1,
    "mix_backward": 2 * STREAMS + 2,
    "aggregate_backward": STREAMS + 1,
    "map_backward": 0,
    "gradients": 3 * STREAMS + 1,
    "weight_gradient": STREAMS,
}
"""How often each kernel reads or writes as much as one stream of all tokens."""


def by_kernel(fused: Fused, channels: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each kernel, and of its bytes."""
    w, unit = work(channels), TOKENS * channels * 2 / BYTES * 1e6
    variants = {name: getattr(fused, name) for name in UNITS if not name.startswith("map")}
    return {
        name: (milliseconds(kernel(name, variants.get(name), w), 40) * 1e3, units * unit)
        for name, units in UNITS.items()
    }


# ------------------------------------------------------------------------------------------------ tuning

P, S, G, W = ProjectionVariant, StreamVariant, GradientVariant, WeightVariant
STREAM_CANDIDATES = (
    S(),
    S(stages=2),
    S(stages=3),
    S(tokens=2, channels=512),
    S(tokens=1, channels=1024),
    S(tokens=1, channels=512, warps=2),
    S(tokens=8, channels=256, warps=8),
    S(tokens=8, channels=128, warps=4),
    S(tokens=1, channels=256, warps=1),
    S(tokens=2, channels=256, warps=1),
)
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "project": (
        P(),
        P(warps=8),
        P(splits=8),
        P(splits=16),
        P(stages=3),
        P(stages=3, splits=8),
        P(depth=128, warps=8, stages=3),
        P(tokens=64),
        P(tokens=256, warps=8, stages=3, splits=8),
        P(parts=2),
        P(parts=2, warps=8),
    ),
    "aggregate": STREAM_CANDIDATES,
    "mix": STREAM_CANDIDATES,
    "mix_backward": STREAM_CANDIDATES,
    "aggregate_backward": STREAM_CANDIDATES,
    "gradients": (
        G(),
        G(stages=1),
        G(stages=3),
        G(per_sm=2),
        G(per_sm=8),
        G(warps=8),
        G(resident=True),
        G(resident=True, stages=1),
        G(resident=True, warps=8),
        G(resident=True, warps=8, stages=3),
        G(tokens=16, resident=True),
        G(tokens=16, channels=128),
        G(tokens=16, channels=128, resident=True, warps=8),
        G(tokens=32, channels=128, warps=8, per_sm=2),
        G(tokens=32, channels=128, warps=8, per_sm=2, resident=True),
    ),
    "weight_gradient": (
        W(),
        W(stages=2),
        W(stages=4),
        W(splits=4),
        W(splits=16),
        W(depth=128),
        W(depth=128, stages=2),
        W(channels=128, warps=4, stages=4),
        W(warps=4),
    ),
}


def label(variant: Any) -> str:
    """A variant in a few letters: what differs from its defaults."""
    usual = vars(type(variant)())
    return (
        " ".join(f"{name}={value}" for name, value in vars(variant).items() if value != usual[name])
        or "defaults"
    )


def tensors(result: Any) -> Iterator[Tensor]:
    """Of what a kernel gives, with partial sums added up."""
    if isinstance(result, projection.Projected):
        yield from (part.sum(0) for part in result)
    elif isinstance(result, Tensor):
        yield result
    else:
        for each in result:
            yield from tensors(each)


def differs(w: Work, which: tuple[str, Any]) -> float | str:
    """From the usual variant, which is checked against float64; or why it does not run."""
    name, variant = which
    try:
        found, usual = (tuple(tensors(kernel(name, v, w)())) for v in (variant, getattr(USUAL, name)))
        return worst(found, tuple(tensor.double() for tensor in usual))
    except Exception as failure:
        return told(failure)


def tune(log: dict[str, Any], names: list[str]) -> Iterator[str]:
    """Microseconds of every variant that runs and is right, the fastest first. They are compiled side by
    side."""
    chosen = names or list(CANDIDATES)
    for channels in CHANNELS:
        w = work(channels)
        cases = [(name, variant) for name in chosen for variant in CANDIDATES[name]]
        with ThreadPoolExecutor(THREADS) as pool:
            differences = list(pool.map(partial(differs, w), cases))
        found: dict[str, dict[str, float]] = {name: {} for name in chosen}
        for (name, variant), difference in zip(cases, differences, strict=True):
            if isinstance(difference, str) or not difference < BOUNDS["outputs"]:
                yield f"{channels} {name} [{label(variant)}] {difference}"
            else:
                found[name][label(variant)] = milliseconds(kernel(name, variant, w), 24) * 1e3
        for name, times in found.items():
            best = sorted(times.items(), key=lambda item: item[1])
            log[f"{channels} {name}"] = dict(best)
            yield f"{channels} {name:19}" + "  ".join(f"[{what}] {us:.0f}" for what, us in best[:6])


# -------------------------------------------------------------------------------------------------- main


def check(log: dict[str, Any]) -> Iterator[str]:
    """Errors of every problem, small and large. Kernels are compiled side by side."""
    shapes = (*CHECKS, *((TOKENS, STREAMS, channels) for channels in CHANNELS))
    with ThreadPoolExecutor(THREADS) as pool:
        for shape, found in zip(shapes, pool.map(checked, shapes), strict=True):
            log[f"errors {shape}"] = found
            if isinstance(found, str):
                yield f"{shape} {found}"
                continue
            said = "  ".join(f"{kind} {value:.1e}" for kind, value in found.items())
            yield f"{'right' if right(found) else 'WRONG'} {shape}  {said}"
    torch.cuda.empty_cache()


def measure(log: dict[str, Any], started: float) -> Iterator[str]:
    """Lines to show, as they come. What fails is told, and the rest goes on."""

    def attempt(name: str, function: Callable[[], Any]) -> Iterator[str]:
        try:
            log[name] = function()
        except Exception as failure:
            log[name] = None
            yield f"{name} {told(failure)}"

    yield from check(log)
    yield f"checked after {time.perf_counter() - started:.0f} s"
    for channels in CHANNELS:
        name = f"kernels {channels}"
        yield from attempt(name, partial(by_kernel, USUAL, channels))
        for which, (us, least) in (log[name] or {}).items():
            yield f"{channels}  {which:19}{us:7.0f} µs, bytes {least:4.0f}"
    for name, implementation in (("ours", USUAL), ("eager", reference), ("compiled", reference)):
        for channels in CHANNELS:
            if name == "compiled" and time.perf_counter() - started > PATIENCE:
                yield f"{name} {channels} is left out: too late to begin"
                continue
            function = sublayer(implementation)
            if name == "compiled":
                function = torch.compile(function, dynamic=False)
            c = case(TOKENS, STREAMS, channels)
            yield from attempt(f"{name} {channels}", partial(timed, function, c))
            yield f"{name} {channels} after {time.perf_counter() - started:.0f} s"


def table(log: dict[str, Any]) -> Iterator[str]:
    yield f"{'ms':>6} {'':9}{'forward':>9}{'both':>9}{'over compiled':>22}"
    for channels in CHANNELS:
        rows = {name: log.get(f"{name} {channels}") for name in ("eager", "compiled", "ours")}
        rows["floor"] = log[f"floor {channels}"] = floors(channels)
        for name, row in rows.items():
            if row is None:
                continue
            base = rows["compiled"]
            times = (
                "" if base is None else "".join(f"{base[way] / row[way]:11.2f}" for way in ("forward", "both"))
            )
            yield f"{channels:6} {name:9}{row['forward']:9.3f}{row['both']:9.3f}{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tune", nargs="*", choices=CANDIDATES, help="time every variant of these kernels, or of all"
    )
    asked = parser.parse_args()
    started, origin = time.perf_counter(), machine.describe()
    log: dict[str, Any] = {}
    tuning = asked.tune is not None
    for line in tune(log, asked.tune) if tuning else measure(log, started):
        print(line, flush=True)
    if not tuning:
        print("\n".join(table(log)))
    log["seconds"] = time.perf_counter() - started
    print("written to", machine.write("hyper_connection_tune" if tuning else "hyper_connection", log, origin))


if __name__ == "__main__":
    main()
