"""Kinds of parameters, on models that have all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.architecture import HyperConnections
from braid.choices import PARAMETER_KINDS
from braid.optim.kinds import kind_of, kinds_of, matrices_of
from braid.planning.plan import plan, whole_models
from braid.recipes import load

KINDS = {
    "embedding.weight": "embedding",
    "head.weight": "head",
    "final_norm.weight": "vector",
    "exit.weight": "hyper_connection",
    "blocks.0.mamba2.x.weight": "matrix",
    "blocks.0.mamba2.conv.x.weight": "state_space",
    "blocks.0.mamba2.A_log": "state_space",
    "blocks.0.mamba2.norm.weight": "vector",
    "blocks.0.mlp.connection.alpha": "hyper_connection",
    "blocks.1.attention.q.weight": "matrix",
    "blocks.1.attention.q_norm.weight": "vector",
    "blocks.1.moe.router.weight": "router",
    "blocks.1.moe.router.bias": "vector",
    "blocks.1.moe.experts.3.gate.weight": "expert",
    "blocks.1.moe.shared.down.weight": "matrix",
    "blocks.2.delta_net.dt_bias": "state_space",
    "mtp.0.blocks.0.mlp.up.weight": "matrix",
    "patches.weight": "embedding",
    "patches.positions": "embedding",
    "projector.out.weight": "matrix",
    "projector.out.bias": "vector",
}


@pytest.fixture(scope="module")
def models():
    run = load("tiny-multimodal")
    run = replace(run, model=replace(run.model, hyper=HyperConnections(), tied=False))
    found = whole_models(plan(run, 1)), whole_models(plan(load("tiny-vlm"), 1))
    return [model for each in found for model in each.values()]


def test_every_tensor_is_of_the_kind_that_its_name_says(models):
    found = {name: kind_of(name, tensor) for model in models for name, tensor in model.canonical().items()}
    assert {name: found[name] for name in KINDS} == KINDS
    assert set(found.values()) == set(PARAMETER_KINDS)


def test_parameters_are_of_one_kind_and_matrices_among_them_are_found(models):
    for model in models:
        canonical = model.canonical()
        kinds = kinds_of(canonical)
        assert kinds.keys() == {tensor.parameter for tensor in canonical.values()}
        found = matrices_of(canonical, ("matrix", "hyper_connection"))
        assert found == {
            tensor.parameter
            for tensor in canonical.values()
            if kinds[tensor.parameter] in ("matrix", "hyper_connection") and len(tensor.shape) == 2
        }
