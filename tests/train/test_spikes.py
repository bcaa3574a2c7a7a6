"""Spikes in training: a step with one is reported or skipped, after a resume and on ranks as in one go."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from braid.config import Mesh
from braid.planning.plan import plan
from braid.train.device import choose_device
from braid.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.helpers import run_on, started, train_to_end

AT = 7
"""The step with a spike."""


def spiking(corpus, **train):
    """A run with a short window."""
    return run_on(corpus, dtype="fp64", spike_window=8, spike_sigma=4.0, **train)


def grow(state):
    """A hundred-million-fold gradient in step AT."""

    def forward(module, inputs, output):
        if state.step + 1 == AT and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e8)

    state.model.get_submodule("final_norm").register_forward_hook(forward)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train(run, out):
    feed, state, places = started(run, out)
    grow(state)
    train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)
    return state


def weights(state):
    return {name: main.clone() for name, main in state.optimizer.main.items()}


@pytest.mark.parametrize("policy", ["off", "warn", "skip"])
def test_a_spike_is_reported_and_skipped_if_asked_for(policy, corpus, tmp_path, capsys):
    train(spiking(corpus, spikes=policy), tmp_path)
    told = lines(tmp_path)
    assert [line["step"] for line in told if line["spike"]] == ([] if policy == "off" else [AT])
    assert [line["step"] for line in told if line["skipped"]] == ([AT] if policy == "skip" else [])
    said = capsys.readouterr().err
    assert (f"step {AT}" in said) == (policy != "off")
    assert ("skipped: a spike of 4 standard deviations: grad_norm" in said) == (policy == "skip")


def test_a_run_that_resumes_decides_as_one_that_was_not_interrupted(corpus, tmp_path):
    run = spiking(corpus, spikes="skip", save_every=5)
    whole = weights(train(run, tmp_path / "whole"))
    older = "checkpoints/step-00000005"
    shutil.copytree(tmp_path / "whole" / older, tmp_path / "parts" / older)
    parts = weights(train(run, tmp_path / "parts"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert [line["skipped"] for line in lines(tmp_path / "parts")] == [0, 1, 0]


def on_ranks(rank, world, run, out):
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True, environment=environment) as trainer:
        grow(trainer.state)
        trainer.train()


def test_ranks_decide_as_one_process(corpus, tmp_path):
    run = spiking(corpus, spikes="skip")
    train(run, tmp_path / "one")
    run_ranks(2, on_ranks, replace(run, mesh=Mesh()), tmp_path / "two")
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert (one["spike"], one["skipped"]) == (two["spike"], two["skipped"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-10)
