"""Entry point of `braid` and `python -m braid`.

SIGTERM counts from here on, before anything else is loaded, which takes seconds: it ends the command like
Ctrl-C, with everything cleaned up on the way, and an exit code of its own. The training loop handles it by
itself.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

TERMINATED = 143
"""`ExitCode.TERMINATED`: what a shell reports for a process that SIGTERM has ended."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def run() -> int:
    """Run the command line."""
    try:
        from braid.cli import main
        from braid.console import flush_at_exit

        code = main()
        flush_at_exit()
        return code
    except SystemExit as end:
        if end.code != TERMINATED:
            raise
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(TERMINATED)  # the interpreter may not shut down cleanly when it is stopped half-way


signal.signal(signal.SIGTERM, _terminate)

if __name__ == "__main__":
    sys.exit(run())
