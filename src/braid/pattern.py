"""The layer-pattern language: text -> Layout.

    pattern = main { "/" depth }        main  = segment { "|" segment }     segment = { item }
    item    = part [ "x" count ]        part  = symbol | group              depth   = { symbol }
    group   = "[" symbol { symbol } "]"

One symbol is one layer: `M` Mamba-2, `G` gated delta net, `*` attention, `+` latent attention (MLA),
`D` sparse latent attention, `-` dense MLP, `E` mixture of experts. `|` cuts the stack into segments, one per
virtual pipeline stage; `[...]` makes several layers one block; `x58` repeats the symbol or group before it, 58
times in all; `/` begins one depth of multi-token prediction.

`parse` is the only place that reads the text. A `Layout` is an immutable tree (segments > blocks > layers);
every layer knows its number, block, segment and MTP depth. `cut`, `cut_into` and `stages` assign segments to
pipeline ranks.

A pattern that breaks a rule raises a `PatternError`, which marks the position with a caret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import Any, NewType

from braid.errors import ConfigError

LayerNumber = NewType("LayerNumber", int)
"""Number of a layer, from 1 in the main stack, and from 1 in each MTP depth."""
BlockIndex = NewType("BlockIndex", int)
"""Index of a block, from 0 in the main stack, and from 0 in each MTP depth."""
SegmentIndex = NewType("SegmentIndex", int)
"""Index of a segment, from 0, in the order of the text."""
Depth = NewType("Depth", int)
"""Index of an MTP depth, from 0."""


class Kind(Enum):
    """Kind of a layer; the value is its symbol."""

    MAMBA2 = "M"
    DELTA_NET = "G"
    ATTENTION = "*"
    LATENT_ATTENTION = "+"
    SPARSE_ATTENTION = "D"
    MLP = "-"
    MOE = "E"

    @property
    def is_mixer(self) -> bool:
        """Whether the layer mixes information across positions."""
        return self not in (Kind.MLP, Kind.MOE)


_MLA_FAMILY = frozenset({Kind.LATENT_ATTENTION, Kind.SPARSE_ATTENTION})
_SYMBOLS = frozenset(kind.value for kind in Kind)
_LEGEND = "M G * + D - E, [ ] around a block, x58 to repeat, | between segments, / before an MTP depth"
MOST_REPEATS = 10_000
"""How often an item may be repeated."""
MOST_LAYERS = 20_000
"""Layers of a pattern. A pattern may come from a file of unknown origin, and memory goes by its layers."""
MOST_CHARACTERS = 100_000
"""Of the text of a pattern."""
MOST_SHOWN = 200
"""Characters that an error shows on each side of its position."""


class PatternError(ConfigError):
    """An invalid pattern. The message shows the rule, the pattern, and a caret under the position."""

    def __init__(self, rule: str, text: str, position: int) -> None:
        self.rule = rule
        self.text = text
        self.position = position
        # Characters that may not be one column wide would shift the caret: show a dot instead.
        printable = "".join(c if " " <= c <= "~" else "·" for c in text)
        begin, end = max(0, position - MOST_SHOWN), position + MOST_SHOWN
        before = f"...{printable[begin:position]}" if begin else printable[:position]
        behind = f"{printable[position:end]}..." if len(text) > end else printable[position:]
        self.excerpt = f"{before}{behind}\n{' ' * len(before)}^"
        super().__init__(f"{rule}\n  {before}{behind}\n  {' ' * len(before)}^")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rule, self.text, self.position)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One symbol of the pattern."""

    kind: Kind
    number: LayerNumber
    block: BlockIndex
    segment: SegmentIndex
    """For a layer of an MTP depth: the last segment, which contains all depths and the head."""
    nth: int
    """Index among the layers of its kind, from 0 in the main stack and on through the MTP depths."""
    depth: Depth | None = None

    @property
    def stream(self) -> int:
        """A number unique to the layer, which selects the counter-RNG stream of its dropout masks."""
        return self.number if self.depth is None else self.number + ((self.depth + 1) << 16)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One symbol or one `[group]`: the unit of checkpoint keys, sharding and scheduling."""

    index: BlockIndex
    layers: tuple[Layer, ...]
    grouped: bool
    """Whether it is written in brackets."""

    def __str__(self) -> str:
        symbols = "".join(layer.kind.value for layer in self.layers)
        return f"[{symbols}]" if self.grouped else symbols


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The blocks between two `|`: one virtual pipeline stage. It may be empty."""

    index: SegmentIndex
    blocks: tuple[Block, ...]
    layers_before: int
    """Layers in earlier segments."""
    blocks_before: int
    """Blocks in earlier segments."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for block in self.blocks for layer in block.layers)

    def __str__(self) -> str:
        return "".join(str(block) for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class MtpDepth:
    """One depth of multi-token prediction.

    Depths are written without groups; their symbols are combined into as few blocks as the rules for groups
    allow: `*E` is one block, with the checkpoint keys of `[*E]`, and `MM` is two.
    """

    depth: Depth
    blocks: tuple[Block, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for block in self.blocks for layer in block.layers)

    def __str__(self) -> str:
        return "".join(layer.kind.value for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parsed pattern."""

    segments: tuple[Segment, ...]
    """At least one, in the order of the text."""
    mtp: tuple[MtpDepth, ...]
    """The MTP depths, all identical; may be empty."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the main stack, in order."""
        return tuple(block for segment in self.segments for block in segment.blocks)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the main stack, in order."""
        return tuple(layer for segment in self.segments for layer in segment.layers)

    def kinds(self) -> frozenset[Kind]:
        """Every kind of layer in the model, including MTP depths."""
        depths = (layer for depth in self.mtp for layer in depth.layers)
        return frozenset(layer.kind for layer in (*self.layers, *depths))

    def __str__(self) -> str:
        main = "|".join(str(segment) for segment in self.segments)
        return "/".join([main, *(str(depth) for depth in self.mtp)])


def compact(layout: Layout) -> str:
    """The pattern of a layout, with repeated blocks written once: `[+-]x3[+E]x58/+E`."""
    main = "|".join(
        "".join(text if count == 1 else f"{text}x{count}" for text, count in _runs(segment))
        for segment in layout.segments
    )
    return "/".join([main, *(str(depth) for depth in layout.mtp)])


def _runs(segment: Segment) -> list[tuple[str, int]]:
    """Equal blocks in a row, and their number. Two layers are shorter than a layer and `x2`."""
    runs = [(text, len(list(same))) for text, same in groupby(map(str, segment.blocks))]
    long = {run: len(f"x{run[1]}") < len(run[0]) * (run[1] - 1) for run in runs}
    return [each for run in runs for each in ([run] if long[run] else [(run[0], 1)] * run[1])]


# ---------------------------------------------------------------------------------------------- parse


@dataclass(frozen=True)
class _Symbol:
    kind: Kind
    position: int


@dataclass(frozen=True)
class _Item:
    symbols: tuple[_Symbol, ...]
    grouped: bool


def parse(text: str | None) -> Layout:
    """Parse a pattern. None and the empty string are a stack without layers."""
    return _parsed("" if text is None else text)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Layout:
    """The same. Planning asks for that of one pattern again and again."""
    if len(text) > MOST_CHARACTERS:
        raise PatternError(
            f"the pattern has {len(text):,} characters: write at most {MOST_CHARACTERS:,}, with x58 to repeat",
            text[:20] + "...",
            20,
        )
    main, *depths = _split(text, "/")
    segments: list[list[_Item]] = []
    held = 0
    for span in _split(text, "|", *main):
        segments.append(_read_items(text, *span, most=MOST_LAYERS - held))
        held += sum(len(item.symbols) for item in segments[-1])
    depth = _read_depths(text, depths)
    main_symbols = (symbol for items in segments for item in items for symbol in item.symbols)
    _check_one_attention_family(text, [*main_symbols, *depth])
    unnumbered = [[([s.kind for s in item.symbols], item.grouped) for item in items] for items in segments]
    return _layout(unnumbered, [s.kind for s in depth], len(depths) if depth else 0)


def _split(text: str, separator: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """The spans of text[start:end] between separators. A separator inside brackets is an error."""
    end = len(text) if end is None else end
    spans, opened = [], None
    for position in range(start, end):
        match text[position]:
            case "[":
                opened = position
            case "]":
                opened = None
            case c if c == separator:
                if opened is not None:
                    raise PatternError(
                        f"the bracket is not closed before {c!r}: put ] before {c!r}", text, opened
                    )
                spans.append((start, position))
                start = position + 1
    return [*spans, (start, end)]


def _read_items(text: str, start: int, end: int, *, most: int) -> list[_Item]:
    """The symbols and groups of one segment, each as often as it is repeated: at most so many layers."""
    items: list[_Item] = []
    layers = 0
    opened: int | None = None
    group: list[_Symbol] = []
    position = start
    while position < end:
        character = text[position]
        if character == "[":
            if opened is not None:
                raise PatternError("groups do not nest: close the first one with ]", text, position)
            opened, group = position, []
        elif character == "]":
            if opened is None:
                raise PatternError("] closes a group that was never opened: put [ before it", text, position)
            _check_group(text, opened, group)
            items.append(_Item(tuple(group), grouped=True))
            opened, layers = None, layers + len(group)
        elif character == "x" and (items or opened is not None):
            if opened is not None:
                raise PatternError("a group is repeated as a whole: put x behind its ]", text, position)
            count, behind = _read_count(text, position, end)
            layers += (count - 1) * len(items[-1].symbols)
            _check_layers(text, position, layers, most)
            items += items[-1:] * (count - 1)
            position = behind
            continue
        elif opened is None:
            items.append(_Item((_read_symbol(text, position),), grouped=False))
            layers += 1
        else:
            group.append(_read_symbol(text, position))
        _check_layers(text, position, layers, most)
        position += 1
    if opened is not None:
        raise PatternError("the bracket is never closed: put ] after the group's last layer", text, opened)
    return items


def _check_layers(text: str, position: int, layers: int, most: int) -> None:
    if layers > most:
        start = max(0, position - 20)
        cut = "..." if start else ""
        rule = f"the pattern has more than {MOST_LAYERS:,} layers: write fewer"
        raise PatternError(rule, cut + text[start : position + 20], len(cut) + position - start)


def _read_count(text: str, position: int, end: int) -> tuple[int, int]:
    """How often the item before an `x` is repeated, and the position behind the number."""
    behind = position + 1
    while behind < end and text[behind] in "0123456789":
        behind += 1
    digits = text[position + 1 : behind]
    if not digits or len(digits) > len(str(MOST_REPEATS)) or not 1 <= int(digits) <= MOST_REPEATS:
        rule = f"x repeats the layer or group before it: write a number from 1 to {MOST_REPEATS:,} behind it"
        raise PatternError(rule, text, position)
    if text[behind : behind + 1] == "x":
        raise PatternError("this is repeated already: write one number", text, behind)
    return int(digits), behind


def _read_symbol(text: str, position: int) -> _Symbol:
    character = text[position]
    if character in _SYMBOLS:
        return _Symbol(Kind(character), position)
    meant = character.upper()
    hint = f"did you mean {meant!r}?" if meant in _SYMBOLS else f"a pattern is made of {_LEGEND}"
    raise PatternError(f"{character!r} is not a symbol: {hint}", text, position)


def _check_group(text: str, opened: int, group: Sequence[_Symbol]) -> None:
    if not group:
        raise PatternError("the group is empty: add layers or remove the brackets", text, opened)
    for place, symbol in enumerate(group):
        earlier = [s.kind for s in group[:place]]
        if Kind.MOE in earlier:
            moe = group[earlier.index(Kind.MOE)]
            raise PatternError("E must be the last layer of its group", text, moe.position)
        if _shares_keys(symbol.kind, earlier):
            raise PatternError(
                f"two layers of this group would share the checkpoint keys of {symbol.kind.value!r}: a group "
                "contains each kind at most once, and at most one attention layer; split it into two groups",
                text,
                symbol.position,
            )


def _shares_keys(kind: Kind, earlier: Sequence[Kind]) -> bool:
    return kind in earlier or (kind in _MLA_FAMILY and not _MLA_FAMILY.isdisjoint(earlier))


def _read_depths(text: str, spans: Sequence[tuple[int, int]]) -> list[_Symbol]:
    """The symbols of one MTP depth; all depths must be identical."""
    if not any(end > start for start, end in spans):
        return []
    depths = [[_read_depth_symbol(text, position) for position in range(*span)] for span in spans]
    for (start, end), depth in zip(spans, depths, strict=True):
        first = [symbol.kind for symbol in depths[0]]
        if [symbol.kind for symbol in depth] != first:
            given, expected = text[start:end], text[slice(*spans[0])]
            raise PatternError(
                f"MTP depths must be identical, {given!r} is not {expected!r}: repeat the first after each /",
                text,
                start,
            )
    return depths[0]


def _read_depth_symbol(text: str, position: int) -> _Symbol:
    if text[position] in "[]":
        raise PatternError("an MTP depth has no groups: write its layers without brackets", text, position)
    if text[position] == "|":
        raise PatternError("an MTP depth has no |: all depths belong to the last segment", text, position)
    return _read_symbol(text, position)


def _check_one_attention_family(text: str, symbols: Sequence[_Symbol]) -> None:
    plain = [s for s in symbols if s.kind is Kind.ATTENTION]
    latent = [s for s in symbols if s.kind in _MLA_FAMILY]
    if plain and latent:
        later = max(plain[0], latent[0], key=lambda s: s.position)
        raise PatternError(
            "a pattern and its MTP depths cannot contain both * and + or D: choose one attention family",
            text,
            later.position,
        )


# ----------------------------------------------------------------------------------------- the tree


_Items = Sequence[tuple[Sequence[Kind], bool]]
"""Blocks without numbers: the kinds of each, and whether it is written in brackets."""


def _layout(segments: Sequence[_Items], depth: Sequence[Kind], depths: int) -> Layout:
    """Build the tree and number its layers, blocks and segments."""
    tree: list[Segment] = []
    layers_before = blocks_before = 0
    count: Counter[Kind] = Counter()
    for index, items in enumerate(segments):
        blocks = _blocks(items, SegmentIndex(index), layers_before, blocks_before, None, count)
        tree.append(
            Segment(
                index=SegmentIndex(index),
                blocks=blocks,
                layers_before=layers_before,
                blocks_before=blocks_before,
            )
        )
        layers_before += len(tree[-1].layers)
        blocks_before += len(blocks)
    last = SegmentIndex(len(segments) - 1)
    depth_items = [(kinds, len(kinds) > 1) for kinds in _group_depth(depth)]
    mtp = (
        MtpDepth(depth=Depth(d), blocks=_blocks(depth_items, last, 0, 0, Depth(d), count))
        for d in range(depths)
    )
    return Layout(segments=tuple(tree), mtp=tuple(mtp))


def _blocks(
    items: _Items,
    segment: SegmentIndex,
    layers_before: int,
    blocks_before: int,
    depth: Depth | None,
    count: Counter[Kind],
) -> tuple[Block, ...]:
    """Number the blocks of a segment or depth. `count` has the layers of each kind so far, and is updated."""
    blocks = []
    number = layers_before
    for offset, (kinds, grouped) in enumerate(items):
        index = BlockIndex(blocks_before + offset)
        layers = []
        for kind in kinds:
            number += 1
            layers.append(
                Layer(
                    kind=kind,
                    number=LayerNumber(number),
                    block=index,
                    segment=segment,
                    nth=count[kind],
                    depth=depth,
                )
            )
            count[kind] += 1
        blocks.append(Block(index=index, layers=tuple(layers), grouped=grouped))
    return tuple(blocks)


def _group_depth(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Split into as few groups as the rules allow: a group ends after `-` or `E`, and before a repeated
    kind."""
    groups: list[list[Kind]] = []
    for kind in kinds:
        if groups and groups[-1][-1].is_mixer and not _shares_keys(kind, groups[-1]):
            groups[-1].append(kind)
        else:
            groups.append([kind])
    return groups


# ----------------------------------------------------------------------------------- pipeline stages


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The segments of one pipeline rank, one per virtual stage."""

    rank: int
    segments: tuple[Segment, ...]


def joined(layout: Layout) -> Layout:
    """The layout with all segments merged into one, for a run without a pipeline."""
    if len(layout.segments) == 1:
        return layout
    items = [([layer.kind for layer in block.layers], block.grouped) for block in layout.blocks]
    depth = [layer.kind for layer in layout.mtp[0].layers] if layout.mtp else []
    return _layout([items], depth, len(layout.mtp))


def cut(layout: Layout, pp: int) -> Layout:
    """The layout with segments for `pp` ranks: those of the pattern, or equal ones if it has no `|`."""
    segments = len(layout.segments)
    if pp < 1:
        raise _at_end(layout, f"pp is {pp}: a pipeline needs at least one rank")
    if segments == 1 and pp > 1:
        return _cut_equally(layout, pp)
    if segments % pp:
        fitting = _one_of([n for n in range(1, segments + 1) if segments % n == 0])
        raise _at_end(
            layout,
            f"{segments} segments cannot be divided over {pp} pipeline ranks: "
            f"make their number a multiple of {pp}, or set pp to {fitting}",
        )
    return layout


def cut_into(layout: Layout, sizes: Sequence[int]) -> Layout:
    """The layout with segments of these numbers of blocks."""
    blocks = layout.blocks
    assert sum(sizes) == len(blocks), f"{sizes} are not {len(blocks)} blocks"
    items: list[_Items] = []
    for size in sizes:
        own, blocks = blocks[:size], blocks[size:]
        items.append([([layer.kind for layer in block.layers], block.grouped) for block in own])
    depth = [layer.kind for layer in layout.mtp[0].layers] if layout.mtp else []
    return _layout(items, depth, len(layout.mtp))


def _one_of(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _cut_equally(layout: Layout, pp: int) -> Layout:
    total = len(layout.layers)
    if total % pp:
        fitting = _one_of([n for n in range(1, total + 1) if total % n == 0 and not _splits_group(layout, n)])
        raise _at_end(
            layout,
            f"{total} {'layer' if total == 1 else 'layers'} cannot be split equally over {pp} pipeline ranks: "
            f"insert | by hand, or set pp to {fitting}",
        )
    items: list[list[tuple[list[Kind], bool]]] = [[] for _ in range(pp)]
    position = 0
    for block in layout.blocks:
        first, last = ((layer.number - 1) * pp // total for layer in (block.layers[0], block.layers[-1]))
        if first != last:
            raise PatternError(
                f"an equal split over {pp} pipeline ranks would cut this group: insert | by hand",
                str(layout),
                position,
            )
        items[first].append(([layer.kind for layer in block.layers], block.grouped))
        position += len(str(block))
    depth = [layer.kind for layer in layout.mtp[0].layers] if layout.mtp else []
    return _layout(items, depth, len(layout.mtp))


def _splits_group(layout: Layout, pp: int) -> bool:
    """Whether an equal split would cut a group."""
    total = len(layout.layers)
    ends = ((block.layers[0].number - 1, block.layers[-1].number - 1) for block in layout.blocks)
    return any(first * pp // total != last * pp // total for first, last in ends)


def stages(layout: Layout, pp: int) -> tuple[Stage, ...]:
    """Interleaved assignment: segment i belongs to pipeline rank i % pp, as its virtual stage i // pp."""
    segments = cut(layout, pp).segments
    return tuple(Stage(rank=rank, segments=segments[rank::pp]) for rank in range(pp))


def _at_end(layout: Layout, rule: str) -> PatternError:
    """An error about the main stack as a whole, with the caret after it."""
    text = str(layout)
    return PatternError(rule, text, len(text.split("/")[0]))
