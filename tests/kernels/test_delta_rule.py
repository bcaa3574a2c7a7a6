"""The delta rule: the chunked form gives what the definition gives, gradients included, documents and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels import delta_rule as room
from braid.kernels.delta_rule.reference import CHUNK, delta_rule

CPU = torch.device("cpu")


def one_token_at_a_time(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, documents: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: for every row and value head, one matrix that is corrected at each token."""
    rows, tokens, heads, _ = v.shape
    answers, memories = [], []
    for b in range(rows):
        for h in range(heads):
            key_head, memory = h // (heads // k.shape[2]), initial[b, h]
            for t in range(tokens):
                if t and documents[b, t] != documents[b, t - 1]:
                    memory = torch.zeros_like(memory)
                query, key = (
                    x[b, t, key_head] / (x[b, t, key_head].pow(2).sum() + 1e-6).sqrt() for x in (q, k)
                )
                memory = memory * log_decay[b, t, h].exp()
                memory = memory + beta[b, t, h] * torch.outer(key, v[b, t, h] - key @ memory)
                answers.append(query @ memory / k.shape[-1] ** 0.5)
            memories.append(memory)
    y = torch.stack(answers).view(rows, heads, tokens, -1).transpose(1, 2)
    return y, torch.stack(memories).view(rows, heads, *memories[0].shape)


def inputs(
    rows: int,
    tokens: int,
    dtype: torch.dtype = torch.float64,
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 5,
    value_dim: int = 7,
) -> tuple[Tensor, ...]:
    """q, k, v, log decay, beta, initial state; some heads forget fast, some hardly at all."""
    generator = torch.Generator().manual_seed(tokens)
    for_keys, for_values, for_heads = (tokens, key_heads, key_dim), (tokens, heads, value_dim), (tokens, heads)
    shapes = (for_keys, for_keys, for_values, for_heads, for_heads, (heads, key_dim, value_dim))
    q, k, v, a, b, state = (torch.randn(rows, *shape, generator=generator) for shape in shapes)
    log_decay = -torch.logspace(-4, 1.5, heads) * torch.nn.functional.softplus(a)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v, log_decay, b.sigmoid(), state))


def packed(tokens: int, *starts: int) -> Tensor:
    """Two rows: one cut at `starts`, one whose last third is padding."""
    documents = torch.zeros(2, tokens, dtype=torch.int64)
    for start in starts:
        documents[0, start:] += 1
    documents[1, tokens - tokens // 3 :] = -1
    return documents


def assert_close(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "documents",
    [
        torch.zeros(2, 1, dtype=torch.int64),
        packed(5, 1, 2, 3, 4),
        packed(37),
        packed(CHUNK, 20),
        packed(2 * CHUNK + 3, 3, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 30, 2 * CHUNK),
    ],
    ids=["one token", "single tokens", "less than a chunk", "a chunk", "many"],
)
def test_equals_the_definition(documents: Tensor) -> None:
    *given, initial = inputs(*documents.shape)
    actual = delta_rule(*given, documents, initial)
    expected = one_token_at_a_time(*given, documents, initial)
    assert_close(actual, expected)
    probes = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in expected]
    leaves = (*given, initial)
    assert_close(torch.autograd.grad(actual, leaves, probes), torch.autograd.grad(expected, leaves, probes))


def test_gradients_are_those_of_the_function() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1]])
    given = inputs(1, 6, key_heads=1, heads=2, key_dim=2, value_dim=2)
    assert torch.autograd.gradcheck(lambda *x: delta_rule(*x[:5], documents, x[5]), given)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_packed_documents_equal_documents_apart(lengths: list[int]) -> None:
    *given, _ = inputs(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    packed_y, packed_state = delta_rule(*given, documents)
    apart = [delta_rule(*pieces) for pieces in zip(*(x.split(lengths, 1) for x in given), strict=True)]
    apart_y = torch.cat([y for y, _ in apart], 1)
    assert_close((packed_y, packed_state), (apart_y, apart[-1][1]))
    probe = torch.randn(packed_y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_close(torch.autograd.grad(packed_y, given, probe), torch.autograd.grad(apart_y, given, probe))


@pytest.mark.parametrize("cut", [1, CHUNK - 1, CHUNK, 100])
def test_a_document_goes_on_from_its_state(cut: int) -> None:
    *given, initial = inputs(2, 150)
    y, state = delta_rule(*given, initial_state_BHKV=initial)
    head, middle = delta_rule(*(x[:, :cut] for x in given), initial_state_BHKV=initial)
    tail, end = delta_rule(*(x[:, cut:] for x in given), initial_state_BHKV=middle)
    assert_close((torch.cat([head, tail], 1), end), (y, state))


def test_steps_equal_the_definition() -> None:
    *given, initial = inputs(2, 23)
    answers, state = [], initial
    for t in range(23):
        y, state = room.step(*(x[:, t] for x in given), state_BHKV=state)
        answers.append(y)
    expected = one_token_at_a_time(*given, torch.zeros(2, 23), initial)
    assert_close((torch.stack(answers, 1), state), expected)


@pytest.mark.parametrize("log_decay", [0.0, -200.0])
def test_the_hardest_memories_stay_exact_and_finite(log_decay: float) -> None:
    """Nothing or everything is forgotten, every token overwrites the same key, and some keys are zero."""
    q, k, v, decay, beta, initial = (x.detach() for x in inputs(2, 90))
    k = k[:, :1].expand_as(k).clone()
    k[:, 70:75] = 0
    given = [q, k, v, torch.full_like(decay, log_decay), torch.ones_like(beta)]
    leaves = [x.requires_grad_() for x in given]
    documents = packed(90, 66)
    actual, expected = (f(*leaves, documents, initial) for f in (delta_rule, one_token_at_a_time))
    assert_close(actual, expected)
    grads, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (actual[0], expected[0]))
    assert_close(grads, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_stay_near_float64(dtype: torch.dtype) -> None:
    given = [x.detach() for x in inputs(2, 300, dtype)[:-1]]
    documents = packed(300, 3, 140)
    wide, wide_state = delta_rule(*(x.double() for x in given), documents)
    actual, state = delta_rule(*given, documents)
    assert actual.dtype == dtype
    assert state.dtype == torch.float32
    bound = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), wide, rtol=bound, atol=bound)
    torch.testing.assert_close(state.double(), wide_state, rtol=1e-5, atol=1e-5)


def test_the_choice_says_why() -> None:
    choice = room.choose(CPU, torch.float64)
    assert str(choice).startswith("delta_rule: reference, because ")
    assert "needs a GPU, not cpu" in choice.reason
