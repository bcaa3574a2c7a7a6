"""A small model with units in units, and a driver for it: enough to see every rule of driving at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

from braid.choices import Strategy
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.schedule.lifetime import Use
from braid.schedule.phases import Unit

SIZE = 4


class Scale(nn.Module):
    """A unit in a unit, which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    """A unit with another one in it, which has a part that is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(torch.tanh(x @ self.weight))

    def part(self, x: Tensor) -> Tensor:
        return self.scale(x @ self.weight)


class Toy(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


UNITS = ("first.scale", "first", "second.scale", "second")


def toy(strategy: Strategy = "all", compute: torch.dtype = torch.float64) -> tuple[Toy, FsdpWeights]:
    """The same weights on every rank, shared by all."""
    model = plain(compute)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dense",))
    units = [Unit(path=path) for path in UNITS]
    shard_units(model, units, meshes={"dense": mesh}, strategy=strategy, compute=compute)
    return model, FsdpWeights(model, UNITS)


def plain(compute: torch.dtype = torch.float64) -> Toy:
    """On one process, in the dtype in which weights are stored."""
    torch.manual_seed(5)
    return Toy().to(torch.promote_types(compute, torch.float32))


def batch(rank: int, number: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, SIZE, generator=generator, dtype=dtype)


def gather(driver: FsdpWeights, *units: str) -> None:
    for unit in units:
        driver.unshard(unit)
    for unit in units:
        driver.wait(unit)


def step(model: Toy, driver: FsdpWeights, batches: list[Tensor]) -> None:
    """One whole step by hand, with a backward for each batch."""
    driver.begin()
    gather(driver, *UNITS)
    for x in batches:
        driver.use(Use(reads=UNITS, grads=UNITS))
        model(x).square().sum().backward()
        if x is not batches[-1]:
            for unit in UNITS:
                driver.accumulate(unit)
    for unit in UNITS:
        driver.reduce(unit)
        driver.reshard(unit)
    driver.finish()


def expected(world: int, batches: int = 1) -> dict[str, Tensor]:
    """The gradients of one process that has the batches of all ranks."""
    model = plain()
    for rank in range(world):
        for number in range(batches):
            model(batch(rank, number)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all ranks, put together."""
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is still gathered"
        assert isinstance(parameter.grad, DTensor), f"{name} has no gradient"
        found[name] = parameter.grad.full_tensor()
    return found


@dataclass
class Calls:
    """How often FSDP2 really went to other ranks."""

    gathers: int = 0
    reductions: int = 0


@contextmanager
def counted() -> Iterator[Calls]:
    """Count what FSDP2 issues."""
    calls = Calls()
    gather_class, reduce_class = _fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter
    originals = gather_class.__call__, reduce_class.__call__

    def gathered(self: object, *given: object, **named: object) -> object:
        calls.gathers += 1
        return originals[0](self, *given, **named)

    def reduced(self: object, *given: object, **named: object) -> object:
        calls.reductions += 1
        return originals[1](self, *given, **named)

    gather_class.__call__, reduce_class.__call__ = gathered, reduced
    try:
        yield calls
    finally:
        gather_class.__call__, reduce_class.__call__ = originals
