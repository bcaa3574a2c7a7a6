"""The life of sharded weights: what may follow what, by which rule anything else is refused, and where the
checker finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from braid.schedule import (
    Act,
    Op,
    Options,
    Rule,
    Schedule,
    check,
    in_phases,
    one_f_one_b,
    overlapped,
    parse_op,
    with_sums,
)
from braid.schedule.lifetime import NO_USE, Lifetime, LifetimeError, Use, lifetime_faults, uses_of
from braid.schedule.lowering import POLICIES, RESIDENT, Policy, lowered
from braid.schedule.recompute import with_replays
from tests.schedule.cases import coarse, fine, meshes, parse_ops, prove

# ------------------------------------------------------------------------------------------- misuse


@contextmanager
def refused(rule: Rule, match: str) -> Iterator[None]:
    with pytest.raises(LifetimeError, match=match) as caught:
        yield
    assert caught.value.rule is rule


def ready(*units: str) -> Lifetime:
    lifetime = Lifetime(["a", "b"])
    for unit in units:
        lifetime.unshard(unit)
        lifetime.wait(unit)
    return lifetime


def test_a_gather_that_is_under_way_can_be_released() -> None:
    lifetime = Lifetime(["a"])
    lifetime.unshard("a")
    lifetime.reshard("a")
    lifetime.finish()


def test_double_unshard() -> None:
    with refused(Rule.RESHARDED, "UNSHARD with a, which is ready: it must be sharded"):
        ready("a").unshard("a")


def test_computing_with_sharded_weights() -> None:
    with refused(Rule.UNSHARDED, "computing with b, which is sharded"):
        ready("a").use(Use(reads=("a", "b")))


def test_computing_while_weights_are_on_their_way() -> None:
    lifetime = Lifetime(["a"])
    lifetime.unshard("a")
    with refused(Rule.UNSHARDED, "computing with a, which is gathering"):
        lifetime.use(Use(reads=("a",)))


@pytest.mark.parametrize(("action", "rule"), [("wait", Rule.UNSHARDED), ("reshard", Rule.RESHARDED)])
def test_nothing_to_wait_for_or_release(action: str, rule: Rule) -> None:
    with refused(rule, rf"{action.upper()} with a, which is sharded"):
        getattr(Lifetime(["a"]), action)("a")


def test_reducing_twice() -> None:
    lifetime = ready("a")
    lifetime.use(Use(reads=("a",), grads=("a",)))
    lifetime.reduce("a")
    with refused(Rule.REDUCED, "REDUCE_GRAD with a, which has no gradient"):
        lifetime.reduce("a")


def test_accumulating_nothing() -> None:
    lifetime = ready("a")
    lifetime.use(Use(grads=("a",)))
    lifetime.accumulate("a")
    with refused(Rule.REDUCED, "ACCUM with a, which has an accumulated gradient"):
        lifetime.accumulate("a")


@pytest.mark.parametrize("between", ["accumulate", "reduce"])
def test_micro_batches_are_told_apart(between: str) -> None:
    """What two of them add may only meet once the first is accumulated, or summed over ranks."""
    lifetime, use = ready("a"), Use(reads=("a",), grads=("a",))
    lifetime.use(use, 0)
    lifetime.use(use, 0)
    with refused(Rule.ACCUMULATED, r"adding to a for .* 1, which has a pending gradient of micro-batch 0"):
        lifetime.use(use, 1)
    getattr(lifetime, between)("a")
    lifetime.use(use, 1)


def test_finish_with_leftovers() -> None:
    lifetime = ready("a")
    lifetime.use(Use(grads=("b",)))
    with refused(Rule.RESHARDED, "a is ready, b has a pending gradient"):
        lifetime.finish()
    lifetime.reshard("a")
    with refused(Rule.REDUCED, "FINISH too early: b has a pending gradient"):
        lifetime.finish()


@pytest.mark.parametrize("action", ["unshard", "wait", "reshard", "accumulate", "reduce"])
def test_a_unit_that_does_not_exist(action: str) -> None:
    with refused(Rule.EXISTS, "with c, which is not a unit: there are a, b"):
        getattr(ready("a"), action)("c")


@pytest.mark.parametrize("use", [Use(reads=("c",)), Use(grads=("c",))])
def test_computing_with_a_unit_that_does_not_exist(use: Use) -> None:
    with refused(Rule.EXISTS, "computing with c, which is not a unit"):
        ready("a").use(use)


def test_weights_that_are_there_all_the_time_are_neither_gathered_nor_released() -> None:
    lifetime = Lifetime(["a"], resident=True)
    lifetime.use(Use(reads=("a",), grads=("a",)), 0)
    with refused(Rule.RESHARDED, "UNSHARD with a, which is ready"):
        lifetime.unshard("a")
    lifetime.reduce("a")
    lifetime.finish()
    lifetime.reshard("a")
    with refused(Rule.RESHARDED, "a is sharded"):
        lifetime.finish()


@pytest.mark.parametrize(
    "text",
    ["", "UNSHARD(a) RESHARD(a)", "FINISH UNSHARD(a)", "FINISH FINISH", "SUM_COPIES[a:grad@0,1] FINISH"],
)
def test_a_list_ends_with_one_finish_and_with_sums_of_copies_behind_it(text: str) -> None:
    with refused(Rule.FINISHED, "FINISH|not reduced yet"):
        prove(parse_ops(text), ["a"], lambda op: NO_USE)


def test_nothing_computes_with_units_after_finish() -> None:
    with refused(Rule.FINISHED, r"F0\.0 comes after FINISH"):
        prove(parse_ops("FINISH F0.0"), ["a"], lambda op: Use(reads=("a",)) if op.act is Act.F else NO_USE)


@pytest.mark.parametrize("act", [Act.UNSHARD, Act.WAIT, Act.RESHARD, Act.ACCUM, Act.REDUCE_GRAD])
def test_an_op_about_units_names_one(act: Act) -> None:
    with refused(Rule.COMPLETE, "names no unit"):
        prove((Op(act=act),), ["a"], lambda op: NO_USE)


# ------------------------------------------------------------------------------------ uses of phases


def test_what_ops_do_with_units_follows_from_phases() -> None:
    built = overlapped(fine("[*E]", late_weights=True), pp=1, micro_batches=2, options=Options(delayed=True))
    uses = uses_of(with_replays(built, ("experts", "norm")))
    block, experts = "stack.blocks.0", "stack.blocks.0.layers.moe.inner.experts"
    wanted = {
        "F0.0:embed": Use(reads=("embedding",)),
        "B0.0:embed": Use(grads=("embedding",)),
        "F0.0:0.mix": Use(reads=(block,)),
        "RECOMPUTE0.0:0.mix": Use(reads=(block,)),
        "B0.0:0.mix": Use(reads=(block,), grads=(block,)),
        "W0.0:0.mix": Use(grads=(block,)),
        "F0.0:0.dispatch": NO_USE,
        "B0.0:0.experts": Use(reads=(experts,), grads=(experts,)),
        "RECOMPUTE0.0:0.experts": Use(reads=(experts,)),
        "W0.0:0.experts.down": Use(grads=(experts,)),
        "W0.0:0.experts.in": Use(grads=(experts,)),
        "F0.0:0.combine": NO_USE,
        "SEND_F0.0>1": NO_USE,
        "FINISH": NO_USE,
    }
    assert {text: uses(parse_op(text)) for text in wanted} == wanted


def test_a_replay_needs_no_more_units_than_it_runs() -> None:
    """Of a block with hyper-connections, those alone: where they are recomputed, nothing else is gathered."""
    built = in_phases(one_f_one_b(1, 1), coarse("[*-]", hyper=True))
    ways = tuple(f"stack.blocks.0.layers.{layer}.connection" for layer in ("attention", "mlp"))
    replay = parse_op("RECOMPUTE0.0:0.block")
    assert uses_of(with_replays(built, ("hyper",)))(replay) == Use(reads=ways)
    assert set(uses_of(with_replays(built, ("block",)))(replay).reads) == {*ways, "stack.blocks.0"}


# ------------------------------------------------------------------------------------ in the checker


def made(policy: Policy = POLICIES["all"]) -> Schedule:
    text = "[*-]|[*E]/-"
    built = with_sums(in_phases(one_f_one_b(2, 3), coarse(text, 2)), {"embedding": (0, 1)})
    return lowered(built, meshes(text, 2), policy)


def without(schedule: Schedule, rank: int, text: str) -> Schedule:
    """The first such op of a rank left out."""
    ops = list(schedule.ops[rank])
    del ops[next(place for place, op in enumerate(ops) if str(replace(op, collectives=())) == text)]
    return replace(schedule, ops=(*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))


@pytest.mark.parametrize(
    ("rank", "left_out", "rule", "op"),
    [
        (0, "UNSHARD(embedding)", Rule.UNSHARDED, "WAIT(embedding)"),
        (1, "WAIT(head)", Rule.UNSHARDED, "F0.1:head"),
        (1, "RESHARD(stack.blocks.1)", Rule.RESHARDED, "UNSHARD(stack.blocks.1)"),
        (0, "REDUCE_GRAD(stack.blocks.0)", Rule.ACCUMULATED, "B1.0:0.block"),
        (0, "FINISH", Rule.FINISHED, "SUM_COPIES"),
    ],
)
def test_a_fault_tells_where_a_list_breaks_a_rule(rank: int, left_out: str, rule: Rule, op: str) -> None:
    broken = without(made(), rank, left_out)
    (fault,) = check(broken).faults
    assert list(lifetime_faults(broken)) == [fault]
    assert (fault.rank, fault.rule, str(replace(fault.op, collectives=()))) == (rank, rule, op)
    assert broken.ops[rank][fault.place] == fault.op


def test_what_is_missing_at_the_end_stands_past_it() -> None:
    broken = without(lowered(in_phases(one_f_one_b(1, 1), coarse("-")), meshes("-"), RESIDENT), 0, "FINISH")
    (fault,) = check(broken).faults
    assert (fault.place, str(fault.op), fault.rule) == (len(broken.ops[0]), "FINISH", Rule.FINISHED)


def test_each_rank_tells_its_first_fault() -> None:
    broken = without(without(made(), 0, "WAIT(embedding)"), 1, "RESHARD(head)")
    broken = without(broken, 0, "FINISH")
    assert [(fault.rank, fault.rule) for fault in check(broken).faults] == [
        (0, Rule.UNSHARDED),
        (1, Rule.RESHARDED),
    ]


def test_before_weights_are_placed_their_rules_are_not_asked() -> None:
    schedule = made()
    unplaced = replace(
        schedule, ops=tuple(tuple(op for op in ops if not op.act.shards) for ops in schedule.ops)
    )
    assert {fault.rule for fault in check(unplaced).faults} == {Rule.UNSHARDED}
    assert check(replace(unplaced, weights="unplaced")).sound


def test_weights_that_are_said_to_be_there_are_not_gathered() -> None:
    assert {fault.rule for fault in check(replace(made(), weights="resident")).faults} == {Rule.RESHARDED}
    assert {fault.rule for fault in check(replace(made(RESIDENT), weights="sharded")).faults} == {
        Rule.UNSHARDED
    }
    assert check(made(RESIDENT)).sound
