"""The state-space scan is its recurrence, token by token, whatever the length, the groups and the documents."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels import ssd
from braid.kernels.ssd import reference

scan = ssd.REFERENCE.function


class Inputs(NamedTuple):
    x_BTHD: Tensor
    dt_BTH: Tensor
    a_H: Tensor
    b_BTGN: Tensor
    c_BTGN: Tensor
    skip_H: Tensor


def inputs(
    tokens: int,
    *,
    rows: int = 2,
    groups: int = 1,
    repeats: int = 2,
    dim: int = 3,
    state: int = 2,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = groups * repeats
    values = Inputs(
        normal(rows, tokens, heads, dim),
        normal(rows, tokens, heads).exp() / 4,
        -normal(heads).exp(),
        normal(rows, tokens, groups, state),
        normal(rows, tokens, groups, state),
        normal(heads),
    )
    return Inputs(*(value.requires_grad_() for value in values))


def by_definition(values: Inputs, documents_BT: Tensor, state_BHDN: Tensor) -> tuple[Tensor, Tensor]:
    """The two lines of the definition, one token and one head at a time."""
    x, dt, a, b, c, skip = values
    repeats = x.shape[2] // b.shape[2]
    outputs, finals = [], []
    for row in range(len(x)):
        for head in range(x.shape[2]):
            state = state_BHDN[row, head]
            for t in range(x.shape[1]):
                if t and documents_BT[row, t] != documents_BT[row, t - 1]:
                    state = torch.zeros_like(state)
                step = dt[row, t, head]
                written = torch.outer(x[row, t, head], b[row, t, head // repeats])
                state = torch.exp(step * a[head]) * state + step * written
                outputs.append(state @ c[row, t, head // repeats] + skip[head] * x[row, t, head])
            finals.append(state)
    y_BTHD = torch.stack(outputs).view(len(x), x.shape[2], x.shape[1], -1).transpose(1, 2)
    return y_BTHD, torch.stack(finals).view_as(state_BHDN)


def documents(rows: list[list[int]]) -> Tensor:
    """Rows of documents of the given lengths. Ids alternate, so that every second document has the same."""
    return torch.stack(
        [torch.cat([torch.full((n,), i % 2) for i, n in enumerate(lengths)]) for lengths in rows]
    )


def assert_same_with_gradients(values: Inputs, documents_BT: Tensor, state_BHDN: Tensor) -> None:
    state_BHDN.requires_grad_()
    ours = scan(*values, documents_BT, state_BHDN)
    expected = by_definition(values, documents_BT, state_BHDN)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in expected]
    leaves = (*values, state_BHDN)
    grads, expected_grads = (
        torch.autograd.grad(sum((y * probe).sum() for y, probe in zip(results, probes, strict=True)), leaves)
        for results in (ours, expected)
    )
    torch.testing.assert_close(grads, expected_grads, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("groups", "repeats"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_groups(groups: int, repeats: int) -> None:
    values = inputs(37, groups=groups, repeats=repeats)
    state = torch.randn(2, groups * repeats, 3, 2, dtype=torch.float64)
    assert_same_with_gradients(values, documents([[37], [5, 31, 1]]), state)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_length_and_documents(data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    total = sum(cuts)
    chunk, together = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK", chunk)
        patch.setattr(reference, "SCAN_CHUNKS", together)
        state = torch.randn(2, 2, 3, 2, dtype=torch.float64)
        assert_same_with_gradients(inputs(total, seed=total), documents([cuts, [total]]), state)


def test_gradcheck() -> None:
    values = inputs(5, rows=1, repeats=1, dim=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK", 2)
        patch.setattr(reference, "SCAN_CHUNKS", 2)
        assert torch.autograd.gradcheck(lambda *leaves: scan(*leaves, documents([[3, 2]])), tuple(values))


def test_the_chunk_that_runs_is_right_over_several_chunks() -> None:
    length = reference.CHUNK * 2 + 9
    state = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    assert_same_with_gradients(inputs(length, rows=1, repeats=1, dim=2), documents([[70, length - 70]]), state)


def test_no_documents_means_one_per_row() -> None:
    values = inputs(21)
    with_ids = scan(*values, documents([[21], [21]]))
    torch.testing.assert_close(scan(*values), with_ids, rtol=1e-13, atol=1e-13)


def test_nothing_crosses_a_boundary() -> None:
    """However large: not a bit of the next document changes."""
    values = inputs(20, rows=1)
    poisoned = values._replace(x_BTHD=values.x_BTHD.detach().clone())
    poisoned.x_BTHD[:, :7] = 1e300
    boundary = documents([[7, 13]])
    clean, dirty = scan(*values, boundary)[0], scan(*poisoned, boundary)[0]
    assert torch.equal(clean[:, 7:], dirty[:, 7:])


def test_strong_decay_has_finite_gradients() -> None:
    values = inputs(64, rows=1)
    strong = Inputs(*(value.detach().clone() for value in values))._replace(dt_BTH=values.dt_BTH.detach() * 1e4)
    leaves = Inputs(*(value.float().requires_grad_() for value in strong))
    scan(*leaves, documents([[20, 44]]))[0].sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_steps_equal_the_scan() -> None:
    values = inputs(11, groups=3, repeats=2)
    state = torch.zeros(2, 6, 3, 2, dtype=torch.float64)
    y_BTHD, final = scan(*values)
    x, dt, a, b, c, skip = values
    for t in range(11):
        y_BHD, state = ssd.step(x[:, t], dt[:, t], a, b[:, t], c[:, t], skip, state)
        torch.testing.assert_close(y_BHD, y_BTHD[:, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_near_float64() -> None:
    exact = inputs(300, groups=2, repeats=2, dim=16, state=16)
    rounded = Inputs(*(value.detach().bfloat16() for value in exact))._replace(
        dt_BTH=exact.dt_BTH.detach().float(), a_H=exact.a_H.detach().float()
    )
    rounded = Inputs(*(value.requires_grad_() for value in rounded))
    truth = Inputs(*(value.detach().double().requires_grad_() for value in rounded))
    boundary = documents([[100, 200], [300]])
    probe = torch.randn(exact.x_BTHD.shape, dtype=torch.float64)
    y, y_true = scan(*rounded, boundary)[0], scan(*truth, boundary)[0]
    assert y.dtype == torch.bfloat16
    (y.double() * probe).sum().backward()
    (y_true * probe).sum().backward()
    for name, ours, theirs in (
        ("y", y, y_true),
        *((name, getattr(rounded, name).grad, getattr(truth, name).grad) for name in Inputs._fields),
    ):
        error = (ours.double() - theirs).norm() / theirs.norm()
        # Most terms of the gradient of a_H cancel, and with them the digits.
        assert error < (5e-2 if name == "a_H" else 1e-2), (name, error)


def test_the_choice_says_why() -> None:
    choice = ssd.choose(torch.device("cpu"), torch.float32)
    assert str(choice).startswith("ssd: reference, because ")


def test_a_large_time_step_costs_later_tokens_no_precision() -> None:
    torch.manual_seed(0)
    dt = torch.full((1, 64, 1), 0.01)
    dt[0, 5] = 1e4
    x, b, c = torch.randn(1, 64, 1, 3), torch.randn(1, 64, 1, 4), torch.randn(1, 64, 1, 4)
    a, skip = torch.tensor([-16.0]), torch.zeros(1)
    wide, _ = ssd.REFERENCE.function(*(t.double() for t in (x, dt, a, b, c, skip)))
    narrow, _ = ssd.REFERENCE.function(x, dt, a, b, c, skip)
    assert (narrow - wide).norm() / wide.norm() < 1e-6


def test_a_documents_decays_do_not_reach_the_next_one_in_float32() -> None:
    torch.manual_seed(0)
    dt = torch.cat([torch.full((1, 512, 1), 2.0), torch.full((1, 512, 1), 1e-3)], 1)
    x, b, c = torch.randn(1, 1024, 1, 3), torch.randn(1, 1024, 1, 4), torch.randn(1, 1024, 1, 4)
    a, skip = torch.tensor([-16.0]), torch.zeros(1)
    documents = (torch.arange(1024) // 512)[None]
    packed, _ = ssd.REFERENCE.function(x, dt, a, b, c, skip, documents)
    alone, _ = ssd.REFERENCE.function(x[:, 512:], dt[:, 512:], a, b[:, 512:], c[:, 512:], skip)
    torch.testing.assert_close(packed[:, 512:], alone, rtol=1e-6, atol=1e-6)
