"""A grid that is not the job: a model on some ranks of a job trains, evaluates, saves and resumes as one
process does, and the other ranks, which hold nothing, know as much about the run as those that do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.errors import ConfigError, DataError
from braid.planning.plan import check, plan
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, outcome, started, train_each
from braid.train import state as states
from braid.train import stored_run
from braid.train.state import State
from braid.train.step import begin_step, evaluate, train_step
from braid.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import small_run
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every point trains a model on ranks, some of which hold nothing")

QUICK = (("hybrid", 8, "at2+4 tp2 pp2"),)
LONG = (
    ("tied", 3, "at1+1"),
    ("hyper", 8, "at2+4 pp2 ep2 overlap"),
    ("hybrid", 5, "at1+4 tp2 ep4 none"),
    ("latent", 6, "at0+4 cp2 ep2 gradients"),
    ("capacity", 8, "at4+4 pp2 v2 optimizer"),
    ("sinkhorn", 4, "at1+2 pp2 dual overlap"),
)


@pytest.mark.parametrize(
    ("model", "world", "words"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
def test_a_model_on_some_ranks_of_a_job_has_the_same_answer(model, world, words, reference, corpus, tmp_path):
    step = {"samples": 16, "micro_batches": 4 if "pp" in words else 2}
    task = Task(run=Topology(world=world, words=words).of(run_of(model, corpus, **step)), checkpoints=tmp_path)
    ranks = run_ranks(world, train_each, [task], timeout_s=120)
    sound = reference(model, **step)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


def go_on(rank: int, world: int, words: str, corpus: Path, before: Path, after: Path) -> tuple[float, float]:
    """A step from a checkpoint, and what it validates to."""
    run = Topology(world=world, words=words).of(run_of("tied", corpus))
    state, feed = started(rank, world, run)
    if before.exists():
        states.load(states.resolve_checkpoint(before), state)
    result = train_step(state, run, feed.train, LEARNING_RATE)
    states.save(after, state, run, feed.train, feed.tokenizer)
    assert isinstance(state, State) == (rank in state.plan.grid.ranks)
    return result.loss, evaluate(state, run, feed.validation)


@pytest.mark.long
def test_checkpoints_go_from_some_ranks_to_others_and_to_one_process(corpus, tmp_path):
    """Rank 0 writes the manifest, whether it holds a part of the model or not."""
    places = [tmp_path / str(number) for number in range(5)]
    expected = [go_on(0, 1, "", corpus, tmp_path / "none", places[0])]
    expected.append(go_on(0, 1, "", corpus, places[0], places[1]))
    (first,) = set(run_ranks(3, go_on, "at1+2 tp2", corpus, tmp_path / "none", places[2]))
    (second,) = set(run_ranks(4, go_on, "at0+2", corpus, places[2], places[3]))
    assert [first, second] == [pytest.approx(each, rel=FP64_BOUND) for each in expected]
    manifests = [stored_run.describe(states.resolve_checkpoint(place)) for place in (places[1], places[3])]
    assert manifests[0].updates == manifests[1].updates == 2
    assert manifests[0].samples == manifests[1].samples
    assert go_on(0, 1, "", corpus, places[3], places[4])[0] < first[0]


# ------------------------------------------------------------------------------------------- the job


def train_with_trainer(rank: int, world: int, out: str) -> tuple[list[float], str]:
    run = small_run()
    train = replace(run.train, steps=2, batch_samples=4, eval_samples=4, save_every=1)
    run = replace(run, train=train, mesh=replace(run.mesh, ranks=(1, 2)))
    trace = Path(out) / "trace.json"
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True, trace=trace) as trainer:
        outcome = trainer.train()
        assert (outcome.model is None) == (rank in (0, 3))
        if outcome.model is None:
            with pytest.raises(ConfigError, match=f"rank {rank} holds no part of the model"):
                _ = trainer.model
        text = trainer.generate("def ", tokens=3)
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True) as trainer:
        assert trainer.resumed == outcome.checkpoint
        assert trainer.train().val_loss == outcome.val_loss
    return [outcome.loss, outcome.val_loss], text


def test_a_rank_without_a_part_of_the_model_keeps_the_books(tmp_path):
    """Rank 0 writes metrics, the trace and the manifest of a model that it does not hold."""
    (losses, _), *others = told = run_ranks(4, train_with_trainer, str(tmp_path), timeout_s=120)
    assert all(each == told[0] for each in others)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (lines[-1]["loss"], lines[-1]["val_loss"]) == tuple(losses)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2}


def fail_in(rank: int, world: int, corpus: Path, how: str) -> str | tuple[str, ...]:
    run = Topology(world=world, words="at1+2").of(run_of("tied", corpus))
    state, feed = started(rank, world, run)
    if how == "vocabulary" and isinstance(state, State):
        state.model.shape = replace(state.model.shape, vocab=3)
    if how == "vocabulary":
        with pytest.raises(DataError) as error:
            train_step(state, run, feed.train, LEARNING_RATE)
        return str(error.value)
    if how == "stop":
        return str(begin_step(state, run, feed.train, LEARNING_RATE, stop=rank == 3).result().stop)
    if rank == 2:
        assert isinstance(state, State)
        with torch.no_grad():
            state.model.get_parameter("final_norm.weight").fill_(torch.nan)
    result = train_step(state, run, feed.train, LEARNING_RATE)
    assert state.skipped_in_a_row == 1
    return result.not_finite


@pytest.mark.parametrize(
    "how", ["vocabulary", *(pytest.param(each, marks=pytest.mark.long) for each in ("stop", "not finite"))]
)
def test_what_happens_on_one_rank_is_known_to_all_of_the_job(how, corpus):
    said = run_ranks(4, fail_in, corpus, how)
    assert len(set(said)) == 1
    expected = {"vocabulary": "rank 1: token id", "stop": "True", "not finite": "final_norm.weight"}
    assert expected[how] in said[0]


# ------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("ranks", "tp", "field", "said"),
    [
        ((6, 4), 1, "mesh.ranks", "ends with rank 9, but the last rank of the job is 7"),
        ((-1, 4), 1, "mesh.ranks[0]", "at least 0"),
        ((0, 0), 1, "mesh.ranks[1]", "at least 1"),
        ((2, 3), 2, "mesh.ranks[1]", "multiple of mesh.tp times mesh.cp times mesh.pp (2)"),
        ((1, 2, 3), 1, "mesh.ranks", "a tuple of 2 integers or None"),
    ],
)
def test_a_span_that_does_not_fit_is_a_problem_of_the_plan(ranks, tp, field, said):
    run = small_run()
    (problem,) = check(replace(run, mesh=replace(run.mesh, ranks=ranks, tp=tp)), 8)
    assert problem.field == field
    assert said in problem.rule


def test_samples_divide_over_the_ranks_of_the_grid_alone():
    run = small_run()
    run = replace(run, train=replace(run.train, batch_samples=8), mesh=replace(run.mesh, ranks=(3, 4)))
    made = plan(run, 7)
    assert (made.axes.dp, tuple(made.grid.ranks), made.world) == (4, (3, 4, 5, 6), 7)
    assert check(replace(run, mesh=replace(run.mesh, ranks=None)), 7)
