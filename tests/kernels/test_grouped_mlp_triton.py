"""The fused grouped MLP: outputs and every gradient near float64, for any spread of rows over experts.

Without a GPU the same kernels are interpreted, in a process of their own: Triton asks whether to interpret when
it is first imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import projections
from braid.kernels.grouped_mlp import reference, sizes
from braid.kernels.grouped_mlp.tuned_table import (
    Tuned,
    WgradKernel,
    Work,
    from_json,
    nearest,
    to_json,
    tuned_table,
)
from braid.nn.delayed_wgrad import DelayedWgrad
from tests.kernels.interpreting import GPU, INTERPRETED, needs_kernels
from tests.planning.estimate.reality import kept

pytest.importorskip("triton")

if GPU or INTERPRETED:
    from braid.kernels.grouped_mlp import fused
    from braid.kernels.grouped_mlp.device.activation import FusedActivation
    from braid.kernels.grouped_mlp.device.tiles import TileConfig, tiles
    from braid.kernels.launch import Launcher

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
HIDDEN, FFN = (328, 136) if GPU else (24, 24)
"""No multiples of a tile's channels."""
COUNTS = [300, 0, 129, 1, 0, 70] if GPU else [5, 0, 19, 1, 0]
FEW = COUNTS if GPU else [3, 0]
"""Where it does not matter which rows belong to which tile: the interpreter is as slow as there are tiles."""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
GLUS = (Glu(), Glu(limit=0.8), Glu(alpha=1.702, limit=0.5, offset=1.0))
CASES: tuple[tuple[Activation, Glu], ...] = (
    *(("swiglu", glu) for glu in GLUS),
    ("relu2", Glu()),
    ("gelu", Glu()),
    ("gelu_tanh", Glu()),
)

BIASES = (True, False)
"""On a GPU the warp-specialised GEMM takes SwiGLU without biases, the plain one takes the rest."""


def combinations() -> Iterator[Any]:
    """Every activation with and without biases; by default each once."""
    for number, (activation, glu) in enumerate(CASES):
        for biases in BIASES:
            marks = () if GPU or biases == (number % 2 == 0) else (pytest.mark.long,)
            yield pytest.param(activation, glu, biases, marks=marks)


def experts(kernel: WgradKernel = "warp-specialised") -> fused.FusedExperts:
    """With small tiles where they are interpreted."""
    tiling = TileConfig() if GPU else TileConfig(rows=16, columns=32, depth=16, parts=2)
    return fused.FusedExperts((Tuned(Work(1, 1, 1), kernel),), tiling)


def config_of(function: fused.FusedExperts) -> fused.FusedConfig:
    activation, kernel = FusedActivation(kind="swiglu"), function.table[0].wgrad
    return fused.FusedConfig(activation, kernel, function.tiling, function.launch)


def inputs(
    counts: list[int],
    activation: Activation,
    dtype: torch.dtype,
    *,
    rows: int | None = None,
    exact: bool = False,
) -> list[Tensor]:
    """Rows, probabilities, two weights, two biases. With `exact` any dtype holds the projections as they are: a
    gradient jumps where a projection passes a limit, and rounding could carry it there."""
    n, e, into = sum(counts) if rows is None else rows, len(counts), len(projections(activation))
    shapes = ((n, HIDDEN), (n,), (e, FFN, into, HIDDEN), (e, HIDDEN, FFN), (e, FFN, into), (e, HIDDEN))
    scales = (1.0, 1.0, HIDDEN**-0.5, FFN**-0.5, 1.0, 1.0)
    drawn = [
        torch.randn(shape, dtype=torch.float64) * scale for shape, scale in zip(shapes, scales, strict=True)
    ]
    if exact:
        x, _, w_in, _, b_in, _ = drawn
        x.copy_(torch.where(x < 0, -1.0, 1.0))
        w_in.copy_(w_in.mul(HIDDEN**0.5).round().clamp(-1, 1) / 16)
        b_in.copy_(b_in.mul(16).round() / 16)
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def run(
    function: Any, tensors: list[Tensor], counts: list[int], activation: Activation, glu: Glu, **options: Any
) -> Tensor:
    x, probs, w_in, w_down, *biases = tensors
    given = dict(zip(("b_in_EFG", "b_down_EC"), biases, strict=False))
    rows = torch.tensor(counts, device=DEVICE)
    y: Tensor = function(x, probs, rows, w_in, w_down, activation, glu=glu, **given, **options)
    return y


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype = DTYPE) -> None:
    bound = 40 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 2e-2
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected).norm() <= bound * expected.norm()


@needs_kernels
@pytest.mark.parametrize(("activation", "glu", "biases"), list(combinations()))
def test_outputs_and_gradients(activation: Activation, glu: Glu, biases: bool) -> None:
    tensors = inputs(COUNTS, activation, DTYPE, exact=glu.limit is not None)[: 6 if biases else 4]
    reals = wide(tensors)
    actual = run(experts(), tensors, COUNTS, activation, glu)
    expected = run(reference.grouped_mlp, reals, COUNTS, activation, glu)
    assert actual.dtype == DTYPE
    assert_near(actual, expected)
    probe = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, probe, retain_graph=True)
    # The interpreter does one thing after the other: there once is enough.
    repeated = GPU or (activation, glu) == CASES[0]
    again = torch.autograd.grad(actual, tensors, probe) if repeated else grads
    wanted = torch.autograd.grad(expected, reals, probe.double())
    for grad, same, want, tensor in zip(grads, again, wanted, tensors, strict=True):
        assert grad.dtype == tensor.dtype
        assert_near(grad, want)
        assert torch.equal(grad, same)
    for grad in grads[2:]:
        assert not any(grad[e].any() for e, count in enumerate(COUNTS) if not count)


@needs_kernels
@pytest.mark.skipif(GPU, reason="for the interpreter, which knows no bfloat16")
def test_half_precision() -> None:
    tensors = inputs(COUNTS, "swiglu", torch.float16)
    reals = wide(tensors)
    actual = run(experts(), tensors, COUNTS, "swiglu", GLUS[2])
    expected = run(reference.grouped_mlp, reals, COUNTS, "swiglu", GLUS[2])
    assert_near(actual, expected, torch.float16)
    probe = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, probe)
    for grad, want in zip(grads, torch.autograd.grad(expected, reals, probe.double()), strict=True):
        assert_near(grad, want, torch.float16)


@needs_kernels
@pytest.mark.parametrize("biases", BIASES if GPU else [True])
@pytest.mark.parametrize("counts", [[0, 0, 4], [0, 0, 0], [16, 16]])
def test_few_and_no_rows(counts: list[int], biases: bool) -> None:
    tensors = inputs(counts, "swiglu", DTYPE)[: 6 if biases else 4]
    reals = wide(tensors)
    actual = run(experts(), tensors, counts, "swiglu", Glu())
    expected = run(reference.grouped_mlp, reals, counts, "swiglu", Glu())
    assert_near(actual, expected)
    probe = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, probe, materialize_grads=True)
    wanted = torch.autograd.grad(expected, reals, probe.double(), materialize_grads=True)
    for grad, want in zip(grads, wanted, strict=True):
        assert_near(grad, want)


@needs_kernels
@pytest.mark.parametrize("biases", BIASES if GPU else [True])
def test_rows_past_the_last_expert_reach_no_result(biases: bool) -> None:
    """Buffers may be longer than the experts' rows."""
    total = sum(COUNTS)
    tensors = inputs(COUNTS, "swiglu", DTYPE, rows=total + 21)
    x, probs, *parameters = [t.detach() for t in tensors]
    dy = torch.randn_like(x)
    for poisoned in (x, probs, dy):
        poisoned[total:] = float("nan")
    config = config_of(experts())
    counts = torch.tensor(COUNTS, device=DEVICE)
    weights = fused.ExpertWeights(*parameters[: 4 if biases else 2])
    y, saved = fused.forward(config, counts, x, probs, weights)
    found = fused.backward(config, dy, saved, weights)
    reals = wide([x[:total], probs[:total], *(p for p in weights if p is not None)])
    expected = run(reference.grouped_mlp, reals, COUNTS, "swiglu", Glu())
    wanted = torch.autograd.grad(expected, reals, dy[:total].double())
    assert found.x_NC is not None
    results = [y[:total], found.x_NC[:total], found.probs_N[:total]]
    results += [product() for product in found[2:] if product is not None]
    for actual, want in zip(results, (expected, *wanted), strict=True):
        assert_near(actual, want)


@needs_kernels
@pytest.mark.parametrize("kernel", ["cuda", "warp-specialised"] if GPU else ["warp-specialised"])
def test_gradients_are_written_then_added_in_float32(kernel: WgradKernel) -> None:
    """The first micro-batch overwrites whatever a buffer holds; the second adds."""
    config = config_of(experts(kernel))
    tensors = inputs(FEW, "swiglu", DTYPE)
    parameters = [t.detach() for t in tensors[2:]]
    buffers = [torch.full(p.shape, float("nan"), device=DEVICE) for p in parameters]
    sums = [torch.zeros(p.shape, dtype=torch.float64, device=DEVICE) for p in parameters]
    for number, counts in enumerate((FEW, FEW[::-1])):
        x, probs = (t.detach() for t in inputs(counts, "swiglu", DTYPE)[:2])
        weights = fused.ExpertWeights(*parameters)
        y, saved = fused.forward(config, torch.tensor(counts, device=DEVICE), x, probs, weights)
        dy = torch.randn_like(y)
        found = fused.backward(config, dy, saved, weights)
        for product, buffer in zip(found[2:], buffers, strict=True):
            assert product is not None
            assert product.into(buffer, accumulate=number > 0) is buffer
        reals = wide([x, probs, *parameters])
        expected = run(reference.grouped_mlp, reals, counts, "swiglu", Glu())
        for total, grad in zip(sums, torch.autograd.grad(expected, reals[2:], dy.double()), strict=True):
            total += grad
    for buffer, total in zip(buffers, sums, strict=True):
        assert_near(buffer, total)


@pytest.mark.skipif(not GPU, reason="the interpreter has neither Gluon nor CUDA")
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "add"])
@pytest.mark.parametrize(("channels_o", "channels_i"), [(256, 512), (320, 576), (HIDDEN, FFN)])
@pytest.mark.parametrize(
    "counts",
    [COUNTS, [70] * 80, [2000 // rank for rank in range(1, 90)] + [0] * 7, [0, 0, 0]],
    ids=["few", "alike", "skewed", "none"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_wgrad_kernels_agree(
    counts: list[int], channels_o: int, channels_i: int, accumulate: bool, dtype: torch.dtype
) -> None:
    """With each other to the last bit, and with float64. In bfloat16 it is the plain kernel."""
    from braid.kernels.grouped_mlp.device.wgrad import weight_gradient

    launch = Launcher()
    where = tiles(launch, torch.tensor(counts, device=DEVICE), sum(counts), 128)
    total = sum(counts)
    grad_NO, x_NI = (torch.randn(total + 1, n, device=DEVICE, dtype=DTYPE) for n in (channels_o, channels_i))
    grad_NO[total] = x_NI[total] = float("nan")  # of no expert
    held_EOI = torch.randn(len(counts), channels_o, channels_i, device=DEVICE, dtype=dtype)
    one, other = held_EOI.clone(), held_EOI.clone()
    for kernel, out_EOI in (("cuda", one), ("warp-specialised", other)):
        weight_gradient(launch, grad_NO, x_NI, where, out_EOI, kernel, TileConfig(), accumulate=accumulate)
    assert torch.equal(one, other)
    pairs = zip(*(t[:total].double().split(counts) for t in (grad_NO, x_NI)), strict=True)
    wanted = torch.stack([grad.t() @ x for grad, x in pairs]) + (held_EOI.double() if accumulate else 0)
    assert (one.double() - wanted).norm() <= (1e-5 if dtype == torch.float32 else 5e-3) * wanted.norm()


@needs_kernels
def test_a_sink_gets_what_backward_would_have_given() -> None:
    tensors = inputs(FEW, "swiglu", DTYPE)
    probe = torch.randn_like(tensors[0])
    at_once = torch.autograd.grad(run(experts(), tensors, FEW, "swiglu", Glu()), tensors, probe)
    wgrad_store = DelayedWgrad()
    y = run(experts(), tensors, FEW, "swiglu", Glu(), wgrad_store=wgrad_store)
    with wgrad_store.node("experts"):
        y.backward(probe)
    assert wgrad_store.pending("experts") == 4
    assert all(t.grad is None for t in tensors[2:])
    wgrad_store.drain("experts")
    wgrad_store.finish()
    for tensor, grad in zip(tensors, at_once, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, grad)


@needs_kernels
@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.long)], ids=["at once", "later"])
def test_a_sink_has_main_gradients_written(later: bool) -> None:
    """The first micro-batch overwrites, the second adds; parameters have no gradient of their own."""
    tensors = inputs(FEW, "swiglu", DTYPE)
    mains = {p: torch.zeros(p.shape, device=DEVICE, requires_grad=True) for p in tensors[2:]}
    wgrad_store, function = DelayedWgrad(mains), experts()
    totals = [torch.zeros(p.shape, dtype=torch.float64, device=DEVICE) for p in mains]
    for number, counts in enumerate((FEW, FEW[::-1])):
        given = [*inputs(counts, "swiglu", DTYPE)[:2], *tensors[2:]]
        reals = wide(given)
        y, expected = (
            run(function, given, counts, "swiglu", Glu(), wgrad_store=wgrad_store),
            run(reference.grouped_mlp, reals, counts, "swiglu", Glu()),
        )
        probe = torch.randn_like(y)
        with wgrad_store.node(number) if later else nullcontext():
            y.backward(probe)
        if later:
            wgrad_store.drain(number)
        for total, grad in zip(totals, torch.autograd.grad(expected, reals[2:], probe.double()), strict=True):
            total += grad
    wgrad_store.finish()
    for (parameter, main), total in zip(mains.items(), totals, strict=True):
        assert parameter.grad is None
        assert main.grad is not None
        assert main.grad.dtype == torch.float32
        assert_near(main.grad, total)


@needs_kernels
def test_without_rows_gradients_are_zeros_where_others_would_be() -> None:
    """Nothing is launched: the first micro-batch writes them, the second leaves them."""
    tensors = inputs([0, 0, 0], "swiglu", DTYPE)
    mains = {p: torch.zeros(p.shape, device=DEVICE, requires_grad=True) for p in tensors[2:]}
    wgrad_store = DelayedWgrad(mains)
    for _ in range(2):
        y = run(experts(), tensors, [0, 0, 0], "swiglu", Glu(), wgrad_store=wgrad_store)
        assert (y.shape, y.dtype) == (tensors[0].shape, DTYPE)
        y.sum().backward()
    wgrad_store.finish()
    for tensor in tensors[:2]:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
    for parameter, main in mains.items():
        assert parameter.grad is None
        assert main.grad is not None
        assert not main.grad.any()
    at_once = torch.autograd.grad(run(experts(), tensors, [0, 0, 0], "swiglu", Glu()).sum(), tensors)
    assert not any(gradient.any() for gradient in at_once)


@needs_kernels
def test_vectors_may_have_any_stride() -> None:
    tensors = inputs(FEW, "swiglu", DTYPE)
    x, probs, w_in, w_down, b_in, b_down = (t.detach() for t in tensors)
    strided = [
        x, torch.stack([probs, probs + 1], 1)[:, 0], w_in, w_down, b_in, b_down.t().contiguous().t(),
    ]  # fmt: skip
    assert not strided[1].is_contiguous()
    for given in strided:
        given.requires_grad_()
    found, wanted = (run(experts(), each, FEW, "swiglu", Glu()) for each in (strided, tensors))
    assert torch.equal(found, wanted)
    probe = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, strided, probe), torch.autograd.grad(wanted, tensors, probe), strict=True
    ):
        assert torch.equal(one, other)


@needs_kernels
def test_a_main_gradient_that_cannot_be_written_is_an_error() -> None:
    tensors = inputs(FEW, "swiglu", DTYPE)
    w_in = tensors[2]
    main = torch.zeros(w_in.shape, device=DEVICE, requires_grad=True)
    main.grad = torch.zeros(w_in.shape[::-1], device=DEVICE).permute(3, 2, 1, 0)
    y = run(experts(), tensors, FEW, "swiglu", Glu(), wgrad_store=DelayedWgrad({w_in: main}))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        y.sum().backward()


@needs_kernels
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_is_kept_is_what_a_plan_says(activation: Activation) -> None:
    tensors = inputs(COUNTS, activation, DTYPE)
    function = fused.FusedExperts(experts().table, replace(experts().tiling, rows=sizes.TILE_ROWS))
    real = kept(lambda: run(function, tensors, COUNTS, activation, Glu()), tensors[2:])
    projected = len(projections(activation)) * FFN
    planned = sizes.kept(
        sum(COUNTS), len(COUNTS), HIDDEN, projected, narrow=DTYPE.itemsize, wide=tensors[1].element_size()
    )
    assert real == planned


@needs_kernels
def test_frozen_weights_and_inputs_get_nothing() -> None:
    tensors = inputs(FEW, "swiglu", DTYPE)
    for frozen in (tensors[0], tensors[3]):
        frozen.requires_grad_(False)
    run(experts(), tensors, FEW, "swiglu", Glu()).sum().backward()
    assert [t.grad is None for t in tensors] == [True, False, False, True, False, False]


@needs_kernels
@pytest.mark.parametrize("counts", [COUNTS, [0, 0], [64, 0, 64, 1000, 3]])
def test_tiles(counts: list[int]) -> None:
    made = tiles(Launcher(), torch.tensor(counts, device=DEVICE), sum(counts), 16)
    ends = torch.tensor(counts).cumsum(0)
    wanted = [
        (e, int(ends[e]) - count + first) for e, count in enumerate(counts) for first in range(0, count, 16)
    ]
    found = int(made.count_1)
    assert list(zip(made.expert_T[:found].tolist(), made.row_T[:found].tolist(), strict=True)) == wanted
    assert made.ends_E.tolist() == ends.tolist()
    assert made.by_size_E.tolist() == sorted(range(len(counts)), key=lambda e: -counts[e])
    assert found <= made.most
    *parts, _ = made
    assert all(part.data_ptr() % 16 == 0 for part in parts)  # whatever the number of rows: no kernel anew


def test_the_nearest_shape_of_the_tuned_table_decides() -> None:
    few, many = Tuned(Work(512, 2048, 1024), "cuda"), Tuned(Work(4096, 2048, 1024), "warp-specialised")
    table = from_json(to_json((few, many)))
    assert table == (few, many)
    assert nearest(table, Work(700, 2048, 768)) == "cuda"
    assert nearest(table, Work(9000, 4096, 1024)) == "warp-specialised"
    assert nearest(table, Work(0, 64, 64)) == "cuda"
    assert {row.wgrad for row in tuned_table()} <= {"cuda", "warp-specialised"}


compiled = pytest.mark.skipif(GPU or INTERPRETED, reason="on a GPU they run, and the interpreter has no Gluon")


@pytest.mark.skipif(INTERPRETED, reason="it runs once, where kernels are compiled")
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad_cuda_compiles_for_hopper(accumulate: bool) -> None:
    """Also where there is no GPU: accumulators stay in registers, and shared memory suffices."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from braid.kernels import cuda
    from braid.kernels.grouped_mlp.device import wgrad_cuda

    source = wgrad_cuda.source(accumulate=accumulate)
    binary, log = cuda.compiled(source, "--ptxas-options=-v", "--no-cache")
    assert binary.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in log
    assert source.shared <= MOST_SHARED
    with pytest.raises(RuntimeError, match=r"wgrad_cuda\.cu does not compile"):
        cuda.compiled(replace(source, macros=()))


@compiled
@pytest.mark.long
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "add"])
def test_wgrad_warp_specialised_compiles_for_hopper(accumulate: bool) -> None:
    from braid.kernels.grouped_mlp.device import wgrad_warp_specialised as kernel

    given = {
        "grad_desc": tile(1, 1, kernel.DEPTH, kernel.ROWS // 2),
        "x_desc": tile(1, 1, kernel.DEPTH, kernel.COLUMNS),
        "out": "*fp32",
        **dict.fromkeys(("ends", "by_size"), "*i32"),
        **dict.fromkeys(("experts", "channels_o", "channels_i"), "i32"),
    }
    compile_for_hopper(kernel._weight_gradient, given, kernel.constants(accumulate=accumulate, even=False))


@compiled
@pytest.mark.long
@pytest.mark.parametrize("epilogue", ["none", "activation", "activation backward"])
def test_gemm_warp_specialised_compiles_for_hopper(epilogue: Any) -> None:
    from braid.kernels.grouped_mlp.device import gemm_warp_specialised as kernel
    from braid.kernels.grouped_mlp.device.activation import FusedActivation

    transposed, (rows, columns, depth) = epilogue != "activation backward", (64, kernel.COLUMNS, kernel.DEPTH)
    unused = {"none": ("a", "h", "probs", "partial_sums"), "activation": ("h", "partial_sums")}
    given = {
        "x_desc": tile(1, 1, rows, depth),
        "w_desc": tile(1, columns, depth) if transposed else tile(1, depth, columns),
        **dict.fromkeys(("y", "a", "h"), "*bf16"),
        **dict.fromkeys(("probs", "partial_sums"), "*fp32"),
        **dict.fromkeys(("tile_expert", "tile_row", "tile_count", "ends"), "*i32"),
        **dict.fromkeys(("channels_out", "channels_in", "rows"), "i32"),
    }
    activation = FusedActivation(kind="swiglu", limit=7.0)
    constants = kernel.constants(epilogue, activation, transposed=transposed, even=False)
    compile_for_hopper(kernel._grouped_gemm, given, constants | dict.fromkeys(unused.get(epilogue, ())))


def tile(*shape: int) -> str:
    """A descriptor of bfloat16 tiles, as a compiler knows it."""
    from braid.kernels.grouped_mlp.device.wgrad_warp_specialised import shared_layout

    return f"tensordesc<bf16{list(shape)},{shared_layout(shape[-1], len(shape))!r}>"


def compile_for_hopper(kernel: Any, given: dict[str, str], constants: dict[str, Any]) -> None:
    """All the way to machine code, which must fit into what a multiprocessor has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = {name: "constexpr" if name in constants else given[name] for name in kernel.arg_names}
    source = GluonASTSource(kernel, names, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    assert made.metadata.shared <= MOST_SHARED
