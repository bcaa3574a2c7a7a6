"""Attention on a GPU: every dtype near what the CPU gives in float64, whichever kernel is taken."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from braid.kernels.attention import attend_cached, choose, reference, sdpa, spans_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WIDTHS = [(64, 64), (192, 128), (64, 128), (21, 13)]
"""Channels of keys and of values."""
BOUNDS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def heads(heads: int, kv_heads: int, tokens: int, widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    return [torch.randn(2, tokens, *size, generator=generator).to(dtype) for size in sizes]


def assert_near(actual: Tensor, expected: Tensor, bound: float) -> None:
    error = (actual.cpu().double() - expected).norm() / expected.norm()
    assert error.item() < bound


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kv_heads", [3, 6])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("start", [0, 140], ids=["whole", "packed"])
def test_outputs_and_gradients(
    dtype: torch.dtype, bound: float, widths: tuple[int, int], kv_heads: int, window: int | None, start: int
) -> None:
    documents = torch.zeros(2, 301, dtype=torch.int64)
    documents[1, start:] += 1
    given = heads(6, kv_heads, 301, widths, dtype)
    wide = [x.double().requires_grad_() for x in given]
    there = [x.to(GPU).requires_grad_() for x in given]
    expected = reference.attend(*wide, spans_of(documents, window, CPU), 0.1)
    actual = choose(GPU, dtype).function(*there, spans_of(documents, window, GPU), 0.1)
    assert actual.dtype == dtype
    assert_near(actual, expected, bound)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    grads = torch.autograd.grad(actual, there, probe.to(GPU))
    for grad, wanted in zip(grads, torch.autograd.grad(expected, wide, probe.double()), strict=True):
        assert_near(grad, wanted, bound)


@pytest.mark.parametrize(("dtype", "bound"), [*BOUNDS, (torch.float16, 3e-3)])
@pytest.mark.parametrize("head_dim", [64, 24, 21])
@pytest.mark.parametrize("kv_heads", [3, 6])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("starts", [(), (20, 25, 140)], ids=["whole", "packed"])
def test_sinks(
    dtype: torch.dtype,
    bound: float,
    head_dim: int,
    kv_heads: int,
    window: int | None,
    starts: tuple[int, ...],
) -> None:
    documents = torch.zeros(2, 301, dtype=torch.int64)
    for start in starts:
        documents[1, start:] += 1
    given = [*heads(6, kv_heads, 301, (head_dim, head_dim), dtype), torch.linspace(-3, 3, 6).to(dtype)]
    wide = [x.double().requires_grad_() for x in given]
    there = [x.to(GPU).requires_grad_() for x in given]
    expected = reference.attend(*wide[:3], spans_of(documents, window, CPU), 0.1, wide[3])
    attend = choose(GPU, dtype, sink_head_dim=head_dim).function
    actual = attend(*there[:3], spans_of(documents, window, GPU), 0.1, there[3])
    assert actual.dtype == dtype
    assert_near(actual, expected, bound)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    grads = torch.autograd.grad(actual, there, probe.to(GPU))
    for grad, wanted in zip(grads, torch.autograd.grad(expected, wide, probe.double()), strict=True):
        assert_near(grad, wanted, bound)


@pytest.mark.parametrize("window", [None, 50])
def test_packed_rows_run_kernels_that_take_any_length(window: int | None) -> None:
    """cuDNN takes whole rows and builds a plan for each new length, so that packed rows never meet it. Masks do
    not make torch write out all scores, which is where it needs a softmax of its own."""
    documents = torch.zeros(2, 301, dtype=torch.int64)
    for start in (20, 25, 140):
        documents[1, start:] += 1
    there = [x.to(GPU).requires_grad_() for x in heads(6, 3, 301, (64, 64), torch.bfloat16)]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        sdpa.attend(*there, spans_of(documents, window, GPU)).sum().backward()
    names = {event.name for event in seen.events()}
    assert any("flash" in name or "fmha" in name for name in names)
    assert not [name for name in names if "cudnn" in name or "SoftMax" in name]


@pytest.mark.parametrize("starts", [(), (20, 25, 140), range(1, 301)], ids=["whole", "packed", "single tokens"])
def test_documents_make_no_difference_to_fused_launches(starts: Iterable[int]) -> None:
    documents = torch.zeros(2, 301, dtype=torch.int64)
    for start in starts:
        documents[1, start:] += 1
    there = [x.to(GPU).requires_grad_() for x in heads(6, 3, 301, (64, 64), torch.bfloat16)]
    attend = choose(GPU, torch.bfloat16).function
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        attend(*there, spans_of(documents, 50, GPU)).sum().backward()
    names = [event.name for event in seen.events() if event.name.startswith("attention_")]
    assert sorted(names) == ["attention_dk_dv", "attention_dq", "attention_forward"]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("widths", [*WIDTHS, (576, 512)])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("newest", [1, 5])
def test_cached(
    dtype: torch.dtype, bound: float, widths: tuple[int, int], kv_heads: int, window: int | None, newest: int
) -> None:
    q, k, v = heads(6, kv_heads, 301, widths, dtype)
    spans = spans_of(torch.zeros(2, 301, dtype=torch.int64), window, CPU)
    expected = reference.attend(q.double(), k.double(), v.double(), spans, 0.1)[:, -newest:]
    actual = attend_cached(q[:, -newest:].to(GPU), k.to(GPU), v.to(GPU), window=window, scale=0.1)
    assert actual.dtype == dtype
    assert_near(actual, expected, bound)
