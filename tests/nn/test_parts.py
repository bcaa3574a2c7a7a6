"""Norms, rotary positions, embedding, linear maps: against the formulas, in float64."""

from __future__ import annotations

import cmath

import pytest
import torch

from braid.distributed.collectives import Group, Groups
from braid.errors import DataError
from braid.nn.embedding import Embedding, check_ids
from braid.nn.linear import Linear
from braid.nn.norm import LayerNorm, RmsNorm
from braid.nn.rotary import rotary_tables, rotate


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_formula() -> None:
    norm, x = RmsNorm(7, 1e-3, dtype=torch.float64), values(3, 5, 7).requires_grad_()
    norm.weight.data = values(7, seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-13, atol=1e-13)
    probe, leaves = values(3, 5, 7, seed=2), (x, norm.weight)
    for grad, want in zip(
        torch.autograd.grad(norm(x), leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_layer_norm_is_its_formula() -> None:
    norm, x = LayerNorm(7, 1e-3, dtype=torch.float64), values(3, 7)
    norm.weight.data, norm.bias.data = values(7, seed=1), values(7, seed=2)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_norm_statistics_are_float32_for_bfloat16(kind: type[RmsNorm] | type[LayerNorm]) -> None:
    norm, x = kind(4096, 1e-5, dtype=torch.bfloat16), (values(2, 4096) + 8).bfloat16()
    for tensor in norm.canonical().values():
        norm.get_parameter(tensor.parameter).data.fill_(1.0 if tensor.fill == "ones" else 0.0)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if kind is LayerNorm else wide
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected.bfloat16(), rtol=0.008, atol=1e-4)


def test_rotary_turns_each_pair_by_position_times_frequency() -> None:
    x, positions = values(2, 3, 4, 10), torch.tensor([[0, 1, 2], [5, 0, 1_000_003]])
    turned = rotate(x, rotary_tables(positions, 10, 100.0, torch.float64))
    for b, t, pair in ((0, 1, 0), (1, 0, 3), (1, 2, 4)):
        angle = float(positions[b, t]) * 100.0 ** (-2 * pair / 10)
        for head in range(4):
            before = complex(x[b, t, head, pair], x[b, t, head, pair + 5])
            after = complex(turned[b, t, head, pair], turned[b, t, head, pair + 5])
            assert abs(before * cmath.exp(1j * angle) - after) < 1e-9


def test_rotary_gradient() -> None:
    tables = rotary_tables(torch.tensor([[0, 3, 4]]), 6, 10.0, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, tables), values(1, 3, 2, 6).requires_grad_())


def test_rotary_tables_of_bfloat16_are_float32() -> None:
    tables = rotary_tables(torch.tensor([[0, 1]]), 4, 10.0, torch.bfloat16)
    assert tables.cos_BT1R.dtype == torch.float32


@pytest.mark.parametrize("bad", [-1, 11, 300])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    with pytest.raises(DataError, match=f"token id {bad} in row 1 at token 2 .* 0 to 10"):
        check_ids(torch.tensor([[0, 1, 2], [3, 10, bad]]), 11)
    check_ids(torch.zeros(0, 3, dtype=torch.int64), 11)


def test_embedding_looks_up_rows() -> None:
    embedding = Embedding(5, 3, dtype=torch.float64)
    embedding.weight.data = values(5, 3)
    ids = torch.tensor([[4, 0]])
    assert torch.equal(embedding(ids)[0], embedding.weight[[4, 0]])


def test_embeddings_of_tp_ranks_add_up_to_those_of_one_process() -> None:
    """The rank that holds a token's row looks it up, and all others add zeros."""
    table, ids = values(10, 4), torch.tensor([[0, 9, 4, 3], [5, 2, 7, 8]])
    total = torch.zeros(*ids.shape, 4, dtype=torch.float64)
    for rank in range(3):  # without a communicator, a rank returns what it would add
        tp = Group(name="tp", size=3, rank=rank, handle=None)
        embedding = Embedding(10, 4, groups=Groups(tp=tp), dtype=torch.float64)
        place = embedding.canonical()["weight"]
        place.write(embedding.weight, place.held.of(table))
        total += embedding(ids).detach()
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_gradients_of_a_norm_are_summed_over_ranks_with_copies(kind: type[RmsNorm] | type[LayerNorm]) -> None:
    tp = Group(name="tp", size=2, rank=0, handle=None)
    norm = kind(8, 1e-5, copies=tp)
    told = {tensor.parameter: tensor.copies for tensor in norm.canonical().values()}
    assert told == dict.fromkeys(dict(norm.named_parameters()), tp)


def test_linear_parts_are_places_in_one_weight() -> None:
    linear = Linear(4, (3, 2, 5), bias=True, dtype=torch.float64)
    linear.weight.data, linear.bias.data = values(30, 4), values(30)
    part = linear.canonical_part((slice(None), 1))
    weight, bias = part["weight"].read(linear.weight), part["bias"].read(linear.bias)
    assert weight.shape == (15, 4)
    x = values(6, 4, seed=3)
    expected = linear(x).view(6, 3, 2, 5)[:, :, 1].reshape(6, 15)
    torch.testing.assert_close(x @ weight.T + bias, expected, rtol=1e-13, atol=1e-13)
    part["weight"].write(linear.weight, torch.zeros(15, 4))
    rows = linear.weight.view(3, 2, 5, 4)
    assert not rows[:, 1].any()
    assert bool(rows[:, 0].any())


@pytest.mark.parametrize("bias", [False, True])
def test_linear_outputs_apart(bias: bool) -> None:
    linear = Linear(4, (5, 2), bias=bias, dtype=torch.float64)
    for parameter in linear.parameters():
        parameter.data = values(*parameter.shape)
    x = values(3, 4, seed=1)
    together = linear(x).view(3, 5, 2)
    for place, output in enumerate(linear.split_forward(x)):
        torch.testing.assert_close(output, together[..., place], rtol=1e-13, atol=1e-13)


def test_a_bf16_embedding_sums_its_gradients_in_float32() -> None:
    ids = torch.zeros(64, 256, dtype=torch.int64)
    wide = Embedding(2, 3, dtype=torch.float64)
    narrow = Embedding(2, 3, dtype=torch.bfloat16)
    grads = torch.rand(64, 256, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide(ids).backward(grads.double())
    narrow(ids).backward(grads)
    error = (narrow.weight.grad.double() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert error < 2**-8


def test_every_id_of_the_vocabulary_is_known_and_no_other() -> None:
    check_ids(torch.tensor([[0, 4]]), 5)
    for wrong in (-1, 5):
        with pytest.raises(DataError):
            check_ids(torch.tensor([[0, wrong]]), 5)
