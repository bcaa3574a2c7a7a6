"""CUDA graphs on a GPU: bit for bit the run without them, and faults that are found."""

from dataclasses import replace

import pytest
import torch

from braid.errors import GraphError
from braid.model.static_batch import StaticBatch
from tests.engine.graph_runs import HYPER, gpu_run, on_gpu, same, train, with_graphs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.costly("kernels of every kind of layer are compiled for the GPU"),
]

STEPS = 50

RUNS = {
    "dense": lambda: gpu_run("[*-]x2"),
    "window": lambda: gpu_run("[*-]x2", window=100),
    "dropout, recompute": lambda: gpu_run("[*-]x2", dropout=0.1, recompute=("full",)),
    "experts, jitter": lambda: gpu_run("[*E]x2"),
    "overlap": lambda: gpu_run("[*E]x2", overlap=True, delay_weights=True, dropout=0.1),
    "hyper-connections": lambda: gpu_run("[*-][*E]", hyper=HYPER, recompute=("hyper",)),
    "everything": lambda: gpu_run(
        "[*-][*E]x2", hyper=HYPER, recompute=("hyper", "norm", "experts", "core"), dropout=0.1, overlap=True
    ),
    "recurrent": lambda: gpu_run("[M-][*E]", dropout=0.1),
    "MTP": lambda: gpu_run("[*E]/*-", mtp_loss=0.3),
}


@pytest.mark.parametrize("name", RUNS)
def test_fifty_steps_with_graphs_are_those_without(name):
    run = RUNS[name]()
    plain, graphed = on_gpu(run), on_gpu(with_graphs(run))
    assert graphed.graphs is not None
    assert train(graphed, run, STEPS) == train(plain, run, STEPS)
    assert same(graphed, plain) == []
    assert graphed.graphs.replayed > 0.8 * STEPS * len(graphed.graphs.sections)


def test_a_stale_weight_is_an_error():
    run = gpu_run("[*-]")
    state = on_gpu(with_graphs(run))
    train(state, run, 3)
    weight = next(state.model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(GraphError, match=r"embedding\.weight"):
        train(state, run, 1)


@pytest.mark.parametrize("name", ["step", "loss scale", "attention tables of window None"])
def test_what_a_graph_reads_it_reads_anew(name, monkeypatch):
    """A counter of the masks, a denominator or document tables that stay as they were: the results differ."""
    run = gpu_run("[*-]", dropout=0.2)
    plain, state = on_gpu(run), on_gpu(with_graphs(run))
    load = StaticBatch.load

    def forgets(self, batch, scale):
        before = self.memory[name].clone()
        load(self, batch, scale)
        if before.abs().sum():
            self.memory[name].copy_(before)

    monkeypatch.setattr(StaticBatch, "load", forgets)
    assert train(state, run, 5) != train(plain, run, 5)


def test_other_shapes_have_graphs_of_their_own():
    run = gpu_run("[*-]")
    longer = replace(run, data=replace(run.data, sequence_tokens=768))
    plain, graphed = on_gpu(run), on_gpu(with_graphs(run))
    for settings in (run, longer, run, longer):
        assert train(graphed, settings, 3) == train(plain, settings, 3)
    assert same(graphed, plain) == []
