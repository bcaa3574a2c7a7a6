"""Ways to break what keeps modules on grids of their own together: each must turn the comparison red.

Like `sabotages.py`: a sabotage replaces a function on every rank alike, and nobody waits for ever.

Shapes: N rows of an edge, C channels, T patches of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.config import Run
from braid.engine.edges import EdgeLinks
from braid.model.encoder import EncoderContext
from braid.nn.dropout import keep_mask
from braid.optim import gradients
from braid.pattern import Layer
from braid.planning import trained
from braid.topology.items import ItemTable
from braid.topology.transfer import Lanes
from braid.train import items
from tests.topology.module_cases import Placement

Break = Callable[[], AbstractContextManager[Any]]

BESIDE = Placement(world=2, language="at0+1", modules={"vision": "at1+1"})
SHARED = Placement(world=2)
SPLIT = Placement(world=2, modules={"vision": "tp2"})


@dataclass(frozen=True, kw_only=True)
class ModuleSabotage:
    """Something that is broken, and where that matters."""

    broken: Break
    placement: Placement
    seen_by: str
    """The check that is there for it."""
    of: Callable[[Run], Run] = lambda run: run
    """The run that shows it."""
    alone_too: bool = False
    """Whether the reference is broken as well: what is wrong is that the answer depends on the ranks."""


# ------------------------------------------------------------------------------------------------ items


def _last_sample_first(table: ItemTable) -> ItemTable:
    """The same items, with samples in the opposite order."""

    def turned(values: Sequence[int]) -> tuple[int, ...]:
        parts = [values[start:stop] for start, stop in pairwise(table.first_items)]
        return tuple(chain.from_iterable(reversed(parts)))

    counts = tuple(reversed(table.counts))
    return replace(table, counts=counts, rows=turned(table.rows), patches=turned(table.patches))


def lanes_in_another_order() -> AbstractContextManager[Any]:
    """The encoder's lanes go through the samples of a micro-batch from the last one on."""
    read, held = items._items, items.held

    def read_turned(module: Any, table: ItemTable, sources: Any, samples: Sequence[int], **known: Any) -> Any:
        return read(module, _last_sample_first(table), sources, samples[::-1], **known)

    def held_turned(layout: Any, grid: Any, table: ItemTable) -> Any:
        return held(layout, grid, _last_sample_first(table) if isinstance(layout, Lanes) else table)

    return patch.multiple(items, _items=read_turned, held=held_turned)


def masks_by_place_in_the_pack() -> AbstractContextManager[Any]:
    """Dropout numbers the patches of a lane from its first one on."""

    def by_place(self: EncoderContext, layer: Layer, rate: float, channels: int) -> Tensor:
        place_1T = torch.arange(self.batch.positions_BT.shape[1])[None]
        return keep_mask(
            rate,
            seed=self.batch.seed,
            step=self.batch.step,
            layer=layer.stream,
            sample_B=self.local_slice(torch.zeros_like(place_1T)),
            position_T=self.local_slice(place_1T),
            channels=channels,
        )

    return patch.object(EncoderContext, "keep_mask", by_place)


# ------------------------------------------------------------------------------------------------ edges


def first_two_swapped() -> AbstractContextManager[Any]:
    """The second micro-batch of a step goes out as the first, and the first as the second."""
    send = EdgeLinks.send
    waiting: list[Tensor] = []

    def swapped(
        self: EdgeLinks, direction: Any, edge: str, micro_batch: int, rows_NC: Tensor, bound: int | None
    ) -> None:
        if direction == "B" or micro_batch > 1:
            send(self, direction, edge, micro_batch, rows_NC, bound)
        elif micro_batch == 0:
            waiting.append(rows_NC)
        else:
            first_NC = waiting.pop()
            send(self, direction, edge, 0, as_long_as(first_NC, rows_NC), None)
            send(self, direction, edge, 1, as_long_as(rows_NC, first_NC), None)

    return patch.object(EdgeLinks, "send", swapped)


def as_long_as(other_NC: Tensor, rows_NC: Tensor) -> Tensor:
    """Rows, cut or filled up to the number of others."""
    missing = max(0, len(other_NC) - len(rows_NC))
    return F.pad(rows_NC, (0, 0, 0, missing))[: len(other_NC)].contiguous()


def gradients_of_rows_divided() -> AbstractContextManager[Any]:
    """Gradients come back divided by the encoder's dp, as if its lanes averaged."""
    receive = EdgeLinks.receive

    def divided(self: EdgeLinks, direction: Any, edge: str, micro_batch: int) -> Tensor:
        rows_NC = receive(self, direction, edge, micro_batch)
        return rows_NC / 2 if direction == "B" else rows_NC

    return patch.object(EdgeLinks, "receive", divided)


# ----------------------------------------------------------------------------------- gradients, moments


def copies_summed_twice() -> AbstractContextManager[Any]:
    """Where the encoder alone has tp: the copies of its weights."""
    whole = gradients.sum_copies_

    def twice(found: Mapping[str, Tensor], copies: Collection[gradients.ReplicatedPart]) -> None:
        whole(found, copies)
        whole(found, [each for each in copies if each.group.name == "tp"])

    return patch.object(gradients, "sum_copies_", twice)


def norm_of_the_language_model() -> AbstractContextManager[Any]:
    """The gradients of an encoder do not count in the norm that clips them."""
    whole = gradients.own_square

    def of_language(found: Mapping[str, Tensor], *given: Any, **known: Any) -> Tensor:
        square = whole(found, *given, **known)
        return 0 * square if any(name.startswith("patches.") for name in found) else square

    return patch.object(gradients, "own_square", of_language)


def everything_learns() -> AbstractContextManager[Any]:
    """What should be frozen has moments, and is updated."""
    return patch.object(trained, "parameters_of", lambda model, _: dict(model.named_parameters()))


def with_dropout(run: Run) -> Run:
    vision = run.modules["vision"]
    return replace(run, modules={"vision": replace(vision, model=replace(vision.model, dropout=0.2))})


def with_a_frozen_trunk(run: Run) -> Run:
    return replace(run, modules={"vision": replace(run.modules["vision"], trained=("projector.*",))})


MODULE_SABOTAGES: Mapping[str, ModuleSabotage] = MappingProxyType(
    {
        "lanes in another order than the table": ModuleSabotage(
            broken=lanes_in_another_order, placement=SHARED, seen_by="first loss"
        ),
        "gradients of an encoder summed over tp twice": ModuleSabotage(
            broken=copies_summed_twice, placement=SPLIT, seen_by="gradients"
        ),
        "two micro-batches swapped on an edge": ModuleSabotage(
            broken=first_two_swapped, placement=BESIDE, seen_by="first loss"
        ),
        "dropout masks by place in the pack": ModuleSabotage(
            broken=masks_by_place_in_the_pack,
            placement=SHARED,
            seen_by="first loss",
            of=with_dropout,
            alone_too=True,
        ),
        "norm over one module": ModuleSabotage(
            broken=norm_of_the_language_model, placement=BESIDE, seen_by="gradient norm"
        ),
        "gradients of rows divided by the encoder's dp": ModuleSabotage(
            broken=gradients_of_rows_divided, placement=SHARED, seen_by="gradients"
        ),
        "moments of a frozen part": ModuleSabotage(
            broken=everything_learns, placement=SHARED, seen_by="saved as held", of=with_a_frozen_trunk
        ),
    }
)
