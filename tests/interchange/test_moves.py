"""Every move goes both ways, and puts rows where it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CheckpointError
from braid.interchange.moves import (
    Channelwise,
    FromOne,
    Move,
    PairsApart,
    PerHead,
    Same,
    Stacked,
    Then,
    joined,
)


def test_rows_one_below_the_other() -> None:
    first, second = joined(1, 2).to_ours(torch.tensor([[1.0], [2.0], [3.0]]))
    assert first.tolist() == [[1.0]]
    assert second.tolist() == [[2.0], [3.0]]


def test_rows_per_head() -> None:
    q, k = PerHead(2, (2, 1)).to_ours(torch.arange(6))
    assert q.tolist() == [0, 1, 3, 4]
    assert k.tolist() == [2, 5]


def test_pairs_side_by_side_come_half_a_head_apart() -> None:
    (ours,) = PairsApart(2, 1, 4).to_ours(torch.arange(10))
    assert ours.tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]


def test_kernels_of_a_convolution_lose_their_middle_dim() -> None:
    x, y = Channelwise((2, 1)).to_ours(torch.arange(6).view(3, 1, 2))
    assert x.tolist() == [[0, 1], [2, 3]]
    assert y.tolist() == [[4, 5]]


def test_stacks_hold_layers_first_then_experts() -> None:
    tensor = torch.arange(2 * 3 * 2).view(2, 3, 2)
    gate_up = Stacked((2, 3), joined(1, 1)).to_ours(tensor)
    assert [part.item() for part in gate_up] == list(range(12))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Move, tuple[int, ...]]:
    """A move, and the shape of a tensor of theirs that it fits."""
    heads, still, pairs, columns = (draw(st.integers(1, 4)) for _ in range(4))
    rows = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    turned = PairsApart(heads, still, 2 * pairs)
    per_head = PerHead(heads, tuple(rows))
    choices: list[tuple[Move, tuple[int, ...]]] = [
        (Same(), (columns,)),
        (per_head, (heads * sum(rows), columns)),
        (turned, (heads * (still + 2 * pairs), columns)),
        (Channelwise(tuple(rows)), (sum(rows), 1, columns)),
        (FromOne(), (columns,)),
        (Then(joined(3, 2 * pairs), (Same(), PairsApart(1, 0, 2 * pairs))), (3 + 2 * pairs, columns)),
        (Stacked((heads, pairs), per_head), (heads, pairs, heads * sum(rows), columns)),
    ]
    return draw(st.sampled_from(choices))


@given(moves(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_there_and_back_is_the_identity(case: tuple[Move, tuple[int, ...]], dtype: torch.dtype) -> None:
    move, shape = case
    theirs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = move.to_ours(theirs)
    assert sum(part.numel() for part in ours) == theirs.numel()
    assert torch.equal(move.to_theirs(ours).to(dtype), theirs)


@pytest.mark.parametrize(
    ("move", "shape"),
    [
        (joined(2, 2), (5, 3)),
        (PerHead(3, (1, 1)), (5, 3)),
        (PairsApart(1, 1, 2), (4, 3)),
        (Channelwise((2,)), (2, 2, 4)),
        (Stacked((2,), Same()), (3, 4)),
    ],
)
def test_another_size_is_told(move: Move, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="has the shape"):
        move.to_ours(torch.zeros(shape))
