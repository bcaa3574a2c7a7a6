"""`braid pattern`: parse a layer pattern and print its blocks, layers and pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rich.console
import rich.text

from braid.cli.args import parse_options, print_table, split_positional, wants_help
from braid.errors import ExitCode
from braid.pattern import Block, Layout, Segment, Stage, cut, parse, stages

HELP = """usage: braid pattern 'PATTERN' [--pp N] [--json]

Parse a layer pattern and print its blocks, layers and pipeline stages.

layers:
  M  Mamba-2
  G  gated delta net
  *  attention
  +  multi-head latent attention (MLA)
  D  sparse latent attention (parsed, but not implemented)
  -  MLP
  E  mixture of experts

structure:
  [...]  several layers as one block, the unit of sharding and recompute
  |      segment boundary; a segment is one virtual pipeline stage
  /      one depth of multi-token prediction (MTP)

rules:
  - A pattern uses either * or + and D, not both.
  - A block contains each kind of layer at most once, E only as its last layer, and no nested block.
  - All MTP depths are identical and contain neither [ ] nor |.
  - Segment i belongs to pipeline rank i % pp, so the number of segments is a multiple of --pp. A pattern
    without | is split into segments with equal numbers of layers.

options:
  --pp N   pipeline-parallel size (default: 1)
  --json   print JSON instead of a table"""


@dataclass(frozen=True, kw_only=True)
class PatternOptions:
    """Parse a layer pattern and print its blocks, layers and pipeline stages."""

    pp: int = 1
    """Pipeline-parallel size."""
    json: bool = False
    """Print JSON instead of a table."""


def explain(args: list[str]) -> int:
    if wants_help(args):
        print(HELP)
        return ExitCode.OK
    text, rest = split_positional(args, "pattern", "'PATTERN'")
    opts = parse_options(PatternOptions, rest, f"braid pattern '{text}'")
    layout = cut(parse(text), opts.pp)
    pp_stages = stages(layout, opts.pp)
    if opts.json:
        print(json.dumps(pattern_json(layout, pp_stages)))
        return ExitCode.OK
    console = rich.console.Console(highlight=False, soft_wrap=True)
    console.print(rich.text.Text(f"{layout}\n{_counts(layout)}\n"))
    print_table(("stage", "segment", "block", "layer", "kind"), _layer_rows(layout, pp_stages), console)
    return ExitCode.OK


def _counts(layout: Layout) -> str:
    counts = {
        "layer": len(layout.layers),
        "block": len(layout.blocks),
        "segment": len(layout.segments),
        "MTP depth": len(layout.mtp),
    }
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items())


def _layer_rows(layout: Layout, pp_stages: Sequence[Stage]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for stage in pp_stages:
        for segment in stage.segments:
            if not segment.blocks:
                rows.append((stage.rank, segment.index, "", "", "(no layers)"))
            for block in segment.blocks:
                rows += _block_rows(block, stage.rank, str(segment.index), str(block.index))
    for depth in layout.mtp:
        for block in depth.blocks:
            rows += _block_rows(block, pp_stages[-1].rank, f"mtp {depth.depth}", str(block.index))
    return rows


def _block_rows(block: Block, rank: int, segment: str, index: str) -> list[tuple[object, ...]]:
    return [
        (
            rank,
            segment,
            f"{index} {block}",
            layer.number,
            f"{layer.kind.value} {layer.kind.name.lower().replace('_', ' ')}",
        )
        for layer in block.layers
    ]


def pattern_json(layout: Layout, pp_stages: Sequence[Stage]) -> dict[str, Any]:
    """Output of `braid pattern --json`; `stages` maps each pipeline rank to its virtual stages."""

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
            for stage in pp_stages
        },
    }
