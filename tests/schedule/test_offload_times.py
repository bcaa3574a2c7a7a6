"""Words with the times of blocks: read, refused, and what they change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid import recipes
from braid.errors import ConfigError
from braid.planning.plan import plan
from braid.schedule import Act
from braid.schedule.offload_times import Times, parsed, words_of

WORDS = ("[*-]=10,20,30,31", "M=5,9,12,13", "head=7,0,0,0")


def test_words_are_read_and_written() -> None:
    assert parsed(WORDS) == {"[*-]": Times(10, 20, 30, 31), "M": Times(5, 9, 12, 13), "head": Times(7, 0, 0, 0)}
    assert words_of(parsed(WORDS)) == WORDS


@pytest.mark.parametrize(
    "words",
    [("M",), ("M=1,2,3",), ("M=1,2,3,x",), ("M=1,2,3,0",), ("M=1,2,3,-4",), ("=1,2,3,4",), ("M=1,2,3,4",) * 2],
)
def test_what_is_no_time_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must be BLOCK=FORWARD,BACKWARD,OUT,BACK"):
        parsed(words)
    run = recipes.load("tiny")
    with pytest.raises(ConfigError, match=r"train\.offload_times"):
        plan(replace(run, train=replace(run.train, offload=0.5, offload_times=words)), 1)


def test_a_kind_of_block_without_times_is_named() -> None:
    run = recipes.load("tiny")
    run = replace(run, model=replace(run.model, pattern="[*-]x3M", mtp_loss=0.0))
    with pytest.raises(ConfigError, match=r"every kind of block, but \[\*-\] is not there"):
        plan(replace(run, train=replace(run.train, offload=0.5, offload_times=WORDS[1:])), 1)


def test_places_follow_from_the_times_of_each_kind() -> None:
    """The first two of eight go. The head computes long enough for the second one to leave."""
    run = recipes.load("tiny")
    run = replace(run, model=replace(run.model, pattern="[*-]x8", mtp_loss=0.0))
    words = ("[*-]=17,38,98,98", "head=77,5,0,0")
    made = plan(replace(run, train=replace(run.train, offload=0.25, offload_times=words)), 1)
    shown = [
        op.act.value + (op.phase or "").removesuffix(".block")
        for op in made.schedule.ops[0]
        if op.micro_batch == 0
        and (op.act in (Act.FREE, Act.RELOAD) or (op.phase or "")[1:] in (".block", "ead"))
    ]
    assert shown == [
        *("F0", "OFFLOAD0", "F1", "OFFLOAD1", "F2", "F3", "F4", "F5", "F6", "FREE0", "F7", "Fhead", "FREE1"),
        *("Bhead", "B7", "RELOAD1", "B6", "B5", "B4", "RELOAD0", "B3", "B2", "B1", "B0"),
    ]
