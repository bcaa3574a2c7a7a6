"""metrics.jsonl, and whoever else listens."""

import json
import math
import shutil
import sys
import types

import pytest

from braid.errors import ConfigError
from braid.train.metrics import Metrics, TensorBoard, Wandb


def steps_in(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_every_step_is_one_json_object_a_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with Metrics(file, after_step=0) as metrics:
        metrics.log(1, {"loss": 2.5, "mfu": None})
        metrics.log(2, {"loss": math.nan})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "loss": 2.5, "mfu": None},
        {"step": 2, "loss": None},
    ]


def test_continuing_moves_later_lines_away_and_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    with Metrics(file, after_step=2) as metrics:
        metrics.log(3, {})
    assert steps_in(file) == [1, 2, 3]
    assert (tmp_path / "metrics-cut.jsonl").read_text() == '{"step": 3}\n{"step": 4, "lo\n'
    with Metrics(file, after_step=1):
        pass
    assert (tmp_path / "metrics-cut.jsonl").read_text().splitlines()[2:] == ['{"step": 2}', '{"step": 3}']


def test_a_file_that_cannot_be_written_is_a_setting_to_change(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        Metrics(tmp_path / "metrics.jsonl", after_step=0)


def test_a_folder_that_is_deleted_under_the_run_is_made_again(tmp_path, capsys):
    file = tmp_path / "run" / "metrics.jsonl"
    with Metrics(file, after_step=0) as metrics:
        metrics.log(1, {})
        shutil.rmtree(tmp_path / "run")
        metrics.log(2, {})
        metrics.log(3, {})
    assert steps_in(file) == [2, 3]
    assert capsys.readouterr().err.count("was deleted while the run writes to it") == 1


def test_listeners_hear_every_step_and_are_closed(tmp_path):
    heard = []

    class Listener:
        def log(self, step, metrics):
            heard.append((step, dict(metrics)))

        def close(self):
            heard.append("closed")

    with Metrics(tmp_path / "metrics.jsonl", after_step=0, listeners=[Listener()]) as metrics:
        metrics.log(1, {"loss": 1.0})
    assert heard == [(1, {"loss": 1.0}), "closed"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_listener_whose_package_is_missing_says_what_to_install(package, tmp_path, monkeypatch):
    missing = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[package]
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"--{package} needs the package {package}"):
        TensorBoard(tmp_path) if package == "tensorboard" else Wandb("project", tmp_path, {})


def test_listeners_speak_their_packages_language(tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder):
            self.add_scalar = lambda *words: told.append(words)
            self.close = lambda: told.append("closed")

    class Run:
        log = staticmethod(lambda metrics, step: told.append((metrics, step)))
        finish = staticmethod(lambda: told.append("finished"))

    board = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **words: Run))
    for listener in (TensorBoard(tmp_path), Wandb("project", tmp_path, {})):
        listener.log(3, {"loss": 1.5, "mfu": None})
        listener.close()
    assert told == [("loss", 1.5, 3), "closed", ({"loss": 1.5}, 3), "finished"]


def test_a_disk_that_is_full_costs_lines_and_not_the_run(tmp_path, capsys):
    metrics = Metrics(tmp_path / "metrics.jsonl", after_step=0)
    metrics._lines.close()
    metrics._lines = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - it is closed by __exit__
    with metrics:
        metrics.log(1, {"loss": 1.0})
        metrics.log(2, {"loss": 1.0})
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_bytes_that_are_no_text_do_not_stop_a_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\xff\x00')
    with Metrics(file, after_step=1) as metrics:
        metrics.log(2, {})
    assert steps_in(file) == [1, 2]
