"""Learning rates, gradient length and AdamW, against plain formulas in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from braid.distributed.collectives import Group
from braid.kernels.optimizer import PLAIN
from braid.optim.adamw import MOMENTS, AdamW
from braid.optim.gradients import ReplicatedPart, clip_scale, own_square, total_norm
from braid.optim.schedule import LearningRate
from braid.optim.shards import local_shard
from tests.ranks import run_ranks


def schedule(kind, steps=100, warmup=10, decay=20, final=0.1):
    return LearningRate(
        kind=kind, peak=2.0, steps=steps, warmup_steps=warmup, decay_steps=decay, final_share=final
    )


def test_cosine_rises_linearly_and_falls_to_its_final_share():
    rate = schedule("cosine").rate
    assert [rate(1), rate(5), rate(10)] == pytest.approx([0.2, 1.0, 2.0])
    assert rate(55) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rate(100) == pytest.approx(0.2)


def test_wsd_stays_and_then_falls_linearly():
    rate = schedule("wsd").rate
    assert [rate(10), rate(50), rate(80)] == [2.0, 2.0, 2.0]
    assert rate(90) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rate(100) == pytest.approx(0.2)


@given(st.sampled_from(["cosine", "wsd"]), st.integers(1, 50), st.integers(0, 50), st.integers(1, 50))
def test_rates_stay_between_zero_and_the_peak_and_only_fall_after_the_rise(kind, stable, warmup, decay):
    steps = warmup + stable + decay
    rates = [schedule(kind, steps, warmup, decay).rate(step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_the_norm_is_over_all_gradients_together():
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    norm = total_norm(own_square(gradients))
    assert float(norm) == 5.0
    assert float(clip_scale(norm, 1.0)) == 0.2
    assert clip_scale(norm, 0.0) is None
    assert float(total_norm(own_square({}))) == 0.0
    assert float(clip_scale(norm, 6.0)) == 1.0, "short ones stay as they are"
    assert float(clip_scale(total_norm(own_square({})), 1.0)) == 1.0


def test_parameters_have_rates_and_counts_of_their_own():
    """As if each had an optimizer of its own, however often others were updated before."""

    def made(names, shares):
        parameters = {name: nn.Parameter(torch.full((3,), 1.0 + place)) for place, name in enumerate("abc")}
        chosen = {name: parameters[name] for name in names}
        given = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        return AdamW(chosen, decaying={"a", "b"}, lr_shares=shares, **given)

    def step(optimizer, rate, skip=None):
        for place, tensor in enumerate(optimizer.main.values()):
            tensor.grad = torch.tensor([0.5, -1.0, 2.0]) / (1 + place)
        optimizer.update(rate, skip=skip)

    together = made("abc", {"b": 0.25, "c": 2.0})
    together.set_updates(5, {"b": 0})
    step(together, 0.1)
    step(together, 0.1, skip=torch.tensor(True))
    assert (together.updates, together.own_updates()) == (6, {"b": 1})
    for place, (name, rate, count) in enumerate([("a", 0.1, 5), ("b", 0.025, 0), ("c", 0.2, 5)]):
        alone = made(name, {})
        alone.set_updates(count)
        alone.main[name].grad = torch.tensor([0.5, -1.0, 2.0]) / (1 + place)
        alone.update(rate)
        assert torch.equal(alone.main[name], together.main[name])
    nothing = made("", {})
    step(nothing, 0.1)
    assert nothing.updates == 1, "a rank without a trained parameter counts too"


def test_a_step_with_a_scale_is_one_with_scaled_gradients_and_a_skipped_one_is_none():
    weights, steps = torch.randn(5), [torch.randn(5) for _ in range(3)]
    scale = torch.tensor(0.3, dtype=torch.float64)

    def trained(given, scale=None, skipped=()):
        parameter = nn.Parameter(weights.clone())
        optimizer = AdamW({"w": parameter}, decaying={"w"}, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
        for number, gradient in enumerate(given):
            parameter.grad = gradient.clone()
            skip = torch.tensor(number in skipped) if skipped else None
            optimizer.update(0.05, scale=scale, skip=skip)
        return parameter.data, optimizer.updates

    scaled, _ = trained(steps, scale=scale)
    wanted, _ = trained([0.3 * step for step in steps])
    torch.testing.assert_close(scaled, wanted)
    skipping, count = trained(steps, skipped=(1,))
    wanted, _ = trained([steps[0], steps[2]])
    assert torch.equal(skipping, wanted)
    assert count == 2


@pytest.mark.parametrize(("rank", "repeated", "norm"), [(0, (), 5.0), (1, (), 3.0), (1, ("b",), 3.0)])
def test_what_other_ranks_hold_as_well_counts_once(rank, repeated, norm):
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    copies = [ReplicatedPart(parameter="b", place=None, group=Group(name="tp", size=2, rank=rank, handle=None))]
    assert float(total_norm(own_square(gradients, copies, frozenset(repeated)))) == norm


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_squares_tell_which_gradient_is_not_finite(bad):
    gradients = {"good": torch.ones(3), "bad": torch.tensor([1.0, bad])}
    assert PLAIN.squares(list(gradients.values())).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_that_is_not_applied_changes_nothing(dtype):
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = AdamW({"w": parameter}, decaying={"w"}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    for gradient, apply in ((1.0, True), (math.nan, False)):
        parameter.grad = torch.full((3,), gradient, dtype=dtype)
        optimizer.accumulate_grads()
        kept = [parameter.detach().clone(), *(optimizer.moment(kind, "w").clone() for kind in MOMENTS)]
        optimizer.update(0.1, skip=torch.tensor(not apply))
        now = [parameter.detach(), *(optimizer.moment(kind, "w") for kind in MOMENTS)]
        assert [torch.equal(*pair) for pair in zip(kept, now, strict=True)] == [not apply] * 3
    assert optimizer.updates == 1
    assert optimizer.main["w"].grad is None


def plain_adamw(weight, gradients, *, rate, betas, eps, decay):
    """The paper's formula."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        corrected = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
        weight = weight - rate * decay * weight - rate * corrected[0] / (corrected[1].sqrt() + eps)
    return weight


def test_adamw_follows_the_formula_and_decays_only_what_is_named():
    start = {"matrix": torch.randn(3, 5, dtype=torch.float64), "norm": torch.randn(5, dtype=torch.float64)}
    gradients = [{name: torch.randn_like(weight) for name, weight in start.items()} for _ in range(4)]
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in start.items()}
    optimizer = AdamW(parameters, decaying={"matrix"}, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    for step in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        optimizer.accumulate_grads()
        optimizer.update(0.05)
    for name, decay in (("matrix", 0.2), ("norm", 0.0)):
        wanted = plain_adamw(
            start[name], [g[name] for g in gradients], rate=0.05, betas=(0.8, 0.9), eps=1e-3, decay=decay
        )
        torch.testing.assert_close(parameters[name].data, wanted, rtol=1e-12, atol=1e-12)
    assert optimizer.updates == 4


def test_a_bf16_model_has_fp32_main_parameters_and_sums_its_gradients_there():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW({"w": parameter}, decaying=(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for part in (256.0, 1.0, 1.0):
        parameter.grad = torch.full((4,), part, dtype=torch.bfloat16)
        optimizer.accumulate_grads()
    assert optimizer.gradients()["w"].dtype == torch.float32
    assert optimizer.gradients()["w"].tolist() == [258.0] * 4
    optimizer.update(1e-4)
    assert optimizer.main["w"].dtype == torch.float32
    assert optimizer.main["w"][0].item() == pytest.approx(1 - 1e-4)
    assert torch.equal(parameter.data, optimizer.main["w"].bfloat16())
    assert parameter.grad is None


def test_main_parameters_that_were_written_are_cast_into_the_model():
    """As a resume does, after it has read them from a checkpoint."""
    narrow, wide = (nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    given = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = AdamW({"narrow": narrow, "wide": wide}, decaying=(), **given)
    for tensor in optimizer.main.values():
        tensor.data.fill_(3.0)
    assert narrow.tolist() == [1.0, 1.0]
    optimizer.copy_to_model()
    assert narrow.tolist() == wide.tolist() == [3.0, 3.0]


def check_shards(rank, world):
    """Rows of a weight of two replicas, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight = distribute_tensor(torch.arange(3.0)[:, None], mesh, [Replicate(), Shard(0)])
    held = local_shard(weight)
    return held.shard.start, held.shard.stop, held.first


def test_of_replicated_shards_one_is_the_first():
    """It alone counts in the length of the gradient and is written to checkpoints."""
    assert run_ranks(4, check_shards) == [(0, 2, True), (2, 3, True), (0, 2, False), (2, 3, False)]
    assert local_shard(torch.ones(3)) == (None, True)


def test_parameters_that_nothing_used_have_zero_gradients_and_still_decay():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = AdamW({"w": parameter}, decaying={"w"}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    optimizer.update(0.1)
    torch.testing.assert_close(parameter.data, torch.full((2, 2), 0.95))
