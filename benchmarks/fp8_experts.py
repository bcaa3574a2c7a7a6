"""Experts in fp8_block on a GPU: forward and backward with float32 accumulation and all quantisation, beside
bf16.

    python -m benchmarks.fp8_experts                           # check, whole steps, every part
    python -m benchmarks.fp8_experts --variants --seconds 120  # and other sizes of kernels, while time lasts

Kernels are compiled in processes of their own first, all at once. Every product is checked against float64
products of the same quantised operands, and every operand against `quantize`. Steps take turns. The
copies of weights in fp8 are made in every step: as in training with a single micro-batch a step.

    fp8_block           every product but weight gradients
    bf16 dgrad2         the same with experts.down.input_grad=bf16
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import expert_kernels as ek
from benchmarks import experts, machine
from benchmarks.expert_kernels import Data, Shape
from braid.kernels.grouped_mlp import fp8, fused, reference
from braid.kernels.grouped_mlp.device import fp8_gemm
from braid.kernels.grouped_mlp.device.fp8_gemm import VARIANTS, Variant, Variants
from braid.kernels.grouped_mlp.tuned_table import Work, nearest, tuned_table
from braid.kernels.precision import FORMATS, Format, LowPrecisionGroupedMlp, Products
from braid.kernels.precision.device.rows import quantize_rows
from braid.kernels.precision.device.weights import QuantizedWeight, quantize_weight
from braid.kernels.precision.quantize import Quantized, quantize

SHAPES = (Shape(262144, 2048, 1024, 64), Shape(32768, 4096, 1536, 16))
BAR = 1.15
CHECKS = (Shape(1705, 512, 256, 16), Shape(811, 528, 336, 16))
"""Small problems with experts of all sizes: channels that are multiples of every tile, and of none."""
BOUND = 8e-3
"""The largest relative error of results in bfloat16."""
STRAY = 2e-3
"""The largest share of values of the activation that may be off: it is exp of other instructions."""
FORM = FORMATS["fp8_block"]
ROUNDS, ROUND_MS = 5, 150

PLAIN = "plain Triton"
CANDIDATES: dict[str, dict[str, Variant | None]] = {
    "product": {
        "256 columns": VARIANTS.product,
        "256, 208 registers": Variant(256, 3, 2, 208, 88),
        "128, 5 stages": Variant(128, 5, 2, 168, 168),
        "128, 6 stages": Variant(128, 6, 2, 168, 168),
    },
    "activation": {
        "4 store warps": VARIANTS.activation,
        "2 store warps": Variant(256, 3, 2, 208, 88),
        "200 registers": Variant(256, 3, 2, 200, 104),
        "separate": None,
    },
}
"""Sizes of each product's kernel; the first are the defaults."""
PRODUCTS_OF = {
    "product": ("fc2", "dgrad1"),
    "activation": ("fc1",),
}


@dataclass(frozen=True)
class Operands:
    """Quantised inputs of every product of one layer."""

    x: Quantized
    dy: Quantized
    dh: Quantized
    a: Quantized
    w_in: QuantizedWeight
    w_down: QuantizedWeight


RECIPES: dict[str, Format | None] = {"fp8_block": FORM, "bf16 dgrad2": None}
"""What dgrad2 takes."""


class Part(NamedTuple):
    """A part of a step."""

    run: Callable[[], object]
    moved: float
    """Bytes that it must move."""
    flops: float = 0.0


def products(input_grad: Format | None = FORM) -> Products:
    """Of one layer, which share the copy of its weight."""
    return Products(forward=FORM, input_grad=input_grad, weight_grad=None)


def rows_of(d: Data, x: Tensor) -> Quantized:
    found = quantize_rows(d.launch, x, by_channels=True).by_channels
    assert found is not None
    return found


def operands(d: Data) -> Operands:
    return Operands(
        x=rows_of(d, d.x),
        dy=rows_of(d, d.dy),
        dh=rows_of(d, d.dh),
        a=rows_of(d, d.a),
        w_in=quantize_weight(d.launch, d.w_in),
        w_down=quantize_weight(d.launch, d.w_down),
    )


def product(name: str, d: Data, q: Operands, variants: Variants) -> Any:
    """One product with its epilogue."""
    bf16 = torch.bfloat16
    match name:
        case "fc1":
            assert q.w_in.whole is not None
            return fp8_gemm.grouped_gemm_activation(
                d.launch, q.x, q.w_in.whole, d.probs, d.where, ek.SWIGLU, bf16, variants
            )
        case "fc2":
            assert q.w_down.whole is not None
            return fp8_gemm.grouped_gemm(d.launch, q.a, q.w_down.whole, d.where, bf16, variants)
        case "dgrad2":
            assert q.w_down.transposed is not None
            return fp8_gemm.grouped_gemm_activation_backward(
                d.launch, q.dy, q.w_down.transposed, d.h, d.probs, d.where, ek.SWIGLU, variants
            )
        case _:
            assert q.w_in.transposed is not None
            return fp8_gemm.grouped_gemm(d.launch, q.dh, q.w_in.transposed, d.where, bf16, variants)


def step(
    d: Data, kernel: Any, variants: Variants = VARIANTS, of_down: Format | None = FORM
) -> tuple[Tensor, ...]:
    """Forward and backward, with the copies of the weights that are taken."""
    into, down = products(), products(of_down)
    for weight, each in ((d.w_in, into), (d.w_down, down)):
        turned = each.input_grad is not None
        made = quantize_weight(d.launch, weight, transposed=turned)
        each.step_weight.forward, each.step_weight.input_grad = made
    config = fp8.Fp8Config(ek.SWIGLU, kernel, ek.TILING, variants, d.launch, into, down)
    e, f2, c = d.w_in.shape
    weights = fused.ExpertWeights(d.w_in.view(e, f2 // 2, 2, c), d.w_down)
    y, saved = config.forward(d.counts, d.x, d.probs, weights)
    found = config.backward(d.dy, saved, weights)
    found.w_down_ECF.into(d.main_down, accumulate=True)
    found.w_in_EFGC.into(d.main_in.view(e, f2 // 2, 2, c), accumulate=True)
    assert found.x_NC is not None
    return y, found.x_NC, found.probs_N


# -------------------------------------------------------------------------------------------- checking


def uneven(shape: Shape, number: int) -> Data:
    """Experts of all sizes, two of them without rows."""
    generator = torch.Generator().manual_seed(7 + number)
    share = torch.rand(shape.experts, generator=generator)
    share[3] = share[-1] = 0
    chosen = share.multinomial(shape.rows, replacement=True, generator=generator)
    return ek.data(shape, chosen.bincount(minlength=shape.experts), "cuda", torch.bfloat16)


def check(variants: Variants) -> dict[str, float]:
    """The worst errors of small problems, by what they are of."""
    worst: dict[str, float] = {}
    for number, shape in enumerate(CHECKS):
        d = uneven(shape, number)
        for name, error in errors(d, variants).items():
            worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))
    return worst


def wrong(found: dict[str, float]) -> dict[str, float]:
    def bound(name: str) -> float:
        return 0.0 if name.endswith("bits") else STRAY if name.endswith("stray") else BOUND

    return {name: error for name, error in found.items() if not error <= bound(name)}


def errors(d: Data, variants: Variants) -> dict[str, float]:
    q, counts = operands(d), d.counts.tolist()

    def times(x: Quantized, weight: Quantized | None) -> Tensor:
        assert weight is not None
        parts = zip(x.dequantized(torch.float64).split(counts), weight.dequantized(torch.float64), strict=True)
        return torch.cat([rows @ w.t() for rows, w in parts])

    (h, a), y = product("fc1", d, q, variants), product("fc2", d, q, variants)
    back, dx = product("dgrad2", d, q, variants), product("dgrad1", d, q, variants)
    again = product("dgrad2", d, q, variants)
    silu = torch.nn.functional.silu(h[:, 0::2].float()) * h[:, 1::2].float()
    wanted_a = quantize((silu * d.probs[:, None]).to(h.dtype), FORM)
    da = times(q.dy, q.w_down.transposed)
    dh, wanted_back_a, dprobs = _activated(d, da)
    narrow = narrow_backward(d)
    plain_dh, plain_a, plain_dprobs = _activated(d, _by_experts(d.dy, d.w_down.double(), counts))
    assert narrow.dh_quantized is not None
    return {
        "fc1": ek.error((h,), (times(q.x, q.w_in.whole),)),
        "fc1, activation": ek.error((a.dequantized(),), (wanted_a.dequantized(torch.float64),)),
        "fc1, activation, stray": _different(a, wanted_a),
        "fc2": ek.error((y,), (times(q.a, q.w_down.whole),)),
        "dgrad2": ek.error((back.dh, back.a_NF, back.dprobs_N), (dh, wanted_back_a, dprobs)),
        "dgrad2, operand, bits": _different(back.dh_quantized, quantize(back.dh, FORM)),
        "bf16 dgrad2": ek.error((narrow.dh, narrow.a_NF, narrow.dprobs_N), (plain_dh, plain_a, plain_dprobs)),
        "bf16 dgrad2, operand, bits": _different(narrow.dh_quantized, quantize(narrow.dh, FORM)),
        "dgrad2, repeated, bits": float(not torch.equal(back.dh, again.dh)),
        "dgrad1": ek.error((dx,), (times(q.dh, q.w_in.transposed),)),
    }


def narrow_backward(d: Data) -> fp8_gemm.ProjectionGradients:
    """dgrad2 in bf16 with the operand of dgrad1."""
    given = d.launch, d.dy, d.w_down, d.h, d.probs, d.where, ek.SWIGLU, ek.TILING
    return fp8_gemm.narrow_activation_backward(*given, quantised=True)


def _by_experts(rows: Tensor, weights_ECF: Tensor, counts: list[int]) -> Tensor:
    each = zip(rows.double().split(counts), weights_ECF, strict=True)
    return torch.cat([part @ weight for part, weight in each])


def _activated(d: Data, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, p = d.h[:, 0::2].double(), d.h[:, 1::2].double(), d.probs.double()[:, None]
    s = torch.sigmoid(gate)
    opened = gate * s
    dh = torch.stack([da * p * up * (s + opened * (1 - s)), da * p * opened], -1).flatten(1)
    return dh, opened * up * p, (da * opened * up).sum(1)


def _different(found: Quantized, wanted: Quantized) -> float:
    """The share of values or scales that differ."""
    values = (found.values.view(torch.uint8) != wanted.values.view(torch.uint8)).double().mean()
    scales = (found.scales - wanted.scales).abs() > 1e-2 * wanted.scales.abs()
    return max(values.item(), scales.double().mean().item())


def whole_check() -> dict[str, float]:
    """How far a layer's output and gradients are from float64 without quantisation: by the emulation, which
    rounds operands as kernels do but for those next to a tie, and by kernels."""
    d = uneven(CHECKS[0], 0)
    e, f2, c = d.w_in.shape
    how = products()
    given = (d.x, d.probs, d.w_in.view(e, f2 // 2, 2, c), d.w_down)
    functions: dict[str, Any] = {
        "exact": reference.grouped_mlp,
        "emulated": LowPrecisionGroupedMlp(into=how, down=how),
        "kernels": fp8.Fp8Experts(tuned_table(), how, how),
    }
    results = {}
    for name, function in functions.items():
        leaves = [each.double() if name == "exact" else each.clone() for each in given]
        x, probs, *weights = (each.requires_grad_() for each in leaves)
        y = function(x, probs, d.counts, *weights, "swiglu")
        results[name] = (y, *torch.autograd.grad(y, (x, probs, *weights), d.dy.to(y.dtype)))
    exact = results.pop("exact")
    return {name: ek.error(found, exact) for name, found in results.items()}


# --------------------------------------------------------------------------------------------- timing


def compare(d: Data, kernel: Any, variants: Variants) -> dict[str, Any]:
    """Whole steps in turns, in microseconds."""
    steps: dict[str, Callable[[], object]] = {"bf16": partial(experts.step, d, kernel)}
    steps |= {name: partial(step, d, kernel, variants, form) for name, form in RECIPES.items()}
    for each in steps.values():
        experts.sustained(each, milliseconds=ROUND_MS)
    turns = [
        {name: experts.sustained(each, milliseconds=ROUND_MS) for name, each in steps.items()}
        for _ in range(ROUNDS)
    ]
    us = {name: [round(turn[name]) for turn in turns] for name in steps}
    gains = {name: round(median(us["bf16"]) / median(us[name]), 3) for name in RECIPES}
    return {**us, "gain": gains}


def parts(d: Data, q: Operands, kernel: Any, variants: Variants) -> dict[str, Part]:
    """Everything that a step runs."""
    n, c = d.x.shape
    e, f2, _ = d.w_in.shape
    f, weight, multiplied = f2 // 2, e * f2 * c, 2.0 * n * c * f2
    found = {
        "quantise x": Part(partial(rows_of, d, d.x), 3.0 * n * c),
        "quantise dy": Part(partial(rows_of, d, d.dy), 3.0 * n * c),
        "quantise w_in": Part(partial(quantize_weight, d.launch, d.w_in), 4.0 * weight),
        "quantise w_down": Part(partial(quantize_weight, d.launch, d.w_down), 2.0 * weight),
    }
    moved = {
        "fc1": n * c + weight + 2 * n * f2 + n * f,
        "fc2": n * f + weight / 2 + 2 * n * c,
        "dgrad2": n * c + weight / 2 + 5 * n * f2 + 6 * n * f,
        "dgrad1": n * f2 + weight + 2 * n * c,
    }
    for name, of in moved.items():
        flops = multiplied / (1 if name in ("fc1", "dgrad1") else 2)
        found[name] = Part(partial(product, name, d, q, variants), of, flops)
    for name, share in (("wgrad2", 2), ("wgrad1", 1)):
        moved_here = 2 * n * c + 2 * n * (f2 / share) + 8 * weight / share
        found[name] = Part(partial(ek.run, name, d, kernel), moved_here, multiplied / share)
    return found


def measure_parts(d: Data, q: Operands, kernel: Any, variants: Variants) -> dict[str, Any]:
    """Microseconds of each part; of products also in bf16."""
    report = {}
    for name, part in parts(d, q, kernel, variants).items():
        us = experts.micro(part.run)
        report[name] = {
            "us": round(us),
            "GB/s": round(part.moved / us / 1e3),
            "TFLOP/s": round(part.flops / us / 1e6),
        }
        if name in ("fc1", "fc2", "dgrad2", "dgrad1"):
            report[name]["bf16 us"] = round(experts.micro(partial(ek.run, name, d)))
    f = d.w_down.shape[2]
    report["bf16 dgrad2, quantised"] = {"us": round(experts.micro(partial(narrow_backward, d)))}
    report["separate: activation"] = {
        "us": round(experts.micro(partial(fp8_gemm.quantized_activation, d.launch, d.h, d.probs, ek.SWIGLU))),
        "floor us": round(len(d.x) * f * 5 / 4.3e6),
    }
    backward = partial(fp8_gemm.quantized_activation_backward, d.launch, d.da, d.h, d.probs, ek.SWIGLU)
    report["separate: activation backward"] = {
        "us": round(experts.micro(backward)),
        "floor us": round(len(d.x) * f * 14 / 4.3e6),
    }
    return report


def replaced(kind: str, variant: Variant | None) -> Variants:
    return VARIANTS._replace(**{kind: variant})  # type: ignore[arg-type]


def usable(compiled: dict[str, str]) -> dict[str, dict[str, Variant | None]]:
    """Candidates that compiled."""
    return {
        kind: {name: v for name, v in named.items() if not compiled.get(f"{kind}: {name}")}
        for kind, named in CANDIDATES.items()
    }


def try_variants(d: Data, q: Operands, candidates: Any, until: float) -> tuple[Variants, dict[str, Any]]:
    """The fastest variant of each kind of product that is right, and the microseconds of all."""
    best, report = VARIANTS, dict[str, Any]()
    for kind, named in candidates.items():
        times: dict[str, float] = {}
        for name, variant in named.items():
            if time.time() > until:
                break
            with_it = replaced(kind, variant)
            bad = wrong(check(with_it))
            if bad:
                report[f"{kind}: {name}"] = {"wrong": bad}
                continue
            each = {of: experts.micro(partial(product, of, d, q, with_it)) for of in PRODUCTS_OF[kind]}
            times[name] = sum(each.values())
            report[f"{kind}: {name}"] = {of: round(each[of]) for of in each}
        if times:
            best = best._replace(**{kind: named[min(times, key=lambda name: times[name])]})
    x = q.a
    assert q.w_down.whole is not None
    plain = partial(fp8_gemm.plain_gemm, d.launch, x, q.w_down.whole, d.where, torch.bfloat16)
    report[f"product: {PLAIN}"] = {"fc2": round(experts.micro(plain))}
    return best, report


# ------------------------------------------------------------------------------------------ compiling


def warm(kind: str, name: str) -> None:
    """Compile one kernel, by running it once."""
    d = uneven(CHECKS[0], 0)
    if kind == "others":
        step_of = {
            "bf16": partial(experts.step, d, "warp-specialised"),
            "cuda": partial(experts.step, d, "cuda"),
        }
        step_of[name]()
    elif kind == "separate":
        fp8_gemm.quantized_activation_backward(d.launch, d.da, d.h, d.probs, ek.SWIGLU)
        fp8_gemm.quantized_activation(d.launch, d.h, d.probs, ek.SWIGLU)
        q = operands(d)
        narrow_backward(d)
        assert q.w_down.whole is not None
        fp8_gemm.plain_gemm(d.launch, q.a, q.w_down.whole, d.where, torch.bfloat16)
    else:
        variant = CANDIDATES[kind][name]
        for data in (d, uneven(CHECKS[1], 1)):
            product(PRODUCTS_OF[kind][0], data, operands(data), replaced(kind, variant))
    torch.cuda.synchronize()


def compile_all(*, variants: bool) -> dict[str, str]:
    """What went wrong with each, nothing where all is well."""
    wanted = [("others", "bf16"), ("others", "cuda"), ("separate", "")]
    for kind, named in CANDIDATES.items():
        wanted += [(kind, name) for name, v in list(named.items())[: None if variants else 1] if v is not None]
    command = [sys.executable, "-m", "benchmarks.fp8_experts", "--warm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, *each], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for each in wanted
    ]
    found = {}
    for (kind, name), process in zip(wanted, started, strict=True):
        output, _ = process.communicate()
        found[f"{kind}: {name}"] = output[-1500:] if process.returncode else ""
    return found


# ------------------------------------------------------------------------------------------------ main


def options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.fp8_experts", description=__doc__, formatter_class=form
    )
    parser.add_argument("--variants", action="store_true", help="try other sizes of the kernels")
    parser.add_argument(
        "--seconds", type=float, default=120, help="begin nothing new after so many; default 120"
    )
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="a folder for figures")
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = options()
    machine.needs_gpu()
    if asked.warm:
        warm(*asked.warm)
        return
    started = time.time()
    until = started + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine.describe(), "shapes": {}}

    def note(what: str) -> None:
        (asked.out / "fp8_experts.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"[{time.time() - started:.0f} s] {what}", flush=True)

    report["compiled"] = compiled = compile_all(variants=asked.variants)
    note(f"compiled; failures: { {name: text for name, text in compiled.items() if text} }")
    report["errors"] = found = check(VARIANTS)
    report["whole"] = whole = whole_check()
    note(f"errors: {found}, of a whole layer: {whole}")
    if wrong(found) or not whole["kernels"] < 1.05 * whole["emulated"]:
        print(f"WRONG: {wrong(found)}, {whole}")
    for shape in SHAPES:
        if time.time() > until:
            break
        entry: dict[str, Any] = {}
        report["shapes"][str(tuple(shape))] = entry
        measure(shape, entry, compiled, until, note, variants=asked.variants)
        torch.cuda.empty_cache()
    for shape, entry in report["shapes"].items():
        print(f"{shape}: {entry.get('whole')} best {entry.get('whole with the best')} bar {BAR}")


def measure(
    shape: Shape,
    entry: dict[str, Any],
    compiled: dict[str, str],
    until: float,
    note: Callable[[str], None],
    *,
    variants: bool,
) -> None:
    """Of one shape."""
    (d,) = ek.loads(shape, ["balanced"])
    kernel = nearest(tuned_table(), Work(shape.rows // shape.experts, shape.hidden, shape.ffn))
    entry["whole"] = compare(d, kernel, VARIANTS)
    note(f"{tuple(shape)} whole: {entry['whole']}")
    q = operands(d)
    entry["parts"] = measure_parts(d, q, kernel, VARIANTS)
    for name, figures in entry["parts"].items():
        print(f"    {name:32} {figures}")
    note("parts")
    if variants and time.time() < until:
        best, entry["variants"] = try_variants(d, q, usable(compiled), until)
        for name, figures in entry["variants"].items():
            print(f"    {name:40} {figures}")
        entry["best"] = {kind: v and tuple(v) for kind, v in best._asdict().items()}
        if best != VARIANTS:
            entry["whole with the best"] = compare(d, kernel, best)
        note(f"best: {entry['best']}, {entry.get('whole with the best')}")


if __name__ == "__main__":
    main()
