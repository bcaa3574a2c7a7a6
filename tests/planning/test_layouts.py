"""A pattern without `|` that cannot be cut into equal segments is cut by work, as if by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid import recipes
from braid.architecture import Attention, Mlp, Model
from braid.config import Mesh, Run, Train
from braid.errors import ConfigError
from braid.pattern import parse
from braid.planning.plan import plan


def run(pattern: str, vocab: int = 257, **mesh: object) -> Run:
    return Run(
        model=Model(
            pattern=pattern,
            hidden=32,
            vocab=vocab,
            attention=Attention(heads=4, kv_heads=2, head_dim=8),
            mlp=Mlp(ffn=64),
        ),
        mesh=Mesh(**mesh),  # type: ignore[arg-type]
        train=Train(steps=2, batch_samples=8, micro_batches=8),
    )


def test_deepseek_v3_is_cut_for_16_ranks() -> None:
    whole = recipes.load("deepseek-v3")
    made = plan(replace(whole, mesh=replace(whole.mesh, pp=16, ep=64)), 2048)
    assert [len(segment.blocks) for segment in made.layout.segments] == [4] * 15 + [1]


@pytest.mark.parametrize(
    ("pattern", "vocab", "mesh", "by_hand"),
    [
        ("[*-]x5", 257, {"pp": 2}, "[*-][*-][*-]|[*-][*-]"),
        ("[*-]x5", 20_000, {"pp": 2}, "[*-][*-][*-][*-][*-]|"),
        ("[*-]x5/*-", 257, {"pp": 2}, "[*-][*-][*-]|[*-][*-]/*-"),
        ("[*-]x7", 257, {"pp": 3}, "[*-][*-]|[*-][*-][*-]|[*-][*-]"),
        ("[*-]x5", 257, {"pp": 2, "schedule": "dual_pipe_v"}, "[*-]|[*-]|[*-][*-]|[*-]"),
    ],
)
def test_the_plan_is_that_of_the_pattern_cut_by_hand(
    pattern: str, vocab: int, mesh: dict[str, object], by_hand: str
) -> None:
    made = plan(run(pattern, vocab, **mesh), mesh["pp"])  # type: ignore[arg-type]
    assert str(made.layout) == by_hand
    assert made.schedule == plan(run(by_hand, vocab, **mesh), mesh["pp"]).schedule  # type: ignore[arg-type]


def test_equal_segments_stay_equal() -> None:
    assert str(plan(run("[*-]x4", 20_000, pp=2), 2).layout) == "[*-][*-]|[*-][*-]"


def test_each_rank_needs_a_block() -> None:
    with pytest.raises(ConfigError, match="cannot be split equally over 4 pipeline ranks"):
        plan(run("[*-]x3", pp=4), 4)


def test_repeats_are_written_out_in_the_layout() -> None:
    assert str(parse("[*-]x2")) == "[*-][*-]"
