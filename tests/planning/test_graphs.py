"""What is captured as CUDA graphs, and the reasons why something is not."""

from dataclasses import replace

import pytest

from braid.planning.graphs import captures, graph_parts
from braid.planning.plan import plan
from tests.engine.graph_runs import gpu_run, run_of, with_graphs


def told(run, world=1, device="cuda"):
    return [str(part) for part in graph_parts(plan(with_graphs(run), world), device)]


def test_without_the_setting_nothing_is_said():
    assert graph_parts(plan(gpu_run("[*-]"), 1), "cuda") == ()


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.1, "recompute": ("full",)}])
@pytest.mark.parametrize("pattern", ["[*-]", "[*E]", "[M-]", "[*E]/*-"])
def test_what_decides_nothing_on_the_host_is_captured(pattern, settings):
    run = gpu_run(pattern, **settings)
    assert told(run)[0] == "forward and backward of a micro-batch: captured"
    assert captures(plan(with_graphs(run), 1), "cuda")


def test_overlapped_micro_batches_are_one_graph_of_a_bounded_size():
    assert told(gpu_run("[*E]", overlap=True))[0] == "forward and backward of 3 micro-batches at once: captured"
    long = told(gpu_run("[*E]", overlap=True, micro_batches=65))[0]
    assert "one graph of all 65 would be too large: at most 64" in long


def changed(run, part, **settings):
    return replace(run, **{part: replace(getattr(run, part), **settings)})


DENSE, MOE = gpu_run("[*-]x3"), gpu_run("[*E]")
DROPS = replace(MOE.model.moe, capacity_factor=1.0)
REASONS = {
    "FSDP2 gathers": (DENSE, 3, "cuda"),
    "a CPU has no CUDA graphs": (DENSE, 1, "cpu"),
    "train.precision makes quantised copies": (changed(DENSE, "train", precision=("fp8_block",)), 1, "cuda"),
    "train.offload copies to host memory": (changed(DENSE, "train", offload=0.5), 1, "cuda"),
    "attention by sdpa cuts documents": (changed(DENSE, "train", dtype="fp32"), 1, "cuda"),
    "attention by reference cuts documents": (
        changed(DENSE, "train", kernels=("attention=reference",)),
        1,
        "cuda",
    ),
    "the reference kernel of experts reads": (
        changed(MOE, "train", kernels=("grouped_mlp=reference",)),
        1,
        "cuda",
    ),
    "model.moe.pad_to_capacity": (changed(MOE, "model", moe=DROPS), 1, "cuda"),
    "experts have no rows for padding": (changed(MOE, "data", packing="documents"), 1, "cuda"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_something_is_not_captured(reason):
    run, world, device = REASONS[reason]
    if world > 1:
        run = changed(run, "train", batch_samples=3 * world)
    first = told(run, world, device)[0]
    assert "not captured" in first
    assert reason in first
    assert not captures(plan(with_graphs(run), world), device)


def test_padding_to_capacity_is_captured():
    padded = changed(MOE, "model", moe=replace(DROPS, pad_to_capacity=True))
    assert told(padded)[0].endswith(": captured")


def test_a_dense_model_may_have_padding():
    assert told(changed(DENSE, "data", packing="documents"))[0].endswith(": captured")


def test_a_cpu_run_goes_on_without_graphs():
    from tests.engine.graph_runs import new_state, train

    run = run_of("[*-]")
    assert new_state(with_graphs(run)).graphs is None
    assert len(train(new_state(with_graphs(run)), run, 1)) == 1
