"""A deep model with several residual streams on two ranks, stopped and continued, as a person does it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from braid.cli import main
from braid.errors import ExitCode
from tests.commands import start

STEPS = 20

RECIPE = f"""
from braid.architecture import Attention, HyperConnections, Mlp, Model
from braid.config import Data, Mesh, Optim, Run, Train

def deep() -> Run:
    '''Eight layers, four streams, kept between spans of two blocks.'''
    return Run(
        model=Model(
            pattern="[*-][*-]|[*-][*-]", hidden=32, vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=8), mlp=Mlp(ffn=64),
            hyper=HyperConnections(streams=4, sinkhorn_steps=5),
        ),
        data=Data(sequence_tokens=32),
        optim=Optim(lr=1e-2),
        train=Train(
            steps={STEPS}, batch_samples=4, micro_batches=2, dtype="bf16", log_every=1, eval_samples=4,
            recompute=("hyper",), recompute_span=2,
        ),
        mesh=Mesh(pp=2),
    )
"""


def told(out: Path) -> list[list[float]]:
    """What does not depend on time or memory, step by step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in ("step", "loss", "grad_norm", "hyper_deviation", "lr")] for line in lines]


@pytest.mark.long
def test_a_deep_model_learns_on_ranks_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text number {number}, " + "and so on, " * 9)
    words = ["data", "build", "--input", str(tmp_path / "texts"), "--output", str(tmp_path / "corpus")]
    assert main([*words, "--validation", "0.2"]) == 0

    def train(out: Path) -> list[str]:
        words = ["train", f"{tmp_path}/mine.py:deep", "--data.sources", f"{tmp_path}/corpus", "--device", "cpu"]
        return [*words, "--world", "2", "--out", str(out)]

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    with start(train(whole)) as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    with start(train(parted)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"step {STEPS // 2}/{STEPS}"):
                process.send_signal(signal.SIGTERM)
                break
        process.communicate()
    assert process.returncode == ExitCode.PREEMPTED
    with start(train(parted)) as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    losses = [loss for _, loss, *_ in told(whole)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    assert told(parted) == told(whole)
