"""The run directory: where everything of a run goes, and who may write there."""

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
    """The folder of a run."""

    out: Path

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other processes from training into it at the same time."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = (self.out / "lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"--out {self.out} cannot be used: {error.strerror}; set another folder"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                holder = lock.read().strip() or "another one"
                raise ConfigError(
                    f"process {holder} is training into {self.out}: wait for it, or set another --out"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield
