"""`braid pattern`: explain a layer pattern."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rich.console
import rich.text

from braid.cli.args import options, print_table, subject, wants_help
from braid.errors import ExitCode
from braid.pattern import Block, Layout, Segment, Stage, cut, parse, stages

HELP = """usage: braid pattern 'PATTERN' [--pp N] [--json]

  M  Mamba-2                  |      a new segment: one virtual pipeline stage
  G  gated delta net          [...]  several layers as one block
  *  attention                /      one depth of multi-token prediction (MTP)
  +  latent attention (MLA)
  D  sparse latent attention, which can be parsed but not built
  -  MLP
  E  mixture of experts

A pattern has * or + and D, not both families. A group holds each kind once, E only as its last layer, and no
other group. MTP depths are written alike, without groups and |. With --pp, segments are dealt to ranks in turn,
so their number is a multiple of it; a pattern without | is split into equal numbers of layers.

  --pp N   pipeline ranks (default 1)
  --json   print JSON instead of a table"""


@dataclass(frozen=True, kw_only=True)
class PatternOptions:
    """Explain a layer pattern: which pipeline rank holds which layers, and what each one is."""

    pp: int = 1
    """Pipeline ranks."""
    json: bool = False
    """Print JSON instead of a table."""


def explain(words: list[str]) -> int:
    if wants_help(words):
        print(HELP)
        return ExitCode.OK
    text, rest = subject(words, "pattern", "'PATTERN'")
    chosen = options(PatternOptions, rest, f"braid pattern '{text}'")
    layout = cut(parse(text), chosen.pp)
    held = stages(layout, chosen.pp)
    if chosen.json:
        print(json.dumps(pattern_json(layout, held)))
        return ExitCode.OK
    console = rich.console.Console(highlight=False, soft_wrap=True)
    console.print(rich.text.Text(f"{layout}\n{_counts(layout)}\n"))
    print_table(("stage", "segment", "block", "layer", "kind"), _pattern_rows(layout, held), console)
    return ExitCode.OK


def _counts(layout: Layout) -> str:
    counts = {
        "layer": len(layout.layers),
        "block": len(layout.blocks),
        "segment": len(layout.segments),
        "MTP depth": len(layout.mtp),
    }
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items())


def _pattern_rows(layout: Layout, held: Sequence[Stage]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for stage in held:
        for segment in stage.segments:
            if not segment.blocks:
                rows.append((stage.rank, segment.index, "", "", "(no layers)"))
            for block in segment.blocks:
                rows += _block_rows(block, stage.rank, str(segment.index), str(block.index))
    for depth in layout.mtp:
        for block in depth.blocks:
            rows += _block_rows(block, held[-1].rank, f"mtp {depth.depth}", str(block.index))
    return rows


def _block_rows(block: Block, rank: int, segment: str, index: str) -> list[tuple[object, ...]]:
    return [
        (rank, segment, f"{index} {block}", layer.number, f"{layer.kind.value} {_spoken(layer.kind.name)}")
        for layer in block.layers
    ]


def _spoken(name: str) -> str:
    return name.lower().replace("_", " ")


def pattern_json(layout: Layout, held: Sequence[Stage]) -> dict[str, Any]:
    """What `braid pattern --json` prints; `stages` holds, for each pipeline rank, its virtual stages."""

    def virtual(vp: int, segment: Segment) -> dict[str, Any]:
        return {
            "vp": vp,
            "segment": segment.index,
            "blocks": [str(block) for block in segment.blocks],
            "layers": [layer.number for layer in segment.layers],
            "layers_before": segment.layers_before,
            "blocks_before": segment.blocks_before,
        }

    return {
        "physical": len(layout.layers),
        "logical": len(layout.blocks),
        "segments": [[str(block) for block in segment.blocks] for segment in layout.segments],
        "mtp": {"depths": len(layout.mtp), "layers": str(layout.mtp[0]) if layout.mtp else ""},
        "stages": {
            str(stage.rank): [virtual(vp, segment) for vp, segment in enumerate(stage.segments)]
            for stage in held
        },
    }
