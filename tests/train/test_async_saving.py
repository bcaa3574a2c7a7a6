"""Saving beside training: what is written, in which order, and what is left when it fails or is interrupted."""

import errno
import json
import os
import random
import signal
import sys
import threading
from dataclasses import replace

import pytest
import torch

from braid import checkpoint
from braid.distributed.collectives import ALONE
from braid.errors import NumericsError, PreemptedError
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.train import async_saving, loop
from braid.train import state as states
from braid.train.async_saving import AsyncSaver, HostBuffer
from braid.train.host_memory import available_bytes
from braid.train.trainer import Trainer
from tests.checkpoint.test_interrupted import start
from tests.ranks import run_ranks
from tests.train.helpers import run_on

PATIENCE_S = 60


def train(run, out, world=1, rank=0, listeners=(), prepare=lambda trainer: None):
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if world > 1 else {}
    options = {"quiet": True, "listeners": listeners, "environment": environment}
    with Trainer(plan(run, world), out=out, device="cpu", **options) as trainer:
        prepare(trainer)
        return trainer.train()


def synchronous(run):
    return replace(run, train=replace(run.train, async_save=False))


def in_saver():
    return threading.current_thread().name.startswith("saving")


def steps_in(out):
    return [int(path.name.removeprefix("step-")) for path in sorted((out / "checkpoints").glob("*"))]


def parts_of(out, step):
    """The bytes of the parts of a checkpoint, and what its manifest says of them."""
    path = checkpoint.step_path(out / "checkpoints", step)
    manifest = checkpoint.verify(path)
    parts = {file: (path / file).read_bytes() for file in manifest.parts}
    return parts, manifest.tensors, {**manifest.extra, "run": None}


@pytest.fixture
def gate(monkeypatch):
    """A save of the thread waits for it, and never for long."""
    gate, real = threading.Event(), states.write

    def write(*arguments):
        if in_saver():
            assert gate.wait(PATIENCE_S), "nobody opened the gate"
        return real(*arguments)

    monkeypatch.setattr(states, "write", write)
    return gate


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_holds_the_bytes_of_its_step_however_much_later_it_is_written(
    dtype, corpus, tmp_path, monkeypatch, gate
):
    run = run_on(corpus, dtype=dtype, save_every=3, keep=9)
    train(synchronous(run), tmp_path / "beside-nothing")
    real, waiting = loop.begin_step, []

    def begin_step(state, *arguments, **options):
        pending = real(state, *arguments, **options)
        if state.step == 5:
            waiting.append(sorted(path.name for path in (tmp_path / "beside/checkpoints").glob("*")))
            gate.set()
        return pending

    monkeypatch.setattr(loop, "begin_step", begin_step)
    train(run, tmp_path / "beside")
    assert waiting == [[]], "two steps had changed the weights, and nothing of step 3 was written"
    for step in (3, 6, 8):
        assert parts_of(tmp_path / "beside", step) == parts_of(tmp_path / "beside-nothing", step)


def test_saves_follow_one_another_and_the_last_checkpoints_stay(corpus, tmp_path, monkeypatch):
    real, told = states.write, []

    def write(root, captured, job):
        told.append(("begins", captured.step, in_saver()))
        path = real(root, captured, job)
        told.append(("ends", captured.step, in_saver()))
        return path

    monkeypatch.setattr(states, "write", write)
    outcome = train(run_on(corpus, save_every=1, keep=2), tmp_path)
    assert told == [(what, step, step < 8) for step in range(1, 9) for what in ("begins", "ends")]
    assert steps_in(tmp_path) == [7, 8]
    assert outcome.checkpoint == tmp_path / "checkpoints/step-00000008"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_save_that_fails_is_reported_and_the_checkpoint_before_it_stands(
    error, corpus, tmp_path, monkeypatch, capsys
):
    real = os.fsync

    def fsync(descriptor):
        if in_saver() and "step-00000004.partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(error, os.strerror(error))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    train(run_on(corpus, save_every=2, keep=9), tmp_path)
    assert steps_in(tmp_path) == [2, 6, 8]
    said = capsys.readouterr().err
    assert said.count("training continues with the previous checkpoint") == 1
    assert f"step-00000004.partial/part-00000.safetensors: {os.strerror(error)}" in said


def failing_on_rank_1(rank, world, run, out, wrong):
    """At which step each rank hears of the save of step 2, which fails on rank 1; how its run ends."""
    real, heard = os.fsync, []

    def fsync(descriptor):
        if in_saver() and rank == 1 and "step-00000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    def prepare(trainer):
        result = AsyncSaver.result

        def note(saver):
            heard.append(trainer.state.step)
            return result(saver)

        AsyncSaver.result = note
        if rank == 1 and wrong == "not finite":
            name = "final_norm.weight"
            begin_step = loop.begin_step

            def poison(state, *arguments, **options):
                pending = begin_step(state, *arguments, **options)
                if state.step == 2:
                    state.optimizer.moment("exp_avg_sq", name).fill_(float("inf"))
                return pending

            loop.begin_step = poison

    if wrong == "full disk":
        os.fsync = fsync
    try:
        ended = train(run, out, world, rank, prepare=prepare).checkpoint.name
    except NumericsError as error:
        ended = str(error).splitlines()[0]
    return heard[0], ended


@pytest.mark.parametrize("wrong", ["full disk", "not finite"])
def test_all_ranks_hear_of_a_failed_save_after_the_same_step(wrong, corpus, tmp_path):
    run = run_on(corpus, save_every=2, keep=9, steps=4, spikes="off")
    first, second = run_ranks(2, failing_on_rank_1, run, tmp_path, wrong)
    assert first == second
    if wrong == "full disk":
        assert steps_in(tmp_path) == [4]
        assert first[1] == "step-00000004"
    else:
        assert steps_in(tmp_path) == []
        assert first[1].startswith("rank 1: step 2 is not saved: ")
        assert "optimizer.exp_avg_sq.final_norm.weight" in first[1]


@pytest.fixture
def open_when_awaited(gate, monkeypatch):
    """The save under way cannot end before somebody waits for it."""
    real = AsyncSaver.result

    def result(saver):
        gate.set()
        return real(saver)

    monkeypatch.setattr(AsyncSaver, "result", result)


@pytest.mark.parametrize("step", [2, 3])
def test_a_signal_waits_for_the_save_under_way(step, corpus, tmp_path, monkeypatch, open_when_awaited):
    """Asked to stop right after the step of that save, it is not written twice."""
    real, writes = loop.begin_step, []

    def begin_step(state, *arguments, **options):
        pending = real(state, *arguments, **options)
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return pending

    write = states.write
    monkeypatch.setattr(loop, "begin_step", begin_step)
    monkeypatch.setattr(states, "write", lambda *a: (writes.append(a[1].step), write(*a))[1])
    with pytest.raises(PreemptedError, match=f"step {step} of 8 is saved"):
        train(run_on(corpus, save_every=2), tmp_path)
    assert writes == steps_in(tmp_path) == sorted({2, step})
    assert checkpoint.latest(tmp_path / "checkpoints").damaged == ()


class Broken:
    def log(self, step, values):
        if step == 3:
            raise ZeroDivisionError("a listener that fails")

    def close(self):
        pass


def test_an_error_waits_for_the_save_under_way(corpus, tmp_path, open_when_awaited):
    with pytest.raises(ZeroDivisionError):
        train(run_on(corpus, save_every=2), tmp_path, listeners=[Broken()])
    assert steps_in(tmp_path) == [2]
    checkpoint.verify(tmp_path / "checkpoints/step-00000002")


def test_an_error_of_one_rank_alone_is_raised_at_its_next_step(corpus, tmp_path, monkeypatch):
    def write(*arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(states, "write", write)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(run_on(corpus, save_every=2), tmp_path)


def train_and_die_at(run, out, moment):
    """Train, and die by kill -9 right before the given file operation of the saving thread."""
    torch.set_num_threads(1)
    left = [moment]

    def count(event, arguments):
        if event.startswith(("open", "os.", "shutil.")) and in_saver() and str(out) in str(arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    train(run, out)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_any_moment_of_saving_and_pruning_the_newest_one_is_whole(kills, corpus, tmp_path):
    run = run_on(corpus, save_every=1, keep=1, steps=3 * kills + 4)
    train(synchronous(run), tmp_path / "whole")
    moments, out, seen = random.Random(kills), tmp_path / "killed", []
    for _ in range(kills):
        process = start(train_and_die_at, run, out, moments.randint(1, 75))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found = checkpoint.latest(out / "checkpoints")
        assert found.damaged == ()
        seen.append(0 if found.path is None else checkpoint.read_manifest(found.path).step)
    assert seen == sorted(seen)
    assert seen[-1] > 0
    train(run, out)
    files = [each / "metrics.jsonl" for each in (tmp_path / "whole", out)]
    losses = [[json.loads(line)["loss"] for line in file.read_text().splitlines()] for file in files]
    assert losses[0] == losses[1]
    assert steps_in(out) == [run.train.steps]


def test_without_room_for_copies_saving_is_synchronous(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(async_saving, "available_bytes", lambda: 1000)
    real, told = states.write, []
    monkeypatch.setattr(states, "write", lambda *a: (told.append(in_saver()), real(*a))[1])
    train(run_on(corpus, save_every=4), tmp_path)
    assert told == [False, False]
    said = capsys.readouterr().err
    assert "checkpoints are saved synchronously: copies of the state need 0.0 GiB" in said


def test_copies_are_made_in_memory_that_is_allocated_once():
    tensors = [torch.randn(3), torch.randn(5, 7, dtype=torch.float64).T, torch.tensor(2.0), torch.empty(0)]
    buffer = HostBuffer(async_saving.buffer_bytes(tensors), torch.device("cpu"))
    first = buffer.copy(tensors)
    buffer.wait()
    assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True))
    second = buffer.copy([-each for each in tensors])
    assert [each.data_ptr() for each in first] == [each.data_ptr() for each in second]
    assert torch.equal(first[1], -tensors[1])
    AsyncSaver(ALONE, torch.device("cpu")).close()


def copied_bytes(rank, world, run, out):
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if world > 1 else {}
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True, environment=environment) as trainer:
        captured = states.capture(trainer.state, run, trainer.data.train, trainer.data.tokenizer)
        return async_saving.buffer_bytes(captured.storages()), len(captured.storages())


@pytest.mark.parametrize(
    ("world", "dtype", "trained"), [(1, "bf16", "*"), (1, "bf16", "blocks.0.*"), (2, "fp32", "*")]
)
def test_a_plan_says_how_much_memory_copies_take(world, dtype, trained, corpus, tmp_path):
    run = replace(run_on(corpus, dtype=dtype, save_every=1), trained=(trained,))
    told = estimate(plan(run, world), "cpu").saved
    measured = [copied_bytes(0, 1, run, tmp_path)] if world == 1 else run_ranks(2, copied_bytes, run, tmp_path)
    size, tensors = max(measured)
    assert told <= size <= told + tensors * async_saving.ALIGNMENT


def test_available_memory_is_that_of_the_tightest_limit(tmp_path):
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   90 kB\n")

    def limit(folder, most, used, cached=None):
        folder.mkdir(parents=True, exist_ok=True)
        version = ("memory.max", "memory.current", "inactive_file")
        if "memory" in folder.parts:
            version = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for name, text in zip(version, (most, used), strict=False):
            (folder / name).write_text(f"{text}\n")
        if cached is not None:
            (folder / "memory.stat").write_text(f"anon 1\n{version[2]} {cached}\nfile 2\n")

    assert available_bytes(tmp_path / "none", own, root) is None
    assert available_bytes(meminfo, own, root) == 90 * 1024
    own.write_text("4:memory:/job\n0::/job/step\n")
    limit(root / "job/step", "max", 7)
    assert available_bytes(meminfo, own, root) == 90 * 1024
    limit(root / "job", 80_000, 30_000, cached=5_000)
    assert available_bytes(meminfo, own, root) == 55_000
    limit(root / "memory", 9223372036854771712, 10)
    limit(root / "memory/job", 40_000, 50_000)
    assert available_bytes(meminfo, own, root) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_state_of_a_gpu_is_copied_to_pinned_memory_before_the_next_step_changes_it(corpus, tmp_path):
    run = run_on(corpus, dtype="bf16", save_every=100)
    with Trainer(plan(run, 1), out=tmp_path, device="cuda", quiet=True) as trainer:
        trainer.step()
        captured = states.capture(trainer.state, run, trainer.data.train, trainer.data.tokenizer)
        before = {piece.name: piece.read().cpu().clone() for piece in captured.pieces(1)}
        the_loop = trainer._get_loop()
        the_loop.save(must=False)
        for _ in range(3):
            trainer.step()
        path = the_loop.saver.result()
        after = {piece.name: piece.read().cpu() for piece in captured.pieces(1)}
    stored = checkpoint.LazyCheckpoint(path)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, tensor in before.items():
        assert torch.equal(stored[name], tensor), name
