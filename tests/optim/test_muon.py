"""Muon: the iteration against singular values in float64, the optimizer against torch's own, matrices as they
are in a checkpoint, and the exchange between ranks against one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from braid import optimizer
from braid.distributed.collectives import ALONE, Group
from braid.nn.canonical import Canonical
from braid.optim.adamw import AdamW
from braid.optim.matrix_exchange import MatrixExchange, Part, owners_of, rounds_of
from braid.optim.muon import Muon
from braid.optim.newton_schulz import A, B, C, orthogonal
from tests.ranks import run_ranks


def by_singular_values(matrix, iterations):
    """What the iteration is for one matrix: the polynomial of its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(iterations):
        values = A * values + B * values**3 + C * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_iteration_acts_on_singular_values(shape, iterations):
    torch.manual_seed(0)
    stacked = torch.randn(2, *shape, dtype=torch.float64)
    for matrix, found in zip(stacked, orthogonal(stacked, iterations), strict=True):
        torch.testing.assert_close(found, by_singular_values(matrix, iterations), rtol=0, atol=1e-12)
    assert not orthogonal(torch.zeros(1, *shape), 5).any(), "an expert without tokens stays where it is"


def whole(name, shape):
    canonical = Canonical(parameter=name, shape=shape, fill="normal")
    return canonical, canonical.held, True


def made(parameters, settings, **given):
    tensors = {name: whole(name, tuple(value.shape)) for name, value in parameters.items()}
    muon = Muon(settings, tensors, next(iter(parameters.values())).dtype)
    given = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3} | given
    return AdamW(parameters, decaying=parameters, muon=muon, **given)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)], ids=str)
@pytest.mark.parametrize(
    ("nesterov", "scale", "theirs"),
    [(True, "match_rms", "match_rms_adamw"), (False, "original", "original")],
    ids=["nesterov", "plain"],
)
def test_steps_are_those_of_torch(shape, nesterov, scale, theirs):
    """torch iterates in bfloat16, on matrices one by one."""
    torch.manual_seed(0)
    begun, gradients = torch.randn(shape), torch.randn(4, *shape)
    ours, other = nn.Parameter(begun.clone()), nn.Parameter(begun.clone())
    settings = optimizer.Muon(nesterov=nesterov, scale=scale, momentum=0.8, dtype="bf16")
    found = made({"w": ours}, settings)
    wanted = torch.optim.Muon(
        [other], lr=0.05, weight_decay=0.3, momentum=0.8, nesterov=nesterov, adjust_lr_fn=theirs
    )
    for gradient in gradients:
        ours.grad, other.grad = gradient.clone(), gradient.clone()
        found.update(0.05)
        wanted.step()
    moved = (other.detach() - begun).abs().max()
    torch.testing.assert_close(ours.detach(), other.detach(), rtol=0, atol=0.03 * float(moved))
    torch.testing.assert_close(found.moment("momentum", "w"), wanted.state[other]["momentum_buffer"])


def test_a_step_in_float64_is_the_formula():
    torch.manual_seed(0)
    begun, gradients = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 3, 7, dtype=torch.float64)
    weight = nn.Parameter(begun.clone())
    found = made({"w": weight}, optimizer.Muon(momentum=0.7), lr_shares={"w": 0.5})
    wanted, average = begun.clone(), torch.zeros_like(begun)
    for gradient in gradients:
        weight.grad = gradient.clone()
        found.update(0.04, scale=torch.tensor(0.25, dtype=torch.float64))
        average = 0.7 * average + 0.3 * (0.25 * gradient)
        direction = by_singular_values(0.7 * average + 0.3 * (0.25 * gradient), 5)
        wanted = wanted * (1 - 0.02 * 0.3) - 0.02 * 0.2 * 7**0.5 * direction
    torch.testing.assert_close(weight.detach(), wanted, rtol=0, atol=1e-12)


def test_a_skipped_step_changes_nothing():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    found = made({"w": weight}, optimizer.Muon())
    found.main["w"].grad = torch.randn(4, 3)
    found.update(0.1, skip=torch.tensor(False))
    assert torch.equal(weight.detach(), found.main["w"].bfloat16()), "the narrow weight is the main one, cast"
    kept = [weight.detach().clone(), found.main["w"].detach().clone(), found.moment("momentum", "w").clone()]
    found.main["w"].grad = torch.full((4, 3), torch.nan)
    found.update(0.1, skip=torch.tensor(True))
    now = [weight.detach(), found.main["w"].detach(), found.moment("momentum", "w")]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_fused_matrices_are_worked_on_apart():
    """Rows of two matrices take turns in a parameter, as those of gate and up do."""
    torch.manual_seed(0)
    fused, first, second = torch.randn(8, 5), torch.randn(4, 5), torch.randn(4, 5)
    tensors = {
        f"w.{part}": Canonical(
            parameter="w", shape=(4, 5), fill="normal", view=(4, 2), index=(slice(None), part)
        )
        for part in (0, 1)
    }
    muon = Muon(
        optimizer.Muon(), {name: (each, each.held, True) for name, each in tensors.items()}, torch.float32
    )
    together = AdamW(
        {"w": nn.Parameter(fused)}, decaying=(), betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0, muon=muon
    )
    together.main["w"].grad = torch.stack([first, second], 1).flatten(0, 1)
    apart = {str(part): nn.Parameter(fused[part::2].clone()) for part in (0, 1)}
    alone = made(apart, optimizer.Muon(), weight_decay=0.0)
    alone.main["0"].grad, alone.main["1"].grad = first.clone(), second.clone()
    together.update(0.1)
    alone.update(0.1)
    for part in (0, 1):
        torch.testing.assert_close(together.main["w"][part::2], alone.main[str(part)])


# ------------------------------------------------------------------------------------------------ ranks

SHAPES = {"rows": (6, 4), "columns": (3, 8), "blocks": (5, 7), "copied": (4, 4), "mine": (2, 9), "few": (1, 3)}


def parts_of(rank):
    """What each of four ranks holds."""
    row, column = divmod(rank, 2)
    parts = {
        "rows": Part(((0, 1, 1, 4)[rank], 0), ((1, 0, 3, 2)[rank], 4), True),
        "columns": Part((0, 2 * rank), (3, 2), True),
        "blocks": Part((3 * row, 4 * column), ((3, 2)[row], (4, 3)[column]), True),
        "copied": Part((2 * row, 0), (2, 4), column == 0),
        "mine": Part((0, 0), (2, 9), True) if rank == 3 else None,
        "few": Part((0, rank), (1, 1), True) if rank < 3 else None,
    }
    return {name: part for name, part in parts.items() if part is not None and 0 not in part.shape}


def values():
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def exchanged(rank, world, most):
    group = Group(name="slab", size=world, rank=rank, handle=torch.distributed.group.WORLD)
    every, found = values(), {}
    exchange = MatrixExchange([parts_of(each) for each in range(world)], group, most)
    exchange.run(
        lambda name: parts_of(rank)[name].of(every[name]),
        found.__setitem__,
        lambda x_NRC: orthogonal(x_NRC, 5),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    return found, exchange.sent()


@pytest.mark.parametrize("most", [1, 30, 10_000])
def test_every_rank_gets_its_part_of_the_whole(most):
    wanted = {name: by_singular_values(value, 5) for name, value in values().items()}
    for rank, (found, sent) in enumerate(run_ranks(4, exchanged, most)):
        assert found.keys() == parts_of(rank).keys()
        for name, value in found.items():
            torch.testing.assert_close(value, parts_of(rank)[name].of(wanted[name]), rtol=0, atol=1e-12)
        assert sent > 0


def test_owners_share_the_work_and_hold_what_they_can():
    every = [parts_of(rank) for rank in range(4)]
    owners = owners_of(SHAPES, every)
    assert owners["mine"] == 3, "it has all of it"
    assert owners["few"] in (0, 1, 2)
    experts = {f"{place}": (64, 32) for place in range(8)}
    held = [{f"{place}": Part((32 * half, 0), (32, 32), True) for place in range(8)} for half in (0, 1)]
    assert sorted(owners_of(experts, held).values()) == [0] * 4 + [1] * 4
    rounds = rounds_of(experts, owners_of(experts, held), 2 * 64 * 32)
    assert [len(names) for names in rounds] == [4, 4]


def test_a_process_alone_sends_nothing():
    found = {}
    exchange = MatrixExchange([{"w": Part((0, 0), (3, 2), True)}], ALONE)
    matrix = torch.randn(3, 2)
    exchange.run(
        lambda _: matrix, found.__setitem__, lambda x: 2 * x, dtype=torch.float32, device=matrix.device
    )
    assert torch.equal(found["w"], 2 * matrix)
    assert exchange.sent() == 0


def test_the_dtype_is_that_of_the_run_unless_another_is_given():
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    tensors = {"w": whole("w", (2, 3))}
    found = [
        Muon(optimizer.Muon(dtype=name), tensors, dtype).dtype
        for name, dtype in product(("auto", "fp32"), dtypes)
    ]
    assert found == [*dtypes, torch.float32, torch.float32, torch.float64]
    assert Muon(optimizer.Muon(dtype="bf16"), tensors, torch.float64).dtype == torch.bfloat16
