"""The layers of a model in the segments of its pipeline: those of the pattern, or equal in layers or work.

A pattern without `|` is cut into segments with equally many layers, if there are such. Otherwise it is cut by
the FLOPs of its blocks, with embedding, head and MTP depths at the ends (`split`). The placement depends on the
model alone, not on the machine that plans, and is printed like one that was made by hand.
"""

from __future__ import annotations

from collections.abc import Callable

from braid.pattern import Layout, PatternError, cut, cut_into, joined, parse
from braid.planning import split
from braid.planning.split import Costs


def layout_of(pattern: str | None, pp: int, *, folded: bool, costs: Callable[[Layout], Costs]) -> Layout:
    """The layers for a pipeline of `pp` ranks. `folded`: a rank has two segments, the first and the last of
    those that are left (DualPipeV). Without a pipeline, the `|` of the pattern are ignored."""
    parsed = parse(pattern)
    if pp == 1:
        return joined(parsed)
    if not is_split_by_work(parsed, pp, folded=folded):
        return cut(parsed, 2 * pp if folded else pp)
    return cut_into(parsed, (split.in_v if folded else split.in_line)(costs(parsed), pp))


def is_split_by_work(layout: Layout, pp: int, *, folded: bool) -> bool:
    """Whether a pattern has no `|`, cannot be cut into equal segments, and has a block for each rank."""
    if len(layout.segments) > 1 or not 1 < pp <= len(layout.blocks):
        return False
    try:
        cut(layout, 2 * pp if folded else pp)
    except PatternError:
        return True
    return False
