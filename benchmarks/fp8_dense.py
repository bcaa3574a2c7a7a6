"""Dense layers in fp8_block beside bf16, on a GPU: a SwiGLU MLP of 4096 → 14336 → 4096 channels on 16,384
tokens, forward, backward and float32 accumulation, with all quantisation.

    python -m benchmarks.fp8_dense --out DIR        # checked first, then timed part by part and as a whole

Every kernel is checked against the reference: quantised operands bit for bit, products against float64. Parts
stand beside their floors: the fewest bytes that must move, at 4.8 TB/s. Whole steps take turns with bf16, so
that a warmer GPU slows all of them; figures are medians over the turns. What fails is said and ends nothing
else. `--out` gets fp8_dense.json, anew after every stage.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from triton.testing import do_bench

from benchmarks import machine
from braid.kernels.glu.fused import FusedMlpActivation
from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.launch import Launcher
from braid.kernels.precision import FORMATS, Products, Quantized, quantize
from braid.kernels.precision.device import activation as act
from braid.kernels.precision.device import rows
from braid.kernels.precision.device.dense import DenseKernels
from braid.kernels.precision.device.products import multiply, weight_gradient, weight_operand
from braid.kernels.precision.device.weights import quantize_weight
from braid.kernels.wgrad import write_product
from braid.nn.delayed_wgrad import DelayedWgrad
from braid.nn.linear import Linear

TOKENS, HIDDEN, FFN = 16384, 4096, 14336
BYTES = 4.8e12
BARS: Mapping[str, float] = {"all": 1.30, "bf16 weight gradients": 1.18}
TURNS, TIMES = 7, 6
FORM = FORMATS["fp8_block"]
SWIGLU = FusedActivation(kind="swiglu")
Rows = dict[str, Any]


class Problem(NamedTuple):
    """Tensors of the MLP."""

    x: Tensor
    dy: Tensor
    h: Tensor
    """The projections, and the gradient of the ffn channels."""
    da: Tensor
    w_in: Tensor
    w_down: Tensor


def draw(*sizes: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * scale).to(torch.bfloat16)


def problem(tokens: int, hidden: int, ffn: int) -> Problem:
    return Problem(
        x=draw(tokens, hidden),
        dy=draw(tokens, hidden, scale=1e-3),
        h=draw(tokens, 2 * ffn),
        da=draw(tokens, ffn, scale=1e-3),
        w_in=draw(2 * ffn, hidden, scale=hidden**-0.5),
        w_down=draw(hidden, ffn, scale=ffn**-0.5),
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of all entries together; not a number where one is not."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def tried(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as raised:
        traceback.print_exc(limit=-2)
        return f"failed: {raised}"[:300]


def held(quantized: Quantized | Tensor | None) -> Quantized:
    assert isinstance(quantized, Quantized)
    return quantized


# -------------------------------------------------------------------------------------------- checking


def differing(found: Quantized | Tensor | None, x: Tensor, *, weight: bool = False) -> int:
    """Bytes and scales that are not those of the reference on the CPU."""
    found, wanted = held(found), quantize(x.cpu(), FORM, weight=weight)
    values = found.values.cpu().view(torch.uint8) != wanted.values.view(torch.uint8)
    scales = found.scales.cpu().contiguous().view(torch.int32) != wanted.scales.contiguous().view(torch.int32)
    return int(values.sum()) + int(scales.sum())


def odd(*shape: int) -> Tensor:
    """Magnitudes of all sizes, zeros of both signs, an infinity and a NaN."""
    x = torch.randn(shape, device="cuda") * torch.logspace(-42, 37, shape[1], device="cuda")
    x = torch.where(torch.rand_like(x) < 0.1, -0.0, x)
    x[3, 5], x[-1, -1] = torch.inf, torch.nan
    return x.to(torch.bfloat16)


def check() -> Rows:
    """Operands that differ from the reference, which must be none, and relative errors of products."""
    found: Rows = {}
    for name, x in (("normal", draw(1024, 1536)), ("odd", odd(333, 517))):
        found[name] = tried(partial(check_quantisers, x))
    found["activation"] = tried(check_activation)
    for outputs, inputs in ((1024, 512), (528, 1536), (512, 640), (1024, 1040), (512, 10304)):
        found[f"product {inputs} → {outputs}"] = tried(partial(check_product, outputs, inputs))
    for tokens in (512, 400):
        found[f"weight gradient of {tokens} tokens"] = tried(partial(check_wgrad, tokens))
    return found


def check_quantisers(x: Tensor) -> Rows:
    both = rows.quantize_rows(Launcher(), x, by_channels=True, by_tokens=True)
    weight = quantize_weight(Launcher(), x)
    return {
        "rows": differing(both.by_channels, x),
        "by tokens": differing(both.by_tokens, x.t()),
        "weight": differing(weight.whole, x, weight=True),
        "weight transposed": differing(weight.transposed, x.t(), weight=True),
    }


def check_activation() -> Rows:
    launch = Launcher()
    h, da = draw(300, 2 * 400).requires_grad_(), draw(300, 400, scale=1e-3)
    a = FusedMlpActivation()("swiglu", h)
    (dh,) = torch.autograd.grad(a, h, da)
    h, a = h.detach(), a.detach()
    made = act.activation_backward(launch, SWIGLU, h, da, by_channels=True, by_tokens=True)
    plain = act.activation_backward(launch, SWIGLU, h, da, by_channels=True, by_tokens=False)
    assert isinstance(plain.gradient.by_tokens, Tensor)
    assert isinstance(plain.ffn, Tensor)
    return {
        "swiglu": differing(act.activation_forward(launch, SWIGLU, h), a),
        "dswiglu rows": differing(made.gradient.by_channels, dh),
        "dswiglu by tokens": differing(made.gradient.by_tokens, dh.t()),
        "ffn by tokens": differing(made.ffn, a.t()),
        "dswiglu in bf16": int((plain.gradient.by_tokens != dh).sum()) + int((plain.ffn != a).sum()),
    }


def check_product(outputs: int, inputs: int) -> float:
    launch = Launcher()
    x, weight = draw(272, inputs), draw(outputs, inputs)
    a = held(rows.quantize_rows(launch, x, by_channels=True).by_channels)
    b = weight_operand(held(quantize_weight(launch, weight).whole))
    wanted = a.dequantized(torch.float64) @ b.dequantized(torch.float64).t()
    return error(multiply(a, b, torch.bfloat16), wanted)


def check_wgrad(tokens: int) -> float:
    launch = Launcher()
    grad, x = (
        held(rows.quantize_rows(launch, draw(tokens, channels), by_tokens=True).by_tokens)
        for channels in (528, 640)
    )
    out = torch.randn(528, 640, device="cuda")
    wanted = out.double() + grad.dequantized(torch.float64) @ x.dequantized(torch.float64).t()
    weight_gradient(grad, x, out, accumulate=True)
    return error(out, wanted)


# -------------------------------------------------------------------------------------------- parts


def milliseconds(function: Callable[[], object]) -> float:
    return round(float(do_bench(function, warmup=8, rep=40, return_mode="median")), 4)


def timed(function: Callable[[], object], floor_bytes: float | None = None) -> Any:
    """Milliseconds, and those of the fewest bytes that must move."""
    found = tried(lambda: milliseconds(function))
    return found if floor_bytes is None else {"ms": found, "floor": round(floor_bytes / BYTES * 1e3, 4)}


def quantisers(p: Problem) -> Iterator[tuple[str, Any]]:
    launch = Launcher()
    (tokens, hidden), ffn = p.x.shape, p.da.shape[1]
    size, inner = tokens * hidden, tokens * ffn

    def of_rows(**which: bool) -> Callable[[], object]:
        return lambda: rows.quantize_rows(launch, p.x, **which)  # type: ignore[arg-type]

    yield "x rows", timed(of_rows(by_channels=True), 3 * size)
    yield "x by tokens", timed(of_rows(by_tokens=True), 3 * size)
    yield "dy both", timed(of_rows(by_channels=True, by_tokens=True), 4 * size)
    weights = p.w_in.numel() + p.w_down.numel()
    yield "weights both", timed(lambda: [quantize_weight(launch, w) for w in (p.w_in, p.w_down)], 4 * weights)
    yield "swiglu", timed(lambda: act.activation_forward(launch, SWIGLU, p.h), 5 * inner)

    def backward(by_tokens: bool) -> Callable[[], object]:
        return lambda: act.activation_backward(launch, SWIGLU, p.h, p.da, by_channels=True, by_tokens=by_tokens)

    yield "dswiglu all", timed(backward(True), 11 * inner)
    yield "dswiglu, bf16 weight gradients", timed(backward(False), 14 * inner)
    fused = FusedMlpActivation()
    h = p.h.requires_grad_()
    a = fused("swiglu", h)
    yield "bf16 swiglu", timed(lambda: fused("swiglu", h), 6 * inner)
    yield "bf16 dswiglu", timed(lambda: torch.autograd.grad(a, h, p.da, retain_graph=True), 10 * inner)
    h.requires_grad_(False)
    for count in (8, 16):
        with patch.object(act, "BACKWARD_WARPS", count):
            yield f"dswiglu all, {count} warps", timed(backward(True))
    for count in (8, 32):
        with patch.object(rows, "ROWS", count), patch.object(act, "ROWS", count):
            yield f"x rows, {count} at once", timed(of_rows(by_channels=True))
            yield f"swiglu, {count} rows at once", timed(lambda: act.activation_forward(launch, SWIGLU, p.h))
            yield f"dswiglu, bf16 weight gradients, {count} rows at once", timed(backward(False))


def products(p: Problem) -> Iterator[tuple[str, Any]]:
    launch, narrow = Launcher(), torch.bfloat16
    w_in, w_down = quantize_weight(launch, p.w_in), quantize_weight(launch, p.w_down)
    for name, x, weight, plain in (
        ("fc1", p.x, w_in.whole, p.w_in),
        ("fc2", p.da, w_down.whole, p.w_down),
        ("dgrad2", p.dy, w_down.transposed, p.w_down.t()),
        ("dgrad1", p.h, w_in.transposed, p.w_in.t()),
    ):
        a, b = held(rows.quantize_rows(launch, x, by_channels=True).by_channels), held(weight)
        yield name, timed(partial(multiply, a, b, narrow))
        yield f"{name} in bf16", timed(partial(F.linear, x, plain))
    for name, grad, x in (("wgrad1", p.h, p.x), ("wgrad2", p.dy, p.da)):
        out = torch.zeros(grad.shape[1], x.shape[1], device="cuda")
        yield (
            f"{name} in bf16",
            timed(partial(write_product, out, grad, x, accumulate=True)),
        )
        g, q = (held(rows.quantize_rows(launch, each, by_tokens=True).by_tokens) for each in (grad, x))
        yield name, timed(partial(weight_gradient, g, q, out, accumulate=True))
        yield f"{name}, not added", timed(partial(multiply, g, q, torch.float32))


# -------------------------------------------------------------------------------------------- whole


class Steps:
    """Forward, backward and accumulation of the MLP, each with weights and mains of its own."""

    def __init__(self, p: Problem) -> None:
        self.p, self.launch = p, Launcher()
        self.weights = [nn.Parameter(each) for each in (p.w_in, p.w_down)]
        self.mains: dict[Tensor, Tensor] = {each: each.detach().float() for each in self.weights}
        self.store = DelayedWgrad(self.mains)
        self.into, self.down = (
            Linear(each.shape[1], len(each), device=torch.device("meta")) for each in self.weights
        )
        for layer, weight in zip((self.into, self.down), self.weights, strict=True):
            layer.weight, layer.wgrad_store = weight, self.store
        self.activation, self.kernels = FusedMlpActivation(), DenseKernels(self.launch)

    def _backward(self, y: Tensor) -> None:
        y.backward(self.p.dy)

    def bf16(self) -> tuple[Tensor, Tensor]:
        x = self.p.x.detach().requires_grad_()
        y = self.down(self.activation("swiglu", self.into(x)))
        self._backward(y)
        assert x.grad is not None
        return y, x.grad

    def fp8(self, *, weight_grad: bool) -> tuple[Tensor, Tensor]:
        """Weights are quantised in it, as in a step of one micro-batch."""
        x = self.p.x.detach().requires_grad_()
        into, down = (
            Products(forward=FORM, input_grad=FORM, weight_grad=FORM if weight_grad else None) for _ in range(2)
        )
        w_in, w_down = self.weights
        for each, weight in ((into, w_in), (down, w_down)):
            copies = quantize_weight(self.launch, weight.detach())
            each.step_weight.forward, each.step_weight.input_grad = copies
        y = self.kernels.mlp(x, w_in, w_down, SWIGLU, into, down, self.store)
        self._backward(y)
        assert x.grad is not None
        return y, x.grad

    def variants(self) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
        return {
            "bf16": self.bf16,
            "all": lambda: self.fp8(weight_grad=True),
            "bf16 weight gradients": lambda: self.fp8(weight_grad=False),
        }


def agreement(steps: Steps) -> Rows:
    """How far results in fp8 are from those in bf16: about 4 to 6 % by the format itself."""
    found: Rows = {}
    gradients: dict[str, list[Tensor]] = {}
    for name, step in steps.variants().items():
        for main in steps.mains.values():
            main.grad = None
        y, dx = step()
        gradients[name] = [y, dx, *(main.grad for main in steps.mains.values() if main.grad is not None)]
        if name != "bf16":
            errors = [round(error(*each), 4) for each in zip(gradients[name], gradients["bf16"], strict=True)]
            found[name] = dict(zip(("y", "dx", "w_in", "w_down"), errors, strict=True))
    return found


def whole(steps: Steps) -> Rows:
    """Medians over turns, and by how much each is faster than bf16."""
    variants = steps.variants()
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 1):
        for name, step in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step()
            start.record()
            for _ in range(TIMES):
                step()
            end.record()
            end.synchronize()
            if turn:
                taken[name].append(start.elapsed_time(end) / TIMES)
    found: Rows = {name: {"ms": round(median(each), 3)} for name, each in taken.items()}
    for name, bar in BARS.items():
        ratios = [base / each for base, each in zip(taken["bf16"], taken[name], strict=True)]
        found[name] |= {"faster": round(median(ratios), 3), "bar": bar, "passes": median(ratios) >= bar}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="the directory of fp8_dense.json")
    out: Path = parser.parse_args().out
    machine.needs_gpu()
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    figures: Rows = {"machine": machine.describe()}

    def stage(name: str, function: Callable[[], Any]) -> None:
        figures[name] = tried(function)
        figures["seconds"] = round(time.monotonic() - started, 1)
        (out / "fp8_dense.json").write_text(json.dumps(figures, indent=2) + "\n")
        print(name, figures["seconds"], "s")
        rows_of = figures[name] if isinstance(figures[name], dict) else {"": figures[name]}
        for key, value in rows_of.items():
            print(f"  {key:44} {value}", flush=True)

    stage("check", check)
    p = problem(TOKENS, HIDDEN, FFN)
    stage("products", lambda: dict(products(p)))
    steps = Steps(p)
    stage("agreement", lambda: agreement(steps))
    stage("whole", lambda: whole(steps))
    stage("quantisers", lambda: dict(quantisers(p)))


if __name__ == "__main__":
    main()
