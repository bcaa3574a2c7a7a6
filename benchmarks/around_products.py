"""What a step does around its matrix products, on a GPU: activations, weight gradients, loss and optimizer.

    python -m benchmarks.around_products            # checked against float64, then timed beside torch

Each figure stands beside its floor: the fewest bytes that must move, at 4.3 TB/s, or the products, at 750
TFLOP/s, both as measured on an H200. `--only NAME` runs one part; `--tune` times variants of each kernel.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import machine
from braid.architecture import Glu
from braid.kernels.activation import activate
from braid.kernels.glu import fused as glu
from braid.kernels.grouped_mlp.product import Gradient
from braid.kernels.linear_cross_entropy import LinearCrossEntropy
from braid.kernels.linear_cross_entropy import fused as loss
from braid.kernels.linear_cross_entropy import reference as plain_loss
from braid.kernels.linear_cross_entropy.chunked import ChunkedLinearCrossEntropy, LogitChunk, Sums
from braid.kernels.linear_cross_entropy.reference import VocabShard
from braid.kernels.optimizer import PLAIN, Hyper, Moments, OptimizerKernels
from braid.kernels.optimizer import fused as optimizer
from braid.kernels.wgrad import write_product

BYTES, FLOPS = 4.3e12, 750e12
TOKENS, HIDDEN, FFN = 16384, 2048, 8192
Row = dict[str, Any]
HYPER = Hyper((0.9, 0.95), 1e-8)


def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of all entries together; not a number where one is not."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()


def milliseconds(function: Callable[[], Any], repeat: int = 60) -> float:
    return float(do_bench(function, warmup=10, rep=repeat, return_mode="median"))


def tried(name: str, function: Callable[[], Row]) -> Row:
    """One line of the table; what fails is said, and does not end the others."""
    try:
        row = {"what": name, **function()}
    except Exception as raised:
        traceback.print_exc(limit=4)
        row = {"what": name, "failed": f"{type(raised).__name__}: {str(raised)[:200]}"}
    print(
        *(f"{key} {value:.4g}" if isinstance(value, float) else value for key, value in row.items()), sep="  "
    )
    return row


def moved(function: Callable[[], Any], count: float) -> Row:
    """Time of what moves so many bytes at least."""
    ms = milliseconds(function)
    return {"ms": ms, "floor_ms": count / BYTES * 1e3, "GB/s": count / ms / 1e6}


# ------------------------------------------------------------------------------------------- activations

KINDS: dict[str, tuple[Any, Glu]] = {
    "swiglu": ("swiglu", Glu()),
    "limited": ("swiglu", Glu(alpha=1.702, limit=1.0, offset=1.0)),
    "relu2": ("relu2", Glu()),
    "gelu": ("gelu", Glu()),
}


def check_activation(name: str) -> Row:
    kind, form = KINDS[name]
    fused, parts = glu.FusedMlpActivation(), 2 if kind == "swiglu" else 1
    worst = [0.0, 0.0]
    for shape in ((1, 1), (3, 7), (5, 333), (2, 9, 1030), (0, 8), (300, 2048)):
        h = draw(*shape[:-1], shape[-1] * parts).requires_grad_()
        exact = h.detach().double().requires_grad_()
        a = fused(kind, h, glu=form)
        wanted = activate(kind, *exact.unflatten(-1, (-1, parts)).unbind(-1), glu=form)
        probe = draw(*a.shape)
        (dh,) = torch.autograd.grad(a, h, probe)
        (d_exact,) = torch.autograd.grad(wanted, exact, probe.double())
        worst = [max(worst[0], error(a, wanted)), max(worst[1], error(dh, d_exact))]
        assert torch.equal(a, fused(kind, h, glu=form))
    assert max(worst) < 6e-3, worst
    h = torch.full((1, 64), float("nan"), device="cuda", dtype=torch.bfloat16).requires_grad_()
    a = fused(kind, h, glu=form)
    a.sum().backward()
    assert h.grad is not None
    assert bool(a.isnan().all()), "a NaN was laundered"
    assert bool(h.grad.isnan().all()), "a NaN was laundered in backward"
    return {"error": worst[0], "gradient error": worst[1]}


def time_activation(name: str, label: str, function: Callable[[], Tensor], leaves: list[Tensor]) -> list[Row]:
    """Bytes: projections and result forward; projections, both gradients backward."""
    entries, parts = 2 * TOKENS * FFN, 2 if name == "swiglu" else 1
    with torch.no_grad():
        forward = tried(f"{name} {label} forward", partial(moved, function, entries * (parts + 1)))
    back = partial(torch.autograd.grad, function(), leaves, draw(TOKENS, FFN), retain_graph=True)
    return [forward, tried(f"{name} {label} backward", partial(moved, back, entries * (2 * parts + 1)))]


def activations(tune: bool) -> list[Row]:
    rows = [tried(f"check {name}", partial(check_activation, name)) for name in KINDS]
    for name in ("swiglu", "relu2"):
        kind, form = KINDS[name]
        parts = 2 if kind == "swiglu" else 1
        apart = [draw(TOKENS, FFN).requires_grad_() for _ in range(parts)]
        joined = draw(TOKENS, FFN * parts).requires_grad_()
        rows += time_activation(name, "torch", partial(activate, kind, *apart, glu=form), apart)
        usual = (glu.BLOCK, glu.WARPS)
        for block, warps in (usual, (2048, 4), (4096, 8), (4096, 4)) if tune else (usual,):
            with patch.object(glu, "BLOCK", block), patch.object(glu, "WARPS", warps):
                fused = partial(glu.FusedMlpActivation(), kind, joined, glu=form)
                rows += time_activation(name, f"{block}/{warps}", fused, [joined])
    return rows


# ----------------------------------------------------------------------------------------- weight gradients


def check_wgrad() -> Row:
    worst = 0.0
    for tokens, out, into in ((1, 8, 8), (77, 24, 40), (0, 8, 16), (1000, 256, 512)):
        grad, x = draw(tokens, out), draw(tokens, into)
        base = draw(out, into, dtype=torch.float32)
        for accumulate in (False, True):
            gradient = base.clone()
            write_product(gradient, grad, x, accumulate=accumulate)
            wanted = grad.double().t() @ x.double() + (base.double() if accumulate else 0)
            worst = max(worst, error(gradient, wanted))
            strided = torch.full((out, 2, into), 7.0, device="cuda")
            strided[:, 1] = base
            write_product(strided[:, 1], grad, x, accumulate=accumulate)
            worst = max(worst, error(strided[:, 1], wanted))
            assert bool((strided[:, 0] == 7).all()), "wrote beside its rows"
    assert worst < 1e-5, worst
    return {"error": worst}


def time_wgrad(out: int, into: int) -> Iterator[Row]:
    grad, x, main = draw(TOKENS, out), draw(TOKENS, into), draw(out, into, dtype=torch.float32)
    flops = 2 * TOKENS * out * into

    def timed(function: Callable[[], Any], bytes_per_weight: int) -> Row:
        """Bytes are those of the gradient alone, from the product's output to the main gradient."""
        ms = milliseconds(function)
        rates = {"floor_ms": flops / FLOPS * 1e3, "TFLOP/s": flops / ms / 1e9}
        return {"ms": ms, **rates, "bytes/weight": bytes_per_weight}

    def narrow() -> Tensor:
        return grad.t().mm(x)

    label = f"wgrad {out}x{into}"
    yield tried(f"{label} narrow, cast", lambda: timed(lambda: narrow().to(torch.float32), 2 + 6))
    yield tried(f"{label} narrow, add", lambda: timed(lambda: main.add_(narrow()), 2 + 10))
    for accumulate, count in ((False, 4), (True, 8)):
        write = partial(write_product, main, grad, x, accumulate=accumulate)
        yield tried(f"{label} {'accumulated' if accumulate else 'written'}", partial(timed, write, count))


def weight_gradients(tune: bool) -> list[Row]:
    rows = [tried("check wgrad", check_wgrad)]
    for out, into in ((2 * FFN, HIDDEN), (HIDDEN, FFN), (4096, HIDDEN), (32000, HIDDEN)):
        rows += time_wgrad(out, into)
    return rows


# ----------------------------------------------------------------------------------------------- optimizer


def parameters(sizes: list[tuple[int, ...]]) -> tuple[list[Moments], list[Tensor]]:
    wide = torch.float32
    found = [
        Moments(
            draw(*size, dtype=wide),
            draw(*size, dtype=wide, scale=0.1),
            draw(*size, dtype=wide).abs() * 0.01,
            None if number % 5 == 4 else draw(*size),
            0.1 * (number % 2),
        )
        for number, size in enumerate(sizes)
    ]
    return found, [draw(*size, dtype=wide) for size in sizes]


def check_optimizer() -> Row:
    sizes = [(3, 5), (20_000,), (7,), (0, 4), (129, 130), (1,), (16384,), (3, 16384)]
    worst, fused = 0.0, optimizer.FusedOptimizer()
    for shifted in (False, True):
        found, gradients = parameters(sizes)
        if shifted:  # a shard may begin anywhere
            gradients = [torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g) for g in gradients]
        square = sum(float(g.double().square().sum()) for g in gradients)
        worst = max(worst, abs(float(fused.squares(gradients).sum()) / square - 1))
        exact = [
            each._replace(**{name: getattr(each, name).double() for name in Moments._fields[:3]}, narrow=None)
            for each in found
        ]
        step, exact_step = torch.tensor(2.0, device="cuda"), torch.tensor(2.0, device="cuda")
        scale = torch.tensor(0.3, dtype=torch.float64, device="cuda")
        for skip in (None, torch.tensor(False, device="cuda"), torch.tensor(True, device="cuda")):
            fused.adamw(found, gradients, HYPER, 1e-2, step, scale=scale, skip=skip)
            wide = [g.double() for g in gradients]
            PLAIN.adamw(exact, wide, HYPER, 1e-2, exact_step, scale=scale, skip=skip)
        assert float(step) == float(exact_step) == 4
        for each, want in zip(found, exact, strict=True):
            if each.main.numel():
                worst = max(worst, *(error(a, b) for a, b in zip(each[:3], want[:3], strict=True)))
                assert each.narrow is None or torch.equal(each.narrow, each.main.bfloat16())
    bad = [torch.ones(70_000, device="cuda"), torch.ones(3, device="cuda")]
    for value in (float("nan"), float("inf")):
        bad[0][69_999] = value
        assert not bool(fused.squares(bad).isfinite().all())
    assert worst < 1e-6, worst
    return {"error": worst}


VARIANTS = ((16384, 2048, 2048, 4), (32768, 8192, 2048, 8), (65536, 4096, 1024, 8), (8192, 4096, 512, 4))
"""Of the optimizer: elements of a chunk, of a step of the norm and of the update, and its warps."""


def optimizer_passes(tune: bool) -> list[Row]:
    rows = [tried("check optimizer", check_optimizer)]
    block = [(4096, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN), (HIDDEN,), (HIDDEN,)]
    sizes: list[tuple[int, ...]] = [*block * 16, (32000, HIDDEN), (32000, HIDDEN), (HIDDEN,)]
    found, gradients = parameters(sizes)
    found = [each._replace(narrow=draw(*each.main.shape)) for each in found]
    count, step = sum(g.numel() for g in gradients), torch.tensor(2.0, device="cuda")
    scale = torch.tensor(0.3, dtype=torch.float64, device="cuda")

    def timed(label: str, kernels: OptimizerKernels) -> Iterator[Row]:
        yield tried(f"norm {label}", lambda: moved(lambda: kernels.squares(gradients), 4 * count))
        update = partial(kernels.adamw, found, gradients, HYPER, 1e-4, step, scale=scale)
        yield tried(f"clip, AdamW, cast {label}", partial(moved, update, 30 * count))

    rows += timed("torch", PLAIN)
    usual = (optimizer.CHUNK, optimizer.BLOCK, optimizer.UPDATE_BLOCK, optimizer.UPDATE_WARPS)
    for variant in (usual, *VARIANTS) if tune else (usual,):
        with ExitStack() as stack:
            for name, value in zip(("CHUNK", "BLOCK", "UPDATE_BLOCK", "UPDATE_WARPS"), variant, strict=True):
                stack.enter_context(patch.object(optimizer, name, value))
            rows += timed("/".join(map(str, variant)), optimizer.FusedOptimizer())
    return rows


# ---------------------------------------------------------------------------------------------------- loss


def head(tokens: int, vocab: int, hidden: int, padding: int = 0) -> tuple[Tensor, ...]:
    x = draw(tokens, hidden).requires_grad_()
    weight = draw(vocab + padding, hidden, scale=hidden**-0.5 * 2).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    return x, weight, labels, torch.rand(tokens, device="cuda") < 0.9


def check_loss() -> Row:
    worst = [0.0, 0.0, 0.0]
    cases = [
        (1, 5, 8, 0),
        (65, 37, 16, 3),
        (300, 1030, 64, 0),
        (300, 1030, 520, 2),
        (0, 9, 8, 0),
        (513, 50_257, 64, 0),
    ]
    for tokens, vocab, hidden, padding in cases:
        for scale in (1.0, 2.5):
            x, weight, labels, mask = head(tokens, vocab, hidden, padding)
            fused = ChunkedLinearCrossEntropy(loss.FusedPasses(), chunk_bytes=0, min_chunk=64)
            exact = tuple(t.detach().double().requires_grad_() for t in (x, weight))
            shard = VocabShard(vocab)
            total = fused(x, weight, labels, mask, shard, scale=scale)
            want = plain_loss.linear_cross_entropy(exact[0], exact[1], labels, mask, shard, scale=scale)
            grads = torch.autograd.grad(total * 0.37, (x, weight))
            wants = torch.autograd.grad(want * 0.37, exact)
            again = torch.autograd.grad(fused(x, weight, labels, mask, shard, scale=scale) * 0.37, (x, weight))
            assert all(torch.equal(*pair) for pair in zip(grads, again, strict=True)), "another result"
            found = [error(a, b) for a, b in zip((total, *grads), (want, *wants), strict=True)]
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
    x, weight, labels, mask = head(64, 100, 16)
    with torch.no_grad():
        x[~mask] = float("nan")
    fused = ChunkedLinearCrossEntropy(loss.FusedPasses())
    (dx,) = torch.autograd.grad(fused(x, weight, labels.where(mask, -100), mask, VocabShard(100)), x)
    assert bool((dx[~mask] == 0).all())
    assert bool(dx[mask].isfinite().all())
    with torch.no_grad():
        x[mask.nonzero()[0]] = float("nan")
    assert bool(fused(x, weight, labels, mask, VocabShard(100)).isnan())
    assert max(worst) < 1e-2, worst
    return {"loss": worst[0], "dx": worst[1], "dweight": worst[2]}


class Main:
    """A wgrad store with a main gradient for all: what can be written there is, the rest is cast and added."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def put(self, parameter: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
        assert isinstance(product, Gradient)
        product.into(self.gradient, accumulate=True)
        return None


def time_loss(vocab: int, tune: bool) -> Iterator[Row]:
    x, weight, labels, mask = head(TOKENS, vocab, HIDDEN)
    shard, logits = VocabShard(vocab), 2 * TOKENS * vocab
    main = Main(torch.zeros(vocab, HIDDEN, device="cuda"))
    flops = 6 * TOKENS * vocab * HIDDEN

    def timed(function: LinearCrossEntropy) -> Row:
        def both() -> None:
            total = function(x, weight, labels, mask, shard, wgrad_store=main) / TOKENS
            _, dweight = torch.autograd.grad(total, (x, weight), allow_unused=True)
            if dweight is not None:
                main.gradient.add_(dweight)

        both()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        peak = torch.cuda.max_memory_allocated() - before
        ms = milliseconds(both, 150)
        return {"ms": ms, "floor_ms": flops / FLOPS * 1e3, "peak GB": peak / 1e9, "logits GB": logits / 1e9}

    yield tried(f"loss {vocab} reference", partial(timed, plain_loss.linear_cross_entropy))
    for power in (28, 29, 30) if tune else (29,):
        chunked = ChunkedLinearCrossEntropy(loss.FusedPasses(), chunk_bytes=2**power)
        yield tried(f"loss {vocab} chunks of {2**power >> 20} MiB", partial(timed, chunked))
    with patch("braid.kernels.linear_cross_entropy.chunked.gradients_in_forward", lambda *_: False):
        chunked = ChunkedLinearCrossEntropy(loss.FusedPasses())
        yield tried(f"loss {vocab} recomputed", partial(timed, chunked))


def time_pass(vocab: int, block: int, warps: int, tokens: int = 2048) -> Row:
    """One pass over a chunk; logits are overwritten by small gradients, which take as long."""
    logits = draw(tokens, vocab)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    chunk = LogitChunk(logits, labels, torch.ones(tokens, dtype=torch.bool, device="cuda"), vocab, 1.0)
    sums = Sums(*torch.empty(3, tokens, device="cuda").unbind())
    passes = loss.FusedPasses()
    with patch.object(loss, "BLOCK", block), patch.object(loss, "WARPS", warps):
        return moved(lambda: passes.sums(chunk, sums, gradient=True), 4 * tokens * vocab)


def losses(tune: bool) -> list[Row]:
    rows, usual = [tried("check loss", check_loss)], (loss.BLOCK, loss.WARPS)
    for vocab in (32000, 131_072):
        for block, warps in ((4096, 8), (8192, 8), (8192, 16), (8192, 32), (16384, 32)) if tune else (usual,):
            rows.append(tried(f"pass {vocab} {block}/{warps}", partial(time_pass, vocab, block, warps)))
        rows += time_loss(vocab, tune)
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "activations": activations,
    "weight_gradients": weight_gradients,
    "optimizer": optimizer_passes,
    "loss": losses,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--tune", action="store_true")
    chosen = parser.parse_args()
    machine.needs_gpu()
    torch.manual_seed(0)
    origin, figures = machine.describe(), {}
    for name, part in PARTS.items():
        if chosen.only in (None, name):
            print(f"-- {name}")
            figures[name] = part(chosen.tune)
            torch.cuda.empty_cache()
    if chosen.only is None:
        print(machine.write("around_products", figures, origin))


if __name__ == "__main__":
    main()
