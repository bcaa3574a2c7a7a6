"""Schedules of whole segments in phases: nothing but that changes."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.pattern import parse
from braid.schedule import (
    Act,
    Schedule,
    Stream,
    check,
    evaluation,
    in_phases,
    interleaved,
    one_f_one_b,
    parse_op,
    simulate,
    v_shape,
    with_sums,
)
from braid.schedule.views import bare, narrow, wide
from tests.schedule.cases import coarse, fine

ITEMS = st.lists(st.sampled_from(["*", "-", "[*E]", "E", "[M*E]"]), max_size=2).map("".join)
MTP = st.sampled_from(["", "/*E", "/E/E", "/*/*"])


GRAINS = (fine, coarse, partial(coarse, whole=True))


def pieces(made: Schedule, rank: int) -> list[str]:
    """What a rank does, phases of a segment that follow one another as one."""
    about = [f"{op.act.value}{op.micro_batch}.{op.segment}" if op.phase else str(op) for op in made.ops[rank]]
    return [text for text, _ in groupby(about)]


def test_each_op_of_a_segment_becomes_its_phases_in_order_and_backward_in_reverse():
    made = in_phases(one_f_one_b(2, 1), coarse("[*E]|-", 2))
    assert str(made) == (
        "0: F0.0:embed F0.0:0.block SEND_F0.0>1 RECV_B0.0<1 B0.0:0.block B0.0:embed\n"
        "1: RECV_F0.1<0 F0.1:1.block F0.1:final_norm F0.1:head "
        "B0.1:head B0.1:final_norm B0.1:1.block SEND_B0.1>0"
    )
    assert [[phase.name for phase in phases] for phases in made.phases] == [
        ["embed", "0.block"],
        ["1.block", "final_norm", "head"],
    ]


def test_phases_may_be_as_fine_as_where_they_run_beside_each_other():
    (ops,) = in_phases(one_f_one_b(1, 1), fine("[*E]")).ops
    names = ["embed", "0.mix", "0.dispatch", "0.experts", "0.combine", "final_norm", "head"]
    assert [op.phase for op in ops] == [*names, *names[::-1]]


def test_a_segment_may_be_one_phase_with_all_its_units():
    first, last = coarse("[*E]|-/*", 2, whole=True, tied=True)
    made = in_phases(one_f_one_b(2, 1), (first, last))
    assert str(made) == (
        "0: F0.0:segment SEND_F0.0>1 RECV_B0.0<1 B0.0:segment\n"
        "1: RECV_F0.1<0 F0.1:segment B0.1:segment SEND_B0.1>0"
    )
    (begin,), (end,) = first.phases, last.phases
    assert (begin.reads, begin.writes, end.reads, end.writes) == ((), ("out",), ("in",), ())
    assert begin.units == ("embedding", "stack.blocks.0.layers.moe.inner.experts", "stack.blocks.0")
    assert end.units == ("embedding", "stack.blocks.1", "mtp.0.blocks.0", "mtp.0", "final_norm")


def test_sums_of_copies_stay_at_the_end():
    built = with_sums(one_f_one_b(2, 2), {"embedding": (0, 1)})
    made = in_phases(built, coarse("*|*", 2))
    assert [ops[-1] for ops in made.ops] == [ops[-1] for ops in built.ops]


@settings(deadline=None, max_examples=60)
@given(
    pp=st.integers(1, 4),
    virtual=st.integers(1, 3),
    micro_batches=st.integers(1, 8),
    fold=st.booleans(),
    backward=st.booleans(),
    grain=st.sampled_from(GRAINS),
    data=st.data(),
    mtp=MTP,
)
def test_any_pipeline_in_phases_is_sound_and_keeps_its_order(
    pp, virtual, micro_batches, fold, backward, grain, data, mtp
):
    built = interleaved(pp, virtual, micro_batches)
    if not backward:
        built = evaluation(v_shape(pp) if fold else built.holder, micro_batches)
    else:
        built = with_sums(built, {"embedding": (0, pp - 1)})
    text = "|".join(data.draw(st.lists(ITEMS, min_size=built.segments, max_size=built.segments))) + mtp
    made = in_phases(built, grain(text, len(parse(text).segments)))
    report = check(made)
    assert report.faults == ()
    assert report.live == check(built).live
    assert wide(made).schedule == narrow(made).schedule == built
    assert bare(made)[0] == made
    assert [pieces(made, rank) for rank in range(pp)] == [list(map(str, ops)) for ops in built.ops]
    assert all(parse_op(str(op)) == op for ops in made.ops for op in ops)
    simulate(made)


@pytest.mark.parametrize("form", [{}, {"hyper": True}, {"latent": True, "shared_experts": True}], ids=str)
def test_a_block_is_one_phase_unless_it_is_cut_finely(form):
    (chain,) = coarse("[M*E]-/*E", **form)
    names = ["embed", "0.block", "1.block", "final_norm", "head", "mtp0.enter", "mtp0.0.block"]
    assert [phase.name for phase in chain.phases] == [*names, "mtp0.final_norm", "mtp0.head"]
    assert {phase.stream for phase in chain.phases} == {Stream.COMPUTE}
    assert not any(phase.buckets for phase in chain.phases if phase.kind == "block")
    assert not any(op.act is Act.W for op in in_phases(one_f_one_b(1, 1), [chain]).ops[0])
