"""Frozen units in a schedule: a backward wherever something up to there is trained, none elsewhere, and what is
left is proved like any other schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model import declaration
from braid.model.declaration import Form
from braid.pattern import Layout, parse
from braid.schedule import (
    Act,
    Options,
    Rule,
    Schedule,
    build,
    check,
    dual_pipe_v,
    freeze,
    in_phases,
    live_peaks,
    overlapped,
    simulate,
    with_sums,
)
from braid.schedule.lowering import POLICIES, RESIDENT, lowered
from braid.schedule.phases import IN, OUT

MICRO_BATCHES = 4
PATTERNS = {1: "[*E]-[ME]-/*E", 2: "[*E]-|[ME]-/*E", 4: "[*E]|-|[ME]|-/*E"}


def built(name: str, form: Form) -> tuple[Layout, Schedule]:
    """A schedule of a hybrid model with MTP, in phases."""
    pp, segments = {"alone": (1, 1), "1f1b": (2, 2), "interleaved": (2, 4)}.get(name, (2, 4))
    layout = parse(PATTERNS[segments])
    chains = declaration.chains(layout, form)
    if name == "dual":
        return layout, dual_pipe_v(chains, pp=pp, micro_batches=MICRO_BATCHES, overlap=True)
    if name == "overlapped":
        options = Options(delayed=True)
        return layout, overlapped(chains, pp=pp, micro_batches=MICRO_BATCHES, options=options)
    order = "1f1b" if name in ("alone", "1f1b") else name
    made = build(order, pp=pp, virtual=segments // pp, micro_batches=MICRO_BATCHES)
    return layout, in_phases(made, chains)


def reached(schedule: Schedule, frozen: frozenset[str]) -> set[tuple[int, str]]:
    """Phases that a gradient reaches, by brute force: one goes to whoever read what a trained one wrote."""
    phases = [(segment, phase) for segment, own in enumerate(schedule.phases) for phase in own]
    found = {(segment, phase.name) for segment, phase in phases if set(phase.units) - frozen}
    while True:
        tensors = {
            (segment + (name == OUT), IN if name == OUT else name)
            for segment, phase in phases
            if (segment, phase.name) in found
            for name in phase.writes
        }
        more = {
            (segment, phase.name)
            for segment, phase in phases
            if any((segment, name) in tensors for name in phase.reads)
        }
        if more <= found:
            return found
        found |= more


@settings(deadline=None)
@given(
    st.sampled_from(["alone", "1f1b", "interleaved", "overlapped", "dual"]),
    st.sampled_from([*POLICIES.values(), RESIDENT]),
    st.booleans(),
    st.data(),
)
def test_backward_goes_as_far_as_something_is_trained(name, policy, hyper, data):
    form = Form(fine=name in ("overlapped", "dual"), posts=name == "alone", hyper=hyper, tied=True)
    layout, whole = built(name, form)
    units = {unit.path: unit.mesh for unit in declaration.units(layout, form)}
    last = data.draw(st.integers(0, len(units) - 1), label="frozen up to")
    frozen = frozenset(list(units)[:last]) | data.draw(st.frozensets(st.sampled_from(sorted(units))))
    frozen -= {"final_norm"}  # something is trained
    made = freeze(whole, frozen)
    expected = reached(whole, frozen)
    backwards = [op for ops in made.ops for op in ops if op.act is Act.B]
    assert {(op.segment, op.phase) for op in backwards} == expected
    assert len(backwards) == len(expected) * MICRO_BATCHES
    for before, after in zip(whole.ops, made.ops, strict=True):
        left = iter(before)
        assert all(op in left for op in after), "what is left keeps its order"
    shared = {} if "embedding" in frozen else {"embedding": (made.holder[0], made.holder[-1])}
    complete = lowered(with_sums(made, shared), units, policy)
    assert not check(complete).faults
    reduced = {op.unit for ops in complete.ops for op in ops if op.act in (Act.ACCUM, Act.REDUCE_GRAD)}
    assert reduced.isdisjoint(frozen)
    assert all(mine <= full for mine, full in zip(live_peaks(complete), live_peaks(whole), strict=True))
    assert simulate(complete).makespan <= simulate(whole).makespan


def test_nothing_frozen_changes_nothing():
    _, whole = built("interleaved", Form())
    assert freeze(whole, frozenset()) is whole


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dual"])
def test_a_backward_too_many_or_too_few_is_a_fault(name):
    form = Form(fine=name == "dual")
    layout, whole = built(name, form)
    blocks = {unit.path for unit in declaration.units(layout, form) if unit.path.startswith("stack.blocks.0")}
    made = freeze(whole, blocks | {"embedding"})
    assert not check(made).faults
    needless = next(op for op in whole.ops[0] if op.act is Act.B and op.segment == 0)
    more = replace(made, ops=((*made.ops[0], needless), *made.ops[1:]))
    rules = {fault.rule for fault in check(more).faults}
    assert rules & {Rule.EXISTS, Rule.PHASE_ORDER}
    place = next(place for place, op in enumerate(made.ops[1]) if op.act is Act.B)
    fewer = replace(made, ops=(made.ops[0], made.ops[1][:place] + made.ops[1][place + 1 :], *made.ops[2:]))
    assert check(fewer).faults
