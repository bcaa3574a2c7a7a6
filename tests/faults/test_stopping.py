"""SIGTERM at moments at which there is nothing to save yet, to real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from braid.errors import ExitCode


def test_sigterm_ends_a_command_that_has_loaded_nothing():
    code = "import os, signal, braid.__main__; os.kill(os.getpid(), signal.SIGTERM)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (ExitCode.TERMINATED, "")


@pytest.mark.long
@pytest.mark.parametrize("module", ["tyro", "torch._utils", "torch.distributed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_while_modules_are_loaded_leaves_nothing_behind(module: str, ranks: int, tmp_path: Path):
    """Python tells of each module that it has loaded: that is when the signal comes."""
    words = ["train", "tiny", "--out", str(tmp_path / "run"), "--world", str(ranks)]
    command = [sys.executable, "-X", "importtime", "-m", "braid", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        told = []
        for line in process.stderr:
            told.append(line)
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGTERM)
                break
        told += process.stderr
        code = process.wait()
    said = [line for line in told if not line.startswith("import time:")]
    assert code == ExitCode.TERMINATED, said
    assert not any("Traceback" in line for line in said), said
    assert not (tmp_path / "run").exists()
