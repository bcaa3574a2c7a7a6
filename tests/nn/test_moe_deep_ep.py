"""The adapter for DeepEP, on a stand-in with DeepEP's interface: the answer is that of one process."""

from __future__ import annotations

import sys

import pytest
import torch

from braid.distributed.collectives import Group
from braid.errors import ConfigError
from braid.nn.moe.deep_ep import DeepEp
from braid.nn.moe.token_dispatcher import problems
from tests.nn import fake_deep_ep
from tests.nn.moe_cases import shape
from tests.nn.moe_ranks import Found, Layout, groups_of, joined, run
from tests.nn.test_moe_ranks import CASES
from tests.ranks import run_ranks

LAYOUTS = (Layout(tp=2, dp=2, ep=4), Layout(tp=2, dp=2, etp=2, ep=2))
NAMES = ("padding, biases, groups, latent", "dropped by probability", "all to one expert")


def through_deep_ep(rank: int, world: int) -> dict[tuple[Layout, str], Found]:
    sys.modules["deep_ep"] = fake_deep_ep
    found = {}
    for layout in LAYOUTS:
        groups = groups_of(layout)
        found |= {(layout, name): run(CASES[name], groups, "deep_ep") for name in NAMES}
    return found


def test_deep_ep_finds_what_one_process_finds() -> None:
    alone = {name: run(CASES[name]) for name in NAMES}
    by_rank = run_ranks(4, through_deep_ep)
    for layout, name in by_rank[0]:
        together = joined([found[layout, name] for found in by_rank], layout)
        # DeepEP's probabilities are float32.
        near = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(together.y_BtC, alone[name].y_BtC, **near)
        torch.testing.assert_close(together.x_grad_BtC, alone[name].x_grad_BtC, **near)
        for tensor, (_, grad) in alone[name].grads.items():
            torch.testing.assert_close(together.grads[tensor][1], grad, **near)


def test_without_deep_ep_a_run_is_told_what_is_missing() -> None:
    pair = Group(name="ep", size=2, rank=0, handle=None)
    with pytest.raises(ConfigError, match=r"package deep_ep, which is not installed.*all_to_all"):
        DeepEp(group=pair, dispatch_group=pair, local_experts=4, etp=1, channels=8)


def test_what_deep_ep_cannot_do_is_a_problem_of_the_run() -> None:
    moe = shape(capacity_factor=1.0, pad_to_capacity=True)
    found = list(problems("mesh.dispatcher", "deep_ep", moe, torch.device("cpu"), torch.float32))
    assert [problem.rule for problem in found] == [
        "DeepEP needs GPUs, not cpu",
        "DeepEP carries bfloat16, not float32",
        "DeepEP cannot pad to capacity",
    ]
    assert not list(problems("mesh.dispatcher", "all_to_all", moe, torch.device("cpu"), torch.float32))
