"""Gradients that are not finite: whose they are, before a reduction has spread them."""

from dataclasses import replace

import pytest
import torch

from braid.config import Mesh
from braid.distributed.groups import opened_groups
from braid.planning.plan import plan
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.nonfinite import Origin, describe_origins, find_origins
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.step import begin_step
from tests.ranks import run_ranks
from tests.train.helpers import run_on


def poison(module, which):
    """Make the gradient of a module's output infinite in each `which`-th of two micro-batches."""
    calls = []

    def forward(module, inputs, output):
        calls.append(None)
        if (len(calls) - 1) % 2 == which:
            output.register_hook(lambda gradient: gradient * float("inf"))

    module.register_forward_hook(forward)


def search(rank, world, run, out, culprit, path, which):
    """What a rank finds after a step that the culprit has poisoned, and what is left of its gradients."""
    groups = opened_groups(plan(run, world).grid, rank)
    with groups as opened:
        state = make_state(plan(run, world), choose_device("cpu"), opened)
        data = open_data_pipeline(run, out / "data")
        initialize_or_resume(state, run, data, RunDir(out=out))
        if rank == culprit:
            poison(state.model.get_submodule(path), which)
        pending = begin_step(state, run, data.train, 1e-3)
        before = [main.clone() for main in state.optimizer.main.values()]
        result = pending.result()
        origins = find_origins(state, run, data.train, pending.step, pending.first)
        same = all(torch.equal(a, b) for a, b in zip(before, state.optimizer.main.values(), strict=True))
        clean = all(main.grad is None for main in state.optimizer.main.values())
        return result.not_finite, origins, same and clean and (state.step, state.samples) == (1, 4)


@pytest.mark.parametrize(("mesh", "world"), [(Mesh(), 1), (Mesh(), 2), (Mesh(tp=2), 2)], ids=str)
def test_rank_parameter_and_micro_batch_are_named_before_a_reduction(mesh, world, corpus, tmp_path):
    run = replace(run_on(corpus, micro_batches=2), mesh=mesh)
    culprit = world - 1
    found = run_ranks(world, search, run, tmp_path, culprit, "final_norm", 1)
    for not_finite, origins, untouched in found:
        assert len(not_finite) > 5, "the reduction and the stream below have spread it"
        assert untouched
        assert origins == found[0][1]
        assert {origin.micro_batch for origin in origins} == {1}
        assert culprit in {origin.rank for origin in origins}
        named = next(origin for origin in origins if origin.rank == culprit).parameters
        assert "final_norm.weight" in named
        if mesh.tp == 1:
            assert [origin.rank for origin in origins] == [culprit]


def test_origins_in_words():
    same = [Origin(rank=rank, micro_batch=0, parameters=("a", "b", "c", "d")) for rank in (0, 1, 3)]
    other = Origin(rank=2, micro_batch=1, parameters=("head.weight",))
    assert describe_origins([*same, other]) == (
        "before any reduction: a, b, c, ... in micro-batch 0 on ranks 0-1, 3; "
        "head.weight in micro-batch 1 on rank 2"
    )
    assert "does not repeat" in describe_origins([])
