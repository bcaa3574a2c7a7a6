"""Checkpoints in memory: replicated on a neighbour, for restarts without a disk.

Every machine has a folder in shared memory with the parts of its own ranks and those of another machine's, as
files like those on disk. What a process leaves there survives it; what a machine takes with it, its neighbour
has. Ranks that start again look which parts are left, and fetch those that they need and their machine lacks. A
step counts if every part of it is left somewhere, to the last bit.

    memory = MemoryCheckpoints(folder, job)
    memory.save(captured, group)             keeps a step in place of the one before
    memory.restore(state, after=20)          the folder of a newer step, which every rank can load; or None

All of these are collective.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braid import checkpoint
from braid.checkpoint import parts
from braid.checkpoint.manifest import MANIFEST_NAME
from braid.distributed.collectives import Group
from braid.errors import CheckpointError, ConfigError
from braid.launch.process import all_gather_json, fail_together
from braid.train import state as states
from braid.train.state import RNG, Capture, JobState

SHARED_MEMORY = Path("/dev/shm")

MESSAGE_BYTES = 256 * 2**20
"""Files travel in messages of this size."""

Offer = Mapping[str, Any]
"""What a machine has of a step: `manifest`, its checksum; `all`, sizes of the parts by name; `valid`, the names
of those that are there and whole."""


def memory_folder(out: Path, job_id: str) -> Path:
    """The folder in shared memory of a run that a launcher has started."""
    name = hashlib.sha256(f"{job_id} {out.resolve()}".encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"braid-{os.geteuid()}-{name}"


def neighbours(machines: Sequence[str]) -> list[int]:
    """By rank, the rank on the next machine that keeps its part; itself if there is one machine only."""
    ranks_of = {
        machine: [rank for rank, each in enumerate(machines) if each == machine] for machine in machines
    }
    order = list(ranks_of)
    found = []
    for rank, machine in enumerate(machines):
        keepers = ranks_of[order[(order.index(machine) + 1) % len(order)]]
        found.append(rank if len(order) == 1 else keepers[ranks_of[machine].index(rank) % len(keepers)])
    return found


def newest_step(offers: Sequence[Mapping[str, Offer]]) -> int | None:
    """The newest step of which every part is left on some machine; `offers` are by rank, and by step."""
    for step in sorted({int(step) for offer in offers for step in offer}, reverse=True):
        having = [offer[str(step)] for offer in offers if str(step) in offer]
        left = {file for each in having for file in each["valid"]}
        if len({each["manifest"] for each in having}) == 1 and left >= set(having[0]["all"]):
            return step
    return None


@dataclass(frozen=True, kw_only=True)
class _Replication:
    """Copies what ranks write to their neighbours."""

    leads: bool
    neighbours: Sequence[int]
    job: Group

    def exchange(self, folder: Path, records: Sequence[checkpoint.Record]) -> None:
        transfers = [
            _Transfer(file, part["size"], source, target)
            for source, target in enumerate(self.neighbours)
            for file, part in records[source]["parts"].items()
            if target != source
        ]
        _transfer(folder, transfers, self.job)


@dataclass(frozen=True)
class _Transfer:
    """A file that goes from one rank to another."""

    file: str
    size: int
    source: int
    target: int


class MemoryCheckpoints:
    """The checkpoints in memory of a run."""

    def __init__(self, folder: Path, job: Group, machine: str | None = None) -> None:
        """`machine` is the name of this rank's: ranks of the same one share `folder`."""
        machine = platform.node() if machine is None else machine
        self.folder, self._job = folder, job
        self._machines = all_gather_json(machine, job)
        self._leads = self._machines.index(machine) == job.rank
        self._neighbours = neighbours(self._machines)
        with fail_together(job):
            self._open_folder()

    def _open_folder(self) -> None:
        """Others may write to shared memory too: the folder is this user's alone."""
        if not self._leads:
            return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise ConfigError(
                f"train.memory_save_every needs {self.folder}: {error.strerror}; set it to 0"
            ) from error
        if found.st_uid != os.geteuid() or not self.folder.is_dir() or self.folder.is_symlink():
            raise ConfigError(f"{self.folder} belongs to somebody else: set train.memory_save_every to 0")

    def save(self, captured: Capture, job: Group) -> None:
        """Keep what was captured in place of the step before. `job` may be any group of all ranks."""
        with fail_together(job):
            self._open_folder()
        replication = _Replication(leads=self._leads, neighbours=self._neighbours, job=job)
        path = states.write(self.folder, captured, job, replication)
        if self._leads:
            for older in checkpoint.complete_steps(self.folder).values():
                if older != path:
                    shutil.rmtree(older, ignore_errors=True)

    def clear(self) -> None:
        """Forget everything, because the disk has what is newest."""
        if self._leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self, state: JobState, after: int) -> Path | None:
        """The folder of the newest step that is left, if it is beyond `after`, with all that the ranks of this
        machine load of it."""
        offers = all_gather_json(self._offer(after) if self._leads else {}, self._job)
        step = newest_step(offers)
        if step is None:
            return None
        of_step: dict[int, Offer] = {
            rank: offer[str(step)] for rank, offer in enumerate(offers) if str(step) in offer
        }
        path, offer = checkpoint.step_path(self.folder, step), next(iter(of_step.values()))
        if self._leads:
            path.mkdir(exist_ok=True)
        has = {rank: {MANIFEST_NAME, *each["valid"]} for rank, each in of_step.items()}
        sizes = {MANIFEST_NAME: offer["manifest_bytes"], **offer["all"]}
        self._fetch(path, has, sizes, [MANIFEST_NAME])
        needed = _needed(path, state)
        self._fetch(path, has, sizes, needed)
        return path

    def _offer(self, after: int) -> dict[str, Offer]:
        """What this machine has of the steps beyond `after`. Reads every byte."""
        found: dict[str, Offer] = {}
        for step, path in checkpoint.complete_steps(self.folder).items():
            with suppress(CheckpointError, OSError):
                manifest, text = checkpoint.read_manifest(path), (path / MANIFEST_NAME).read_bytes()
                if step > after and manifest.step == step:
                    found[str(step)] = {
                        "manifest": hashlib.sha256(text).hexdigest(),
                        "manifest_bytes": len(text),
                        "all": {file: part.size for file, part in manifest.parts.items()},
                        "valid": [file for file in manifest.parts if _is_whole(path, file, manifest)],
                    }
        return found

    def _fetch(
        self, path: Path, has: Mapping[int, Collection[str]], sizes: Mapping[str, int], needed: Collection[str]
    ) -> None:
        """Bring files to the machines whose ranks need them and that lack them."""
        asked = all_gather_json([self._leads, sorted(needed)], self._job)
        by_machine: dict[str, set[str]] = {}
        leaders = {}
        for rank, (machine, (leads, files)) in enumerate(zip(self._machines, asked, strict=True)):
            by_machine.setdefault(machine, set()).update(files)
            if leads:
                leaders[machine] = rank
        transfers = [
            _Transfer(file, sizes[file], next(each for each in has if file in has[each]), leaders[machine])
            for machine, files in by_machine.items()
            for file in sorted(files)
            if file not in has.get(leaders[machine], ())
        ]
        _transfer(path, transfers, self._job)


def _is_whole(path: Path, file: str, manifest: checkpoint.Manifest) -> bool:
    chunks = [(name, chunk, manifest.tensors[name].dtype) for name, chunk in manifest.chunks_by_part()[file]]
    return not parts.find_faults(path, file, manifest.parts[file], chunks, lambda size: None)


def _needed(path: Path, state: JobState) -> set[str]:
    """The parts that this rank reads."""
    tensors = checkpoint.read_manifest(path).tensors
    files = {chunk.file for chunk in tensors[RNG].chunks}
    for name, box in states.boxes_in(path, state):
        stored = tensors[name].chunks if name in tensors else ()
        files |= {chunk.file for chunk in stored if checkpoint.overlap(chunk.box, box) is not None}
    return files


# -------------------------------------------------------------------------------------- between ranks


def _transfer(folder: Path, transfers: Sequence[_Transfer], job: Group) -> None:
    """Copy files of a folder from rank to rank. Collective; space is reserved before anything is sent, so that
    nobody waits for a rank without any."""
    with fail_together(job):
        for each in transfers:
            if each.target == job.rank:
                _reserve(folder / each.file, each.size)
    sent: list[dist.Work] = []
    for each in transfers:
        if each.source == job.rank:
            for message in _messages(folder / each.file, each.size):
                work = dist.isend(message, each.target, group=job.handle)
                assert work is not None, "this rank is in the group"
                sent.append(work)
    for each in transfers:
        if each.target == job.rank:
            for message in _messages(folder / each.file, each.size):
                dist.recv(message, each.source, group=job.handle)
    for work in sent:
        work.wait()
    with fail_together(job):
        pass  # a barrier: what a machine's first rank receives, all of its ranks read


def _reserve(path: Path, size: int) -> None:
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            # A file in shared memory without pages of its own ends the process once there are none left.
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise CheckpointError(f"cannot keep {path} in memory: {error.strerror}") from error


def _messages(path: Path, size: int) -> Sequence[Tensor]:
    """A file as tensors that share its memory."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).split(MESSAGE_BYTES)
