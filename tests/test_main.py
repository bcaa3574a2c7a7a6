"""What ends `braid`: a signal, or the command itself."""

import os
import signal
import sys
from io import StringIO

import pytest

import braid.cli
from braid.errors import ExitCode


@pytest.fixture
def run():
    """The entry point. Its module handles SIGTERM from the import on, which pytest should not."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        from braid.__main__ import run

        yield run
    finally:
        signal.signal(signal.SIGTERM, before)


def ending_with(monkeypatch, code):
    def main():
        print("said before the end")
        print("an error before the end", file=sys.stderr)
        raise SystemExit(code)

    monkeypatch.setattr(braid.cli, "main", main)


def test_a_command_that_ends_itself_keeps_its_exit_code(run, monkeypatch):
    ending_with(monkeypatch, ExitCode.CONFIG)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == ExitCode.CONFIG


class Unflushed(StringIO):
    """A stream whose text is lost unless it is flushed."""

    def __init__(self):
        super().__init__()
        self.shown = ""

    def flush(self):
        self.shown = self.getvalue()


def test_a_terminated_command_shows_what_it_has_said_and_leaves_at_once(run, monkeypatch):
    class Left(BaseException):
        """In place of the end of this process."""

    def leave(code):
        raise Left(code)

    ending_with(monkeypatch, ExitCode.TERMINATED)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "stdout", Unflushed())
    monkeypatch.setattr(sys, "stderr", Unflushed())
    with pytest.raises(Left) as left:
        run()
    assert left.value.args == (ExitCode.TERMINATED,)
    assert sys.stdout.shown == "said before the end\n"
    assert sys.stderr.shown == "an error before the end\n"
