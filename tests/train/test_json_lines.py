"""Lines of metrics, samples and launches are there in full or not at all."""

import io
import json
import resource
import signal
from contextlib import contextmanager

import pytest

from braid.train.json_lines import append, cut_lines_after, write_line
from braid.train.metrics import Metrics


@contextmanager
def files_of_at_most(size: int):
    """Writing beyond fails in the middle of a line, as on a disk that gets full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [0, 1, 9, 10])
def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_behind(room, tmp_path):
    file = tmp_path / "lines"
    with io.FileIO(file, "a") as lines:
        write_line(lines, '{"step":1}')
        with files_of_at_most(11 + room), pytest.raises(OSError, match="File too large"):
            write_line(lines, '{"step":2}')
        write_line(lines, '{"step":3}')
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3]


def test_metrics_of_a_full_disk_are_whole_lines(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    with Metrics(file, after_step=0) as metrics:
        metrics.log(1, {"loss": 1.0})
        with files_of_at_most(file.stat().st_size + 5):
            metrics.log(2, {"loss": 2.0})
        metrics.log(3, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3]
    assert "training continues without it" in capsys.readouterr().err


def test_a_line_after_one_that_was_cut_off_is_a_line_of_its_own(tmp_path):
    file = tmp_path / "launches.jsonl"
    append(file, '{"step": 0}')
    with file.open("a") as lines:
        lines.write('{"step": 1, "wor')
    append(file, '{"step": 2}')
    assert file.read_text().splitlines() == ['{"step": 0}', '{"step": 1, "wor', '{"step": 2}']


ODD = [
    "",
    "5",
    "[]",
    '{"step": NaN}',
    '{"step": null}',
    f'{{"step": {"9" * 400}}}',
    "[" * 100_000,
    '{"loss": 1}',
]


@pytest.mark.parametrize("line", ODD, ids=lambda line: line[:20])
def test_a_line_without_a_step_is_moved_and_not_lost(line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    cut_lines_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics-cut.jsonl").read_text() == f"{line}\n"


def test_a_file_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").write_text('{"step": 1}\n{"step": 2}\n')
    file = tmp_path / "metrics.jsonl"
    file.symlink_to("elsewhere")
    cut_lines_after(file, 1)
    assert file.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == '{"step": 1}\n'
