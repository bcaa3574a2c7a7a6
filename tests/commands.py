"""`braid` with some words in a process of its own, forked from one that has torch loaded: it begins at once.

with start(["train", ...]) as process:
    for line in process.stdout: ...
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate()
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Self

import torch

from braid.cli import main
from tests.ranks import warm_server, without_main


class Command:
    """A command that runs, as `subprocess.Popen` shows one."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        receive, send = warm_server().Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with the command)
        self._process = warm_server().Process(
            target=_run, args=([*words], environment, send, self._errors.name)
        )
        with without_main():
            self._process.start()
        send.close()
        self.stdout = os.fdopen(os.dup(receive.fileno()), errors="replace")
        receive.close()

    @property
    def returncode(self) -> int | None:
        """Negative where a signal ended it; None as long as it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self) -> tuple[str, str]:
        """All it still says, and all of its errors."""
        told = "" if self.stdout.closed else self.stdout.read()
        self._process.join()
        with open(self._errors.name) as file:
            return told, file.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self._process.join()
        self._errors.close()


def start(words: Sequence[str], **environment: str) -> Command:
    """With variables of the environment besides those of this process."""
    return Command(words, environment)


def _run(words: list[str], environment: Mapping[str, str], out: Connection, errors: str) -> None:
    os.environ.update(environment)
    os.dup2(out.fileno(), 1)
    out.close()
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = ["-c"]
    torch.set_num_threads(1)
    code = main(words)
    sys.stdout.flush()
    sys.exit(code)
