"""Conversion: a mapping of tensors under their names becomes one under ours, or the other way round.

Nothing is copied before somebody asks for a tensor. What does not fit the table is an error that lists every
name: those that are missing, those that are too many, and copies that differ from their original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from braid.architecture import Model
from braid.errors import CheckpointError
from braid.interchange.moves import FromOne, Stacked
from braid.interchange.tables import Adapter, Link, copies, ignored, links

Direction = Literal["to_ours", "to_theirs"]


class Lazy(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, each time anew."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def convert(
    tensors: Mapping[str, Tensor], adapter: Adapter, shape: Model, direction: Direction
) -> Mapping[str, Tensor]:
    """The tensors of a model of this shape under the other side's names. Every name must have its place."""
    table = list(links(adapter, shape))
    if direction == "to_ours":
        repeated, unread = copies(adapter, shape), ignored(adapter, shape, tensors.keys())
        named = [link.theirs for link in table]
        _check_names(f"{adapter.name} tensors", tensors, named, repeated.keys(), unread)
        _check_copies(tensors, repeated)
        return Lazy(
            {
                name: partial(_ours, tensors, link, place)
                for link in table
                for place, name in enumerate(link.ours)
            }
        )
    _check_names("the model's tensors", tensors, [name for link in table for name in link.ours])
    return Lazy({link.theirs: partial(_theirs, tensors, link) for link in table})


def _ours(tensors: Mapping[str, Tensor], link: Link, place: int) -> Tensor:
    theirs = tensors[link.theirs]
    try:
        if isinstance(link.move, Stacked):  # of hundreds of experts, only the one that is wanted
            entry, place = divmod(place, len(link.ours) // prod(link.move.dims))
            return link.move.inner.to_ours(link.move.entry(theirs, entry))[place]
        return link.move.to_ours(theirs)[place]
    except CheckpointError as error:
        raise CheckpointError(f"{link.theirs} {error}") from error


def _theirs(tensors: Mapping[str, Tensor], link: Link) -> Tensor:
    ours = [tensors[name] for name in link.ours]
    try:
        theirs = link.move.to_theirs(ours)
    except (CheckpointError, RuntimeError) as error:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(link.ours[:6], ours, strict=False))
        raise CheckpointError(f"{link.theirs} cannot be put together from {shapes}: {error}") from error
    # What was widened on its way in is as narrow as the rest on its way out.
    return theirs.to(tensors["embedding.weight"].dtype) if link.move == FromOne() else theirs


def _check_names(
    what: str,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    allowed: Collection[str] = (),
    ignored: Sequence[str] = (),
) -> None:
    """Raise one error that lists every name that is missing or has no place."""
    left = tensors.keys() - set(wanted) - set(allowed)
    extra = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    found = [f"missing  {name}" for name in sorted(set(wanted) - tensors.keys())]
    found += [f"extra    {name}" for name in sorted(extra)]
    if found:
        raise CheckpointError("\n  ".join([f"{what} do not fit the model's shape: {len(found)} names", *found]))


def _equal(copy: Tensor, original: Tensor) -> bool:
    """Tensors without numbers, of which only shapes are wanted, count as equal."""
    return copy.is_meta or torch.equal(copy, original)


def _check_copies(tensors: Mapping[str, Tensor], copies: Mapping[str, str]) -> None:
    differing = [
        f"{name} differs from {original}, of which it should be a copy"
        for name, original in copies.items()
        if name in tensors and not _equal(tensors[name], tensors[original])
    ]
    if differing:
        raise CheckpointError("\n  ".join(["these tensors contradict their config.json", *differing]))
