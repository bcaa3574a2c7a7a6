"""Ends in pairs: two forwards beside each other when a step begins, two backwards when it ends. Same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from braid.config import Mesh
from braid.errors import ConfigError
from braid.model.declaration import Form, chains
from braid.pattern import parse
from braid.planning.plan import plan
from braid.schedule import Act, Options, check, overlapped, simulate
from tests.engine.overlap_cases import Case
from tests.engine.test_overlap_sharded import both
from tests.ranks import run_ranks

ENDS = Case(paired_ends=True, steps=2)
TWO = replace(ENDS, world=2, ep=2)
PAIRED = Options(paired_ends=True)

SHARDED = (
    (replace(TWO, pattern="[*E]-E", tied=True, delayed=True, micro_batches=4), "all"),
    (replace(TWO, pattern="[*E]E", delayed=True, latent=4), "gradients"),
    (replace(TWO, pattern="[*E]-E/*EE"), "gradients"),
    (replace(TWO, pattern="[*E]-E", dtype="bf16", delayed=True, late_weights=True, micro_batches=4), "all"),
    (replace(TWO, pattern="E[*E]", tied=True, delayed=True, late_weights=True), "gradients"),
)


@pytest.mark.parametrize(
    ("case", "shard"),
    [*SHARDED[:2], *(pytest.param(*each, marks=pytest.mark.long) for each in SHARDED[2:])],
    ids=str,
)
def test_sharded_weights_train_with_the_same_bits(case, shard):
    assert run_ranks(case.world, both, case, shard) == [[]] * case.world


@pytest.mark.exhaustive
@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize(
    ("delayed", "late_weights", "latent"),
    [(False, False, 0), (True, False, 4), (True, True, 0), (True, True, 4)],
)
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "all"])
@pytest.mark.parametrize(
    ("pattern", "tied"), [("[*E][M*E]/*E/*E", True), ("[*E]-E/*EE", False), ("E[*E]-", True)]
)
def test_every_strategy_has_the_same_bits(pattern, tied, shard, delayed, late_weights, latent, micro_batches):
    case = replace(TWO, pattern=pattern, tied=tied, delayed=delayed, late_weights=late_weights, latent=latent)
    assert run_ranks(2, both, replace(case, micro_batches=micro_batches), shard) == [[]] * 2


def test_two_run_beside_each_other_at_both_ends():
    schedule = plan(replace(ENDS, micro_batches=4).run(overlap=True), 1).schedule
    assert schedule.live_bound == (3,)
    ops = [op for op in schedule.ops[0] if op.act.computes]
    first = next(place for place, op in enumerate(ops) if op.act is Act.B)
    last = max(place for place, op in enumerate(ops) if op.act is Act.F)
    assert {op.micro_batch for op in ops[:first]} == {0, 1}
    assert {op.micro_batch for op in ops[last + 1 :] if op.phase != "embed"} == {2, 3}


def test_any_model_has_a_sound_schedule():
    """Every pattern with every option, and every number of micro-batches."""
    patterns = ("[*E]", "E-[M*E]", "-E-", "[*E]E/*E/*E", "/*E-E", "--")
    options = ((PAIRED, False), (PAIRED._replace(delayed=True), False), (PAIRED._replace(delayed=True), True))
    wrong = []
    for pattern, (chosen, late), latent in product(patterns, options, (False, True)):
        kind = {"tied": True, "shared_experts": True, "latent": latent, "late_weights": late, "posts": True}
        found = chains(parse(pattern), Form(fine=True, **kind))
        for micro_batches in (1, 2, 3, 6):
            schedule = overlapped(found, pp=1, micro_batches=micro_batches, options=chosen)
            checked = check(schedule)
            if checked.faults or checked.live != schedule.live_bound:
                wrong.append(f"{pattern} {chosen} {kind} m{micro_batches}: {checked.faults}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("delayed", [False, True])
def test_communication_that_takes_half_as_long_as_computation_is_hidden_but_for_its_first_and_its_last(delayed):
    """Four blocks: per micro-batch 8 of forward and 16 of backward, and 8 of exchanges of a half each."""
    found = chains(parse("[*E]" * 4), Form(fine=True, posts=True))
    for micro_batches in (2, 5, 9):
        options = PAIRED._replace(delayed=delayed)
        schedule = overlapped(found, pp=1, micro_batches=micro_batches, options=options)
        assert simulate(schedule).makespan == pytest.approx(24 * micro_batches + 1)


def test_options_without_a_meaning_are_refused():
    run = ENDS.run(overlap=False)
    with pytest.raises(ConfigError, match=r"(?s)mesh\.paired_ends.*mesh\.overlap as well"):
        plan(replace(run, mesh=Mesh(paired_ends=True)), 1)
    pipeline = Case(world=2, pp=2, pattern="[*E]|[*E]", micro_batches=4).run(overlap=True)
    with pytest.raises(ConfigError, match=r"(?s)mesh\.paired_ends.*mesh\.pp to 1"):
        plan(replace(pipeline, mesh=replace(pipeline.mesh, paired_ends=True)), 2)
