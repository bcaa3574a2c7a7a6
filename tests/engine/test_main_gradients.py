"""Weight gradients that are written where the optimizer or FSDP2 wants them: the same numbers as by way of
`.grad`, at once or later, in the first micro-batch of a step and in those after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups
from braid.engine import fsdp2
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.kernels.grouped_mlp import FusedGroupedMlp, GroupedMlp, reference
from braid.kernels.grouped_mlp.product import Gradient, WgradStore, WritesInPlace, empty_like
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.moe.experts import Experts
from braid.optim.adamw import AdamW
from braid.optim.shards import local
from braid.schedule.lifetime import Use
from braid.schedule.phases import Unit
from tests.ranks import run_ranks

CHANNELS, COUNTS = 6, [[3, 0, 4], [1, 5, 0], [0, 0, 2]]
SHAPE = architecture.Moe(experts=3, top_k=1, ffn=4, bias=True)


class _Writing:
    """Hands on products that can write where they are told, as those of fused kernels do."""

    def __init__(self, wgrad_store: WgradStore) -> None:
        self.wgrad_store = wgrad_store

    def put(self, parameter: Tensor, product: Any) -> Tensor | None:
        def write(gradient: Tensor, accumulate: bool) -> None:
            assert gradient.dtype == torch.float32
            gradient.copy_(gradient + product() if accumulate else product())

        return self.wgrad_store.put(parameter, Gradient(write, empty_like(parameter)))


class InPlace(WritesInPlace):
    def __call__(self, *given: Any, wgrad_store: WgradStore | None = None, **options: Any) -> Tensor:
        return reference.grouped_mlp(
            *given, wgrad_store=None if wgrad_store is None else _Writing(wgrad_store), **options
        )


IN_PLACE = InPlace()


class Layer(nn.Module):
    """A root around experts."""

    def __init__(
        self, dtype: torch.dtype, groups: Groups = Groups(), grouped_mlp: GroupedMlp = IN_PLACE
    ) -> None:
        super().__init__()
        self.experts = Experts(SHAPE, CHANNELS, grouped_mlp, groups=groups, dtype=dtype)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x_MC: Tensor, counts: list[int]) -> Tensor:
        probs_M = torch.linspace(0.5, 1.5, len(x_MC))
        y_MC: Tensor = self.experts(x_MC, probs_M, torch.tensor(counts))
        return y_MC


def rows(counts: list[int], rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + sum(counts))
    return torch.randn(sum(counts), CHANNELS, generator=generator).bfloat16().requires_grad_()


def back(y: Tensor) -> None:
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))


# ------------------------------------------------------------------------------------------ one process


def optimizer_of(layer: Layer) -> AdamW:
    named = dict(layer.named_parameters())
    return AdamW(named, decaying=(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def gathered(layer: Layer, optimizer: AdamW) -> dict[str, Tensor]:
    """By way of `.grad`."""
    set_wgrad_store(layer, None)
    for counts in COUNTS:
        back(layer(rows(counts), counts))
        optimizer.accumulate_grads()
    return {name: gradient.clone() for name, gradient in optimizer.gradients().items()}


def written(layer: Layer, optimizer: AdamW, *, later: bool) -> dict[str, Tensor]:
    wgrad_store = DelayedWgrad(optimizer.main_copies())
    set_wgrad_store(layer, wgrad_store)
    for number, counts in enumerate(COUNTS):
        y = layer(rows(counts), counts)
        if later:
            with wgrad_store.node(number):
                back(y)
            if number > 0:
                wgrad_store.drain(number - 1)
        else:
            back(y)
        assert all(p.grad is None for p in layer.experts.parameters())
        optimizer.accumulate_grads()
    if later:
        wgrad_store.drain(len(COUNTS) - 1)
    wgrad_store.finish()
    return {name: gradient.clone() for name, gradient in optimizer.gradients().items()}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_lone_process_writes_main_gradients(later: bool) -> None:
    """Twice: what the first step has left is overwritten."""
    expected_of, actual_of = Layer(torch.bfloat16), Layer(torch.bfloat16)
    plain, direct = optimizer_of(expected_of), optimizer_of(actual_of)
    for _ in range(2):
        expected, actual = gathered(expected_of, plain), written(actual_of, direct, later=later)
        for name, gradient in expected.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, actual[name]), name
        plain.update(0.1)
        direct.update(0.1)
    for old, new in zip(expected_of.parameters(), actual_of.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_weight_that_is_its_own_main_copy_has_a_gradient_as_ever() -> None:
    layer = Layer(torch.float32)
    wgrad_store = DelayedWgrad(optimizer_of(layer).main_copies())
    set_wgrad_store(layer, wgrad_store)
    back(layer(rows(COUNTS[0]).detach().float(), COUNTS[0]))
    assert all(p.grad is not None for p in layer.parameters())


# -------------------------------------------------------------------------------------------- sharded


def sharded(world: int, etp_rank: int, grouped_mlp: GroupedMlp = IN_PLACE) -> Layer:
    """Experts of which this rank has a slice of the ffn channels, shared by ranks that have the same one."""
    slices = ALONE if etp_rank == 0 else Group(name="etp", size=2, rank=1, handle=None)
    layer = Layer(torch.float32, Groups(etp=slices), grouped_mlp)
    meshes = {"dense": init_device_mesh("cpu", (world,))}
    units = [Unit(path="experts")]
    shard_units(layer, units, meshes=meshes, strategy="optimizer", compute=torch.bfloat16)
    return layer


def by_hooks(layer: Layer, rank: int, wgrad_store: DelayedWgrad | None) -> dict[str, Tensor]:
    set_wgrad_store(layer, wgrad_store)
    assert isinstance(layer, FSDPModule)
    for number, counts in enumerate(COUNTS):
        last = number == len(COUNTS) - 1
        layer.set_requires_gradient_sync(last)
        layer.set_is_last_backward(last)
        back(layer(rows(counts, rank), counts))
    return taken(layer)


def by_driver(layer: Layer, driver: FsdpWeights, rank: int, wgrad_store: DelayedWgrad) -> dict[str, Tensor]:
    """What a schedule does, with weight gradients that come when the weights are gone."""
    set_wgrad_store(layer, wgrad_store)
    driver.begin()
    for number, counts in enumerate(COUNTS):
        driver.unshard("experts")
        driver.wait("experts")
        driver.use(Use(reads=("experts",), grads=("experts",)))
        y = layer(rows(counts, rank), counts)
        with wgrad_store.node(number):
            back(y)
        driver.reshard("experts")
        wgrad_store.drain(number)
        if number < len(COUNTS) - 1:
            driver.accumulate("experts")
    driver.reduce("experts")
    driver.finish()
    wgrad_store.finish()
    return taken(layer)


def taken(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = local(parameter.grad).clone()
        parameter.grad = None
    return found


def every_way(rank: int, world: int, etp_rank: int) -> None:
    expected = by_hooks(sharded(world, etp_rank), rank, None)
    assert any(gradient.any() for gradient in expected.values())
    layer, other = sharded(world, etp_rank), sharded(world, etp_rank)
    wgrad_store = DelayedWgrad(fsdp2.AccumulatedGrads(layer))
    ways = {
        "hooks": lambda: by_hooks(other, rank, DelayedWgrad(fsdp2.AccumulatedGrads(other))),
        "ops": lambda: by_driver(layer, FsdpWeights(layer, ["experts"]), rank, wgrad_store),
    }
    for name, way in ways.items():
        for parameter, gradient in way().items():
            assert torch.equal(gradient, expected[parameter]), f"{parameter} by {name}"


@pytest.mark.parametrize("etp_rank", [0, 1], ids=["all channels", "a bias that others add"])
def test_sharded_weights_accumulate_where_they_are_reduced_from(etp_rank: int) -> None:
    run_ranks(2, every_way, etp_rank)


def without_rows(rank: int, world: int, etp_rank: int) -> None:
    layer = sharded(world, etp_rank, FusedGroupedMlp())
    set_wgrad_store(layer, DelayedWgrad(fsdp2.AccumulatedGrads(layer)))
    back(layer(rows([0, 0, 0], rank), [0, 0, 0]))
    assert not any(gradient.any() for gradient in taken(layer).values())


@pytest.mark.parametrize("etp_rank", [0, 1], ids=["all channels", "a bias that others add"])
def test_a_rank_without_rows_reduces_zeros_of_one_dtype(etp_rank: int) -> None:
    """With the kernels of a GPU, of which none is launched."""
    pytest.importorskip("triton")
    run_ranks(2, without_rows, etp_rank)
