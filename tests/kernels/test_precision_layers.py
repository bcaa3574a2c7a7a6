"""Layers in fp8_block by kernels: what they give by the reference, where sizes fit and where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid import architecture, kernels, pattern
from braid.distributed.collectives import Group, Groups
from braid.kernels import glu
from braid.kernels.precision import FORMATS, BlockKernels, Format, Products, Shards, Slice
from braid.kernels.precision.dense import choose
from braid.kernels.precision.grid import copy_bytes
from braid.nn.cost import Workload
from braid.nn.mlp import Mlp
from braid.nn.precision import LossTally, set_precision, temporary_bytes
from braid.precision import ProductFormats, precision_of
from braid.recipes import load
from tests.kernels.interpreting import DEVICE, GPU, needs_kernels

DTYPE = torch.bfloat16 if GPU else torch.float32
BOUND = 2e-2 if GPU else 1e-6
FORM = FORMATS["fp8_block"]
ALL = Products(forward=FORM, input_grad=FORM, weight_grad=FORM)


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted.double()).norm().item() / (wanted.double().norm().item() or 1.0)


def run(
    mlp: Mlp, x: Tensor, block_kernels: BlockKernels | None, settings: str
) -> tuple[list[Tensor], dict[str, float]]:
    """Output and gradients, and what the tally says."""
    tally = LossTally()
    set_precision(mlp, precision_of(settings.split()), Groups(), tally, block_kernels)
    tally.start()
    x = x.clone().requires_grad_()
    y = mlp(x)
    probe = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y.dtype) * 1e-3
    found = [y, *torch.autograd.grad(y, [x, *mlp.parameters()], probe)]
    return found, {name: float(number) for name, number in tally.metrics().items()}


@needs_kernels
@pytest.mark.parametrize(
    ("sequences", "bias", "settings"),
    [
        (1, False, "fp8_block"),
        (2, True, "fp8_block"),
        (2, False, "fp8_block dense.weight_grad=bf16"),
        (1, True, "fp8_block dense.input_grad=bf16"),
    ],
)
def test_an_mlp_by_kernels_is_the_one_of_the_reference(sequences: int, bias: bool, settings: str) -> None:
    """Two sequences of 24 tokens have no whole blocks: with weight gradients in fp8, the reference steps in.
    With a bias the two layers are quantised one by one. Elements that become zero are counted the same."""
    torch.manual_seed(3)
    shape = architecture.Mlp(ffn=512, activation="swiglu", bias=bias)
    mlp = Mlp(shape, 512, glu.choose(torch.device("cuda"), DTYPE).function, dtype=DTYPE, device=DEVICE)
    for parameter in mlp.parameters():
        parameter.data.normal_(std=0.2)
    sizes = torch.logspace(-5, 0, 512, device=DEVICE)
    x = (torch.randn(sequences, 48 // sequences, 512, device=DEVICE) * sizes).to(DTYPE)
    found, counted = run(mlp, x, BlockKernels(), settings)
    wanted, expected = run(mlp, x, None, settings)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < BOUND
    assert set(counted) == set(expected)
    for name, number in expected.items():
        assert counted[name] == pytest.approx(number, rel=0.02 if GPU else 0, abs=2 if GPU else 0)
    assert counted["fp8_zeroed_input"] > 0


@pytest.mark.parametrize(
    ("weight", "shape", "products", "taken"),
    [
        ((1024, 512), (2, 128, 512), ALL, True),
        ((1024, 512), (1, 144, 512), ALL, True),
        ((1024, 512), (2, 72, 512), ALL, False),
        ((1024, 512), (2, 72, 512), Products(forward=FORM, input_grad=FORM, weight_grad=None), True),
        ((1024, 512), (1, 100, 512), ALL, False),
        ((1024, 512), (1, 0, 512), ALL, False),
        ((640, 512), (1, 128, 512), ALL, True),
        ((512, 2320), (1, 128, 2320), ALL, True),
        ((2320, 648), (1, 128, 648), ALL, False),
        ((512, 512), (1, 128, 512), Products(forward=None, input_grad=FORM, weight_grad=FORM), False),
        (
            (512, 512),
            (1, 128, 512),
            Products(forward=FORM, input_grad=FORMATS["mxfp8"], weight_grad=None),
            False,
        ),
    ],
)
def test_which_sizes_kernels_take(
    weight: tuple[int, int], shape: tuple[int, ...], products: Products, taken: bool
) -> None:
    assert BlockKernels().takes(products, weight, shape) == taken


def test_why_the_reference_runs() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    block = ProductFormats(forward="fp8_block", input_grad="fp8_block")
    assert "needs a GPU, not cpu; it emulates" in choose(cpu, torch.bfloat16, block).reason
    assert "does not support float32" in choose(cuda, torch.float32, block).reason
    mixed = ProductFormats(forward="fp8_block", weight_grad="mxfp8")
    assert choose(cuda, torch.bfloat16, mixed).reason == "fused multiplies fp8_block, not mxfp8"
    assert (
        "forward is quantised" in choose(cuda, torch.bfloat16, ProductFormats(weight_grad="fp8_block")).reason
    )


def test_a_run_without_low_precision_has_no_such_kernels() -> None:
    shape = load("tiny").model
    kinds = pattern.parse(shape.pattern).kinds()
    assert kernels.choose(shape, kinds, torch.device("cpu"), torch.float32).low_precision is None
    block = precision_of(["fp8_block"]).dense
    chosen = kernels.choose(shape, kinds, torch.device("cpu"), torch.float32, ("auto",), block)
    assert chosen.low_precision is not None
    assert chosen.low_precision.name == "reference"


@pytest.mark.parametrize("settings", ["fp8_block", "fp8_block dense.weight_grad=bf16"])
def test_kernels_need_less_memory_than_the_reference(settings: str) -> None:
    """They convert nothing to float32, but for a weight gradient; nothing changes where they do not fit."""
    mlp = Mlp(architecture.Mlp(ffn=1024), 512, dtype=torch.bfloat16, device=torch.device("meta"))

    def temporary(tokens: int, block_kernels: BlockKernels | None) -> int:
        set_precision(mlp, precision_of(settings.split()), Groups(), None, block_kernels)
        workload = Workload(rows=1, tokens=tokens, dtype=torch.bfloat16, device="cuda")
        return temporary_bytes(mlp, tokens, 0, workload)

    assert temporary(4096, BlockKernels()) < temporary(4096, None) / 3
    assert temporary(4100, BlockKernels()) == temporary(4100, None)


@needs_kernels
@pytest.mark.parametrize("shape", [(144, 272), (2, 144, 272)], ids=["dense", "experts"])
@pytest.mark.parametrize("input_grad", [FORM, None], ids=["both", "forward alone"])
def test_a_steps_copies_are_those_of_the_reference(shape: tuple[int, ...], input_grad: Format | None) -> None:
    """By a kernel: both layouts in one read, the bytes that a plan counts, and what becomes zero."""
    torch.manual_seed(4)
    sizes = torch.logspace(-6, 0, shape[-1], device=DEVICE)
    weight = (torch.randn(shape, device=DEVICE) * sizes).to(DTYPE)
    made = {}
    for name, block_kernels in (("kernel", BlockKernels()), ("reference", None)):
        tally = LossTally()
        products = Products(
            forward=FORM, input_grad=input_grad, weight_grad=None, tally=tally, kernels=block_kernels
        )
        tally.start()
        products.quantize_weight(weight)
        zeroed = tally.metrics()["fp8_zeroed_weight"]
        made[name] = products, products.step_weight, float(zeroed)
    (products, found, zeroed), (_, wanted, expected) = made["kernel"], made["reference"]
    assert zeroed == expected > 0
    held = [each for each in (found.forward, found.input_grad) if each is not None]
    for one, other in zip(held, [wanted.forward, wanted.input_grad], strict=False):
        assert other is not None
        assert one.values.is_contiguous()
        assert torch.equal(one.values.view(torch.uint8), other.values.contiguous().view(torch.uint8))
        assert torch.equal(one.scales, other.scales)
    assert len(held) == (1 if input_grad is None else 2)
    sizes_of = (each.values.nbytes + each.scales.untyped_storage().nbytes() for each in held)
    assert copy_bytes(products, shape) == sum(sizes_of)


def test_copies_whose_blocks_ranks_share_are_made_by_the_reference() -> None:
    """A kernel does not know the others' magnitudes."""
    group = Group(name="tp", size=2, rank=0, handle=None)
    for held, by_kernel in ((128, True), (144, False)):
        shards = Shards(outputs=Slice(group))
        products = Products(
            forward=FORM, input_grad=FORM, weight_grad=None, shards=shards, kernels=BlockKernels()
        )
        assert products.copies_by_kernel((held, 256)) == by_kernel
    assert not Products(forward=FORM, input_grad=FORM, weight_grad=None).copies_by_kernel((128, 128))
