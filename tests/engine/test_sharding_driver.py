"""Sharded weights: what FSDP2 is told to do is what it does, and every misuse is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from braid.engine import fsdp2
from braid.schedule.lifetime import LifetimeError, Use
from tests.engine.toy import UNITS, batch, counted, expected, gather, plain, step, toy, whole
from tests.ranks import run_ranks


def assert_expected(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    found = whole(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------ right steps


def steps_by_hand(rank: int, world: int) -> None:
    """Three steps with data of their own: no root was ever called before, nothing leaks into the next one."""
    model, driver = toy()
    for number in range(1, 4):
        model.zero_grad()
        with counted() as calls:
            step(model, driver, [batch(rank, each) for each in range(number)])
        assert_expected(model, expected(world, number))
        assert (calls.gathers, calls.reductions) == (4, 4) == driver.stats[:2]


def test_a_step_by_hand() -> None:
    run_ranks(2, steps_by_hand)


def units_in_units(rank: int, world: int) -> None:
    """Units are called like plain modules: from outside, from within another unit, by any method. With hooks
    each call would gather again, and release what it found."""
    model, driver = toy("all")
    heard: list[str] = []
    foreign = model.first.scale.register_forward_hook(lambda *_: heard.append("foreign"))
    with counted() as calls:
        driver.begin()
        gather(driver, "first", "first.scale")
        driver.use(Use(reads=("first", "first.scale"), grads=("first", "first.scale")))
        x = batch(rank)
        total = model.first(x) + model.first.part(x) + model.first.scale(x)
        total.sum().backward()
        assert not isinstance(model.first.weight, DTensor), "nobody has released it"
        assert (calls.gathers, calls.reductions) == (2, 0)
        assert heard == ["foreign"] * 3
        driver.abort()
    assert [*model.first.scale._forward_hooks] == [foreign.id], "hooks of others stay"


def test_no_hook_of_fsdp2_ever_fires() -> None:
    run_ranks(2, units_in_units)


def unused_weights(rank: int, world: int) -> None:
    """Each rank uses another weight of a unit, and only one rank uses the second unit at all."""
    model, driver = toy()
    step(model, driver, [batch(rank)])
    model.zero_grad()
    driver.begin()
    gather(driver, *UNITS)
    driver.use(Use(reads=UNITS, grads=UNITS))
    if rank == 0:
        model.second(batch(rank)).sum().backward()
    else:
        (batch(rank) @ model.first.weight).sum().backward()
    for unit in UNITS:
        driver.reduce(unit)
        driver.reshard(unit)
    driver.finish()
    found, reference = whole(model), plain()
    reference.second(batch(0)).sum().backward()
    (batch(1) @ reference.first.weight).sum().backward()
    for name, parameter in reference.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)


def test_a_weight_that_some_ranks_do_not_use_has_zeros_there() -> None:
    run_ranks(2, unused_weights)


class _Late(torch.autograd.Function):
    """A product whose weight gradient is left for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: list[Callable[[], None]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (dy,), (x, weight), target = gradients, ctx.saved_tensors, ctx.weight

        def add() -> None:
            added = x.t() @ dy
            target.grad = added if target.grad is None else target.grad + added

        ctx.queue.append(add)
        return dy @ weight.t(), None, None


def late_weight_gradients(rank: int, world: int) -> None:
    """Two micro-batches, both weight gradients after the weights are gone; two steps with data of their own."""
    model, driver = toy()
    unit = Use(reads=("second",), grads=("second",))
    for first in (0, 2):
        model.zero_grad()
        queue: list[Callable[[], None]] = []
        driver.begin()
        gather(driver, "second")
        for number in (first, first + 1):
            driver.use(Use(reads=unit.reads))
            x = batch(rank, number).requires_grad_()
            _Late.apply(x, model.second.weight, queue).square().sum().backward()
        driver.reshard("second")
        assert isinstance(model.second.weight, DTensor), "who looks it up now finds another Parameter"
        for add in queue:
            driver.use(Use(grads=("second",)))
            add()
            if add is not queue[-1]:
                driver.accumulate("second")
        driver.reduce("second")
        driver.finish()
        reference = plain().second
        for number in (first, first + 1):
            for other in range(world):
                (batch(other, number) @ reference.weight).square().sum().backward()
        assert isinstance(model.second.weight.grad, DTensor)
        assert reference.weight.grad is not None
        found = model.second.weight.grad.full_tensor()
        assert_close(found, reference.weight.grad, rtol=1e-12, atol=1e-12)


def test_weight_gradients_may_come_after_the_weights_are_gone() -> None:
    run_ranks(2, late_weight_gradients)


def narrow_sums(rank: int, world: int) -> tuple[float, float]:
    """The error of the gradient of many micro-batches in bf16, with ACCUM and without."""
    errors = []
    for accumulate in (True, False):
        model, driver = toy(compute=torch.bfloat16)
        driver.begin()
        gather(driver, "second")
        total = torch.zeros(4, 4, dtype=torch.float64)
        for number in range(64):
            driver.use(Use(reads=("second",), grads=("second",)))
            x = batch(0, number).to(torch.bfloat16)
            (x @ model.second.weight).sum().backward()
            total += (x.t() @ torch.ones(3, 4, dtype=torch.bfloat16)).double()
            if accumulate and number < 63:
                driver.accumulate("second")
        driver.reduce("second")
        driver.reshard("second")
        driver.finish()
        assert isinstance(model.second.weight.grad, DTensor)
        found = model.second.weight.grad.full_tensor().double()
        errors.append(float((found - world * total).norm() / (world * total).norm()))
    return errors[0], errors[1]


def test_micro_batches_are_summed_in_float32() -> None:
    ((accumulated, not_accumulated), *_) = run_ranks(2, narrow_sums)
    assert accumulated < 1e-6
    assert not_accumulated > 1e-3, "else this test shows nothing"


# -------------------------------------------------------------------------------------------- misuse


def misuses(rank: int, world: int) -> None:
    model, driver = toy()
    with pytest.raises(LifetimeError, match="no step has begun"):
        driver.unshard("first")
    driver.abort()
    driver.begin()
    with pytest.raises(LifetimeError, match="has begun already"):
        driver.begin()
    with pytest.raises(LifetimeError, match="computing with first, which is sharded"):
        driver.use(Use(reads=("first",)))
    with pytest.raises(LifetimeError, match="not a unit"):
        driver.unshard("third")
    driver.unshard("first")
    with pytest.raises(LifetimeError, match="UNSHARD with first, which is gathering"):
        driver.unshard("first")
    driver.wait("first")
    driver.use(Use(reads=("first",), grads=("first",)))
    with pytest.raises(LifetimeError, match="first is ready, first has"):
        driver.finish()
    driver.reduce("first")
    with pytest.raises(LifetimeError, match="REDUCE_GRAD with first, which has no gradient"):
        driver.reduce("first")
    driver.reshard("first")
    with pytest.raises(LifetimeError, match="RESHARD with first, which is sharded"):
        driver.reshard("first")
    driver.abort()
    step(model, driver, [batch(rank)])
    assert_expected(model, expected(world))


def test_misuse_is_refused_and_does_no_harm() -> None:
    run_ranks(2, misuses)


def released_early(rank: int, world: int) -> None:
    """FSDP2 itself would ignore it, and keep the weights for good."""
    model, driver = toy()
    driver.begin()
    driver.unshard("first")
    driver.reshard("first")
    assert isinstance(model.first.weight, DTensor)
    gather(driver, "first")
    assert not isinstance(model.first.weight, DTensor)
    driver.abort()


def test_a_release_during_a_gather_waits_for_it() -> None:
    run_ranks(2, released_early)


def unreduced_before(rank: int, world: int) -> None:
    model, driver = toy()
    driver.begin()
    gather(driver, *UNITS)
    model(batch(rank)).sum().backward()
    driver._lifetime = None  # somebody has forgotten how the step ended
    with pytest.raises(LifetimeError, match=r"never reduced: first\.scale, first"):
        driver.begin()


def test_a_step_does_not_begin_with_gradients_of_another() -> None:
    run_ranks(1, unreduced_before)


# --------------------------------------------------------------------------------------------- abort


def aborted(rank: int, world: int) -> None:
    """At a point where everything is under way: a unit reduced, one accumulated, one with fresh gradients, one
    that is being gathered."""
    model, driver = toy("all", torch.bfloat16)
    x = batch(rank).to(torch.bfloat16)
    driver.begin()
    gather(driver, "first", "first.scale", "second.scale")
    driver.use(Use(reads=("first", "first.scale", "second.scale"), grads=UNITS))
    model.second.scale(model.first(x)).float().square().sum().backward()
    driver.reduce("first")
    driver.accumulate("second.scale")
    driver.unshard("second")
    driver.abort()
    assert not any(fsdp2.has_unreduced_grads(module) for module in fsdp2.fsdp_modules(model))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is still gathered"
        assert parameter.grad is None, f"{name} still has a gradient"
    fresh, other = toy("all", torch.bfloat16)
    for each, by in ((model, driver), (fresh, other)):
        step(each, by, [batch(rank, number).to(torch.bfloat16) for number in (1, 2)])
    for one, two in zip(whole(model).values(), whole(fresh).values(), strict=True):
        assert torch.equal(one, two)


def test_an_aborted_step_leaves_nothing_behind() -> None:
    run_ranks(2, aborted)
