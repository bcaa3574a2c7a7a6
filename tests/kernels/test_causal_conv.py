"""The causal convolution is the plain double loop, whatever the documents, and goes on from its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels.causal_conv import causal_conv


def by_hand(x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor, documents_BT: Tensor) -> Tensor:
    """Token by token, walking back until the document or the taps end."""
    rows = []
    taps = weight_CK.shape[1]
    for x_TC, documents in zip(x_BTC, documents_BT.tolist(), strict=True):
        outputs = []
        for token in range(len(documents)):
            y_C, reached = bias_C, token
            while reached >= 0 and token - reached < taps and documents[reached] == documents[token]:
                y_C = y_C + weight_CK[:, taps - 1 - (token - reached)] * x_TC[reached]
                reached -= 1
            outputs.append(y_C)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def inputs(tokens: int, taps: int, rows: int = 2, channels: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 10 + taps)
    shapes = ((rows, tokens, channels), (channels, taps), (channels,))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(
    "documents",
    [[5], [0, 1], [0, 0, 0, 0, 0, 0, 0], [3, 3, 1, 3, 3, 3, 0, -1, -1], [0, 1, 2, 3, 4]],
    ids=lambda documents: "".join(map(str, documents)),
)
def test_matches_the_loop_with_gradients(documents: list[int], taps: int) -> None:
    x, weight, bias = inputs(len(documents), taps)
    documents_BT = torch.tensor([documents, documents[::-1]])
    y, state = causal_conv(x, weight, bias, documents_BT)
    expected = by_hand(x, weight, bias, documents_BT)
    assert state is None
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(y)
    grads = torch.autograd.grad((y * probe).sum(), (x, weight, bias))
    expected_grads = torch.autograd.grad((expected * probe).sum(), (x, weight, bias))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 4])
def test_no_documents_means_one_per_row(taps: int) -> None:
    x, weight, _ = inputs(9, taps)
    y, _ = causal_conv(x, weight)
    assert torch.equal(y, causal_conv(x, weight, None, torch.zeros(2, 9, dtype=torch.long))[0])


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[4, 5], [1] * 9, [1, 2, 6]], ids=str)
def test_pieces_that_hand_on_the_state_are_the_whole(cuts: list[int], taps: int) -> None:
    x, weight, bias = inputs(9, taps)
    state: Tensor | None = torch.zeros(2, 3, taps - 1, dtype=torch.float64)
    pieces = []
    for piece in x.split(cuts, 1):
        y, state = causal_conv(piece, weight, bias, state_BCP=state)
        pieces.append(y)
    assert state is not None
    assert state.shape == (2, 3, taps - 1)
    assert torch.equal(torch.cat(pieces, 1), causal_conv(x, weight, bias)[0])


def test_bfloat16_rounds_once() -> None:
    x, weight, bias = (tensor.detach().bfloat16() for tensor in inputs(37, 4))
    y, _ = causal_conv(x, weight, bias)
    exact, _ = causal_conv(x.double(), weight.double(), bias.double())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)
