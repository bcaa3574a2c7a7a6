"""DualPipeV trains as its own order does without nodes, to the last bit; and as 1F1B does, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from braid.config import Mesh, Run
from braid.distributed.groups import open_groups, opened_groups
from braid.engine.node import Watch
from braid.planning import divisibility
from braid.planning.plan import plan, whole_model
from braid.prove.outcome import Task, outcome, started, train_each
from braid.schedule import Act, Costs, simulate
from braid.train import state as states
from braid.train import step as steps
from braid.train.build import state_context
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.distributed_generation import next_logits
from tests.engine import oracle
from tests.engine.overlap_cases import RATE, Case, Trained, assert_same_bits, make_state, micro_batches
from tests.engine.overlap_cases import train as train_plainly
from tests.engine.stream_log import communication_order, stream_faults
from tests.ranks import run_ranks
from tests.states import backward
from tests.topology.cases import make_corpus, run_of
from tests.topology.matrix import segmented

BOUND = 1e-10
"""How far gradients of two schedules may be apart in float64, relative to their length."""


@dataclass(frozen=True, kw_only=True)
class Dual(Case):
    """A model on a folded pipeline; `overlapping` is whether its pairs interleave."""

    overlapping: bool = True

    def __str__(self) -> str:
        return super().__str__() + " overlapping" * self.overlapping

    def run(self, *, overlap: bool = True) -> Run:
        run = super().run(overlap=False)
        mesh = replace(
            run.mesh,
            schedule="dual_pipe_v",
            overlap=self.overlapping,
            early_release=self.overlapping and self.early_release,
        )
        return replace(run, mesh=mesh)


# --------------------------------------------------------------------------------- the same order in one piece


def both(rank: int, world: int, case: Dual) -> tuple[Trained, Trained]:
    """In nodes, and with whole segments."""
    return train(rank, case, nodes=True), train(rank, case, nodes=False)


def train(rank: int, case: Dual, *, nodes: bool) -> Trained:
    run = case.run()
    worked_out = plan(run, case.world)
    groups = open_groups(worked_out.grid, rank)
    state, told = make_state(worked_out, groups), Trained()
    for number in range(case.steps):
        batches = micro_batches(case, groups, number)
        watch, counts = Watch() if nodes else None, steps.count(state, batches)
        if nodes:
            parts, loads = backward(state, run, batches, counts, watch)
        else:
            parts, loads = oracle.backward(state, run, batches, counts)
        told.metrics.append(parts)
        found = state.optimizer.gradients()
        told.gradients.append({name: gradient.clone() for name, gradient in found.items()})
        for name, gradient in found.items():
            group = groups.edp if ".experts." in name else groups.slab
            if group.handle is not None:
                dist.all_reduce(gradient, group=group.handle)
        state.optimizer.update(RATE)
        steps.update_selection_biases(state.model, loads)
        told.issued = watch.issued if watch else []
    told.weights = {name: tensor.detach().clone() for name, tensor in state.weights().items()}
    return told


@pytest.mark.parametrize(
    "case",
    [
        Dual(world=2, pp=2, pattern="[*E]|[*E]-|M|*E/*E", tied=True, micro_batches=5),
        Dual(world=2, pp=2, pattern="*-|-|*|-", micro_batches=6, dtype="bf16", overlapping=False),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                Dual(
                    world=2, pp=2, pattern="|[*E]|E|[G*E]", micro_batches=4, dtype="bf16", latent=4, dropout=0.1
                ),
                Dual(world=2, pp=2, pattern="|||[*E]/*E/*E", micro_batches=2, shared=False, overlapping=False),
                Dual(
                    world=4, pp=2, ep=2, pattern="[*E]|[M*E]|*E|[G*E]/*E", micro_batches=4, early_release=True
                ),
                Dual(world=4, pp=4, pattern="*|[*E]||-|[*E]|*E||E", tied=True, micro_batches=9, steps=1),
            )
        ),
    ],
    ids=str,
)
def test_nodes_give_the_bits_of_whole_segments_in_the_same_order(case):
    schedule = plan(case.run(), case.world).schedule
    told, slab = run_ranks(case.world, both, case, timeout_s=90), case.world // case.pp
    for rank, (nodes, whole) in enumerate(told):
        assert_same_bits(whole, nodes)
        assert list(stream_faults(nodes.issued, schedule.phases)) == []
        planned = [op for op in schedule.ops[rank // slab] if op.phase is not None]
        assert [issued.op for issued in nodes.issued] == planned
        assert communication_order(nodes.issued) == communication_order(told[rank // slab * slab][0].issued)


# --------------------------------------------------------------------------------------------------- 1F1B


def folded_and_not(rank: int, world: int, case: Dual, plain: Case) -> tuple[Trained, Trained]:
    return train(rank, case, nodes=True), train_plainly(rank, plain, overlap=False)


@pytest.mark.parametrize(
    ("tied", "mtp", "apart"),
    [
        pytest.param(False, "", set(), marks=pytest.mark.long, id="apart"),
        pytest.param(True, "/*E", {"embedding.weight"}, id="tied"),
    ],
)
def test_what_one_segment_uses_has_the_bits_of_1f1b(tied, mtp, apart):
    """One process uses the embedding twice; 1F1B sums copies, which is another order."""
    common = {"world": 2, "pp": 2, "micro_batches": 5, "steps": 1, "tied": tied}
    case = Dual(pattern=f"[*E]|[*E]-|M|*E{mtp}", **common)
    told = run_ranks(2, folded_and_not, case, Case(pattern=f"[*E][*E]-|M*E{mtp}", **common))
    folded, plain = (
        {name: gradient for rank in told for name, gradient in rank[which].gradients[0].items()}
        for which in (0, 1)
    )
    assert folded.keys() == plain.keys()
    assert {name for name, gradient in plain.items() if not torch.equal(gradient, folded[name])} == apart


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("dual"))


def with_mesh(run: Run, segments: int, **mesh: object) -> Run:
    pattern = segmented(run.model.pattern, segments)
    return replace(run, model=replace(run.model, pattern=pattern), mesh=Mesh(**mesh))


@pytest.mark.parametrize(
    ("model", "world", "pp", "mesh"),
    [
        ("tied", 2, 2, {}),
        pytest.param("hybrid", 4, 2, {"ep": 2, "overlap": True}, marks=pytest.mark.long),
        pytest.param("latent", 4, 4, {"overlap": True}, marks=pytest.mark.long),
        pytest.param("hybrid", 4, 2, {"shard": "gradients"}, marks=pytest.mark.long),
        pytest.param("tied", 4, 4, {"shard": "optimizer"}, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_1f1b(model, world, pp, mesh, corpus):
    run = run_of(model, corpus, samples=16, micro_batches=4, steps=1)
    common = {name: value for name, value in mesh.items() if name != "overlap"}
    tasks = [
        Task(run=with_mesh(run, pp, pp=pp, **common)),
        Task(run=with_mesh(run, 2 * pp, pp=pp, schedule="dual_pipe_v", **mesh)),
    ]
    assert [plan(task.run, world).schedule.name for task in tasks] == ["1f1b", "dual_pipe_v"]
    told = run_ranks(world, train_each, tasks, timeout_s=120)
    shapes = {name: torch.Size(each.shape) for name, each in whole_model(plan(run, 1)).canonical().items()}
    plain, dual = (outcome([rank[n] for rank in told], shapes, task) for n, task in enumerate(tasks))
    assert not dual.quarrels
    assert plain.gradients.keys() == dual.gradients.keys()
    for name, gradient in plain.gradients.items():
        apart = float((dual.gradients[name] - gradient).norm())
        assert apart <= BOUND * max(float(gradient.norm()), 1e-3), name
    for one, other in zip(plain.figures, dual.figures, strict=True):
        assert other == pytest.approx(one, rel=1e-9)
    assert dual.val_loss == pytest.approx(plain.val_loss, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "world", "mesh", "recompute"),
    [
        ("tied", 2, {}, ("norm", "block")),
        pytest.param("hybrid", 4, {"ep": 2, "overlap": True}, ("full",), marks=pytest.mark.long),
        pytest.param("hybrid", 4, {"overlap": True}, ("experts", "core", "norm"), marks=pytest.mark.long),
    ],
)
def test_what_is_made_again_changes_no_bit(model, world, mesh, recompute, corpus):
    run = with_mesh(run_of(model, corpus, micro_batches=4, steps=1), 4, pp=2, schedule="dual_pipe_v", **mesh)
    again = replace(run, train=replace(run.train, recompute=recompute))
    ops = [op for ops in plan(again, world).schedule.ops for op in ops]
    assert any(op.act is Act.RECOMPUTE for op in ops)
    for kept, made in run_ranks(world, train_each, [Task(run=run), Task(run=again)], timeout_s=120):
        assert kept.figures == made.figures
        assert kept.gradients.keys() == made.gradients.keys()
        for name, (_, gradient) in kept.gradients.items():
            assert torch.equal(gradient, made.gradients[name][1]), name


def told_next(rank: int, world: int, run: Run) -> torch.Tensor:
    """Scores of the token after each row."""
    state, _ = started(rank, world, run)
    return next_logits(state, run, torch.arange(7).repeat(2, 1) + 90)


def test_a_folded_pipeline_tells_the_next_token_as_one_process_does(corpus):
    run = run_of("tied", corpus)
    folded = with_mesh(run, 4, pp=2, schedule="dual_pipe_v")
    for logits_BV in run_ranks(2, told_next, folded):
        torch.testing.assert_close(logits_BV, told_next(0, 1, run), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------- what was run


def executed(rank: int, world: int, run: Run, out: str) -> tuple[str, ...]:
    worked_out = plan(run, world)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        with state_context(worked_out, choose_device("cpu"), groups) as state:
            states.initialize(state, run)
            steps.train_step(state, run, open_data_pipeline(run, Path(out)).train, rate=1e-3)
            return tuple(str(span.op) for span in state.log)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (2, 3), pytest.param(4, 8, marks=pytest.mark.long)])
def test_the_executed_log_has_the_bubble_of_the_plan(pp, micro_batches, corpus, tmp_path):
    run = run_of("tied", corpus, samples=2 * micro_batches, micro_batches=micro_batches)
    pattern = "|".join(["-"] * (2 * pp))
    run = replace(
        run, model=replace(run.model, pattern=pattern), mesh=Mesh(pp=pp, schedule="dual_pipe_v", shard="none")
    )
    schedule = plan(run, pp).schedule
    told = run_ranks(pp, executed, run, str(tmp_path))
    assert list(told) == [tuple(map(str, ops)) for ops in schedule.ops]
    if micro_batches >= 2 * pp:
        timeline = simulate(schedule, Costs(phases={"mix": 1.0}))
        assert timeline.idle == pytest.approx([pp - 1] * pp)
