"""A pipeline runs its schedule as it was planned, and writes what one process writes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from braid.config import Run
from braid.data import ByteTokenizer
from braid.distributed.groups import opened_groups
from braid.errors import ConfigError
from braid.planning import divisibility
from braid.planning.plan import plan
from braid.schedule import simulate
from braid.train import state as states
from braid.train.build import state_context
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.distributed_generation import generate_distributed, next_logits
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.schedule.cases import compute_ops
from tests.train.helpers import run_on


def piped(corpus: Path, pattern: str, micro_batches: int, **mesh: int) -> Run:
    run = run_on(corpus, dtype="fp64", batch_samples=2 * micro_batches, micro_batches=micro_batches)
    return replace(run, model=replace(run.model, pattern=pattern), mesh=replace(run.mesh, **mesh))


@contextmanager
def begun(rank: int, world: int, run: Run, out: str):
    worked_out = plan(run, world)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with opened_groups(worked_out.grid, rank, tp_runs=runs) as groups:
        with state_context(worked_out, choose_device("cpu"), groups) as state:
            states.initialize(state, run)
            yield state, open_data_pipeline(run, Path(out))


def executed(rank: int, world: int, run: Run, out: str) -> list[str]:
    with begun(rank, world, run, out) as (state, feed):
        train_step(state, run, feed.train, rate=1e-3)
        assert [span.op for span in state.log] == list(state.plan.schedule.ops[state.model.groups.pp.rank])
        assert all(span.start <= span.end for span in state.log)
        return [str(span.op) for span in state.log]


@pytest.mark.parametrize(
    ("pattern", "pp", "virtual", "micro_batches"),
    [("[*-]|[*-]", 2, 1, 4), ("[*-]|[*-]|[*-]|[*-]", 4, 1, 6), ("[*-]|[*-]|[*-]|[*-]", 2, 2, 4)],
)
def test_the_executed_log_has_the_bubble_of_the_plan(corpus, tmp_path, pattern, pp, virtual, micro_batches):
    run = piped(corpus, pattern, micro_batches, pp=pp)
    schedule = plan(run, pp).schedule
    lists = run_ranks(pp, executed, run, str(tmp_path))
    assert [" ".join(each) for each in lists] == [" ".join(map(str, ops)) for ops in schedule.ops]
    for rank, ops in enumerate(schedule.ops):
        held = schedule.segments_of(rank)
        assert len(held) == virtual
        phases = sum(len(schedule.phases[segment]) for segment in held)
        assert len(compute_ops(ops)) == 2 * phases * micro_batches
    # Every segment has one block, and nothing else takes time.
    assert simulate(schedule).bubble == pytest.approx((pp - 1) / (virtual * micro_batches + pp - 1))


def written(rank: int, world: int, run: Run, out: str) -> tuple[torch.Tensor, str]:
    with begun(rank, world, run, out) as (state, _):
        rows = torch.arange(7).repeat(2, 1) + 90
        generate = partial(generate_distributed, state, run, ByteTokenizer(), temperature=0.9, seed=3)
        with pytest.raises(ConfigError, match=r"2 problems\nprompt = ''(.|\n)*tokens = -1"):
            generate("", tokens=-1)
        if world > 1:
            with pytest.raises(ConfigError, match=r'different texts.*\n  prompt: "to" on rank 0, '):
                generate("to" + rank * "!", tokens=1)
        text = generate("to be", tokens=5)
        return next_logits(state, run, rows), text


@pytest.mark.parametrize(
    ("world", "mesh"), [(2, {"pp": 2}), (4, {"pp": 2, "tp": 2}), (4, {"cp": 2, "pp": 2}), (2, {"ep": 2})]
)
def test_ranks_write_what_one_process_writes(corpus, tmp_path, world, mesh):
    alone, text = written(0, 1, piped(corpus, "[*-]|[*E]", 2), str(tmp_path))
    for logits_BV, same in run_ranks(world, written, piped(corpus, "[*-]|[*E]", 2, **mesh), str(tmp_path)):
        torch.testing.assert_close(logits_BV, alone, rtol=1e-5, atol=1e-6)
        assert same == text
