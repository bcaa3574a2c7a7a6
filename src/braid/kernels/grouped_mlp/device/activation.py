"""Activations and their gradients inside a kernel, for the epilogue of a matmul.

Gate and up of an ffn channel are neighbours in a tile of projections, so that one thread holds both.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class FusedActivation:
    """An activation as the kernels know it: `kernels.activation` defines what the numbers mean."""

    kind: str
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    @property
    def constants(self) -> dict[str, object]:
        """What a kernel is compiled for."""
        return {"KIND": self.kind, "ALPHA": self.alpha, "LIMIT": self.limit, "OFFSET": self.offset}

    @property
    def projections(self) -> int:
        """Projections into the ffn: gate and up, or up alone."""
        return 2 if self.kind == "swiglu" else 1


@triton.jit
def activate(
    h,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The ffn channels [ROWS, COLS], in float32, of projections."""
    if KIND == "swiglu":
        gate, up = h.to(tl.float32).reshape(ROWS, COLS, 2).split()
        if LIMIT is not None:
            gate, up = _limited(gate, up, LIMIT)
        value = gate * tl.sigmoid(ALPHA * gate) * (up + OFFSET)
    elif KIND == "relu2":
        positive = tl.maximum(h.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
    elif KIND == "gelu_tanh":
        up = h.to(tl.float32)
        value = up * tl.sigmoid(_tanh_argument(up))
    else:
        up = h.to(tl.float32)
        value = 0.5 * up * (1.0 + tl.erf(up * 0.7071067811865476))
    return value


@triton.jit
def activate_backward(
    da,
    h,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The ffn channels, and the gradient of the projections, from the gradient `da` of the ffn channels: both
    in float32, the latter with gate and up as neighbours again."""
    if KIND == "swiglu":
        gate, up = h.to(tl.float32).reshape(ROWS, COLS, 2).split()
        if LIMIT is not None:
            gate_shut = gate > LIMIT
            up_shut = tl.abs(up) > LIMIT
            gate, up = _limited(gate, up, LIMIT)
        sigmoid = tl.sigmoid(ALPHA * gate)
        opened = gate * sigmoid
        value = opened * (up + OFFSET)
        d_gate = da * (up + OFFSET) * (sigmoid + ALPHA * opened * (1.0 - sigmoid))
        d_up = da * opened
        if LIMIT is not None:
            d_gate = tl.where(gate_shut, 0.0, d_gate)
            d_up = tl.where(up_shut, 0.0, d_up)
        dh = tl.join(d_gate, d_up).reshape(ROWS, 2 * COLS)
    elif KIND == "relu2":
        positive = tl.maximum(h.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
        dh = 2.0 * da * positive
    elif KIND == "gelu_tanh":
        up = h.to(tl.float32)
        sigmoid = tl.sigmoid(_tanh_argument(up))
        value = up * sigmoid
        slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * up * up)
        dh = da * (sigmoid + value * (1.0 - sigmoid) * slope)
    else:
        up = h.to(tl.float32)
        normal = 0.5 * (1.0 + tl.erf(up * 0.7071067811865476))
        value = up * normal
        dh = da * (normal + up * 0.3989422804014327 * tl.exp(-0.5 * up * up))
    return value, dh


@triton.jit
def _tanh_argument(up):
    """Twice the argument of tanh in approximate GELU: (1 + tanh(z)) / 2 is the sigmoid of 2z."""
    return 1.5957691216057308 * (up + 0.044715 * up * up * up)


@triton.jit
def _limited(gate, up, LIMIT: tl.constexpr):
    """Clamped projections. The GPU's plain minimum and maximum would turn a NaN into the limit."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tile.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1).split()


@triton.jit
def split_columns(tile, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):
    """A tile as 2 or 4 narrower ones, from left to right. An epilogue that handles one of them at a time needs
    less shared memory."""
    left, right = _halves(tile, ROWS, COLS)
    if PARTS == 2:
        parts = (left, right)
    else:
        tl.static_assert(PARTS == 4)
        first, second = _halves(left, ROWS, COLS // 2)
        third, fourth = _halves(right, ROWS, COLS // 2)
        parts = (first, second, third, fourth)
    return parts
