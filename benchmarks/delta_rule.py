"""The gated delta rule on a GPU: 4 rows of 4096 tokens, 16 key heads and 32 value heads of 128, bfloat16.

    python -m benchmarks.delta_rule           # errors against float64, then times beside the reference
    python -m benchmarks.delta_rule --tune    # every variant of every kernel

Errors are compared with those of the WY form in torch, with the operands of every product rounded to bfloat16,
float32 sums and a float32 inverse. A single token with random gradients of the final state is above the bound:
they enter the gradient of its decay rounded. Shapes: see `braid.kernels.delta_rule.reference`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from benchmarks import machine
from braid.kernels.delta_rule import reference
from braid.kernels.delta_rule.device.gradients import (
    DeltaRuleGradientVariant,
    key_gradients,
    pair_gradients,
    query_gradients,
)
from braid.kernels.delta_rule.device.pairs import PairsVariant, token_pairs
from braid.kernels.delta_rule.device.scan import ScanVariant, outputs, state_gradients, states
from braid.kernels.delta_rule.fused import USUAL, FusedDeltaRule
from braid.kernels.delta_rule.recurrent import query, unit
from braid.kernels.launch import Launcher

DEVICE = "cuda"
NAMES = ("y", "state", "dq", "dk", "dv", "dg", "dβ", "dS")
THREADS = 14
RATIO = 1.5
"""Largest error of any output or gradient, in errors of the rounded formula."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int = 4
    tokens: int = 4096
    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    documents: int = 1
    """Documents of a row, of random lengths."""
    initial: bool = False

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.tokens} {self.key_heads}/{self.heads} {self.key_dim}/{self.value_dim}"
        return f"{sizes} {self.documents} docs{' +state' if self.initial else ''}"


TIMED = Shape()
CHECKS = (
    Shape(rows=1, documents=7, initial=True),
    Shape(rows=1),
    Shape(rows=2, tokens=1, key_heads=1, heads=2, initial=True),
    Shape(rows=2, tokens=200, key_heads=2, heads=2, key_dim=64, value_dim=64, documents=60),
    Shape(rows=1, tokens=333, key_heads=1, heads=4, key_dim=96, value_dim=192, documents=5, initial=True),
    Shape(rows=2, tokens=100, key_heads=2, heads=4, key_dim=32, value_dim=48, documents=3),
    Shape(rows=1, tokens=500, key_heads=2, heads=4, key_dim=256, value_dim=256, documents=3, initial=True),
)


class Case:
    """Random inputs, and the gradients of outputs and final state."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(shape.rows, *sizes, generator=generator, device=DEVICE)

        q, k = (draw(shape.tokens, shape.key_heads, shape.key_dim).bfloat16() for _ in range(2))
        v = draw(shape.tokens, shape.heads, shape.value_dim).bfloat16()
        rates = torch.logspace(-3, 1, shape.heads, device=DEVICE)
        log_decay = -rates * F.softplus(draw(shape.tokens, shape.heads) - 2)
        beta = draw(shape.tokens, shape.heads).sigmoid().bfloat16()
        self.leaves = [q, k, v, log_decay, beta]
        self.documents: Tensor | None = None
        if shape.documents > 1:
            cuts = torch.rand(shape.rows, shape.tokens, generator=generator, device=DEVICE)
            self.documents = (cuts < shape.documents / shape.tokens).long().cumsum(1)
        if shape.initial:
            self.leaves.append(draw(shape.heads, shape.key_dim, shape.value_dim))
        self.dy = draw(shape.tokens, shape.heads, shape.value_dim).bfloat16()
        self.d_final = draw(shape.heads, shape.key_dim, shape.value_dim)

    def both_ways(self, rule: Callable[..., Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Outputs, final state and all gradients, with inputs in `dtype`."""
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in self.leaves]
        y, final = rule(*leaves[:5], self.documents, *leaves[5:])
        grads = torch.autograd.grad((y, final), leaves, (self.dy.to(y.dtype), self.d_final.to(final.dtype)))
        return [y, final, *grads]


# --------------------------------------------------------------------------------- rounded formula


class _RoundedProduct(torch.autograd.Function):
    """A product whose operands are rounded to bfloat16, both ways, with float32 sums."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _rounded(a) @ _rounded(b)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (_rounded(x) for x in ctx.saved_tensors)
        d = _rounded(d)
        return _sum_to(d @ b.mT, a.shape), _sum_to(a.mT @ d, b.shape)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x.sum_to_size(shape)


def rounded_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents_BT: Tensor | None = None,
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The WY form, chunk by chunk, every product rounded."""
    product: Callable[[Tensor, Tensor], Tensor] = _RoundedProduct.apply
    tokens, key_heads = q_BTGK.shape[1:3]
    chunk, repeats = min(reference.CHUNK, tokens), v_BTHV.shape[2] // key_heads
    split, chunks = (key_heads, repeats), reference._chunks
    q, k = (chunks(f(x.float()).unsqueeze(3), chunk) for f, x in ((query, q_BTGK), (unit, k_BTGK)))
    v = chunks(v_BTHV.float().unflatten(2, split), chunk)
    beta = chunks(beta_BTH.float().unflatten(2, split).unsqueeze(-1), chunk)
    log_decay = chunks(log_decay_BTH.float().unflatten(2, split).unsqueeze(-1), chunk)
    decay = reference._decays(log_decay.squeeze(-1), reference._run_chunks(documents_BT, chunk))
    inverse = reference._inverse(beta * product(k, k.mT) * decay.between_XLS)
    written, erased = product(inverse, beta * v), product(inverse, beta * decay.since_state_XL1 * k)
    scores, read = product(q, k.mT) * decay.between_XLS, decay.since_state_XL1 * q
    key, keep = (decay.to_end_XL1 * k).mT, decay.since_state_XL1[..., -1:, :]
    sizes = (q_BTGK.shape[0], *split, k_BTGK.shape[3], v_BTHV.shape[3])
    state = v.new_zeros(sizes) if initial_BHKV is None else initial_BHKV.float().view(sizes)
    y = []
    for n in range(len(q)):
        delta = written[n] - product(erased[n], state)
        y.append(product(read[n], state) + product(scores[n], delta))
        state = keep[n] * state + product(key[n], delta)
    y_BTHV = torch.stack(y).permute(1, 0, 4, 2, 3, 5).flatten(1, 2)[:, :tokens].flatten(2, 3)
    return y_BTHV.to(v_BTHV.dtype), state.flatten(1, 2)


# ------------------------------------------------------------------------------------------ checks


def error(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-300)
    )


def checked(fused: FusedDeltaRule, shape: Shape) -> dict[str, tuple[float, float]]:
    """Errors of the kernels and of the rounded formula, by name."""
    case = Case(shape)
    wide = case.both_ways(reference.delta_rule, torch.float64)
    rounded = case.both_ways(rounded_delta_rule)
    found, again = case.both_ways(fused), case.both_ways(fused)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "not deterministic"
    pairs = zip(NAMES, found, rounded, wide, strict=False)
    return {name: (error(f, w), error(r, w)) for name, f, r, w in pairs}


def told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def check(fused: FusedDeltaRule, log: dict[str, Any]) -> Iterator[str]:
    """Kernels of all shapes are compiled side by side."""

    def attempt(shape: Shape) -> dict[str, tuple[float, float]] | str:
        try:
            return checked(fused, shape)
        except Exception as failure:
            return told(failure)

    # torch loads its linear algebra at the first use, which threads must not share.
    torch.linalg.solve_triangular(*torch.ones(2, 1, 1, device=DEVICE, dtype=torch.float64), upper=False)
    with ThreadPoolExecutor(THREADS) as pool:
        for shape, errors in zip(CHECKS, pool.map(attempt, CHECKS), strict=True):
            log[f"errors {shape}"] = errors
            if isinstance(errors, str):
                yield f"{shape}: {errors}"
                continue
            above = [name for name, (f, r) in errors.items() if not f <= RATIO * r + 1e-6]
            said = " ".join(f"{name} {f:.1e}/{f / max(r, 1e-30):.2f}" for name, (f, r) in errors.items())
            yield f"{'ABOVE ' + ', '.join(above) if above else 'right'} {shape}: {said}"
    torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------- timings


class Work:
    """Tensors of every kernel at the timed shape."""

    def __init__(self, shape: Shape, fused: FusedDeltaRule) -> None:
        self.case, self.launch = Case(shape), fused.launch
        q, k, v, g, beta = self.case.leaves[:5]
        self.pairs = token_pairs(self.launch, q, k, g, beta, None, USUAL.inverse, inverse=True)
        self.backward, _ = state_gradients(
            self.launch, q, k, self.case.dy, self.pairs, None, USUAL.state_gradients, initial=False
        )
        self.forward, self.kept = states(
            self.launch, q, k, v, self.pairs, None, self.backward.states_BHNVK, USUAL.states
        )
        self.from_pairs, _ = self.kernel("pair_gradients", USUAL.pair_gradients)()

    def kernel(self, name: str, variant: Any) -> Callable[[], Any]:
        q, k, v, g, beta = self.case.leaves[:5]
        launch, pairs, dy = self.launch, self.pairs, self.case.dy
        forward, backward = self.forward, self.backward
        match name:
            case "inverse" | "scores":
                return lambda: token_pairs(launch, q, k, g, beta, None, variant, inverse=name == "inverse")
            case "outputs":
                return lambda: outputs(launch, q, k, v, pairs, None, variant)
            case "states":
                return lambda: states(launch, q, k, v, pairs, None, backward.states_BHNVK, variant)
            case "state_gradients":
                return lambda: state_gradients(launch, q, k, dy, pairs, None, variant, initial=False)[0]
            case "pair_gradients":
                deltas = (forward.deltas_BTHV, backward.deltas_BTHV)
                return lambda: pair_gradients(launch, q, k, v, None, dy, pairs, *deltas, variant)
            case "query_gradients":
                found = self.from_pairs
                return lambda: query_gradients(
                    launch, q, k, None, dy, pairs, forward.states_BHNVK, found, variant
                )
        assert name == "key_gradients"
        return lambda: key_gradients(
            launch, q, k, g, beta, None, pairs, forward, backward, self.kept, self.from_pairs, variant
        )


P, S, G = PairsVariant, ScanVariant, DeltaRuleGradientVariant
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "inverse": (
        P(registers=128),
        P(registers=112),
        P(registers=96),
        P(precision="ieee", registers=128),
        P(precision="bf16x3", registers=128),
        P(precision="bf16x3", registers=104),
    ),
    "scores": (P(), P(registers=96), P(registers=80)),
    "outputs": (S(), S(channels=128, warps=8)),
    "states": (S(), S(stages=3), S(channels=128, warps=8, stages=3)),
    "state_gradients": (S(), S(channels=128, warps=8), S(channels=128, warps=8, stages=3)),
    "pair_gradients": (G(), G(registers=128), G(registers=96), G(warps=4), G(warps=4, registers=168)),
    "query_gradients": (
        G(stages=2),
        G(stages=3),
        G(registers=128),
        G(stages=2, registers=128),
        G(warps=4),
        G(warps=4, registers=168),
        G(warps=4, channels=64, stages=2),
    ),
    "key_gradients": (
        G(),
        G(stages=2),
        G(registers=168),
        G(registers=128),
        G(warps=4, stages=2),
        G(warps=4, channels=64, stages=2),
        G(channels=64, stages=3),
    ),
}


def label(variant: Any) -> str:
    usual = vars(type(variant)())
    changed = (f"{name}={value}" for name, value in vars(variant).items() if value != usual[name])
    return " ".join(changed) or "defaults"


def tune(fused: FusedDeltaRule, log: dict[str, Any]) -> Iterator[str]:
    """Microseconds of every variant. They are compiled side by side."""
    work = Work(TIMED, fused)
    todo = [(name, variant) for name, variants in CANDIDATES.items() for variant in variants]

    def compiled(which: tuple[str, Any]) -> str | None:
        try:
            work.kernel(*which)()
        except Exception as failure:
            return told(failure)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        failures = list(pool.map(compiled, todo))
    torch.cuda.synchronize()
    for (name, variant), failure in zip(todo, failures, strict=True):
        if failure is None:
            us = 1e3 * do_bench(work.kernel(name, variant), warmup=10, rep=60, return_mode="median")
            log.setdefault(name, {})[label(variant)] = us
        yield f"{name:16}{label(variant):36}" + (f"{us:8.0f} us" if failure is None else failure)


def timed(fused: FusedDeltaRule, log: dict[str, Any]) -> Iterator[str]:
    case = Case(TIMED)
    leaves = [x.requires_grad_() for x in case.leaves]
    rules: dict[str, Callable[..., Any]] = {"fused": fused, "reference": reference.delta_rule}
    for name, rule in rules.items():
        y, _ = rule(*leaves)

        def forward(rule: Callable[..., Any] = rule) -> object:
            with torch.no_grad():
                return rule(*leaves)

        def both(rule: Callable[..., Any] = rule) -> object:
            return torch.autograd.grad(rule(*leaves)[0], leaves, case.dy)

        del y
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        ms = [do_bench(f, warmup=20, rep=150, return_mode="median") for f in (forward, both)]
        log[name] = {"forward_ms": ms[0], "both_ms": ms[1], "peak_mib": mib}
        yield f"{name:10} forward {ms[0]:7.3f} ms, forward + backward {ms[1]:7.3f} ms, peak {mib:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every variant of every kernel")
    asked = parser.parse_args()
    machine.needs_gpu()
    started, origin, log = time.perf_counter(), machine.describe(), dict[str, Any]()
    fused = FusedDeltaRule(launch=Launcher())
    parts = (tune, timed) if asked.tune else (check, timed)
    for part in parts:
        for line in part(fused, log):
            print(line, flush=True)
        print(f"after {time.perf_counter() - started:.0f} s", flush=True)
    log["seconds"] = time.perf_counter() - started
    print("written to", machine.write("delta_rule_tune" if asked.tune else "delta_rule", log, origin))


if __name__ == "__main__":
    main()
