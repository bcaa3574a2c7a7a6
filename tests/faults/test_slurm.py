"""The Slurm job script, with programs of Slurm that only write down what they are asked."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm_train.sh"

SCONTROL = """#!/bin/bash
[ "$1" = show ] && printf 'node7\\nnode8\\n' || echo "$@" >> "$ASKED"
"""
SRUN = """#!/bin/bash
echo "srun $@" >> "$ASKED"
[ -n "$SAVES" ] && mkdir -p "$SAVES"
trap 'sleep 0.2; echo saved >> "$ASKED"; exit 1' TERM
echo started
[ "$RUNS" = forever ] && while true; do sleep 0.05; done
exit "$RUNS"
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job, and the file with what Slurm was asked."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **job, "ASKED": str(tmp_path / "asked"), "SAVES": "", "PATH": path}


def ended(
    environment: dict[str, str], out: Path, number: signal.Signals | None = None
) -> tuple[int, list[str]]:
    """The exit code of a job, and what Slurm was asked; a signal is sent once the step runs."""
    command = [str(SCRIPT), str(out), "tiny", "--mesh.tp", "2"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "started\n"
        if number is not None:
            job.send_signal(number)
    return job.returncode, Path(environment["ASKED"]).read_text().splitlines()


def test_a_job_that_is_asked_to_stop_waits_for_the_save_and_is_requeued(slurm, tmp_path):
    code, (step, *rest) = ended({**slurm, "RUNS": "forever"}, tmp_path / "out", signal.SIGTERM)
    assert (code, rest) == (1, ["saved", "requeue 12"])
    assert "--rdzv-endpoint node7:29500 --rdzv-id 12 -m braid train tiny --mesh.tp 2 --out" in step


def test_a_job_that_fails_is_requeued_if_it_has_saved(slurm, tmp_path):
    saves = tmp_path / "out" / "checkpoints" / "step-00000010"
    code, asked = ended({**slurm, "RUNS": "1", "SAVES": str(saves)}, tmp_path / "out")
    assert (code, asked[1:]) == (1, ["requeue 12"])
    os.utime(saves, (1, 1))
    code, asked = ended({**slurm, "RUNS": "1"}, tmp_path / "out")
    assert (code, len(asked)) == (1, 3)  # the step of the second job, and no requeue


def test_a_job_that_is_done_is_not_requeued(slurm, tmp_path):
    code, asked = ended(
        {**slurm, "RUNS": "0", "SAVES": str(tmp_path / "out/checkpoints/step-1")}, tmp_path / "out"
    )
    assert (code, len(asked)) == (0, 1)


def test_a_job_without_words_says_what_it_needs(slurm):
    told = subprocess.run([str(SCRIPT), "out"], env=slurm, capture_output=True, text=True)
    assert told.returncode == 2
    assert "OUT RECIPE" in told.stderr
