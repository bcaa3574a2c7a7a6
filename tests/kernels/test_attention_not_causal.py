"""Attention without a causal mask: every token of a document sees all of it, and nothing of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels import attention
from braid.kernels.attention import pairs_seen, reference, sdpa, spans_of

CPU = torch.device("cpu")
LENGTHS = ([37], [5, 1, 20, 11], [1] * 37, [130, 3])
"""A single document, packed ones, documents of one token, and one too long to share a masked piece."""


def one_document_at_a_time(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], sinks: Tensor | None) -> Tensor:
    """The definition: a softmax over all keys of the document, and over the head's sink, which has no value."""
    repeats, scale, outputs = q.shape[2] // k.shape[2], q.shape[3] ** -0.5, []
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    for q_L, k_L, v_L in zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True):
        scores = torch.einsum("blhd,bmhd->bhlm", q_L, k_L) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        outputs.append(torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1)[..., : k_L.shape[1]], v_L))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend], ids=["reference", "sdpa"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole", "packed", "single tokens", "long"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.4, -30.0, 2.5, 0.1]).double()], ids=["plain", "sinks"])
def test_equals_the_definition(attend: attention.Attend, lengths: list[int], sinks: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 10), (2, 10), (2, 10), (4, 10))
    *given, probe = (
        torch.randn(1, sum(lengths), *size, dtype=torch.float64, generator=generator) for size in sizes
    )
    given += [] if sinks is None else [sinks]
    given = [x.clone().requires_grad_() for x in given]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    actual = attend(*given[:3], spans_of(documents, None, CPU, causal=False), None, *given[3:])
    expected = one_document_at_a_time(*given[:3], lengths, None if sinks is None else given[3])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(*(torch.autograd.grad(y, given, probe) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


def test_rows_of_single_documents_need_no_mask() -> None:
    spans = spans_of(torch.zeros(3, 8), None, CPU, causal=False)
    assert [(piece.mask_LL, piece.causal) for piece in spans.pieces] == [(None, False)] * 3


def test_tiles_are_ordered_by_the_whole_documents_that_they_see() -> None:
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([300, 700, 20]))[None]
    tiles = spans_of(documents, None, CPU, causal=False).tiles
    assert not tiles.causal
    for table in (tiles.queries_P2, tiles.keys_P2):
        begin, end = table.long().unbind(1)
        sizes = tiles.last_N[end - 1] - tiles.first_N[begin]
        assert sizes.tolist() == [700] * 6 + [300] * 3 + [20]


def test_a_window_without_a_causal_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a window of 7 tokens: .* set the window to None"):
        spans_of(torch.zeros(1, 8), 7, CPU, causal=False)


def test_pairs_of_a_document() -> None:
    assert pairs_seen(9, None, causal=False) == 81


def test_the_choice_on_a_gpu_says_that_kernels_for_hopper_are_causal() -> None:
    pytest.importorskip("triton")
    gpu, dtype = torch.device("cuda"), torch.bfloat16
    causal, not_causal = (attention.choose(gpu, dtype, causal=causal) for causal in (True, False))
    assert causal.name == not_causal.name == "fused"
    assert "Hopper" in not_causal.reason
    assert "Hopper" not in causal.reason
