"""Everything that a driven model can be, as one product; and each of it beside FSDP2's hooks.

    PRODUCT                                       every combination, once
    run_ranks(2, compared, combinations)[rank]    what differs, for each combination

A combination is driven by a schedule in phases that reduces gradients once in a step. It is the same to the
last bit as the loop of hooks on the same ranks that does so, recomputes nothing and delays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import product
from typing import NamedTuple, get_args

import torch.distributed as dist

from braid.choices import Strategy
from tests.engine.driven import Case, Comparison, Driven, Ranks, Steps


class Combination(NamedTuple):
    """A model, its ranks, and how it is driven."""

    world: int
    block: str
    dtype: str
    blocks: int
    shard: Strategy
    micro_batches: int
    delayed: bool
    """Whether weight gradients come late."""
    recompute: tuple[str, ...]

    @property
    def case(self) -> Case:
        case = Case(
            block=self.block,
            blocks=self.blocks,
            micro_batches=self.micro_batches,
            dtype=self.dtype,
            recompute=self.recompute,
        )
        return case.sharing(self.shard)

    def __str__(self) -> str:
        return (
            f"{self.world} ranks, {self.blocks} x {self.block} in {self.dtype}, "
            f"{self.micro_batches} micro-batches, shard {self.shard}, "
            f"{'delayed' if self.delayed else 'at once'}, recompute {'+'.join(self.recompute) or 'nothing'}"
        )


PRODUCT = tuple(
    Combination(*values)
    for values in product(
        (2, 4),  # ranks
        ("[*E]", "[M*E]"),
        ("fp32", "bf16"),  # reduced in float32
        (1, 3, 4),  # blocks
        get_args(Strategy),
        (1, 3, 4),  # micro-batches
        (False, True),  # weight gradients that come late
        ((), ("norm",), ("full",)),  # what is recomputed
    )
)

Plant = Callable[[Driven], AbstractContextManager[None]]
"""Something that is wrong while a model is driven."""

TOGETHER = timedelta(seconds=20)
"""How long ranks wait for each other where one of them has failed."""


def compared(
    rank: int, world: int, combinations: Sequence[Combination], plant: Plant | None = None
) -> dict[Combination, list[str]]:
    """What is not the same to the last bit, for each combination; or what was raised, where all ranks did. A
    rank that is alone with it ends, and says at which combination."""
    comparison, failures = _Planted(Ranks(rank, world), plant), dist.new_group(timeout=TOGETHER)
    found: dict[Combination, list[str]] = {}
    for each in combinations:
        assert each.world == world
        try:
            wrong = comparison.differences(each.case, "late" if each.delayed else "phases", once=True)
        except Exception as error:
            error.add_note(f"{each}; before that failed: {', '.join(_failed(found)) or 'none'}")
            _wait_for_all(failures, error)
            wrong = [f"{type(error).__name__}: {error}"]
            comparison.forget()
        found[each] = wrong
    return found


def _wait_for_all(failures: dist.ProcessGroup, error: Exception) -> None:
    """Ranks that have not failed do not come here."""
    try:
        dist.barrier(failures)
    except RuntimeError:
        raise error from None


def _failed(found: dict[Combination, list[str]]) -> list[str]:
    return [str(each) for each, wrong in found.items() if wrong]


class _Planted(Comparison):
    """With a fault in what is driven."""

    def __init__(self, ranks: Ranks, plant: Plant | None) -> None:
        super().__init__(ranks)
        self.plant = plant

    def drive(self, trained: Driven) -> Steps:
        with nullcontext() if self.plant is None else self.plant(trained):
            return super().drive(trained)


def report(told: Sequence[dict[Combination, list[str]]]) -> str:
    """For people: every combination that failed on any rank, with what is wrong; empty where none did."""
    failed = {each: wrong for found in told for each, wrong in found.items() if wrong}
    return "\n".join(f"{each}: {wrong[0]}, and {len(wrong) - 1} more" for each, wrong in failed.items())
