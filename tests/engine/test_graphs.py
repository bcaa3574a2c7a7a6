"""Steps through graphs that run their function again, on a CPU: the same code on the same memory as with CUDA
graphs, whose results must be those of a run without, to the bit."""

from dataclasses import replace

import pytest
import torch

from braid.engine.graphs import Addresses, GraphCache, Rerun, parameters_and_buffers
from braid.errors import GraphError
from braid.model.language import LossScale
from braid.model.static_batch import StaticBatch
from braid.train.step import evaluate
from braid.train.step_graphs import StepGraphs
from tests.engine.graph_runs import HYPER, Documents, new_state, run_of, same, train

RUNS = {
    "dense, fp32": run_of("[*-]x2"),
    "dense, bf16, dropout": run_of("[*-]x2", dtype="bf16", dropout=0.1),
    "one micro-batch": run_of("[*-]", micro_batches=1),
    "experts, jitter": run_of("[*E]x2"),
    "recurrent": run_of("[M-][*E]", dropout=0.1),
    "recompute": run_of("[*-][*E]", recompute=("full",), dropout=0.1),
    "hyper-connections": run_of("[*-][*E]", hyper=HYPER, recompute=("hyper",), dtype="bf16"),
    "overlap": run_of("[*E]x2", overlap=True, delay_weights=True, dropout=0.1),
    "MTP": run_of("[*E]/*-", mtp_loss=0.3),
}


def graphed(run, most=16):
    state = new_state(run)
    state.graphs = StepGraphs(state, Rerun(state.streams), most)
    return state


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_graphs_is_the_run_without(name):
    run = RUNS[name]
    plain, state = new_state(run), graphed(run)
    assert train(state, run, 4) == train(plain, run, 4)
    assert same(state, plain) == []
    sections = 4 * len(state.graphs.sections)
    assert state.graphs.replayed + state.graphs.eager == sections
    assert state.graphs.replayed >= sections - 2, "all but the first of each form come from a graph"


@pytest.mark.long
def test_fifty_steps_with_everything_at_once():
    run = run_of("[*-][*E]", hyper=HYPER, recompute=("hyper", "norm", "core"), dropout=0.1, overlap=True)
    plain, state = new_state(run), graphed(run)
    assert train(state, run, 50) == train(plain, run, 50)
    assert same(state, plain) == []


def test_steps_in_which_only_some_micro_batches_have_a_graph():
    """Gradients and counts pass from graphs to ops and back."""
    run = run_of("[*E]", micro_batches=4, dtype="bf16")
    plain, state = new_state(run), graphed(run)
    inner = state.graphs.cache.get
    calls = iter(range(1000))
    state.graphs.cache.get = lambda key, record: inner(key, record) if next(calls) % 3 else None
    assert train(state, run, 6) == train(plain, run, 6)
    assert same(state, plain) == []
    assert min(state.graphs.replayed, state.graphs.eager) > 5


def test_forms_beyond_the_most_graphs_run_without_one(capsys):
    run = run_of("[*-]", micro_batches=2)
    plain, state = new_state(run), graphed(run, most=2)
    longer = replace(run, data=replace(run.data, sequence_tokens=16))
    for each, settings in ((state, run), (plain, run), (state, longer), (plain, longer)):
        each.told = getattr(each, "told", []) + train(each, settings, 3)
    assert state.told == plain.told
    assert same(state, plain) == []
    assert len(state.graphs.cache) == 2
    assert capsys.readouterr().err.count("2 CUDA graphs are held") == 1, "said once"


def test_an_evaluation_between_steps_changes_nothing():
    run = run_of("[*-]", dropout=0.1)
    run = replace(run, train=replace(run.train, eval_samples=2))
    plain, state = new_state(run), graphed(run)
    loader = Documents(run.model.vocab, run.data.sequence_tokens)
    loader.samples_per_epoch = 100
    told = []
    for each in (plain, state):
        told.append([])
        for _ in range(3):
            told[-1] += [train(each, run, 1, loader), evaluate(each, run, loader)]
    assert told[0] == told[1]


# --------------------------------------------------------------------------------------- planted faults


def test_a_stale_weight_is_an_error():
    run = run_of("[*-]x2")
    state = graphed(run)
    train(state, run, 2)
    weight = next(state.model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(GraphError, match=r"embedding.weight: not in the memory .* set train.graphs to none"):
        train(state, run, 1)


def test_a_replaced_module_is_an_error():
    run = run_of("[*-]x2")
    state = graphed(run)
    train(state, run, 2)
    final = state.model.final_norm
    final.weight = torch.nn.Parameter(final.weight.detach().clone())
    with pytest.raises(GraphError, match=r"final_norm\.weight"):
        train(state, run, 1)


def test_a_stale_gradient_and_a_stale_input_are_errors():
    run = run_of("[*-]")
    state = graphed(run)
    train(state, run, 2)
    static = next(iter(state.graphs.inputs.values()))
    for held, name, said in (
        (state.graphs.grads, "embedding.weight", "the gradient of embedding.weight"),
        (static.memory, "tokens_BT", "tokens_BT of a micro-batch"),
        (static.memory, "step", "step of a micro-batch"),
    ):
        kept = held[name]
        held[name] = kept.clone()
        with pytest.raises(GraphError, match=said):
            train(state, run, 1)
        held[name] = kept


@pytest.mark.parametrize("name", ["step", "loss scale"])
def test_masks_and_losses_follow_what_is_in_memory(name, monkeypatch):
    """A counter or a denominator that stays as it was at the capture shows in the results."""
    run = run_of("[*-]", dropout=0.2)
    plain, state = new_state(run), graphed(run)
    load = StaticBatch.load

    def forgets(self, batch, scale):
        before = self.memory[name].clone()
        load(self, batch, scale)
        if before.abs().sum():
            self.memory[name].copy_(before)

    monkeypatch.setattr(StaticBatch, "load", forgets)
    assert train(state, run, 4) != train(plain, run, 4)


def test_a_batch_of_another_shape_is_an_error():
    run = run_of("[*-]")
    state = graphed(run)
    train(state, run, 2)
    static = next(iter(state.graphs.inputs.values()))
    other = replace(Documents(257, 16).batch(range(2)), step=1)
    with pytest.raises(GraphError, match=r"_BT of shape \[2, 24\] was given \[2, 16\]"):
        static.load(other, LossScale.of(10, [], 0.0))


# ------------------------------------------------------------------------------------------------ parts


def test_addresses_see_every_weight_and_buffer():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    addresses = Addresses(parameters_and_buffers(module))
    addresses.check()
    module[1].running_mean = torch.zeros(2)
    with pytest.raises(GraphError, match=r"1\.running_mean"):
        addresses.check()


def test_the_cache_captures_what_comes_twice_up_to_its_bound():
    cache, recorded = GraphCache(2), []

    def ask(key):
        return cache.get(key, lambda: recorded.append(key) or key)

    assert [ask(key) for key in "aabbcca"] == [None, "a", None, "b", None, None, "a"]
    assert recorded == ["a", "b"]
    assert cache.full
