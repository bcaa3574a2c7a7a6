"""The work of layers in low precision, as `nn.work` has it of others: products in a format, and what quantises
their operands.

What kernels quantise takes as long as a `Kernel` of the name `quantise` by the bytes that it must move.
Products that are emulated are of the format `emulated`, which no calibration knows: such runs study losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from braid.kernels.precision.formats import Format
from braid.kernels.precision.products import Products
from braid.nn.work import Kernel, Piece, Product, Work, moved

Quantiser = Literal[
    "rows", "tokens", "both", "weight", "activation", "activation backward", "activation backward, by tokens"
]
QUANTISED_BYTES: Mapping[Quantiser, int] = MappingProxyType(
    {
        "rows": 3,
        "tokens": 3,
        "both": 4,
        "weight": 4,
        "activation": 5,
        "activation backward": 14,
        "activation backward, by tokens": 11,
    }
)
"""Bytes that a quantiser reads and writes for each element, of an activation for each ffn channel of SwiGLU, in
bfloat16 without scales."""
FOR_A_PROJECTION: Mapping[Quantiser, int] = MappingProxyType(
    {"activation": 2, "activation backward": 5, "activation backward, by tokens": 4}
)
"""How many of them are for one of two projections."""
EMULATED = "emulated"


def quantised(of: Quantiser, elements: int, projections: int = 2) -> Piece:
    """Quantising so many elements, or the operands that an activation of so many ffn channels makes."""
    size = QUANTISED_BYTES[of] - FOR_A_PROJECTION.get(of, 0) * (2 - projections)
    return Piece(Kernel("quantise", (("of", of),), 0, size * elements))


def linear_work(
    products: Products, tokens: int, outputs: int, inputs: int, *, fused: bool, bias_bytes: int
) -> Work:
    """Of a linear layer, by kernels (`fused`) or emulated."""
    bare = products_work(products, tokens, outputs, inputs, fused=fused)
    sums = moved(wgrad=bias_bytes, launches=2).wgrad
    if not fused:
        return Work(bare.forward, bare.backward, (*bare.wgrad, *sums))
    return Work(
        (*_some(products.forward, quantised("rows", tokens * inputs)), *bare.forward),
        (*_gradients(products, tokens * outputs), *bare.backward),
        (*_some(products.weight_grad, quantised("tokens", tokens * inputs)), *bare.wgrad, *sums),
    )


def mlp_work(into: Products, down: Products, tokens: int, hidden: int, ffn: int, projections: int) -> Work:
    """Of an MLP whose activation quantises what it makes."""
    first = products_work(into, tokens, ffn * projections, hidden, fused=True)
    last = products_work(down, tokens, hidden, ffn, fused=True)
    by_tokens = into.weight_grad is not None
    backward: Quantiser = "activation backward, by tokens" if by_tokens else "activation backward"
    return Work(
        (
            *_some(into.forward, quantised("rows", tokens * hidden)),
            *first.forward,
            quantised("activation", tokens * ffn, projections),
            *last.forward,
        ),
        (
            *_gradients(down, tokens * hidden),
            *last.backward,
            quantised(backward, tokens * ffn, projections),
            *first.backward,
        ),
        (*last.wgrad, *_some(into.weight_grad, quantised("tokens", tokens * hidden)), *first.wgrad),
    )


def experts_work(
    into: Products,
    down: Products,
    rows: int,
    groups: int,
    hidden: int,
    ffn: int,
    projections: int,
    *,
    fused: bool,
) -> Work:
    """Of experts with equally many rows."""
    each, projected = -(-rows // groups), ffn * projections
    first = products_work(into, each, projected, hidden, fused=fused, groups=groups, rows=rows)
    last = products_work(down, each, hidden, ffn, fused=fused, groups=groups, rows=rows)
    if not fused:
        return first + last
    if down.input_grad is None:
        between = _some(into.input_grad, quantised("rows", rows * projected))
    else:
        between = (quantised("activation backward", rows * ffn, projections),)
    return Work(
        (*_some(into.forward, quantised("rows", rows * hidden)), *first.forward, *last.forward),
        (
            *_some(down.input_grad, quantised("rows", rows * hidden)),
            *last.backward,
            *between,
            *first.backward,
        ),
        last.wgrad + first.wgrad,
    )


def products_work(
    products: Products,
    tokens: int,
    outputs: int,
    inputs: int,
    *,
    fused: bool,
    groups: int = 1,
    rows: int | None = None,
) -> Work:
    """The three products of a layer, as `nn.work.linear_work` has them, in their formats."""
    counted = None if rows is None else 2 * rows * outputs * inputs

    def product(m: int, n: int, k: int, form: Format | None) -> tuple[Piece]:
        name = "" if form is None else form.name if fused else EMULATED
        return (Piece(Product(m, n, k, groups, counted, name)),)

    return Work(
        product(tokens, outputs, inputs, products.forward),
        product(tokens, inputs, outputs, products.input_grad),
        product(outputs, inputs, tokens, products.weight_grad),
    )


def _gradients(products: Products, elements: int) -> tuple[Piece, ...]:
    """Quantising the gradient of a layer's outputs for the products that take it."""
    by_channels, by_tokens = products.input_grad is not None, products.weight_grad is not None
    if not (by_channels or by_tokens):
        return ()
    return (quantised("both" if by_channels and by_tokens else "rows" if by_channels else "tokens", elements),)


def _some(form: Format | None, piece: Piece) -> tuple[Piece, ...]:
    return () if form is None else (piece,)
