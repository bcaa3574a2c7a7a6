"""Tokens to rows and back: every implementation gives what single rows and float64 give, gaps included.

Without a GPU the Triton kernels are interpreted, in a process of their own: Triton asks whether to interpret
when it is first imported.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels import permute
from braid.kernels.permute import FusedPermute, Permute, Plain
from tests.kernels.interpreting import DEVICE, GPU, needs_kernels

WAYS = [pytest.param(Plain(), id="reference"), pytest.param(FusedPermute(), id="fused", marks=needs_kernels)]
DTYPES = [torch.float32, torch.float64, torch.float16, *([torch.bfloat16] if GPU else [])]
SIZES = [(5, 3, 24), (1, 1, 1), (7, 8, 70), (0, 2, 8), (3, 1, 2100)]
"""Tokens, slots, channels."""


def places(tokens: int, slots: int, gaps: bool) -> tuple[Tensor, Tensor]:
    """The token of each row, and the row of each slot. With gaps every third slot goes nowhere, and two rows
    are nobody's."""
    kept = [slot for slot in range(tokens * slots) if not (gaps and slot % 3 == 1)]
    order = torch.randperm(len(kept))
    slot_M = torch.tensor(kept, dtype=torch.int64)[order]
    rows = len(kept) + (2 if gaps else 0)
    token_M = torch.cat([slot_M // slots, torch.full((rows - len(kept),), tokens)])
    row_of = torch.full((tokens * slots,), rows)
    row_of[slot_M] = torch.arange(len(kept))
    return token_M.to(DEVICE), row_of.view(tokens, slots).to(DEVICE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "gaps"])
def test_rows_are_their_tokens_and_tokens_the_sums_of_their_rows(
    way: Permute, dtype: torch.dtype, size: tuple[int, int, int], gaps: bool
) -> None:
    tokens, slots, channels = size
    token_M, row_NS = places(tokens, slots, gaps)
    x = torch.randn(tokens, channels).to(DEVICE, dtype)
    permuted = way.permute(x, token_M, row_NS, gaps=gaps)
    nobody = x.new_zeros(channels)
    assert permuted.dtype == dtype
    for row, token in enumerate(token_M.tolist()):
        assert torch.equal(permuted[row], nobody if token == tokens else x[token])
    y = torch.randn(len(token_M), channels).to(DEVICE, dtype)
    summed = way.unpermute(y, row_NS, gaps=gaps)
    padded = torch.cat([y, y.new_zeros(1, channels)]).double()
    wanted = padded[row_NS.flatten()].unflatten(0, row_NS.shape).sum(1)
    assert summed.dtype == dtype
    assert summed.shape == (tokens, channels)
    torch.testing.assert_close(summed.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_small_terms_are_not_lost_among_large_ones(way: Permute) -> None:
    """A token's sum is rounded once: 2048 + eight times 1 in half precision."""
    y = torch.tensor([[2048.0]] + [[1.0]] * 8).to(DEVICE, torch.float16)
    row_NS = torch.arange(9, device=DEVICE)[None]
    assert way.unpermute(y, row_NS, gaps=False).item() == 2056.0


def test_choice_names_its_reason() -> None:
    assert permute.choose(torch.device("cpu")).name == "reference"
    assert "GPU" in permute.choose(torch.device("cpu")).reason
    if not torch.cuda.is_available():
        assert permute.choose(torch.device("cuda")).name == "fused"
