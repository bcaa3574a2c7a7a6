"""Checkpoints in memory: what is left of them when processes, machines and bits are lost."""

import functools
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid import checkpoint
from braid.distributed.collectives import ALONE
from braid.errors import ExitCode
from braid.planning.plan import plan
from braid.train import loop, memory_checkpoints, trainer
from braid.train.memory_checkpoints import MemoryCheckpoints, neighbours, newest_step
from tests.launch.test_worker_pool import RECIPE, braid, start, workers_of
from tests.ranks import run_ranks
from tests.train.helpers import run_on

pytestmark = pytest.mark.costly("ranks train, crash and train again; a launcher starts them from nothing")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_a_neighbour_is_on_another_machine_and_every_machine_keeps_about_as_much(machines):
    found = neighbours(machines)
    if len(set(machines)) == 1:
        assert found == list(range(len(machines)))
        return
    assert all(machines[rank] != machines[other] for rank, other in enumerate(found))
    for machine in set(machines):
        kept = [found.count(rank) for rank, each in enumerate(machines) if each == machine]
        assert max(kept) - min(kept) <= 1


def offer(*valid, manifest="m"):
    return {"manifest": manifest, "manifest_bytes": 9, "all": {"a": 1, "b": 2}, "valid": list(valid)}


def test_a_step_counts_if_every_part_of_it_is_left_somewhere():
    assert newest_step([{}, {}]) is None
    assert newest_step([{"3": offer("a")}, {}]) is None
    assert newest_step([{"3": offer("a")}, {"3": offer("b")}]) == 3
    assert newest_step([{"3": offer("a", "b"), "12": offer("a")}, {"12": offer("a")}]) == 3
    assert newest_step([{"3": offer("a", "b"), "12": offer("a")}, {"12": offer("b")}]) == 12
    assert newest_step([{"12": offer("a")}, {"12": offer("b", manifest="other")}]) is None


class Crash(Exception):
    """Of all ranks at once."""


def trained(rank, world, run, out, machine, folder, crash_after=None):
    """Train; returns the checkpoint that was resumed from, and the losses of rank 0."""
    begin_step = loop.begin_step

    def begin_or_crash(state, *arguments, **options):
        if state.step == crash_after:
            raise Crash
        return begin_step(state, *arguments, **options)

    of_launcher, trainer.memory_folder = trainer.memory_folder, lambda out, job: folder
    trainer.MemoryCheckpoints = functools.partial(MemoryCheckpoints, machine=machine)
    loop.begin_step = begin_or_crash
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"} if world > 1 else {}
    launched = {**ranks, "TORCHELASTIC_RUN_ID": "1"}
    try:
        with trainer.Trainer(
            plan(run, world), out=out, device="cpu", quiet=True, environment=launched
        ) as training:
            training.train()
    except Crash:
        pass
    finally:
        loop.begin_step = begin_step
        trainer.memory_folder, trainer.MemoryCheckpoints = of_launcher, MemoryCheckpoints
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return training.resumed, [json.loads(line)["loss"] for line in lines]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def losing(rank, world, run, folder, lost):
    """Two machines with a rank each, which crash after step 5; then something is lost, and they start again."""
    torch.set_num_threads(1)
    machine = "ab"[rank]
    without = replace(run, train=replace(run.train, memory_save_every=0))
    _, whole = trained(rank, world, without, folder / "whole", machine, folder / "none")
    mine, both = folder / machine, [folder / "a", folder / "b"]
    trained(rank, world, run, folder / "out", machine, mine, crash_after=5)
    memory_checkpoints.all_gather_json(0, training_group(rank, world))
    kept = {each.name: sorted(path.name for path in (each / "step-00000004").iterdir()) for each in both}
    if rank == 0:
        if lost == "machine":
            shutil.rmtree(folder / "b")
        if lost in ("bit", "both copies"):
            flip_a_bit(folder / "a/step-00000004/part-00001.safetensors")
        if lost == "both copies":
            flip_a_bit(folder / "b/step-00000004/part-00001.safetensors")
    memory_checkpoints.all_gather_json(0, training_group(rank, world))
    machine = "c" if machine == "b" and lost == "machine" else machine
    resumed, losses = trained(rank, world, run, folder / "out", machine, folder / machine)
    left = [path.name for path in folder.glob("[abc]")]
    return kept, resumed and str(resumed.relative_to(folder)), losses == whole, left


def training_group(rank, world):
    return memory_checkpoints.Group(name="all", size=world, rank=rank, handle=torch.distributed.group.WORLD)


@pytest.mark.parametrize("lost", ["machine", "bit", "both copies"])
def test_after_a_crash_training_goes_on_from_what_is_left_in_memory(lost, corpus, tmp_path):
    """Steps 2 and 4 are in memory, none is on disk; a replacement of machine b is c."""
    run = run_on(corpus, memory_save_every=2, steps=7, batch_samples=4, eval_samples=0)
    told = run_ranks(2, losing, run, tmp_path, lost)
    everything = ["manifest.json", "part-00000.safetensors", "part-00001.safetensors"]
    assert told[0][0] == {"a": everything, "b": everything}
    other = "c" if lost == "machine" else "b"
    restored = [None, None] if lost == "both copies" else ["a/step-00000004", f"{other}/step-00000004"]
    assert [each[1] for each in told] == restored
    assert [each[2] for each in told] == [True, True], "the losses are those of a run that did not crash"
    assert told[0][3] == [], "what is on disk at the end is not kept twice"
    checkpoint.verify(tmp_path / "out/checkpoints/step-00000007")


@pytest.mark.parametrize(("crash", "resumed"), [(3, "out/checkpoints/step-00000003"), (4, "a/step-00000004")])
def test_what_is_newer_is_used(crash, resumed, corpus, tmp_path):
    run = run_on(corpus, memory_save_every=2, save_every=3, steps=5, eval_samples=0)
    trained(0, 1, run, tmp_path / "out", "a", tmp_path / "a", crash_after=crash)
    assert trained(0, 1, run, tmp_path / "out", "a", tmp_path / "a")[0] == tmp_path / resumed


def test_memory_that_is_full_stops_no_training(corpus, tmp_path):
    run = run_on(corpus, memory_save_every=2, steps=5, batch_samples=4, eval_samples=0)
    told = run_ranks(2, without_room, run, tmp_path)
    assert [len(losses) for _, losses in told] == [5, 5]


def without_room(rank, world, run, folder):
    def full(file, start, size):
        raise OSError(28, "No space left on device")

    os.posix_fallocate = full
    machine = "ab"[rank]
    return trained(rank, world, run, folder / "out", machine, folder / machine)


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(memory_checkpoints.ConfigError, match="belongs to somebody else"):
        MemoryCheckpoints(tmp_path / "link", ALONE)


@pytest.mark.long
def test_a_launcher_starts_ranks_again_from_memory_and_leaves_nothing_there(corpus, tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    words = ["train", f"{tmp_path}/mine.py:small", "--data.sources", str(corpus)]
    words += ["--out", str(tmp_path / "out")]
    words += ["--train.save-every", "0", "--train.memory-save-every", "3", "--train.steps", "60"]
    with start(braid(*words, "--world", "2", "--restarts", "1")) as launcher:
        for line in launcher.stdout:
            if line.startswith("step 20/"):
                os.kill(workers_of(launcher.pid)[1], signal.SIGKILL)
                break
        out, errors = launcher.communicate()
    assert launcher.returncode == ExitCode.OK, errors
    found = re.search(r"resuming from the checkpoint of (step-\d+) in memory, (\S+)/step-\d+:", errors)
    assert found, errors
    assert "the disk has none" in errors
    assert f"continues from step {int(found[1][5:])}" in out
    assert not Path(found[2]).exists()
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 61)]
