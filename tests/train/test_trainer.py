"""`Trainer`: a plan trained from Python, step by step or to its end, and several of them in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from braid.config import Run
from braid.errors import ConfigError
from braid.planning.plan import plan
from braid.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.runs import small_run


def short(shard: str = "all", steps: int = 2) -> Run:
    run = small_run()
    return replace(
        run,
        train=replace(run.train, steps=steps, batch_samples=4, eval_samples=4),
        mesh=replace(run.mesh, shard=shard),
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
    """Sharded runs with meshes of their own, one after the other, on the same ranks."""
    meshes = ("all", "none", "all")
    return [trained(Path(out) / str(number), short(shard), world) for number, shard in enumerate(meshes)]


def test_several_sharded_runs_follow_one_another_in_one_process(tmp_path: Path) -> None:
    for losses in run_ranks(2, several, str(tmp_path)):
        assert losses[0] == losses[1] == losses[2]


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan is for 2 ranks, but this process is alone: plan for 1, or"):
        Trainer(plan(short(), 2), out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_trainer_gives_its_folder_back(tmp_path: Path) -> None:
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True):
        with pytest.raises(ConfigError, match="is training into"):
            Trainer(plan(short(), 1), out=tmp_path, device="cpu")
    Trainer(plan(short(), 1), out=tmp_path, device="cpu").close()


def test_a_closed_trainer_does_nothing_more(tmp_path: Path) -> None:
    """Its folder may be another one's by now."""
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        pass
    for use in (trainer.step, trainer.train, trainer.evaluate, trainer.save, lambda: trainer.generate("def ")):
        with pytest.raises(ConfigError, match=r"trainer is closed and no longer holds .*: create another"):
            use()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_there_is_no_step_after_the_last(tmp_path: Path) -> None:
    """The plan could not resume from it."""
    with Trainer(plan(short(), 1), out=tmp_path, device="cpu", quiet=True) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match=r"all 2 steps are done: .* train.steps above 2"):
            trainer.step()
        assert trainer.step_number == 2


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'gpu' is not one of auto, cpu, cuda"):
        Trainer(plan(short(), 1), out=tmp_path, device="gpu")  # type: ignore[arg-type]


def test_a_quiet_trainer_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, short())
    assert capsys.readouterr().out == ""
