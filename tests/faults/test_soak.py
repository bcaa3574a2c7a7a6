"""A training with faults ends with the losses and weights of one without, to the bit."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.soak import KINDS, rounds

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.costly(
    "a run, its restart and the one it is compared with: three starts of ranks that load torch"
)


def test_every_kind_of_fault_comes_once_in_a_round():
    drawn = rounds(KINDS, random.Random(3))
    first, second = ([next(drawn) for _ in KINDS] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(KINDS)
    assert first != second
    again = rounds(KINDS, random.Random(3))
    assert [next(again) for _ in range(2 * len(KINDS))] == first + second


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["braid", "torchrun"])
def test_a_flipped_bit_of_the_newest_checkpoint_and_kill_9_change_no_bit_of_a_run(launcher, tmp_path):
    command = [sys.executable, "-m", "scripts.soak", "--faults", "1", "--kinds", "flip", "--every", "0.5"]
    command += ["--world", "2", "--launcher", launcher, "--out", str(tmp_path / "soak.json")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    assert [fault["kind"] for fault in report["faults"]] == ["flip"]
    assert report["different"] == []
    assert report["steps"] > report["faults"][0]["step"]
