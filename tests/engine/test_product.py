"""The whole product of sharding, delayed weight gradients and recompute: the bits of FSDP2's own hooks.

Samples that are run by `make test` are in `test_sharding_driver_model.py` and `test_recompute_sharded.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from braid.engine import fsdp2
from braid.schedule import Rule
from braid.schedule.lifetime import LifetimeError
from tests.engine.driven import Driven
from tests.engine.product import PRODUCT, Combination, Plant, compared, report
from tests.ranks import run_ranks

MODELS = [*dict.fromkeys(each[:4] for each in PRODUCT)]
"""Ranks, block, dtype and number of blocks: what is built once."""


def test_the_product_has_every_combination_once() -> None:
    numbers = {name: len({getattr(each, name) for each in PRODUCT}) for name in Combination._fields}
    assert numbers == {
        "world": 2,
        "block": 2,
        "dtype": 2,
        "blocks": 3,
        "shard": 4,
        "micro_batches": 3,
        "delayed": 2,
        "recompute": 3,
    }
    assert len(PRODUCT) == len(set(PRODUCT)) == 1728


def every() -> Sequence[Combination]:
    return PRODUCT


def compare(combinations: Sequence[Combination]) -> None:
    """Those of one model, which is built once."""
    told = run_ranks(combinations[0].world, compared, combinations, timeout_s=900.0)
    assert not report(told), report(told)
    assert all([*found] == [*combinations] for found in told)


@pytest.mark.long
@pytest.mark.drawn("combination", every, 12)
def test_combinations_that_are_drawn_have_the_bits_of_hooks(combination: Combination) -> None:
    compare([combination])


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_every_combination_has_the_bits_of_hooks(model: tuple[int, str, str, int]) -> None:
    compare([each for each in PRODUCT if each[:4] == model])


# ------------------------------------------------------------------------------------ what would be seen

WAYS = [("optimizer", False, ()), ("all", True, ("full",))]


@contextmanager
def losing(trained: Driven) -> Iterator[None]:
    """What a micro-batch adds to a block's gradient is dropped, where it should wait for the next one's."""

    def lose(unit: str) -> None:
        type(trained.keeper).accumulate(trained.keeper, unit)
        if unit == "stack.blocks.0":
            fsdp2.clear_grads(trained.keeper.modules[unit])

    trained.keeper.accumulate = lose  # type: ignore[method-assign]
    yield
    del trained.keeper.accumulate


@contextmanager
def hasty(trained: Driven) -> Iterator[None]:
    """A block's gradient is summed over ranks with every micro-batch: another order of the same sum. A few
    bfloat16 numbers have the same sum in float32 in any order."""

    def reduce(unit: str) -> None:
        type(trained.keeper).accumulate(trained.keeper, unit)
        if unit == "stack.blocks.0":
            fsdp2.post_backward(trained.keeper.modules[unit], reduce=True)

    trained.keeper.accumulate = reduce  # type: ignore[method-assign]
    yield
    del trained.keeper.accumulate


@contextmanager
def narrow(trained: Driven) -> Iterator[None]:
    """What micro-batches add to a gradient is summed in the dtype that computes."""
    flush = fsdp2.post_backward
    fsdp2.post_backward = lambda module, *, reduce: flush(module, reduce=True) if reduce else None
    try:
        yield
    finally:
        fsdp2.post_backward = flush


@contextmanager
def forgetful(trained: Driven) -> Iterator[None]:
    """What a micro-batch adds is still there when the next one adds to it."""
    trained.keeper.accumulate = lambda unit: None  # type: ignore[method-assign]
    yield
    del trained.keeper.accumulate


@contextmanager
def repeating(trained: Driven) -> Iterator[None]:
    """Every step has the data of the first."""
    trained.batches = lambda step: type(trained).batches(trained, 0)  # type: ignore[method-assign]
    yield
    del trained.batches


@contextmanager
def idling(trained: Driven) -> Iterator[None]:
    """The optimizer leaves weights as they are."""
    update = trained.state.optimizer.update
    trained.state.optimizer.update = lambda *_: update(0.0)  # type: ignore[method-assign]
    yield
    del trained.state.optimizer.update


@contextmanager
def raising(trained: Driven) -> Iterator[None]:
    """Some combinations do not come to their end."""
    if trained.case.recompute:
        raise LifetimeError(Rule.FINISHED, "on purpose")
    yield


def always(each: Combination) -> bool:
    return True


def several(each: Combination) -> bool:
    """Whether there is anything to put with what comes later."""
    return each.micro_batches > 1


@pytest.mark.parametrize(
    ("plant", "dtype", "spoils", "first"),
    [
        (losing, "bf16", several, "gradient of step 0 "),
        (hasty, "fp32", several, "gradient of step 0 "),
        pytest.param(narrow, "bf16", several, "gradient of step 0 ", marks=pytest.mark.long),
        (forgetful, "fp32", several, "LifetimeError: adding to "),
        pytest.param(repeating, "bf16", always, "gradient of step 1 ", marks=pytest.mark.long),
        pytest.param(idling, "bf16", always, "gradient of step 1 ", marks=pytest.mark.long),
        (raising, "fp32", lambda each: bool(each.recompute), "LifetimeError: on purpose"),
    ],
    ids=["losing", "hasty", "narrow", "forgetful", "repeating", "idling", "raising"],
)
def test_what_is_wrong_is_told_of_every_combination_that_has_it(
    plant: Plant, dtype: str, spoils: Callable[[Combination], bool], first: str
) -> None:
    some = [Combination(2, "[*E]", dtype, 1, shard, m, *way) for m in (1, 3) for shard, *way in WAYS]
    told = run_ranks(2, compared, some, plant)
    assert report(told).count("\n") + 1 == len([*filter(spoils, some)])
    for found in told:
        assert [each for each, wrong in found.items() if wrong] == [*filter(spoils, some)]
        assert all(first in wrong[0] for wrong in found.values() if wrong)
        assert all(str(each) in report([found]) for each in filter(spoils, some))
