"""What a person sees while a run is trained."""

from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from braid.console import Line, duration, flush_at_exit, magnitude, say, table, warn
from braid.train.device import choose_device


def line(**changes):
    figures = {
        "step": 120,
        "steps": 400,
        "loss": 2.412,
        "grad_norm": 0.81,
        "lr": 2.9e-4,
        "tokens_per_s": 21_000.0,
        "mfu": None,
        "memory_bytes": 2**29,
        "seconds_left": 41.0,
    }
    return str(Line(**{**figures, **changes}))


def test_a_progress_line_reads_at_a_glance():
    assert line() == "step 120/400  loss 2.412  gnorm 0.81  lr 2.9e-4  21.0k tok/s  peak 0.5 GiB  eta 0m41s"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full, as on Linux")
def test_a_log_on_a_full_disk_ends_no_run():
    log = FULL.open("w")
    with redirect_stdout(log), redirect_stderr(log):
        for _ in range(3):
            say("step 1/400" * 2000)
            warn("a rank is slow")
        flush_at_exit()
    log.close()  # nothing is left that could fail


def test_mfu_is_shown_only_where_the_peak_is_known():
    assert "41.3% mfu" in line(mfu=0.4131)
    assert "mfu" not in line()


def test_lines_keep_their_width():
    assert len(line()) == len(line(step=7, loss=1.0, grad_norm=1.2345, lr=1e-3, tokens_per_s=999_960.0))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (21_000, "21.0k"),
        (999_999, "1.00M"),
        (1.02e6, "1.02M"),
        (2e9, "2.00G"),
    ],
)
def test_magnitudes(number, text):
    assert magnitude(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0m00s"), (41, "0m41s"), (725, "12m05s"), (3600, "1h00m"), (11_220, "3h07m")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu, 1 thread"), (3, "cpu, 3 threads")])
def test_threads_are_counted_as_a_person_does(monkeypatch, threads, name):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert choose_device("cpu").name == name


def test_tables_align():
    assert table([("a", "x"), ("long", "y"), ("", "z")]) == "a     x\nlong  y\n      z"
