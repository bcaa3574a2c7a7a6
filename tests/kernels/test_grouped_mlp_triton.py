"""The experts' MLP in Triton: outputs and every gradient near float64, for any spread of rows over experts.

Without a GPU the same kernels are interpreted, in a process of their own: Triton asks whether to interpret when
it is first imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.architecture import Activation, Glu
from braid.kernels.activation import projections
from braid.kernels.grouped_mlp import reference, sizes
from braid.nn.delayed_wgrad import DelayedWgrad
from tests.kernels.interpreting import GPU, INTERPRETED, needs_kernels
from tests.planning.estimate.reality import kept

pytest.importorskip("triton")

if GPU or INTERPRETED:
    from braid.kernels.grouped_mlp import fused
    from braid.kernels.grouped_mlp.device.elementwise import ElementVariant
    from braid.kernels.grouped_mlp.device.tiles import tiles
    from braid.kernels.grouped_mlp.device.variants import (
        KeeperVariant,
        RelayRowVariant,
        RelayVariant,
        RowVariant,
        WeightVariant,
    )
    from braid.kernels.grouped_mlp.paths import Measured, Paths, Work, from_json, measured, nearest
    from braid.kernels.launch import Launcher

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
HIDDEN, FFN = (328, 136) if GPU else (24, 24)
"""No multiples of a tile's channels."""
COUNTS = [300, 0, 129, 1, 0, 70] if GPU else [5, 0, 19, 1, 0]
FEW = COUNTS if GPU else [3, 0]
"""Where it does not matter which rows belong to which tile: the interpreter is as slow as there are tiles."""
MOST_SHARED = 227 * 1024
"""Bytes that a block may have on the chip."""
GLUS = (Glu(), Glu(limit=0.8), Glu(alpha=1.702, limit=0.5, offset=1.0))
CASES: tuple[tuple[Activation, Glu], ...] = (
    *(("swiglu", glu) for glu in GLUS),
    ("relu2", Glu()),
    ("gelu", Glu()),
)


WAYS = (
    "ours",
    "ours, nested, without biases",
    "grouped_mm, without biases",
    *(("ours, handed on", "ours, handed on, without biases") if GPU else ()),
)


def combinations() -> Iterator[Any]:
    """Every activation in every way; by default each in one."""
    for number, (activation, glu) in enumerate(CASES):
        for place, way in enumerate(WAYS):
            marks = () if GPU or place == number % len(WAYS) else (pytest.mark.long,)
            yield pytest.param(activation, glu, way, marks=marks)


def experts(*, ours: bool = True, flat: bool = True, handed: bool = False) -> fused.FusedExperts:
    """With our products, or with `grouped_mm` and kernels for the activation. Those that hand tiles from warps
    to warps are for a GPU."""
    if GPU:
        row, weight, element = RowVariant(parts=4), WeightVariant(leave="pointers", flat=flat), ElementVariant()
    else:
        row = RowVariant(columns=32, depth=16, parts=2, warps=4, flat=flat)
        weight = WeightVariant(rows=32, columns=32, depth=16, leave="pointers", parts=2, early=1, flat=flat)
        element = ElementVariant(rows=4, columns=16)
    product = row if ours else None
    paths = Paths(
        fc1=product, fc2=product, dgrad2=product, dgrad1=product, wgrad1=weight, wgrad2=weight,
        forward=element, backward=element,
    )  # fmt: skip
    if handed:
        shallow = RelayRowVariant(depth=32, stages=6)
        paths = replace(
            paths, fc1=RelayRowVariant(), fc2=shallow, dgrad2=RelayRowVariant(), dgrad1=shallow,
            wgrad1=KeeperVariant(), wgrad2=RelayVariant(group=16, takers=2, ahead=6),
        )  # fmt: skip
    return fused.FusedExperts((Measured(Work(1, 1, 1), paths),), 128 if GPU else 16)


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
@pytest.mark.parametrize(("activation", "glu", "way"), list(combinations()))
def test_outputs_and_gradients(activation: Activation, glu: Glu, way: str) -> None:
    ours, flat, biases = "ours" in way, "nested" not in way, "without" not in way
    tensors = inputs(COUNTS, activation, DTYPE, exact=glu.limit is not None)[: 6 if biases else 4]
    reals = wide(tensors)
    actual = run(experts(ours=ours, flat=flat, handed="handed" in way), tensors, COUNTS, activation, glu)
    expected = run(reference.grouped_mlp, reals, COUNTS, activation, glu)
    assert actual.dtype == DTYPE
    assert_near(actual, expected)
    probe = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, probe, retain_graph=True)
    again = torch.autograd.grad(actual, tensors, probe)
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
@pytest.mark.parametrize("handed", [False, True] if GPU else [False])
@pytest.mark.parametrize("counts", [[0, 0, 4], [0, 0, 0], [16, 16]])
def test_few_and_no_rows(counts: list[int], handed: bool) -> None:
    tensors = inputs(counts, "swiglu", DTYPE)[: 4 if handed else 6]
    reals = wide(tensors)
    actual = run(experts(handed=handed), tensors, counts, "swiglu", Glu())
    expected = run(reference.grouped_mlp, reals, counts, "swiglu", Glu())
    assert_near(actual, expected)
    probe = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, tensors, probe, materialize_grads=True)
    wanted = torch.autograd.grad(expected, reals, probe.double(), materialize_grads=True)
    for grad, want in zip(grads, wanted, strict=True):
        assert_near(grad, want)


@needs_kernels
@pytest.mark.parametrize(
    "way", ["ours", pytest.param("grouped_mm", marks=pytest.mark.long), *(["handed on"] if GPU else [])]
)
def test_what_follows_the_last_row_is_nobody_s(way: str) -> None:
    """Buffers may be longer than the experts' rows; whatever is there reaches no result."""
    total = sum(COUNTS)
    tensors = inputs(COUNTS, "swiglu", DTYPE, rows=total + 21)
    x, probs, *parameters = [t.detach() for t in tensors]
    dy = torch.randn_like(x)
    for poisoned in (x, probs, dy):
        poisoned[total:] = float("nan")
    function = experts(ours=way != "grouped_mm", handed=way == "handed on")
    how = fused.How(
        function.table[0].paths,
        fused.Formula(kind="swiglu", alpha=1.0, limit=None, offset=0.0),
        function.tile_rows,
        function.launch,
    )
    counts = torch.tensor(COUNTS, device=DEVICE)
    of_experts = fused.ExpertWeights(*parameters[: 4 if way == "ours" else 2])
    y, kept = fused.forward(how, counts, x, probs, of_experts)
    found = fused.backward(how, dy, kept, of_experts)
    reals = wide([x[:total], probs[:total], *parameters[: len([p for p in of_experts if p is not None])]])
    expected = run(reference.grouped_mlp, reals, COUNTS, "swiglu", Glu())
    wanted = torch.autograd.grad(expected, reals, dy[:total].double())
    assert found.x_NC is not None
    results = [y[:total], found.x_NC[:total], found.probs_N[:total]]
    results += [product() for product in found[2:] if product is not None]
    for actual, want in zip(results, (expected, *wanted), strict=True):
        assert_near(actual, want)


@needs_kernels
@pytest.mark.parametrize("how", ["flat", pytest.param("nested", marks=pytest.mark.long), "handed on"])
def test_gradients_are_written_then_added_in_float32(how: str) -> None:
    """The first micro-batch overwrites whatever a buffer holds; the second adds."""
    if how == "handed on" and not GPU:
        pytest.skip("Gluon cannot be interpreted")
    function = experts(flat=how == "flat", handed=how == "handed on")
    tensors = inputs(COUNTS, "swiglu", DTYPE)
    parameters = [t.detach() for t in tensors[2:]]
    buffers = [torch.full(p.shape, float("nan"), device=DEVICE) for p in parameters]
    sums = [torch.zeros(p.shape, dtype=torch.float64, device=DEVICE) for p in parameters]
    how = fused.How(
        function.table[0].paths,
        fused.Formula(kind="swiglu", alpha=1.0, limit=None, offset=0.0),
        function.tile_rows,
        function.launch,
    )
    for number, counts in enumerate((COUNTS, COUNTS[::-1])):
        x, probs = (t.detach() for t in inputs(counts, "swiglu", DTYPE)[:2])
        of_experts = fused.ExpertWeights(*parameters)
        y, kept = fused.forward(how, torch.tensor(counts, device=DEVICE), x, probs, of_experts)
        dy = torch.randn_like(y)
        found = fused.backward(how, dy, kept, of_experts)
        for product, buffer in zip(found[2:], buffers, strict=True):
            assert product is not None
            assert product.into(buffer, accumulate=number > 0) is buffer
        reals = wide([x, probs, *parameters])
        expected = run(reference.grouped_mlp, reals, counts, "swiglu", Glu())
        for total, grad in zip(sums, torch.autograd.grad(expected, reals[2:], dy.double()), strict=True):
            total += grad
    for buffer, total in zip(buffers, sums, strict=True):
        assert_near(buffer, total)


@pytest.mark.skipif(not GPU, reason="Gluon cannot be interpreted")
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "add"])
@pytest.mark.parametrize(("channels_o", "channels_i"), [(256, 512), (320, 576), (HIDDEN, FFN)])
@pytest.mark.parametrize(
    "counts",
    [COUNTS, [70] * 80, [2000 // rank for rank in range(1, 90)] + [0] * 7, [0, 0, 0]],
    ids=["few", "alike", "skewed", "none"],
)
def test_gradients_do_not_depend_on_who_takes_them_away(
    counts: list[int], channels_o: int, channels_i: int, accumulate: bool
) -> None:
    from braid.kernels.grouped_mlp.device.weights import weight_gradient

    launch = Launcher()
    where = tiles(launch, torch.tensor(counts, device=DEVICE), sum(counts), 128)
    grad_NO, x_NI = (
        torch.randn(sum(counts), channels, device=DEVICE, dtype=DTYPE) for channels in (channels_o, channels_i)
    )
    there_EOI = torch.randn(len(counts), channels_o, channels_i, device=DEVICE)
    ways = (
        RelayVariant(), RelayVariant(ahead=0), RelayVariant(takers=2, ahead=6), RelayVariant(takers=2),
        KeeperVariant(), KeeperVariant(group=1),
    )  # fmt: skip
    found = [there_EOI.clone() for _ in ways]
    for way, out_EOI in zip(ways, found, strict=True):
        weight_gradient(launch, grad_NO, x_NI, where, out_EOI, way, accumulate=accumulate)
    for out_EOI in found[1:]:
        assert torch.equal(out_EOI, found[0])


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
    function = fused.FusedExperts(experts().table)
    real = kept(lambda: run(function, tensors, COUNTS, activation, Glu()), tensors[2:])
    projected = len(projections(activation)) * FFN
    told = sizes.kept(
        sum(COUNTS), len(COUNTS), HIDDEN, projected, narrow=DTYPE.itemsize, wide=tensors[1].element_size()
    )
    assert real == told


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


@needs_kernels
def test_the_nearest_measured_shape_decides() -> None:
    ways = {"fc1": RowVariant(parts=4), "wgrad1": RelayVariant(ahead=4), "wgrad2": WeightVariant(early=1)}
    paths = {name: asdict(way) for name, way in ways.items()}
    small, large = ({"rows": rows, "hidden": 2048, "ffn": 1024} for rows in (512, 4096))
    entries = [{"work": small, "paths": paths}, {"work": large, "paths": paths | {"fc1": None}}]
    text = json.dumps({"shapes": entries})
    table = from_json(text)
    assert nearest(table, Work(700, 2048, 768)).fc1 == RowVariant(parts=4)
    assert nearest(table, Work(9000, 4096, 1024)).fc1 is None
    assert nearest(table, Work(9000, 4096, 1024)).wgrad1 == RelayVariant(ahead=4)
    assert nearest(table, Work(9000, 4096, 1024)).wgrad2 == WeightVariant(early=1)
    assert nearest(table, Work(0, 64, 64)).fc1 is not None
    assert len(measured()) > 0


compiled = pytest.mark.skipif(
    GPU or INTERPRETED, reason="on a GPU they run, and the interpreter knows no Gluon"
)


@pytest.mark.skipif(INTERPRETED, reason="it runs once, where kernels are compiled")
@pytest.mark.parametrize("accumulate", [True, False])
def test_kept_weight_gradients_compile_for_hopper(accumulate: bool) -> None:
    """Also where there is no GPU: sums stay in registers, and what is there fits onto the chip."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from braid.kernels import cuda
    from braid.kernels.grouped_mlp.device import keeper, variants

    source = keeper.source(variants.KeeperVariant(), accumulate=accumulate)
    binary, log = cuda.compiled(source, "--ptxas-options=-v", "--no-cache")
    assert binary.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in log
    assert source.shared <= MOST_SHARED
    with pytest.raises(RuntimeError, match=r"keeper\.cu does not compile"):
        cuda.compiled(replace(source, macros=()))


@compiled
@pytest.mark.long
@pytest.mark.parametrize(
    ("accumulate", "takers"), [(False, 4), (True, 4), (True, 2)], ids=["overwrite", "add", "add by two"]
)
def test_relayed_weight_gradients_compile_for_hopper(accumulate: bool, takers: int) -> None:
    from braid.kernels.grouped_mlp.device.relay import _weight_gradient

    given = {
        "grad_desc": tile(1, 1, 32, 64),
        "x_desc": tile(1, 1, 32, 256),
        "out": "*fp32",
        **dict.fromkeys(("ends", "by_size"), "*i32"),
        **dict.fromkeys(("experts", "channels_o", "channels_i"), "i32"),
    }
    constants = {"BM": 128, "BN": 256, "BK": 32, "STAGES": 4, "GROUP": 8, "AHEAD": 2 if accumulate else 0}
    constants |= {"TAKERS": takers, "ACCUMULATE": accumulate, "EVEN": False}
    compile_for_hopper(_weight_gradient, given, constants)


@compiled
@pytest.mark.long
@pytest.mark.parametrize(("depth", "stages"), [(64, 3), (32, 6)])
@pytest.mark.parametrize("what", ["plain", "activate", "gradient"])
def test_relayed_rows_compile_for_hopper(what: str, depth: int, stages: int) -> None:
    from braid.kernels.grouped_mlp.device.relay_rows import _multiply_rows, takers

    transposed = what != "gradient"
    unused = {"plain": ("a", "h", "probs", "prob_sums"), "activate": ("h", "prob_sums"), "gradient": ()}[what]
    given = {
        "x_desc": tile(1, 1, 64, depth),
        "w_desc": tile(1, 256, depth) if transposed else tile(1, depth, 256),
        **dict.fromkeys(("y", "a", "h"), "*bf16"),
        **dict.fromkeys(("probs", "prob_sums"), "*fp32"),
        **dict.fromkeys(("tile_expert", "tile_row", "tile_count", "ends"), "*i32"),
        **dict.fromkeys(("channels_out", "channels_in", "rows"), "i32"),
    }
    sizes_of = {"BM": 128, "BN": 256, "BK": depth, "STAGES": stages, "TAKERS": takers(what), "EVEN": False}
    formula = {"ALPHA": 1.0, "LIMIT": 7.0, "OFFSET": 0.0}
    constants = {"WHAT": what, "TRANSPOSED": transposed} | sizes_of | formula | dict.fromkeys(unused)
    compile_for_hopper(_multiply_rows, given, constants)


def tile(*shape: int) -> str:
    """A descriptor of bfloat16 tiles, as a compiler knows it."""
    from braid.kernels.grouped_mlp.device.relay import shared_layout

    return f"tensordesc<bf16{list(shape)},{shared_layout(shape[-1], len(shape))!r}>"


def compile_for_hopper(kernel: Any, given: dict[str, str], constants: dict[str, Any]) -> None:
    """All the way to machine code, which must fit into what a multiprocessor has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = constants | {"num_warps": 4}
    names = {name: "constexpr" if name in constants else given[name] for name in kernel.arg_names}
    source = GluonASTSource(kernel, names, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    assert made.metadata.shared <= MOST_SHARED
