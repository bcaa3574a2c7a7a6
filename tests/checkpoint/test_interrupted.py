"""Killed, out of space or failing while saving: what was there before still loads, nothing is left over."""

import errno
import multiprocessing
import os
import random
import resource
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import braid.checkpoint
from braid.checkpoint import Piece, latest, read, read_manifest, save, verify
from braid.errors import CheckpointError
from tests.checkpoint.helpers import all_same, mixed_tensors, whole

STORE = str(Path(braid.checkpoint.__file__).parent)
DONE, LINE = b"S", b"."


def start(function, *arguments):
    """A child process that has torch loaded from the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks_preload"])
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def content(step):
    return mixed_tensors(seed=step)


def save_forever(root, first_step, progress):
    """Save one step after another; tell of every line of the store that runs, and of every step done."""
    torch.set_num_threads(1)

    def trace(frame, event, _argument):
        if not frame.f_code.co_filename.startswith(STORE):
            return None
        if event == "line":
            os.write(progress.fileno(), LINE)
        return trace

    sys.settrace(trace)
    for step in range(first_step, first_step + 10_000):
        save(root, step, whole(content(step)), extra={"step": step}, chunk_bytes=64)
        os.write(progress.fileno(), DONE)


def kill_after(root, first_step, lines):
    """Kill -9 a saving child once it has run so many lines of the store; returns how many saves were done."""
    receive, send = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = start(save_forever, root, first_step, send)
    send.close()
    seen = b""
    while len(seen) < lines:
        seen += os.read(receive.fileno(), lines - len(seen))
    process.kill()
    process.join()
    while rest := os.read(receive.fileno(), 65536):
        seen += rest
    receive.close()
    assert process.exitcode == -signal.SIGKILL
    return seen.count(DONE)


def lines_of_one_save(root):
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(STORE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save(root, 0, whole(content(0)), extra={}, chunk_bytes=64)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("times", [6, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_random_moments_of_saving_the_newest_complete_one_always_loads(times, tmp_path):
    moments = random.Random(0)
    one_save = lines_of_one_save(tmp_path / "other")
    root, newest = tmp_path / "root", 0
    for _ in range(times):
        newest += kill_after(root, newest + 1, moments.randint(1, 3 * one_save))
        found = latest(root)
        assert found.damaged == ()
        assert (found.path is None) == (newest == 0)
        if found.path is not None:
            # The child may have completed one more and been killed before it could say so.
            held = read_manifest(found.path).step
            assert held in (newest, newest + 1)
            assert all_same(read(found.path, content(held)), content(held))
            newest = held
    save(root, newest + 1, whole(content(newest + 1)), extra={})
    assert all(path.name.startswith("step-") and path.suffix == "" for path in root.iterdir())


def save_and_die_at(root, moment):
    """Re-save step 1 and die by kill -9 right before the given file operation."""
    torch.set_num_threads(1)
    left = [moment]

    def count(event, arguments):
        if event.startswith(("open", "os.", "shutil.")) and str(root) in str(arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(root, 1, whole(content(2)), extra={"version": 2})


def test_killed_before_every_file_operation_of_a_re_save_the_old_or_the_new_one_is_whole(tmp_path):
    versions = []
    for moment in range(1, 100):
        root = tmp_path / str(moment)
        save(root, 1, whole(content(1)), extra={"version": 1})
        process = start(save_and_die_at, root, moment)
        process.join()
        found = latest(root)
        assert found.damaged == ()
        version = verify(found.path).extra["version"]
        assert all_same(read(found.path, content(version)), content(version))
        versions.append(version)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        save(root, 3, [], extra={})
        assert {path.name for path in root.iterdir()} == {"step-00000001", "step-00000003"}
        assert verify(root / "step-00000001").extra["version"] == version
    assert versions == sorted(versions)
    assert versions.count(1) > 5
    assert versions.count(2) > 1


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        path = save(tmp_path, 7, [Piece.whole("w", torch.full((3,), value))], extra={"value": value})
        assert read(path, {"w": torch.empty(3)})["w"].tolist() == [value] * 3
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def largest_file(size):
    """No file may grow past `size`: the operating system refuses the write that would, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 1, whole(content(1)), extra={})
    return tmp_path


def only_step_1_is_there(root):
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert all_same(read(latest(root).path, content(1)), content(1))


@pytest.mark.parametrize("step", [1, 2])
def test_too_little_space_is_seen_before_anything_is_written(saved, step):
    with pytest.raises(CheckpointError, match=r"needs 3\.\d MiB, has 2\.0 MiB"):
        save(saved, step, [Piece.whole("w", torch.zeros(900_000))], extra={}, free_bytes=2 * 2**20)
    only_step_1_is_there(saved)


@pytest.mark.parametrize("step", [1, 2])
def test_a_write_that_fails_in_the_middle_leaves_nothing(saved, step):
    with largest_file(100_000), pytest.raises(CheckpointError, match=r"needs 1\.0 MiB, has .*iB") as caught:
        save(saved, step, [Piece.whole("w", torch.zeros(2**18))], extra={})
    assert isinstance(caught.value.__cause__, OSError)
    only_step_1_is_there(saved)


@pytest.mark.parametrize("fails_at", range(5))
@pytest.mark.parametrize("step", [1, 2])
def test_a_disk_that_is_full_at_any_sync_leaves_the_old_one_or_the_new_one(saved, monkeypatch, fails_at, step):
    calls = iter(range(100))
    real_fsync = os.fsync

    def fsync(descriptor):
        if next(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        save(saved, step, whole(content(5)), extra={})
    except CheckpointError as error:
        assert "No space left on device" in str(error)
    monkeypatch.undo()
    assert all("." not in path.name for path in saved.iterdir())
    found = latest(saved)
    assert found.damaged == ()
    assert any(all_same(read(found.path, content(seed)), content(seed)) for seed in (1, 5))


def test_a_step_that_cannot_take_its_place_leaves_the_old_one_of_that_step(saved, monkeypatch):
    real_rename = Path.rename

    def rename(path, target):
        if "partial" in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="cannot commit step 1"):
        save(saved, 1, whole(content(5)), extra={})
    monkeypatch.undo()
    only_step_1_is_there(saved)


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot begin step 1"):
        save(tmp_path / "file", 1, [], extra={})


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="step -1"):
        save(tmp_path, -1, [], extra={})
