"""Packed attention in Triton and Gluon: outputs and gradients near float64, the same bits on every run.

On a CPU the plain kernels are interpreted, and those for Hopper are compiled (`long`).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.kernels.attention import reference, spans_of
from braid.kernels.attention.sizes import supports
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels

DTYPE, BOUND = (torch.bfloat16, 9e-3) if GPU else (torch.float32, 2e-6)
WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (160, 96), (64, 160), (24, 40), (21, 13)]
"""Channels of keys and of values: those that kernels for Hopper have, those that they pad, two for SDPA."""
MOST_SHARED = 232448
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def attend(*args: Any, **kwargs: Any) -> Tensor:
    from braid.kernels.attention.fused import FusedAttention

    return FusedAttention(hopper=GPU)(*args, **kwargs)


def documents(rows: int, tokens: int, *starts: int) -> Tensor:
    """The first row is cut at `starts`, the others are single documents."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    for start in starts:
        ids[0, start:] += 1
    return ids


def check(
    ids: Tensor,
    window: int | None,
    heads: int,
    kv_heads: int,
    widths: tuple[int, int],
    *,
    sinks: bool,
    causal: bool = True,
    dtype: torch.dtype = DTYPE,
    bound: float = BOUND,
) -> None:
    """Output and gradients against float64, and a second run against the first. Keys and values are slices of
    one tensor, as in a layer."""
    generator = torch.Generator().manual_seed(1)
    q, kv, dy = (
        torch.randn(*ids.shape, count, width, generator=generator).to(DEVICE, dtype)
        for count, width in ((heads, widths[0]), (kv_heads, sum(widths)), (heads, widths[1]))
    )
    given = [q, *kv.split(widths, -1)]
    given += [torch.randn(heads, generator=generator).to(DEVICE, dtype)] if sinks else []
    spans = spans_of(ids, window, DEVICE, causal=causal)
    wide = [x.double().requires_grad_() for x in given]
    y = reference.attend(*wide[:3], spans, 0.3, *wide[3:])
    expected, runs = (y, *torch.autograd.grad(y, wide, dy.double())), []
    for _ in range(2 if GPU else 1):
        here = [x.detach().requires_grad_() for x in given]
        y = attend(*here[:3], spans, 0.3, *here[3:])
        runs.append((y, *torch.autograd.grad(y, here, dy)))
    for actual, wanted in zip(runs[0], expected, strict=True):
        assert actual.dtype == dtype
        assert ((actual.double() - wanted).norm() <= bound * wanted.norm() + bound).item()
    assert all(torch.equal(first, again) for first, again in zip(runs[0], runs[-1], strict=True))


@needs_kernels
@pytest.mark.parametrize(
    ("window", "starts", "kv_heads", "sinks"),
    [(None, (5, 6, 20), 1, True), (30, (), 2, False)],
    ids=["packed, sinks", "window, whole"],
)
def test_outputs_and_gradients(window: int | None, starts: tuple[int, ...], kv_heads: int, sinks: bool) -> None:
    check(documents(1, 70, *starts), window, 2, kv_heads, (24, 16), sinks=sinks)


@needs_kernels
def test_every_token_of_a_document_sees_all_of_it() -> None:
    check(documents(1, 150, 5, 6, 20), None, 2, 1, (24, 16), sinks=True, causal=False)


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_long_documents_without_a_causal_mask(kv_heads: int) -> None:
    check(documents(2, 290, 5, 6, 270), None, 2, kv_heads, (16, 32), sinks=False, causal=False)


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize(("window", "sinks"), [(None, True), (100, False)])
def test_long_documents_across_rows(window: int | None, sinks: bool) -> None:
    check(documents(2, 290, 5, 6, 270), window, 2, 1, (16, 32), sinks=sinks)


@needs_kernels
def test_an_empty_micro_batch_has_an_empty_output() -> None:
    given = [torch.zeros(0, 8, heads, 16, dtype=DTYPE, device=DEVICE).requires_grad_() for heads in (4, 2, 2)]
    y = attend(*given, spans_of(torch.zeros(0, 8), None, DEVICE))
    assert y.shape == (0, 8, 4, 16)
    grads = torch.autograd.grad(y.sum(), given)
    assert [grad.shape for grad in grads] == [x.shape for x in given]


@needs_kernels
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_nan_and_inf_pass_through(value: float, which: int) -> None:
    """To every query that sees the token, and to the gradient of that query."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 40, 1, 16, generator=generator).to(DEVICE, DTYPE) for _ in range(3)]
    given[which][0, 7] = value
    here = [x.requires_grad_() for x in given]
    y = attend(*here, spans_of(documents(1, 40, 30), None, DEVICE))
    dq, _, _ = torch.autograd.grad(y, here, torch.ones_like(y))
    seen = slice(7, 8 if which == 0 else 30)
    for result in (y, dq):
        assert not bool(result[0, seen].isfinite().all(-1).any())


@on_gpu
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("starts", [(), (5, 6, 20, 300, 301, 560)], ids=["whole", "packed"])
@pytest.mark.parametrize(("kv_heads", "sinks"), [(1, True), (4, False)])
def test_every_head_size_on_a_gpu(
    widths: tuple[int, int], window: int | None, starts: tuple[int, ...], kv_heads: int, sinks: bool
) -> None:
    # With sinks, `attention.choose` selects these kernels only for head sizes that they have.
    sinks = sinks and all(map(supports, widths))
    check(documents(2, 700, *starts), window, 4, kv_heads, widths, sinks=sinks)


@on_gpu
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("starts", [(), (5, 6, 20, 300, 301, 560)], ids=["whole", "packed"])
def test_every_head_size_without_a_causal_mask_on_a_gpu(
    widths: tuple[int, int], starts: tuple[int, ...]
) -> None:
    sinks = all(map(supports, widths))
    check(documents(2, 700, *starts), None, 4, 2, widths, sinks=sinks, causal=False)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
def test_documents_of_one_token_on_a_gpu(tokens: int) -> None:
    check(torch.arange(tokens)[None], None, 4, 2, (128, 128), sinks=True)


@on_gpu
def test_half_precision_and_more_tiles_than_programs() -> None:
    check(documents(2, 2500, 100, 1400), None, 16, 2, (64, 64), sinks=False, dtype=torch.float16, bound=2e-3)


compiled = pytest.mark.skipif(GPU or INTERPRETED, reason="on a GPU they run, and the interpreter has no Gluon")


@compiled
@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "widths"),
    [("forward", (192, 128)), ("dq", (256, 256)), ("dk_dv", (256, 256)), ("dk_dv", (80, 80))],
)
def test_kernels_compile_for_hopper(kernel: str, widths: tuple[int, int]) -> None:
    """All the way to machine code, which must fit into what a multiprocessor has."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    function, given, constants = hopper_kernel(kernel, *widths)
    names = {name: "constexpr" if name in constants else given[name] for name in function.arg_names}
    source = GluonASTSource(function, names, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    assert made.metadata.shared <= MOST_SHARED


def hopper_kernel(kernel: str, qk_dim: int, v_dim: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """A kernel, the types of its arguments, and its constants."""
    from braid.kernels.attention.device import (
        hopper,
        hopper_dk_dv,
        hopper_dk_dv_wide,
        hopper_dq,
        hopper_forward,
    )
    from braid.kernels.attention.packed import PackedInputs
    from braid.kernels.attention.tiles import tiles_of

    q, k, v = (torch.empty(8, heads, dim) for heads, dim in ((4, qk_dim), (2, qk_dim), (2, v_dim)))
    tiles = tiles_of(torch.zeros(8, dtype=torch.int64), None, torch.device("cpu"))
    packed = PackedInputs(q_NQD=q, k_NKD=k, v_NKV=v, tiles=tiles, scale=0.1)
    of_keys = hopper_dk_dv_wide if hopper.is_wide(packed) else hopper_dk_dv
    module = {"forward": hopper_forward, "dq": hopper_dq, "dk_dv": of_keys}[kernel]
    constants = module.constants(packed)
    rows, step = (64, constants["N"]) if kernel != "dk_dv" else (constants["M"], 64)
    d, d1, value_dim = constants["D"], constants.get("D1", 0), constants["V"]

    def tile(tokens: int, channels: int) -> str:
        return f"tensordesc<bf16{[tokens, 1, channels]},{hopper._layout()!r}>"

    given = {
        "q_desc": tile(rows, d), "k_desc": tile(step, d), "v_desc": tile(step, value_dim),
        "dy_desc": tile(rows, value_dim), "q1_desc": tile(rows, 64), "k1_desc": tile(step, 64),
        **dict.fromkeys(("y", "dq", "dk", "dv", "sinks"), "*bf16"), **dict.fromkeys(("lse", "delta"), "*fp32"),
        **dict.fromkeys(("first", "last", "tiles"), "*i32"), **dict.fromkeys(("tokens", "count"), "i32"),
    }  # fmt: skip
    function = getattr(module, f"attention_{kernel}")
    absent = set() if d1 else {"q1_desc", "k1_desc"} & set(function.arg_names)
    return function, given, {**constants, **dict.fromkeys(absent)}
