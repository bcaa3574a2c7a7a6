"""The run directory: the paths of a run's files, and the lock that keeps out a second writer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from braid.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """The output folder of a run."""

    out: Path

    @property
    def lock_file(self) -> Path:
        return self.out / "lock"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.out / "samples.jsonl"

    @property
    def launches(self) -> Path:
        return self.out / "launches.jsonl"

    @property
    def status(self) -> Path:
        return self.out / "status.json"

    @property
    def failures(self) -> Path:
        return self.out / "failures"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and hold an exclusive lock on it. The lock ends with the process."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = os.fdopen(os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666), "r+", errors="replace")
        except OSError as error:
            raise self._unusable(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "another one"
                if owner == str(os.getpid()):
                    raise ConfigError(
                        f"this process is training into {self.out}: close that Trainer, or set another out"
                    ) from None
                raise ConfigError(
                    f"process {owner} is training into {self.out}: wait for it, or set another --out"
                ) from None
            except OSError as error:  # a filesystem without locks
                raise self._unusable(error) from error
            try:
                # Unbuffered: what does not fit on a full disk would fail again when the file is closed.
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
            except OSError as error:
                raise self._unusable(error) from error
            yield

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"--out {self.out} cannot be used: {error.strerror}; set another folder")
