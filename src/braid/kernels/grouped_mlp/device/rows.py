"""Products of rows with the weights of their experts, and what can be done with a result before it leaves the
chip: an activation times the row's probability, or the gradient of one.

Every program takes one tile after the other. Operands come through tensor descriptors, which read zeros past
the end of a dim; results leave through descriptors that write nothing past the end of an expert. So no size
needs to be a multiple of a tile's.

Shapes: N rows, E experts, F ffn channels, G projections into the ffn, I channels in and O out of any product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from braid.kernels.grouped_mlp.device.formulas import activate, activate_backward, side_by_side
from braid.kernels.grouped_mlp.device.ragged import ragged, read_rows, write_rows
from braid.kernels.grouped_mlp.device.tiles import Tiles
from braid.kernels.grouped_mlp.device.variants import RelayRowVariant, RowVariant, RowWay
from braid.kernels.launch import Descriptor, Launcher, parts_of


@dataclass(frozen=True, kw_only=True)
class Formula:
    """An activation as kernels know it."""

    kind: str
    alpha: float
    limit: float | None
    offset: float

    @classmethod
    def none(cls) -> Formula:
        """That of a product without an activation."""
        return cls(kind="none", alpha=1.0, limit=None, offset=0.0)

    @property
    def constants(self) -> dict[str, object]:
        return {"KIND": self.kind, "ALPHA": self.alpha, "LIMIT": self.limit, "OFFSET": self.offset}

    @property
    def projections(self) -> int:
        return 2 if self.kind == "swiglu" else 1


def multiply(
    launch: Launcher,
    x_NI: Tensor,
    weight: Tensor,
    tiles: Tiles,
    variant: RowWay,
    *,
    transposed: bool,
    bias_EO: Tensor | None = None,
    probs_N: Tensor | None = None,
) -> Tensor:
    """Rows times the weights of their experts; `weight` is E, O, I where `transposed`, else E, I, O. A bias
    counts as often as the row's probability says."""
    if isinstance(variant, RelayRowVariant):
        from braid.kernels.grouped_mlp.device import relay_rows  # Gluon cannot be interpreted

        if bias_EO is None and x_NI.dtype == torch.bfloat16:
            return relay_rows.multiply(launch, x_NI, weight, tiles, variant, transposed=transposed)
        variant = RowVariant()
    _, channels_in = x_NI.shape
    channels_out = weight.shape[1 if transposed else 2]
    y_NO = torch.empty(len(x_NI), channels_out, dtype=x_NI.dtype, device=x_NI.device)
    v = variant
    tensors = (
        *_operands(x_NI, weight, tiles, v, transposed),
        ragged(y_NO, tiles.tile_rows, v.columns // v.parts),
        bias_EO,
        probs_N if bias_EO is not None else None,
        *_map_of(tiles),
    )
    constants = {**_constants(tiles, v), "TRANSPOSED": transposed}
    _run(launch, _multiply, tiles, v, tensors, (channels_out, channels_in), constants)
    return y_NO


def multiply_activate(
    launch: Launcher,
    x_NI: Tensor,
    w_in: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    formula: Formula,
    variant: RowWay,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Projections into the ffn, and ffn channels times each row's probability. `w_in` is E, F · G, I."""
    if isinstance(variant, RelayRowVariant):
        from braid.kernels.grouped_mlp.device import relay_rows  # Gluon cannot be interpreted

        if bias is None and formula.kind == "swiglu" and x_NI.dtype == torch.bfloat16:
            return relay_rows.multiply_activate(launch, x_NI, w_in, probs_N, tiles, formula, variant)
        variant = RowVariant()
    rows, channels_in = x_NI.shape
    projected, v = w_in.shape[1], variant
    h = torch.empty(rows, projected, dtype=x_NI.dtype, device=x_NI.device)
    a = torch.empty(rows, projected // formula.projections, dtype=x_NI.dtype, device=x_NI.device)
    part = v.columns // v.parts
    tensors = (
        *_operands(x_NI, w_in, tiles, v, transposed=True),
        ragged(h, tiles.tile_rows, part),
        ragged(a, tiles.tile_rows, part // formula.projections),
        bias,
        probs_N,
        *_map_of(tiles),
    )
    constants = {**_constants(tiles, v), "G": formula.projections, **formula.constants}
    _run(launch, _multiply_activate, tiles, v, tensors, (projected, channels_in), constants)
    return h, a


def multiply_activate_backward(
    launch: Launcher,
    dy_NI: Tensor,
    w_down_EIF: Tensor,
    h: Tensor,
    probs_N: Tensor,
    tiles: Tiles,
    formula: Formula,
    variant: RowWay,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of what the experts give: those of the projections and of the probabilities, and the
    ffn channels times each row's probability once more. Probabilities get one sum per tile, added in a fixed
    order."""
    if isinstance(variant, RelayRowVariant):
        from braid.kernels.grouped_mlp.device import relay_rows  # Gluon cannot be interpreted

        if formula.kind == "swiglu" and h.dtype == torch.bfloat16:
            return relay_rows.multiply_activate_backward(
                launch, dy_NI, w_down_EIF, h, probs_N, tiles, formula, variant
            )
        variant = RowVariant(parts=4)
    rows, channels_in = dy_NI.shape
    ffn, v, gates = w_down_EIF.shape[2], variant, formula.projections
    dh = torch.empty_like(h)
    a_NF = torch.empty(rows, ffn, dtype=h.dtype, device=h.device)
    sums = torch.empty(parts_of(ffn, v.columns), rows, dtype=torch.float32, device=h.device)
    part = v.columns // v.parts
    tensors = (
        *_operands(dy_NI, w_down_EIF, tiles, v, transposed=False),
        TensorDescriptor.from_tensor(h, [tiles.tile_rows, gates * part]),
        ragged(dh, tiles.tile_rows, gates * part),
        ragged(a_NF, tiles.tile_rows, part),
        probs_N,
        sums,
        *_map_of(tiles),
    )
    constants = {**_constants(tiles, v), "G": gates, **formula.constants}
    _run(launch, _multiply_activate_backward, tiles, v, tensors, (ffn, channels_in, rows), constants)
    return dh, a_NF, sums.sum(0)


def _run(
    launch: Launcher,
    kernel: object,
    tiles: Tiles,
    variant: RowVariant,
    tensors: tuple[Tensor | Descriptor | None, ...],
    numbers: tuple[int, ...],
    constants: Mapping[str, object],
) -> None:
    """The first number is that of channels out."""
    v, most = variant, tiles.most * parts_of(numbers[0], variant.columns)
    programs = min(most, launch.multiprocessors(tiles.ends_E.device) * v.per_sm) if v.per_sm else most
    launch(
        kernel, (programs, 1), tensors, numbers, constants,
        warps=v.warps, stages=v.stages, registers=v.registers,
    )  # fmt: skip


def _operands(
    x_NI: Tensor, weight: Tensor, tiles: Tiles, variant: RowVariant, transposed: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    block = [variant.columns, variant.depth] if transposed else [variant.depth, variant.columns]
    return (
        ragged(x_NI, tiles.tile_rows, variant.depth),
        TensorDescriptor.from_tensor(weight, [1, *block]),
    )


def _map_of(tiles: Tiles) -> tuple[Tensor, ...]:
    return tiles.expert_T, tiles.row_T, tiles.count_1, tiles.ends_E


def _constants(tiles: Tiles, variant: RowVariant) -> dict[str, object]:
    return {
        "BM": tiles.tile_rows,
        "BN": variant.columns,
        "BK": variant.depth,
        "PARTS": variant.parts,
        "FLAT": variant.flat,
    }


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _product(
    x_desc,
    w_desc,
    row,
    end,
    expert,
    column,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, channels_in, BK):
        x = read_rows(x_desc, row, end, k, BM, BK)  # zeros past the end, which take the least power
        if TRANSPOSED:
            w = w_desc.load([expert, column, k]).reshape(BN, BK).T
        else:
            w = w_desc.load([expert, k, column]).reshape(BK, BN)
        sums = tl.dot(x, w, sums)
    return sums


@triton.jit
def _multiply(
    x_desc,
    w_desc,
    y_desc,
    bias,
    probs,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    FLAT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=FLAT):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        y = _product(x_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, TRANSPOSED)
        if bias is not None:
            n = column + tl.arange(0, BN)
            b = tl.load(bias + expert * channels_out + n, mask=n < channels_out, other=0.0).to(tl.float32)
            m = row + tl.arange(0, BM)
            y += tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)[:, None] * b[None, :]
        parts = side_by_side(y, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            at = column + part * (BN // PARTS)
            write_rows(y_desc, row, end, at, parts[part].to(y_desc.dtype), BM, BN // PARTS)


@triton.jit
def _multiply_activate(
    x_desc,
    w_desc,
    h_desc,
    a_desc,
    bias,
    probs,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    FLAT: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    PART: tl.constexpr = BN // PARTS
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=FLAT):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        projected = _product(x_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, True)
        if bias is not None:
            n = column + tl.arange(0, BN)
            b = tl.load(bias + expert * channels_out + n, mask=n < channels_out, other=0.0)
            projected += b.to(tl.float32)[None, :]
        m = row + tl.arange(0, BM)
        prob = tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)
        parts = side_by_side(projected, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            # Backward computes the activation again, from what is kept: so does this, from the same numbers.
            h = parts[part].to(h_desc.dtype)
            at = column + part * PART
            write_rows(h_desc, row, end, at, h, BM, PART)
            a = activate(h, BM, PART // G, KIND, ALPHA, LIMIT, OFFSET) * prob[:, None]
            write_rows(a_desc, row, end, at // G, a.to(a_desc.dtype), BM, PART // G)


@triton.jit(do_not_specialize=["rows"])
def _multiply_activate_backward(
    dy_desc,
    w_desc,
    h_desc,
    dh_desc,
    a_desc,
    probs,
    prob_sums,
    tile_expert,
    tile_row,
    tile_count,
    ends,
    channels_out,
    channels_in,
    rows,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    FLAT: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    across = tl.cdiv(channels_out, BN)
    PART: tl.constexpr = BN // PARTS
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, tl.num_programs(0), flatten=FLAT):
        expert = tl.load(tile_expert + tile // across)
        row = tl.load(tile_row + tile // across)
        column = (tile % across) * BN
        end = tl.load(ends + expert)
        da = _product(dy_desc, w_desc, row, end, expert, column, channels_in, BM, BN, BK, False)
        m = row + tl.arange(0, BM)
        prob = tl.load(probs + m, mask=m < end, other=0.0).to(tl.float32)
        prob_sum = tl.zeros((BM,), dtype=tl.float32)
        parts = side_by_side(da, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            at = column + part * PART
            h = h_desc.load([row, G * at])
            value, dh = activate_backward(parts[part] * prob[:, None], h, BM, PART, KIND, ALPHA, LIMIT, OFFSET)
            prob_sum += tl.sum(parts[part] * value, 1)
            write_rows(dh_desc, row, end, G * at, dh.to(dh_desc.dtype), BM, G * PART)
            write_rows(a_desc, row, end, at, (value * prob[:, None]).to(a_desc.dtype), BM, PART)
        tl.store(prob_sums + (tile % across).to(tl.int64) * rows + m, prob_sum, mask=m < end)
