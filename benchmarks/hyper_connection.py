"""Hyper-connections on a GPU: one sublayer around an identity branch, four streams, bfloat16, 8192 tokens.

    python -m benchmarks.hyper_connection           # checked against float64, then timed beside torch
    python -m benchmarks.hyper_connection --tune    # every variant of every kernel, or of those that are named
    python -m benchmarks.hyper_connection --block   # what they add to a block of attention and experts

Eager and compiled torch run `reference`. Floors are of the chip: bytes at 4.3 TB/s, each tensor read and
written as often as two kernels into and out of the branch and a pass for the weight's gradient need."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import machine
from braid import architecture, kernels, pattern
from braid.kernels.hyper_connection import reference
from braid.kernels.hyper_connection.device import gradients, mapping, projection, streams
from braid.kernels.hyper_connection.device.gradients import GradientVariant, WgradVariant
from braid.kernels.hyper_connection.device.mapping import MapVariant
from braid.kernels.hyper_connection.device.projection import ProjectionVariant
from braid.kernels.hyper_connection.device.streams import StreamVariant
from braid.kernels.hyper_connection.fused import USUAL, FusedHyperConnection
from braid.kernels.hyper_connection.reference import ConnectionForm, Mappings, Parameters
from braid.kernels.launch import Launcher
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel

FORM = ConnectionForm(steps=20, eps=1e-6, norm_eps=1e-5)
BYTES = 4.3e12
"""What the chip moves in a second, as measured."""
STREAMS, TOKENS, FEW_TOKENS = 4, 8192, 64
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
SLEEP = 4_000_000
"""Cycles, longer than the host takes for anything that is timed."""
PARTIAL = ("project", "map_backward", "weight_gradient")
"""Kernels that leave sums to others."""
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
        out: Tensor = implementation.post(entered.post_inputs, entered.branch_NC)
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


def errors(fused: FusedHyperConnection, c: Case) -> dict[str, float]:
    """The largest of each kind; and whether the same comes every time, to the last bit."""
    wanted, made = truth(c)
    entered = fused.pre(c.x, c.parameters, FORM)
    found = both_ways(sublayer(fused), c)
    again = [both_ways(sublayer(fused), c) for _ in range(REPEATS - 1)]
    exit_ = check_exit(fused, c)
    alike = all(torch.equal(*pair) for other in again for pair in zip(found, other, strict=True))
    return {
        "mappings": worst(
            (entered.post_inputs.post_NS, entered.post_inputs.res_NSS), (made.post_NS, made.res_NSS)
        ),
        "outputs": worst((found[0],), (wanted[0],)),
        "gradients": worst((*found[1:], *exit_[0]), (*wanted[1:], *exit_[1])),
        "repeats": float(alike),
    }


def checked(shape: tuple[int, int, int]) -> dict[str, float] | str:
    """The errors of a problem, or why it does not run; backward stays in this thread, with what it compiles."""
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return errors(FusedHyperConnection.of(shape[1], torch.bfloat16), case(*shape))
    except Exception as failure:
        return told(failure)


def told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure)[:300]}"


def check_exit(fused: FusedHyperConnection, c: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
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
    """As a caller has it, the median: where the device is faster than the host, it waits."""
    found: float = do_bench(function, warmup=budget // 4, rep=budget, return_mode="median")
    return found


def on_device(function: Callable[[], object], repeats: int = 12) -> float:
    """Milliseconds of the device alone, the median, with nothing in its cache: it sleeps until the host has
    handed over all of its work."""
    much = torch.empty(2**28, dtype=torch.int8, device="cuda")
    function()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        much.zero_()
        torch.cuda._sleep(SLEEP)
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in pairs)


def host_microseconds(function: Callable[[], object], repeats: int = 200) -> float:
    """Of the host, for work that the device has done before more comes."""
    function()
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            function()
        taken.append((time.perf_counter() - started) / repeats * 1e6)
    return min(taken)


def floors(channels: int) -> dict[str, float]:
    """Milliseconds of two kernels forward, and of two and a pass for the weight backward: see the module."""
    unit = TOKENS * channels * 2 / BYTES * 1e3
    forward = (3 * STREAMS + 2) * unit
    return {"forward": forward, "both": forward + (7 * STREAMS + 3) * unit}


def timed(function: Callable[..., Tensor], c: Case) -> dict[str, float]:
    """Backward stays in the thread that asks for it, as it does from one layer of a model to the next: a single
    sublayer would pay for waking another one."""

    def forward() -> object:
        return function(c.x, c.parameters)

    def both() -> object:
        return both_ways(function, c)

    with torch.autograd.set_multithreading_enabled(False):
        return {
            "forward": milliseconds(forward),
            "both": milliseconds(both),
            "forward on device": on_device(forward),
            "both on device": on_device(both),
        }


def host(fused: FusedHyperConnection, channels: int) -> dict[str, float]:
    """Microseconds of the host for one sublayer, also where backward stays in the thread that asks for it."""
    c, function = case(FEW_TOKENS, STREAMS, channels), sublayer(fused)

    def both() -> object:
        return both_ways(function, c)

    found = {
        "forward": host_microseconds(lambda: function(c.x, c.parameters)),
        "both": host_microseconds(both),
    }
    with torch.autograd.set_multithreading_enabled(False):
        found["both in one thread"] = host_microseconds(both)
    return found


class Work(NamedTuple):
    """Everything that the kernels of one sublayer are given."""

    c: Case
    launch: Launcher
    sums: Tensor
    made: Mappings
    known: mapping.Known
    reached: mapping.ToStreams
    d_weight: Tensor
    partial: Tensor
    branch: Tensor


def work(channels: int) -> Work:
    c, launch = case(TOKENS, STREAMS, channels), Launcher()
    x, (weight, alpha, bias), _ = c
    x = x.detach()
    sizes = {"streams": STREAMS, "channels": channels}
    sums = projection.project(launch, x.flatten(1), weight, USUAL.project)
    made, known = mapping.map_forward(launch, sums, alpha, bias, FORM, USUAL.map, **sizes)
    reached, partial = mapping.map_backward(
        launch, made, known, alpha, bias, FORM, USUAL.map_backward, **sizes, in_parts=True
    )
    d_weight = gradients.weight_gradient(launch, x.flatten(1), reached.factor, USUAL.weight_gradient)
    branch = streams.aggregate(launch, x, made.pre_NS, USUAL.aggregate)
    return Work(c, launch, sums, made, known, reached, d_weight, partial, branch)


def kernel(name: str, variant: Any, w: Work) -> Callable[[], Any]:
    """One kernel, by one variant."""
    (x, (weight, alpha, bias), grad), made, launch = w.c, w.made, w.launch
    x, weight = x.detach(), weight.detach()
    sizes = {"streams": STREAMS, "channels": x.shape[2]}
    match name:
        case "project":
            return lambda: projection.project(launch, x.flatten(1), weight, variant)
        case "map":
            return lambda: mapping.map_forward(launch, w.sums, alpha, bias, FORM, variant, **sizes)
        case "aggregate":
            return lambda: streams.aggregate(launch, x, made.pre_NS, variant)
        case "mix":
            return lambda: streams.mix(launch, x, w.branch, None, made.post_NS, made.res_NSS, variant)
        case "mix_backward":
            return lambda: streams.mix_backward(launch, grad, x, w.branch, None, made.post_NS, variant)
        case "aggregate_backward":
            return lambda: streams.aggregate_backward(launch, w.branch, x, variant)
        case "map_backward":
            return lambda: mapping.map_backward(
                launch, made, w.known, alpha, bias, FORM, variant, **sizes, in_parts=True
            )
        case "weight_gradient":
            return lambda: gradients.weight_gradient(launch, x.flatten(1), w.reached.factor, variant)
        case "added_up":
            return lambda: gradients.added_up(launch, w.d_weight, w.partial)
    assert name == "gradients"
    mappings = (made.pre_NS, made.res_NSS, w.reached)
    return lambda: gradients.gradients(launch, x, grad, w.branch, *mappings, weight, variant)


UNITS = {
    "project": STREAMS,
    "map": 0,
    "aggregate": STREAMS + 1,
    "mix": 2 * STREAMS + 1,
    "mix_backward": 2 * STREAMS + 2,
    "aggregate_backward": STREAMS + 1,
    "map_backward": 0,
    "weight_gradient": STREAMS,
    "added_up": 0,
    "gradients": 3 * STREAMS + 1,
}
"""How often each kernel reads or writes as much as one stream of all tokens."""


def by_kernel(fused: FusedHyperConnection, channels: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each kernel on the device, and of its bytes."""
    w, unit = work(channels), TOKENS * channels * 2 / BYTES * 1e6
    variants = {name: getattr(fused, name, None) for name in UNITS}
    return {
        name: (on_device(kernel(name, variants[name], w)) * 1e3, units * unit) for name, units in UNITS.items()
    }


# ------------------------------------------------------------------------------------------------- block

BLOCK = architecture.Model(
    pattern="[*E]",
    hidden=4096,
    vocab=256,
    attention=architecture.Attention(heads=32, kv_heads=8, head_dim=128),
    moe=architecture.Moe(experts=64, top_k=8, ffn=1536),
)
ROWS = 2


def block_step(shape: architecture.Model) -> Callable[[], object]:
    """Forward and backward of one block, with all gradients."""
    device, dtype, layout = torch.device("cuda"), torch.bfloat16, pattern.parse(shape.pattern)
    chosen = kernels.choose(shape, layout.kinds(), device, dtype)
    model = LanguageModel(shape, layout, chosen, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.02, generator=generator)
    tokens = torch.randint(shape.vocab, (ROWS, TOKENS // ROWS))
    context = model.prepare(MicroBatch.of_tokens(tokens))
    sizes = (ROWS, TOKENS // ROWS, *shape.stream)
    stream, grad = (torch.randn(sizes, device=device, dtype=dtype, generator=generator) for _ in range(2))
    leaves = [stream.requires_grad_(), *model.stack.parameters()]

    def run() -> object:
        out = model.stack(stream, model.segments, context)
        return torch.autograd.grad(out, leaves, grad, allow_unused=True)

    return run


def in_block(log: dict[str, Any]) -> Iterator[str]:
    """Milliseconds of a block without and with hyper-connections, in turn."""
    hyper = architecture.HyperConnections(streams=STREAMS)
    steps = {"plain": block_step(BLOCK), "hyper": block_step(replace(BLOCK, hyper=hyper))}
    for name in ("plain", "hyper") * 3:
        log.setdefault(name, []).append(milliseconds(steps[name], 400))
        yield f"{name:6}{log[name][-1]:8.3f} ms"
    log["added"] = median(log["hyper"]) / median(log["plain"]) - 1
    yield f"hyper-connections add {log['added']:.1%}"


# ------------------------------------------------------------------------------------------------ tuning

P, S, G, W, M = ProjectionVariant, StreamVariant, GradientVariant, WgradVariant, MapVariant
STREAM_CANDIDATES = (
    S(),
    S(stages=2),
    S(stages=3),
    S(tokens=2, channels=512),
    S(tokens=1, channels=1024),
    S(tokens=1, channels=512, warps=2),
    S(tokens=1, channels=512, warps=4),
    S(tokens=8, channels=256, warps=8),
    S(tokens=1, channels=256, warps=1),
    S(tokens=2, channels=256, warps=1),
)
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "project": (
        P(),
        P(stages=3, splits=6),
        P(stages=3, splits=12),
        P(warps=8),
        P(warps=8, stages=3, splits=6),
        P(depth=128, warps=8, stages=3),
        P(tokens=256, warps=8, splits=8, stages=3),
        P(parts=2, warps=8, stages=3, splits=6),
    ),
    "map": (M(), M(tokens=4), M(tokens=16), M(tokens=32)),
    "aggregate": STREAM_CANDIDATES,
    "mix": STREAM_CANDIDATES,
    "mix_backward": STREAM_CANDIDATES,
    "aggregate_backward": STREAM_CANDIDATES,
    "map_backward": (M(), M(tokens=4), M(tokens=2)),
    "gradients": (
        G(),
        G(splits=2),
        G(tokens=16, channels=128),
        G(tokens=16, channels=128, warps=8),
        G(tokens=16, channels=128, warps=8, splits=1),
        G(tokens=16, channels=128, warps=8, splits=2),
        G(tokens=16),
        G(tokens=16, splits=2),
        G(tokens=16, splits=8),
        G(tokens=16, stages=3),
        G(tokens=32, channels=128, warps=8),
    ),
    "weight_gradient": (
        W(),
        W(stages=2),
        W(stages=4),
        W(stages=4, per_sm=1),
        W(per_sm=4),
        W(per_sm=4, stages=2),
        W(channels=128, warps=4, stages=4),
    ),
}


def label(variant: Any) -> str:
    """A variant in a few letters: what differs from its defaults."""
    usual = vars(type(variant)())
    return (
        " ".join(f"{name}={value}" for name, value in vars(variant).items() if value != usual[name])
        or "defaults"
    )


def tensors(name: str, result: Any) -> Iterator[Tensor]:
    """Of what a kernel gives, with partial sums added up."""
    if result is None:
        return
    if isinstance(result, Tensor):
        yield result.sum(0) if name in PARTIAL else result
    else:
        for each in result:
            yield from tensors(name, each)


def differs(w: Work, which: tuple[str, Any]) -> float | str:
    """From the usual variant, which is checked against float64; or why it does not run."""
    name, variant = which
    try:
        found, usual = (tuple(tensors(name, kernel(name, v, w)())) for v in (variant, getattr(USUAL, name)))
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
                found[name][label(variant)] = on_device(kernel(name, variant, w)) * 1e3
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
            yield f"{channels}  {which:19}{us:7.1f} µs, bytes {least:4.0f}"
        yield from attempt(f"host {channels}", partial(host, USUAL, channels))
        yield f"{channels}  host µs {log[f'host {channels}']}"
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
    parser.add_argument("--block", action="store_true", help="time a block with and without them")
    asked = parser.parse_args()
    started, origin = time.perf_counter(), machine.describe()
    log: dict[str, Any] = {}
    if asked.tune is not None:
        name, lines = "hyper_connection_tune", tune(log, asked.tune)
    elif asked.block:
        name, lines = "hyper_connection_block", in_block(log)
    else:
        name, lines = "hyper_connection", chain(measure(log, started), table(log))
    for line in lines:
        print(line, flush=True)
    log["seconds"] = time.perf_counter() - started
    print("written to", machine.write(name, log, origin))


if __name__ == "__main__":
    main()
