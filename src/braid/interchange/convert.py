"""Conversion: a mapping of tensors under their names becomes one under ours, or the other way round.

Nothing is copied before somebody asks for a tensor. What does not fit the table is an error that lists every
name: those that are missing, those that are too many, and copies that differ from their original.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from braid.architecture import Trunk
from braid.errors import CheckpointError
from braid.interchange.moves import FromOne, Stacked
from braid.interchange.sliced import opened
from braid.interchange.spelling import spelled
from braid.interchange.tables import Adapter, NameLink, copies, ignored, links

Direction = Literal["to_ours", "to_theirs"]
MOST_LISTED = 20
"""Names of one kind that a message lists: large models have tens of thousands."""

OTHER_TENSORS = (
    "a config.json (for megatron, a --recipe) that describes these files, or all the files that it describes"
)
"""What to do where files and settings are those of two models."""


class Lazy(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, each time anew."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers  # a Mapping would make the tensor to find out, and differences of names ask

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def convert(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Trunk,
    direction: Direction,
    *,
    narrowed: bool = True,
) -> Mapping[str, Tensor]:
    """The tensors of a model of this shape under the other side's names. Every name must have its place.
    `narrowed` gives theirs that were widened on their way in the dtype of the rest."""
    if direction == "to_theirs":
        return together(tensors, list(links(adapter, shape)), narrowed=narrowed)
    table = [link for told in spelled(adapter, shape, tensors) for link in told]
    faults = name_faults(tensors, table, adapter, shape)
    check(f"{adapter.name} tensors do not fit the model's shape", faults, OTHER_TENSORS)
    check("these tensors contradict their config.json", copy_faults(tensors, adapter, shape))
    return apart(tensors, table)


def apart(tensors: Mapping[str, Tensor], table: Sequence[NameLink]) -> Mapping[str, Tensor]:
    """Our tensors, each out of the one of theirs in which it lies."""
    return Lazy(
        {name: partial(_ours, tensors, link, place) for link in table for place, name in enumerate(link.ours)}
    )


def together(
    tensors: Mapping[str, Tensor], table: Sequence[NameLink], *, narrowed: bool = True
) -> Mapping[str, Tensor]:
    """Their tensors, each put together from those of ours that lie in it; there may be no others of ours."""
    faults = _differences(tensors.keys(), {name for link in table for name in link.ours})
    check("the model's tensors do not fit the model's shape", faults, "a checkpoint of this very model")
    return Lazy({link.theirs: partial(_theirs, tensors, link, narrowed) for link in table})


def check(what: str, faults: Sequence[str], remedy: str = "") -> None:
    """Raise one error with all that was found, if anything was: of each kind, its first word, the first
    `MOST_LISTED`."""
    if not faults:
        return
    count = "1 name" if len(faults) == 1 else f"{len(faults)} names"
    seen: Counter[str] = Counter()
    lines = []
    for fault in faults:
        kind = fault.split()[0]
        seen[kind] += 1
        if seen[kind] <= MOST_LISTED:
            lines.append(fault)
    lines += [f"... and {n - MOST_LISTED} more {kind}" for kind, n in seen.items() if n > MOST_LISTED]
    raise CheckpointError("\n  ".join([f"{what}: {count}", *lines, *([f"set   {remedy}"] if remedy else [])]))


def _ours(tensors: Mapping[str, Tensor], link: NameLink, place: int) -> Tensor:
    try:
        if isinstance(link.move, Stacked):  # of hundreds of experts, only the one that is wanted
            entry, place = divmod(place, len(link.ours) // prod(link.move.dims))
            return link.move.inner.to_ours(link.move.entry(opened(tensors, link.theirs), entry))[place]
        return link.move.to_ours(tensors[link.theirs])[place]
    except CheckpointError as error:
        raise CheckpointError(f"{link.theirs} {error}") from error


def _theirs(tensors: Mapping[str, Tensor], link: NameLink, narrowed: bool) -> Tensor:
    ours = [tensors[name] for name in link.ours]
    try:
        theirs = link.move.to_theirs(ours)
    except (CheckpointError, RuntimeError) as error:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(link.ours[:6], ours, strict=False))
        raise CheckpointError(f"{link.theirs} cannot be put together from {shapes}: {error}") from error
    # What was widened on its way in is as narrow as the rest on its way out.
    return theirs.to(tensors["embedding.weight"].dtype) if narrowed and link.move == FromOne() else theirs


def name_faults(
    tensors: Mapping[str, Tensor], table: Sequence[NameLink], adapter: Adapter, shape: Trunk
) -> list[str]:
    """Every name of the table that is missing, and every one besides that has no place. transformers saves
    modules of width 0, such as no shared experts, as tensors without entries: these need no place."""
    allowed = {name for each in _spellings(adapter) for name in copies(each, shape)}
    unread = {pattern for each in _spellings(adapter) for pattern in ignored(each, shape, tensors)}
    held = {name for name in tensors if not any(re.fullmatch(pattern, name) for pattern in unread)}
    wanted = {link.theirs for link in table}
    empty = {name for name in held - wanted - allowed if tensors[name].numel() == 0}
    return _differences(held - empty - (allowed - wanted), wanted)


def _differences(held: Set[str], wanted: Set[str]) -> list[str]:
    missing = [f"missing  {name}" for name in sorted(wanted - held)]
    return missing + [f"extra    {_legible(name)}" for name in sorted(held - wanted)]


def _legible(name: str) -> str:
    """A name of a file's tensor as a message shows it: quoted where it is empty, or has spaces or controls."""
    return name if name.isprintable() and len(name.split()) == 1 else repr(name)


def copy_faults(tensors: Mapping[str, Tensor], adapter: Adapter, shape: Trunk) -> list[str]:
    """Every tensor that differs from the one that it repeats."""
    repeated = {pair for each in _spellings(adapter) for pair in copies(each, shape).items()}
    return [
        f"{name} differs from {original}, of which it should be a copy"
        for name, original in sorted(repeated)
        if name in tensors and original in tensors and not _equal(tensors[name], tensors[original])
    ]


def _spellings(adapter: Adapter) -> tuple[Adapter, ...]:
    return (adapter, *adapter.others)


def _equal(copy: Tensor, original: Tensor) -> bool:
    """Tensors without numbers, of which only shapes are wanted, count as equal."""
    return copy.is_meta or torch.equal(copy, original)
