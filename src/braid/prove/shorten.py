"""Fewer repetitions of equal blocks: the depth of a small run.

    [+-]x3[+E]x58                         ->  [+-]x3[+E]x3
    [GE]x3[*E][GE]x3[*E][GE]x3[*E] ...    ->  [GE]x3[*E][GE]x3[*E]
    [*E]x24, windows in every other layer ->  [*E]x4

Blocks that are repeated in a row, one by one or in groups, are kept at least twice, and at least three of them:
a first, a last, and one between two others. All that differs is kept, in its order: kinds, groups and windows,
how one kind follows another, the first and the last blocks, MTP depths. Each segment of a pipeline is shortened
by itself, so that it still has what it had. Recompute across blocks keeps one block more than its span.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from braid.architecture import Trunk
from braid.choices import AUTO
from braid.config import Run
from braid.pattern import Block, Kind, Layout, compact, parse
from braid.planning import modules
from braid.planning.plan import layout_of

FEWEST = 3
"""Blocks that are left of a repetition."""
LONGEST = 64
"""Blocks that are looked for as a group that is repeated. Patterns may have thousands of blocks."""
OFFLOAD = 0.5
"""Of few blocks, a share of which some are offloaded and some are not."""


def shorten(run: Run) -> Run:
    """A run with fewer equal blocks, or the same one if it has none to spare."""
    spans = run.train.recompute_span + 1 if run.model.hyper is not None else 0
    pattern = run.model.pattern
    if not _numbered((*run.trained, *run.lr_share, *run.train.lora.targets)):
        pattern = _shortened(run.model, layout_of(run), max(FEWEST, spans))
    encoders = {}
    for name, module in run.modules.items():
        encoders[name] = module
        if not _numbered((*module.trained, *module.lr_share)):
            shorter = _shortened(module.model, modules.layout_of(module), FEWEST)
            encoders[name] = replace(module, model=replace(module.model, pattern=shorter))
    share = run.train.offload
    if share == AUTO or (pattern != run.model.pattern and 0 < share < 1):
        share = OFFLOAD
    return replace(
        run,
        model=replace(run.model, pattern=pattern),
        modules=encoders,
        train=replace(run.train, offload=share),
    )


def _numbered(globs: Iterable[str]) -> bool:
    """Whether any of them may name blocks by number. `mamba2` is the one word with a digit."""
    return any(re.search(r"[0-9?\[]", glob.replace("mamba2", "")) for glob in globs)


def _shortened(trunk: Trunk, layout: Layout, fewest: int) -> str:
    """The pattern of the layers, in the segments that they have."""
    windows = 1 if trunk.attention is None else len(trunk.attention.window_pattern)

    def label(block: Block) -> Hashable:
        """Blocks with the same label compute the same."""
        return str(block), tuple(e.nth % windows for e in block.layers if e.kind is Kind.ATTENTION)

    segments = []
    for segment in layout.segments:
        kept = without_repeats([label(block) for block in segment.blocks], fewest)
        segments.append("".join(str(segment.blocks[place]) for place in kept))
    depths = [str(depth) for depth in layout.mtp]
    if sum(len(parse(segment).blocks) for segment in segments) == len(layout.blocks):
        return trunk.pattern
    return compact(parse("/".join(["|".join(segments), *depths])))


class _Repeat(NamedTuple):
    """Groups of `length` that are equal, from a place on, with blocks to spare."""

    saved: int
    place: int
    length: int


def without_repeats(labels: Sequence[Hashable], fewest: int = FEWEST) -> list[int]:
    """The places of what is left when groups that are repeated in a row are kept twice, and so often that they
    are at least so many; the longest repetitions first."""
    kept = list(range(len(labels)))
    while repeat := _longest([labels[place] for place in kept], fewest):
        del kept[repeat.place : repeat.place + repeat.saved]
    return kept


def _longest(labels: Sequence[Hashable], fewest: int) -> _Repeat | None:
    """The repetition that has most to spare."""
    found = []
    for length in range(1, min(LONGEST, len(labels) // 3) + 1):
        enough = max(2, -(-fewest // length))
        repeated = [one == other for one, other in zip(labels, labels[length:], strict=False)]
        place = 0
        for same, run in groupby(repeated):
            equal = len(list(run))
            if same and (spare := equal // length + 1 - enough) > 0:
                found.append(_Repeat(spare * length, place, length))
            place += equal
    return max(found, key=lambda each: (each.saved, -each.place), default=None)
