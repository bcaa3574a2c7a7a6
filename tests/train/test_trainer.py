"""`Trainer`: a plan trained from Python, step by step or to its end, and several of them in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from braid.config import Mesh, Run
from braid.errors import ConfigError
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.train.trainer import MARGIN, Trainer
from tests.ranks import run_ranks
from tests.runs import small_run


def short(**mesh: Any) -> Run:
    run = small_run()
    return replace(
        run,
        train=replace(run.train, steps=2, batch_samples=4, eval_samples=4),
        mesh=replace(run.mesh, **mesh),
    )


def trained(out: Path, run: Run, world: int = 1) -> list[float]:
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True) as trainer:
        outcome = trainer.train()
        assert outcome.val_loss == trainer.evaluate()
        text = trainer.generate("def ", tokens=2)
        assert text.startswith("def ")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_several_runs_follow_one_another_in_one_process(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / name, short()) for name in ("one", "two"))
    assert len(first) == 2
    assert first == second


def test_steps_by_hand_are_those_of_a_run(tmp_path: Path) -> None:
    losses = trained(tmp_path / "whole", short())
    with Trainer(plan(short(), 1), out=tmp_path / "steps", device="cpu", quiet=True) as trainer:
        assert trainer.step().loss == losses[0]
        assert trainer.step_number == 1
        saved = trainer.save()
    assert saved.name == "step-00000001"
    with Trainer(plan(short(), 1), out=tmp_path / "steps", device="cpu", quiet=True) as trainer:
        assert trainer.resumed == saved
        assert trainer.step().loss == losses[1]


def several(rank: int, world: int, out: str) -> list[list[float]]:
    """Sharded runs with meshes of their own, one after the other, on the same ranks. Some meshes have the same
    ranks as an earlier one, whose communicators are closed."""
    meshes: list[dict[str, Any]] = [{}, {"tp": 2}, {"shard": "none"}, {"pp": 2}, {}]
    return [trained(Path(out) / str(number), short(**mesh), world) for number, mesh in enumerate(meshes)]


def test_several_sharded_runs_follow_one_another_in_one_process(tmp_path: Path) -> None:
    for losses in run_ranks(2, several, str(tmp_path)):
        assert losses[0] == losses[2] == losses[4]
        assert losses[0] == pytest.approx(losses[1]) == losses[3]


def several_of_one_mesh(rank: int, world: int, out: str) -> list[list[float]]:
    """Its axes of one rank have groups of their own, which close with a trainer: the next mesh is equal to that
    of the trainer before it, and DTensor takes them for one another."""
    run = replace(short(), mesh=Mesh(pp=2))
    return [trained(Path(out) / str(number), run, world) for number in range(2)]


def test_several_runs_of_one_mesh_follow_one_another_in_one_process(tmp_path: Path) -> None:
    for losses in run_ranks(2, several_of_one_mesh, str(tmp_path)):
        assert losses[0] == losses[1]


def timeouts(rank: int, world: int, out: str) -> set[timedelta]:
    """Those of all communicators that trainers open: of groups, pipelines and replicas."""
    found, opened = set(), dist.distributed_c10d._world.pg_map
    for number, mesh in enumerate((Mesh(pp=2), Mesh(replicate=2))):
        before, run = set(opened), replace(short(), mesh=mesh)
        run = replace(run, train=replace(run.train, stall_timeout_s=5000.0))
        with Trainer(plan(run, world), out=Path(out) / str(number), device="cpu", quiet=True):
            handles = set(opened) - before
            assert handles
            found |= {each._get_backend(torch.device("cpu")).options._timeout for each in handles}
    return found


def test_every_communicator_waits_longer_than_the_watchdog(tmp_path: Path) -> None:
    for found in run_ranks(2, timeouts, str(tmp_path)):
        assert found == {timedelta(seconds=5000) + MARGIN}


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan is for 2 ranks, but this process is alone: plan for 1, or"):
        Trainer(plan(short(), 2), out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_trainer_gives_its_folder_back(tmp_path: Path) -> None:
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True):
        with pytest.raises(ConfigError, match="this process is training into"):
            Trainer(plan(short(), 1), out=tmp_path, device="cpu")
    Trainer(plan(short(), 1), out=tmp_path, device="cpu").close()


def test_a_closed_trainer_refuses(tmp_path: Path) -> None:
    """Its lock is gone: another trainer may be writing into the folder."""
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        trainer.step()
    for use in (trainer.step, trainer.train, trainer.evaluate, trainer.save, lambda: trainer.generate("def ")):
        with pytest.raises(ConfigError, match="this trainer is closed"):
            use()
    assert trainer.step_number == 1
    assert not list(tmp_path.glob("checkpoints/*"))


def test_no_step_follows_the_last_one(tmp_path: Path) -> None:
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        trainer.step(), trainer.step()
        with pytest.raises(ConfigError, match="the run is complete: step 2 of 2 is done"):
            trainer.step()
        assert trainer.train().checkpoint.name == "step-00000002"  # saved now: `step` saves nothing
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        assert trainer.train().checkpoint == trainer.resumed


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device tpu: must be one of auto, cpu, cuda"):
        Trainer(plan(short(), 1), out=tmp_path, device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device tpu: must be cpu or cuda"):
        estimate(plan(short(), 1), "tpu")


def test_a_quiet_trainer_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, short())
    assert capsys.readouterr().out == ""
