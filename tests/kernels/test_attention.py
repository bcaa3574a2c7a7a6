"""Attention: every implementation gives what the definition gives, gradients included, at odd sizes."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from braid.kernels import attention, choose
from braid.kernels.attention import attend_cached, reference, sdpa, spans_of
from braid.kernels.attention.spans import SpanPiece
from braid.kernels.attention.tiles import LONG, TILE
from braid.pattern import Kind
from tests.runs import small_run

CPU = torch.device("cpu")


def one_token_at_a_time(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    window: int | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: for every row, token and head, a softmax over the keys that this token may see, and over
    the head's sink, which has no value."""
    rows, tokens, heads, dim = q.shape
    repeats = heads // k.shape[2]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out = q.new_zeros(rows, tokens, heads, v.shape[-1])
    for b in range(rows):
        start = 0
        for t in range(tokens):
            if t and documents[b, t] != documents[b, t - 1]:
                start = t
            first = start if window is None else max(start, t - window + 1)
            for h in range(heads):
                scores = k[b, first : t + 1, h // repeats] @ q[b, t, h] * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                probs = scores.softmax(0)[: t + 1 - first]
                out[b, t, h] = probs @ v[b, first : t + 1, h // repeats]
    return out


def heads(
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    dtype: torch.dtype = torch.float64,
    v_dim: int | None = None,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens * 100 + heads)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim or dim))
    return [torch.randn(2, tokens, *size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def packed(tokens: int, *starts: int) -> Tensor:
    """Two rows: one cut at `starts`, one a single document."""
    documents = torch.zeros(2, tokens, dtype=torch.int64)
    for start in starts:
        documents[0, start:] += 1
    return documents


DOCUMENTS = (packed(37), packed(37, 5, 6, 20), packed(37, *range(1, 37)))


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend], ids=["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=["whole", "packed", "single tokens"])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_equals_the_definition(
    attend: attention.Attend, window: int | None, documents: Tensor, kv_heads: int
) -> None:
    q, k, v = heads(3, kv_heads, 37, 10)
    expected = one_token_at_a_time(q, k, v, documents, window)
    actual = attend(q, k, v, spans_of(documents, window, CPU))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for grad, wanted in zip(
        torch.autograd.grad(actual, (q, k, v), probe),
        torch.autograd.grad(expected, (q, k, v), probe),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


SINKS = torch.tensor([-30.0, 0.4, 2.5], dtype=torch.float64)
"""One that hardly counts, and two that do."""


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend], ids=["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [packed(13), packed(13, 4, 5)], ids=["whole", "packed"])
def test_sinks_equal_the_definition(attend: attention.Attend, window: int | None, documents: Tensor) -> None:
    q, k, v = heads(3, 1, 13, 5)
    given = (q, k, v, SINKS.clone().requires_grad_())
    expected = one_token_at_a_time(q, k, v, documents, window, sinks=given[3])
    actual = attend(q, k, v, spans_of(documents, window, CPU), sinks_Q=given[3])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(y, given, probe) for y in (actual, expected)]
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=["whole", "packed", "single tokens"])
def test_sinks_equal_the_reference(window: int | None, documents: Tensor) -> None:
    given = (*heads(6, 3, 37, 10), SINKS.repeat(2).requires_grad_())
    q, k, v, sinks = given
    spans = spans_of(documents, window, CPU)
    expected, actual = (attend(q, k, v, spans, 0.7, sinks) for attend in (reference.attend, sdpa.attend))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(y, given, probe) for y in (actual, expected)]
    for grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend], ids=["reference", "sdpa"])
@pytest.mark.parametrize("documents", DOCUMENTS[:2], ids=["whole", "packed"])
@pytest.mark.parametrize("v_dim", [3, 17])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_values_may_be_narrower_or_wider_than_keys(
    attend: attention.Attend, documents: Tensor, v_dim: int, scale: float | None
) -> None:
    q, k, v = heads(6, 3, 37, 10, v_dim=v_dim)
    expected = one_token_at_a_time(q, k, v, documents, 7, scale)
    actual = attend(q, k, v, spans_of(documents, 7, CPU), scale)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for grad, wanted in zip(
        torch.autograd.grad(actual, (q, k, v), probe),
        torch.autograd.grad(expected, (q, k, v), probe),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("newest", [1, 5, 37])
@pytest.mark.parametrize(("kv_heads", "v_dim"), [(1, 4), (3, 10), (6, 13)])
@pytest.mark.parametrize("sinks", [None, SINKS.repeat(2)], ids=["plain", "sinks"])
def test_the_newest_tokens_read_as_among_all(
    window: int | None, newest: int, kv_heads: int, v_dim: int, sinks: Tensor | None
) -> None:
    q, k, v = heads(6, kv_heads, 37, 10, v_dim=v_dim)
    spans = spans_of(packed(37), window, CPU)
    expected = reference.attend(q, k, v, spans, 0.7, sinks)[:, -newest:]
    actual = attend_cached(q[:, -newest:], k, v, window=window, scale=0.7, sinks_Q=sinks)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_stay_near_float64(dtype: torch.dtype) -> None:
    documents = packed(300, 3, 8, 140)
    q, k, v = heads(4, 2, 300, 16, dtype)
    wide = [x.detach().double() for x in (q, k, v)]
    bound = 10 * torch.finfo(dtype).eps
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, -20.0], dtype=dtype)):
        wide_sinks = None if sinks is None else sinks.double()
        expected = reference.attend(*wide, spans_of(documents, 90, CPU), sinks_Q=wide_sinks)
        for attend in (reference.attend, sdpa.attend):
            actual = attend(q, k, v, spans_of(documents, 90, CPU), sinks_Q=sinks)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=8), min_size=1, max_size=3))
def test_pieces_cover_every_token_once_and_never_share_a_document(rows: list[list[int]]) -> None:
    tokens = max(sum(row) for row in rows)
    documents = torch.full((len(rows), tokens), -1)
    for b, row in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        documents[b, : len(ids)] = ids
    spans = spans_of(documents, None, CPU)
    assert sum(piece.length for piece in spans.pieces) == documents.numel()
    runs = spans.runs_BT.flatten()
    ends = torch.tensor([piece.length for piece in spans.pieces]).cumsum(0)[:-1]
    assert bool((runs[ends] != runs[ends - 1]).all())
    for piece, part in zip(spans.pieces, runs.split([p.length for p in spans.pieces]), strict=True):
        assert (piece.mask_LL is None) == (part[0] == part[-1])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=2),
    st.one_of(st.none(), st.integers(1, 300)),
)
def test_tiles_cover_every_token_once_and_long_documents_share_none(
    rows: list[list[int]], window: int | None
) -> None:
    tokens = max(sum(row) for row in rows)
    documents = torch.full((len(rows), tokens), -1)
    for b, row in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        documents[b, : len(ids)] = ids
    spans = spans_of(documents, window, CPU)
    runs, tiles = spans.runs_BT.flatten(), spans.tiles
    places = torch.arange(len(runs))
    near = places[:, None] - places if window else torch.zeros(len(runs), len(runs), dtype=torch.int64)
    sees = (runs[:, None] == runs) & (places[:, None] >= places) & (near < (window or 1))
    assert torch.equal(tiles.first_N, sees.int().argmax(1).int())
    assert torch.equal(tiles.last_N, (places + sees.sum(0)).int())
    work = {"queries": tiles.first_N, "keys": tiles.last_N}
    for table, of in ((tiles.queries_P2, "queries"), (tiles.keys_P2, "keys")):
        begin, end = table.sort(0).values.long().unbind(1)
        assert [begin[0], end[-1]] == [0, len(runs)]
        assert torch.equal(begin[1:], end[:-1])
        assert int((end - begin).max()) <= TILE
        pieces = [runs[a:b].bincount().count_nonzero() for a, b in zip(begin, end, strict=True)]
        long = [int((runs == runs[a]).sum()) >= LONG for a in begin]
        assert all(count == 1 for count, is_long in zip(pieces, long, strict=True) if is_long)
        begin, end = table.long().unbind(1)
        sizes = end - work[of][begin] if of == "queries" else work[of][end - 1] - begin
        assert bool((sizes.diff() <= 0).all())


def test_a_document_that_returns_in_the_same_row_is_another_document() -> None:
    documents = torch.tensor([[0, 1, 0]])
    assert spans_of(documents, None, CPU).runs_BT.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("documents", "cudnn"), [(packed(300), {True}), (packed(300, 40, 50, 210), {False})])
def test_on_a_gpu_packed_rows_never_meet_cudnn(documents: Tensor, cudnn: set[bool]) -> None:
    """It would build a plan for every new length of a document. Tensors without data stand in for a GPU's."""
    met = set()

    def asked(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        met.add(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    spans = spans_of(documents, None, CPU)
    assert spans.pieces  # computed before tensors lose their data
    with FakeTensorMode(), mock.patch.object(F, "scaled_dot_product_attention", asked):
        q, k, v = (torch.empty(2, 300, heads, 8, device="cuda") for heads in (4, 2, 2))
        assert sdpa.attend(q, k, v, spans).shape == q.shape
    assert met == cudnn


def test_the_choice_says_why() -> None:
    choice = attention.choose(CPU, torch.float64)
    assert str(choice).startswith("attention: sdpa, because ")
    assert "float64 on cpu" in choice.reason
    choice = attention.choose(torch.device("cuda"), torch.float32)
    assert str(choice).startswith("attention: sdpa, because fused does not support float32")


def test_a_gpu_attends_with_fused_kernels() -> None:
    pytest.importorskip("triton")
    for head_dim in (None, 64):
        choice = attention.choose(torch.device("cuda"), torch.bfloat16, sink_head_dim=head_dim)
        assert str(choice).startswith("attention: fused, because one launch covers all documents")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cpu", torch.float64, 5, None),
        ("cuda", torch.float32, 4, None),
        ("cuda", torch.float64, 64, "do not support float64"),
        ("cuda", torch.bfloat16, 20, "do not support 20 channels of a head"),
    ],
)
def test_sinks_that_no_kernel_supports_fall_back_and_say_that_it_is_slow(
    device: str, dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    choice = attention.choose(torch.device(device), dtype, sink_head_dim=head_dim)
    assert choice.name == ("sdpa" if reason is None else "reference")
    assert reason is None or (reason in choice.reason and "slow" in choice.reason)


def test_packed_rows_of_a_gpu_have_the_same_answer_here() -> None:
    """Kernels that take a mask there want a key head for each query head."""
    q, k, v = (torch.randn(1, 5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    masked = sdpa._attend_any_length(q, k, v, SpanPiece(length=5, mask_LL=seen), None)
    causal = sdpa._attend_any_length(q, k, v, SpanPiece(length=5, mask_LL=None), None)
    expected = one_token_at_a_time(q, k, v, torch.zeros(1, 5), None)
    for actual in (masked, causal):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_only_layers_that_a_model_has_choose_a_kernel() -> None:
    model = small_run().model
    dense = choose(model, {Kind.ATTENTION, Kind.MLP}, CPU, torch.float32)
    assert dense.grouped_mlp is None
    assert dense.permute is None
    mixture = choose(model, {Kind.ATTENTION, Kind.MOE}, CPU, torch.float32)
    assert mixture.grouped_mlp is not None
    assert mixture.permute is not None
