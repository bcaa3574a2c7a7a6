"""Adapters as tables: which of their tensors is which of ours, and how the one lies in the other.

Names have placeholders. Theirs may use {layer}, their number of the layer; {expert}; in multi-token prediction
{depth}, and {inner}, the layer's place in its depth. Where their name has no {expert} or {layer} and ours goes
by experts or blocks, these are leading dims of their tensor. `links` writes a table out for one model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from braid.architecture import SHAPE_OF, Trunk
from braid.errors import ConfigError
from braid.interchange.moves import Move, Same, Stacked
from braid.pattern import Block, Kind, Layer, MtpDepth, parse

Shape = Any
"""A `Trunk`, a language model or an encoder; tables reach into the parts of it that their own layers need, and
these exist then."""


def always(shape: Shape) -> bool:
    """For rows that every model has."""
    return True


def same(shape: Shape) -> Move:
    """For tensors that are the same on both sides."""
    return Same()


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One of their tensors, and what it holds of ours."""

    theirs: str
    ours: tuple[str, ...]
    move: Callable[[Shape], Move] = same
    """How ours lie in theirs, for a model of this shape."""
    when: Callable[[Shape], bool] = always
    """Which models have this row."""
    after: Kind | None = None
    """Which layers have this row: those after a mixer of this kind, within a pair; None for all."""
    folded: bool = False
    """Whether the experts that one of their tensors holds are rows of it, one below the other, and no dim."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that their files may repeat: it must equal what it is a copy of, and is not written."""

    theirs: str
    of: str
    """Their name of the original."""
    when: Callable[[Shape], bool]


Counting = Literal["pair", "layer", "block"]
"""What one of their numbered layers is: a mixer with the MLP or mixture after it, one of our layers, or one of
our blocks."""


@dataclass(frozen=True, kw_only=True)
class Depths:
    """How their names tell multi-token prediction."""

    prefix: str
    """Before the names of the layers of a depth; {layer} goes on counting after the main stack."""
    rows: tuple[TableRow, ...]
    """What a depth has besides layers, under full names."""
    copies: tuple[Copy, ...] = ()
    unread: str
    """Regular expression of the names that a model without depths leaves unread; {layer} follows its last."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A table for one family of models in one form."""

    name: str
    counting: Counting
    prefix: str
    """Before the names of a layer's tensors."""
    ends: tuple[TableRow, ...]
    """What is before the first layer and after the last."""
    layers: Mapping[Kind, tuple[TableRow, ...]]
    """What each kind of layer has; other kinds have no place in this family."""
    depths: Depths | None = None
    hyper: bool = False
    """Whether its models have hyper-connections around every layer; the others have one residual stream."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Settings of a model, by dotted names, that names cannot tell, each with the value that its models have.
    Families with a config.json need none: it is read back."""
    fixed_rule: str = ""
    """Why, and what to do instead: lines of an error."""
    wide: str = ""
    """Regular expression of our names of what is float32 or better in files, whatever the rest is."""
    copies: tuple[Copy, ...] = ()
    ignored: tuple[str, ...] = ()
    """Regular expressions of names that are no weights of the model and may be there."""
    wrapper: str = ""
    """What may stand, once or several times, before every name."""
    others: tuple[Adapter, ...] = ()
    """Other spellings of the same: a reader takes of each tensor the one whose names are there."""


@dataclass(frozen=True, kw_only=True)
class NameLink:
    """One of their tensors and the tensors of ours that lie in it, all named in full."""

    theirs: str
    ours: tuple[str, ...]
    move: Move


def rows(
    theirs: str,
    ours: str,
    parts: str = "",
    *,
    move: Callable[[Shape], Move] = same,
    when: Callable[[Shape], bool] = always,
    after: Kind | None = None,
) -> tuple[TableRow, ...]:
    """Rows that differ in one word: `{}` stands for each of `parts`, where `a:b` is theirs and ours."""
    pairs = [part.split(":") if ":" in part else (part, part) for part in parts.split()] or [("", "")]
    return tuple(
        TableRow(
            theirs=theirs.replace("{}", one),
            ours=(ours.replace("{}", other),),
            move=move,
            when=when,
            after=after,
        )
        for one, other in pairs
    )


def folded(adapter: Adapter) -> Adapter:
    """The same where experts that share a tensor lie one below the other in it."""
    table = tuple(
        replace(row, folded="{expert}" in row.ours[0] and "{expert}" not in row.theirs)
        for row in adapter.layers.get(Kind.MOE, ())
    )
    layers = {kind: table if kind is Kind.MOE else other for kind, other in adapter.layers.items()}
    return replace(adapter, layers=MappingProxyType(layers))


def beneath(adapter: Adapter, at: str) -> Adapter:
    """The same where every name begins with `at`, beside the tensors of other models."""

    def moved(table: Sequence[TableRow]) -> tuple[TableRow, ...]:
        return tuple(replace(row, theirs=at + row.theirs) for row in table)

    def moved_copies(given: Sequence[Copy]) -> tuple[Copy, ...]:
        return tuple(replace(copy, theirs=at + copy.theirs, of=at + copy.of) for copy in given)

    depths = adapter.depths
    if depths is not None:
        depths = replace(
            depths,
            prefix=at + depths.prefix,
            rows=moved(depths.rows),
            copies=moved_copies(depths.copies),
            unread=re.escape(at) + depths.unread,
        )
    return replace(
        adapter,
        prefix=at + adapter.prefix,
        ends=moved(adapter.ends),
        depths=depths,
        copies=moved_copies(adapter.copies),
        ignored=tuple(re.escape(at) + pattern for pattern in adapter.ignored),
        others=tuple(beneath(other, at) for other in adapter.others),
    )


def named(text: str, parts: str) -> tuple[str, ...]:
    """Names that differ in one word: `{}` stands for each of `parts`."""
    return tuple(text.replace("{}", part) for part in parts.split())


# ----------------------------------------------------------------------------------- tables written out


def links(adapter: Adapter, shape: Trunk) -> Iterator[NameLink]:
    """Every tensor of a model of this shape."""
    check_fit(adapter, shape)
    layout = parse(shape.pattern)
    yield from _written(adapter.ends, "", "", [{}], shape)
    numbered = number(adapter.counting, layout.blocks, shape.pattern)
    yield from _layers(adapter, numbered, "blocks.{block}.", adapter.prefix, shape)
    for depth in layout.mtp:
        assert adapter.depths is not None, "check_fit refuses depths that have no table"
        place = {"layer": _after(numbered) + depth.depth, "depth": depth.depth}
        yield from _written(adapter.depths.rows, "", "mtp.{depth}.", [place], shape)
        yield from _depth_layers(adapter, adapter.depths.prefix, depth, place, shape)


def check_fit(adapter: Adapter, shape: Trunk) -> None:
    """Raise where the family has no names for something in the pattern."""
    layout = parse(shape.pattern)
    foreign = sorted(kind.value for kind in layout.kinds() - adapter.layers.keys())
    if foreign:
        known = " ".join(sorted(kind.value for kind in adapter.layers))
        raise ConfigError(
            f"{adapter.name} has no layers of the kind {' '.join(foreign)}\n  rule  its layers are {known}\n"
            "  set   a model type that has them: docs/interchange.md lists all"
        )
    for kind, name in SHAPE_OF:
        if kind in layout.kinds() and getattr(shape, name) is None:
            raise ConfigError(f"the pattern {str(layout)!r} has {kind.value}, but model.{name} is not set")
    if adapter.hyper != (shape.hyper is not None):
        raise ConfigError(
            f"{adapter.name} has hyper-connections around every layer, and model.hyper is not set"
            if adapter.hyper
            else f"{adapter.name} has no names for hyper-connections, and model.hyper is set\n"
            "  rule  its models have one residual stream, and what connects several would be lost\n"
            "  set   the model type to deepseek_v4, for latent attention and experts"
        )
    if lost := list(_lost(adapter, shape)):
        count = "1 setting" if len(lost) == 1 else f"{len(lost)} settings"
        summary = f"{adapter.name} has no place for {count} of this model"
        raise ConfigError("\n  ".join([summary, *lost, *adapter.fixed_rule.split("\n")]))
    if "{layer}" not in adapter.prefix and len({str(block) for block in layout.blocks}) > 1:
        raise ConfigError(f"{adapter.name} needs blocks that are all alike, the pattern is {str(layout)!r}")
    if layout.mtp and adapter.depths is None:
        raise ConfigError(f"{adapter.name} has no names for the MTP depths of the pattern")
    if len(layout.mtp) > 1 and adapter.depths is not None:
        name = adapter.depths.rows[0].theirs
        if "{layer}" not in name and "{depth}" not in name:
            raise ConfigError(f"{adapter.name} has names for 1 MTP depth, the pattern has {len(layout.mtp)}")
    number(adapter.counting, layout.blocks, shape.pattern)


def _lost(adapter: Adapter, shape: Trunk) -> Iterator[str]:
    """Every setting that the adapter cannot tell, and that is another than its models have. Parts without a
    layer in the pattern do not matter."""
    kinds = parse(shape.pattern).kinds()
    used = {name for kind, name in SHAPE_OF if kind in kinds}
    for name, value in adapter.fixed:
        part, _, field = name.rpartition(".")
        if part and part not in used:
            continue
        given = getattr(getattr(shape, part) if part else shape, field)
        if given != value:
            yield f"model.{name} = {given!r}: its models have {value!r}"


def copies(adapter: Adapter, shape: Trunk) -> dict[str, str]:
    """Names that files of such a model may repeat, and of which name each is a copy."""
    layout = parse(shape.pattern)
    found = {copy.theirs: copy.of for copy in adapter.copies if copy.when(shape)}
    after = _after(number(adapter.counting, layout.blocks, shape.pattern))
    repeated = () if adapter.depths is None else adapter.depths.copies
    for depth in layout.mtp:
        place = {"layer": after + depth.depth, "depth": depth.depth}
        found |= {copy.theirs.format(**place): copy.of for copy in repeated if copy.when(shape)}
    return found


def ignored(adapter: Adapter, shape: Trunk, names: Collection[str]) -> tuple[str, ...]:
    """Regular expressions of the names that files of such a model may hold and that are left unread. What looks
    like an MTP depth is one only if it has what no other layer has."""
    layout = parse(shape.pattern)
    if adapter.depths is None or layout.mtp:
        return adapter.ignored
    after = str(_after(number(adapter.counting, layout.blocks, shape.pattern)))
    if adapter.depths.rows[0].theirs.replace("{layer}", after).replace("{depth}", "0") not in names:
        return adapter.ignored
    return (*adapter.ignored, adapter.depths.unread.replace("{layer}", after))


Numbered = Sequence[tuple[int, Layer]]
"""Their number of each of our layers."""


def number(counting: Counting, blocks: Sequence[Block], pattern: str) -> Numbered:
    """Their number of each of our layers, from 0."""
    layers = [layer for block in blocks for layer in block.layers]
    match counting:
        case "block":
            return [(layer.block, layer) for layer in layers]
        case "layer":
            return list(enumerate(layers))
    wanted = [place % 2 == 0 for place in range(len(layers) + len(layers) % 2)]
    if [layer.kind.is_mixer for layer in layers] != wanted:
        raise ConfigError(
            f"the pattern {pattern!r} cannot be written in this family\n"
            "  rule  each of its layers is one mixer (* + G) with one - or E after it"
        )
    return [(place // 2, layer) for place, layer in enumerate(layers)]


def _after(numbered: Numbered) -> int:
    """Their number of what follows the last layer."""
    return numbered[-1][0] + 1 if numbered else 0


def _layers(adapter: Adapter, numbered: Numbered, ours: str, prefix: str, shape: Shape) -> Iterator[NameLink]:
    mixers = {index: layer.kind for index, layer in numbered if layer.kind.is_mixer}
    for kind, table in adapter.layers.items():
        for row in table:
            found = [
                (index, layer)
                for index, layer in numbered
                if layer.kind is kind and row.after in (None, mixers.get(index))
            ]
            places = [{"layer": index, "block": layer.block} for index, layer in found]
            if places:
                stacked = "{layer}" not in prefix
                yield from _written([row], prefix, ours, places, shape, stacked=stacked)


def _depth_layers(
    adapter: Adapter, prefix: str, depth: MtpDepth, place: Mapping[str, int], shape: Shape
) -> Iterator[NameLink]:
    """The layers of one depth, each by itself: no name may serve two."""
    if "{inner}" not in prefix and len(depth.blocks) > 1:
        raise ConfigError(f"{adapter.name} has names for 1 block in an MTP depth, not for {str(depth)!r}")
    for inner, layer in enumerate(depth.layers):
        here = {**place, "inner": inner, "block": layer.block}
        yield from _written(adapter.layers[layer.kind], prefix, "mtp.{depth}.blocks.{block}.", [here], shape)


def _written(
    table: Sequence[TableRow],
    prefix: str,
    ours_prefix: str,
    places: Sequence[Mapping[str, int]],
    shape: Shape,
    *,
    stacked: bool = False,
) -> Iterator[NameLink]:
    """The rows that this model has, at each of the places where a layer of their kind stands. `stacked` says
    that one tensor of theirs holds all places."""
    for row in table:
        if not row.when(shape):
            continue
        theirs, ours = prefix + row.theirs, [ours_prefix + name for name in row.ours]
        experts = range(shape.moe.experts) if "{expert}" in ours[0] else (None,)
        held: dict[str, list[str]] = {}
        for place in places:
            for expert in experts:
                inside = held.setdefault(theirs.format(**place, expert=expert), [])
                inside += [name.format(**place, expert=expert) for name in ours]
        dims: tuple[int, ...] = (len(places),) if stacked else ()
        dims += (len(experts),) if "{expert}" in ours[0] and "{expert}" not in theirs else ()
        move = Stacked(dims, row.move(shape), row.folded) if dims else row.move(shape)
        for name, inside in held.items():
            yield NameLink(theirs=name, ours=tuple(inside), move=move)
