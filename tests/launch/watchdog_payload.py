"""`braid` with a mishap in the third step of rank 0: `python -m tests.launch.watchdog_payload ACTION WORDS`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from braid.cli import main
from braid.train import loop

FOREVER = threading.Event()
"""Is never set."""


def hang() -> None:
    FOREVER.wait()


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_slow() -> None:
    """Much more work than there is in a step."""
    x = torch.ones(256, 256)
    for _ in range(200):
        x = x @ x / 256


def with_mishap(mishap: Callable[[], None]) -> None:
    """Have it happen in every forward from the third step on."""
    real = loop.begin_step

    def begin_step(state: Any, *arguments: Any, **options: Any) -> Any:
        if state.step == 2 and state.model.groups.world.rank == 0:
            state.model.embedding.register_forward_pre_hook(lambda *_: mishap())
        return real(state, *arguments, **options)

    loop.begin_step = begin_step


if __name__ == "__main__":
    with_mishap({each.__name__: each for each in (hang, be_killed, be_stopped, be_slow)}[sys.argv[1]])
    sys.exit(main(sys.argv[2:]))
