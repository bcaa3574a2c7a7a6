"""Weight gradients of experts in two buckets: when each is added, and that the checker follows both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from braid.schedule import (
    Act,
    Chain,
    Costs,
    Op,
    Options,
    Rule,
    Schedule,
    Stream,
    check,
    overlapped,
    parse_op,
    simulate,
)
from braid.schedule.lifetime import uses_of
from braid.schedule.lowering import POLICIES, lowered
from braid.schedule.overlapped import Side, pair
from braid.schedule.views import phase_of, stream_of
from tests.schedule.cases import fine, meshes, prove

LATE = Options(delayed=True)
PAIRED = Options(delayed=True, paired_ends=True)


def chain(text: str, *, late_weights: bool = True, latent: bool = False, posts: bool = False) -> Chain:
    (found,) = fine(text, latent=latent, late_weights=late_weights, posts=posts)
    return found


def paired(f: str | None, b: str, options: Options = LATE, *, latent: bool = False) -> str:
    """A forward of micro-batch 1 beside a backward of micro-batch 0."""
    sides = [
        None if text is None else Side((micro_batch, 0), chain(text, latent=latent))
        for micro_batch, text in ((1, f), (0, b))
    ]
    return " ".join(map(str, pair(*sides, options))).replace(".0:", ":")


def schedule(
    text: str, micro_batches: int = 3, options: Options = LATE, *, pp: int = 1, latent: bool = False
) -> Schedule:
    found = fine(text, pp, latent=latent, late_weights=True, posts=options.paired_ends)
    return overlapped(found, pp=pp, micro_batches=micro_batches, options=options)


def listed(made: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, made.ops[rank])).replace(".0:", ":")


# -------------------------------------------------------------------------------------------- order


def test_experts_have_two_drawers_and_nothing_else_has():
    for late, of_experts in ((True, ("0.experts.down", "0.experts.in")), (False, ("0.experts",))):
        buckets = {phase.name: phase.buckets for phase in chain("[*E]-", late_weights=late, latent=True).phases}
        assert buckets.pop("0.experts") == of_experts
        assert buckets == {name: (name,) if name in ("0.mix", "0.combine", "1.mix") else () for name in buckets}


def test_what_leads_into_the_ffn_waits_for_the_next_link():
    assert paired("[*E][*E]", "[*E][*E]") == (
        "F1:embed B0:head B0:final_norm "
        "B0:1.combine F1:0.mix B0:1.experts F1:0.dispatch W0:1.experts.down B0:1.dispatch "
        "F1:0.experts F1:0.combine B0:1.mix W0:1.mix "
        "B0:0.combine F1:1.mix W0:1.experts.in B0:0.experts F1:1.dispatch W0:0.experts.down B0:0.dispatch "
        "F1:1.experts F1:1.combine B0:0.mix W0:0.experts.in W0:0.mix "
        "F1:final_norm F1:head B0:embed"
    )


def test_a_backward_alone_has_it_in_the_same_place():
    assert paired(None, "[*E][*E]") == (
        "B0:head B0:final_norm B0:1.combine B0:1.experts W0:1.experts.down B0:1.dispatch B0:1.mix W0:1.mix "
        "B0:0.combine W0:1.experts.in B0:0.experts W0:0.experts.down B0:0.dispatch B0:0.mix "
        "W0:0.experts.in W0:0.mix B0:embed"
    )


def test_a_link_without_experts_ends_the_wait_as_well():
    assert paired("--", "-[*E]") == (
        "F1:embed B0:head B0:final_norm "
        "B0:1.combine F1:0.mix B0:1.experts W0:1.experts.down B0:1.dispatch B0:1.mix W0:1.mix "
        "F1:1.mix W0:1.experts.in B0:0.mix W0:0.mix F1:final_norm F1:head B0:embed"
    )


def test_where_a_forward_goes_on_it_waits_for_the_end():
    ops = paired("[*E][*E]", "[*E]").split()
    assert ops[-5:] == ["W0:0.experts.in", "W0:0.mix", "F1:final_norm", "F1:head", "B0:embed"]
    assert ops.index("F1:1.combine") < ops.index("W0:0.experts.in")


def test_early_release_moves_no_weight_gradients():
    words = paired("[*E][*E]", "[*E][*E]", LATE._replace(early_release=True)).split()
    place = words.index("W0:1.experts.in")
    assert words[place - 1 : place + 2] == ["F1:1.mix", "W0:1.experts.in", "B0:0.experts"]
    assert words.index("W0:1.experts.down") < words.index("B0:1.dispatch") < words.index("B0:1.mix")


def test_a_projection_back_from_a_latent_comes_with_the_first_drawer():
    words = paired("[*E]", "[*E]", latent=True).split()
    place = words.index("W0:0.combine")
    assert words[place : place + 3] == ["W0:0.combine", "W0:0.experts.down", "B0:0.dispatch"]


def test_in_a_pipeline_it_comes_when_the_message_has_left():
    made = schedule("[*E]|[*E]", 4, pp=2)
    words = listed(made, rank=1).replace(".1:", ":").split()
    assert words.index("SEND_B0.1>0") < words.index("W0:1.experts.in") == words.index("W0:1.mix") - 1


def test_without_ops_for_weight_gradients_there_is_nothing_to_wait():
    assert " W" not in paired("[*E][*E]", "[*E][*E]", Options())
    assert check(schedule("[*E][*E]", options=Options())).faults == ()


# ------------------------------------------------------------------------------------------ paired ends


def test_between_paired_ends_it_waits_for_the_next_backward():
    words = listed(schedule("[*E][*E]", 5, PAIRED)).split()
    place = words.index("W0:0.experts.in")
    assert words[place - 1 : place + 2] == ["F3:0.mix", "W0:0.experts.in", "B1:1.experts"]
    assert words.index("B1:head") < words.index("W0:0.mix") < place


@pytest.mark.parametrize(("text", "latent"), [("[*E]", False), ("[*E][*E]", True), ("[*E]/*E", False)])
def test_where_backwards_stay_apart_it_comes_before_the_next_one(text, latent):
    words = listed(schedule(text, 5, PAIRED, latent=latent)).split()
    for number in range(2):
        begins = next(place for place, word in enumerate(words) if word.startswith(f"B{number + 1}:"))
        assert max(place for place, word in enumerate(words) if word.startswith(f"W{number}:")) < begins


def test_before_the_last_two_backwards_nothing_waits_any_more_and_they_add_both_at_once():
    words = listed(schedule("[*E][*E]", 4, PAIRED)).split()
    begins = words.index("B2:head")
    assert {word[1] for word in words[begins:]} == {"2", "3"}
    for name in ("2:1", "3:1", "2:0", "3:0"):
        place = words.index(f"W{name}.experts.down")
        assert place > begins
        assert words[place - 1 : place + 2] == [
            f"B{name}.dispatch",
            f"W{name}.experts.down",
            f"W{name}.experts.in",
        ]


# ---------------------------------------------------------------------------------------------- proof


def found(made: Schedule, change: Callable[[list[Op]], None]) -> set[tuple[Rule, str, str]]:
    """What the checker says when the list of a rank is changed: the rule, the op, and why."""
    ops = list(made.ops[0])
    change(ops)
    faults = check(replace(made, ops=(tuple(ops),))).faults
    return {(fault.rule, str(fault.op), fault.why) for fault in faults}


@pytest.mark.parametrize("bucket", ["experts.down", "experts.in"])
@pytest.mark.parametrize("options", [LATE, PAIRED], ids=["plain", "paired"])
def test_every_drawer_is_emptied_once_after_its_backward_and_in_order(bucket, options):
    made = schedule("[*E][*E]", 4, options)
    assert found(made, lambda ops: None) == set()
    first, second = (parse_op(f"W{number}.0:1.{bucket}") for number in range(2))

    def early(ops: list[Op]) -> None:
        ops.remove(first)
        ops.insert(ops.index(parse_op("B0.0:1.experts")), first)

    def swapped(ops: list[Op]) -> None:
        one, other = ops.index(first), ops.index(second)
        ops[one], ops[other] = ops[other], ops[one]
        ops.insert(one, ops.pop(ops.index(parse_op("B1.0:1.experts"))))

    def twice(ops: list[Op]) -> None:
        ops.append(first)

    assert (Rule.WEIGHTS, str(first), "it is missing") in found(made, lambda ops: ops.remove(first))
    assert found(made, twice) == {(Rule.WEIGHTS, str(first), "it has run before")}
    assert (Rule.WEIGHTS, str(first), "its backward has not run") in found(made, early)
    later = (Rule.WEIGHTS, str(first), "a later backward's weight gradients came first")
    assert later in found(made, swapped)


def test_one_op_does_not_stand_for_both_drawers():
    def whole(ops: list[Op]) -> None:
        down, into = (ops.index(parse_op(f"W0.0:0.experts.{bucket}")) for bucket in ("down", "in"))
        ops[down] = parse_op("W0.0:0.experts")
        del ops[into]

    told = {(op, why) for rule, op, why in found(schedule("[*E]"), whole) if rule is Rule.WEIGHTS}
    missing = {(f"W0.0:0.experts.{bucket}", "it is missing") for bucket in ("down", "in")}
    assert told == missing | {("W0.0:0.experts", "its backward has not run")}


@pytest.mark.parametrize("strategy", sorted(POLICIES))
@pytest.mark.parametrize("options", [LATE, PAIRED], ids=["plain", "paired"])
def test_the_experts_unit_is_whole_after_the_last_drawer_of_a_micro_batch(strategy, options):
    made = schedule("[*E]-[*E]", 4, options)
    units = meshes("[*E]-[*E]")
    full = lowered(made, units, POLICIES[strategy])
    assert check(full).faults == ()
    (ops,) = full.ops
    figures = prove(ops, units, uses_of(full))
    every = POLICIES[strategy].reduce_every
    assert figures.reductions == len(units) * (made.micro_batches if every else 1)
    experts = [unit for unit, mesh in units.items() if mesh == "expert"]
    assert len(experts) == 2
    for unit in experts:
        block = unit.split(".")[2]
        added, reductions = list[tuple[int | None, str]](), 0
        for op in ops:
            if op.act is Act.W and op.phase and op.phase.startswith(f"{block}.experts."):
                added.append((op.micro_batch, op.phase.rpartition(".")[2]))
            elif op.unit == unit and op.act in (Act.ACCUM, Act.REDUCE_GRAD):
                whole = [(number, bucket) for number in range(len(added) // 2) for bucket in ("down", "in")]
                assert added == whole
                reductions += op.act is Act.REDUCE_GRAD
                if op.act is Act.REDUCE_GRAD:
                    assert len(added) == 2 * (reductions if every else made.micro_batches)


# ------------------------------------------------------------------------------------ time, and its worth


def test_weight_gradients_run_where_the_backward_did_that_left_them_and_after_it():
    made = schedule("[*E]", 1, latent=True)
    stream, phase = stream_of(made), phase_of(made)
    assert stream(parse_op("W0.0:0.combine")) is Stream.COMMUNICATION
    for spans in simulate(made).spans:
        ends = {span.op.phase: span.end for span in spans if span.op.act is Act.B}
        buckets = [span for span in spans if span.op.act is Act.W]
        assert [str(span.op)[5:] for span in buckets] == [
            "0.combine",
            "0.experts.down",
            "0.experts.in",
            "0.mix",
        ]
        for span in buckets:
            left_by = phase(span.op)
            assert left_by is not None
            assert stream(span.op) is left_by.stream
            assert span.start >= ends[left_by.name]


def test_two_drawers_take_as_long_together_as_one():
    costs = Costs(phases={"experts": 3.0})
    parts = [costs.of(parse_op(f"W0.0:mtp0.2.experts.{bucket}"), delayed=True) for bucket in ("down", "in")]
    assert parts == pytest.approx([1.0, 2.0])
    assert sum(parts) == pytest.approx(costs.of(parse_op("W0.0:mtp0.2.experts"), delayed=True))


@pytest.mark.parametrize("options", [LATE, PAIRED], ids=["plain", "paired"])
def test_more_is_hidden_where_transfers_take_as_long_as_computation_and_experts_longer_than_mixers(options):
    blocks, micro_batches, experts = 8, 12, 2.0
    compute = micro_batches * blocks * 3 * (1 + experts)
    transfer = compute / (4 * blocks * micro_batches)
    costs = Costs(phases={"mix": 1.0, "dispatch": transfer, "experts": experts, "combine": transfer})
    hidden = []
    for late in (False, True):
        found = chain("[*E]" * blocks, late_weights=late, posts=True)
        made = overlapped([found], pp=1, micro_batches=micro_batches, options=options)
        hidden.append((2 * compute - simulate(made, costs).makespan) / compute)
    assert hidden[1] > hidden[0] + 0.08
