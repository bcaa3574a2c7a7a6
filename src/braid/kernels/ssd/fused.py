"""SSD in Triton: chunked, with the states on the chip in forward and between two passes in backward.

Forward walks over the chunks of every head with its state in registers (`outputs`): it reads the inputs and
writes y once. Backward recomputes the state at the start of every chunk and scans the gradients of the states
in the other direction, both in one launch (`states`), after which all chunks are independent (`gradients`).
Both begin with the cumulative log decays (`decays`). Only the inputs are saved.

Products have operands in the dtype of the inputs and float32 sums (float32 inputs: three tf32 products each);
decays, the carried states and all other arithmetic are float32. Every sum has a fixed order: tiles depend on
sizes and the number of SMs alone.

Shapes: B rows, T tokens, G groups, H heads, D head channels, N state channels, Z segments, L chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.ssd import reference, why_not_these_sizes
from braid.kernels.ssd.device.decays import accumulate_decays, time_step_gradients
from braid.kernels.ssd.device.gradients import SsdGradientVariant, chunk_gradients
from braid.kernels.ssd.device.outputs import OutputVariant, scan_outputs
from braid.kernels.ssd.device.states import StateGradient, StateVariant, scan_states

SHORTEST_SEGMENT = 4
"""Chunks of a segment at least: a segment costs another pass over x and B."""
SMALLEST_TILE = 16
"""Smallest operand of a tensor-core product."""


class SsdTiles(NamedTuple):
    """Chunk length and tile sizes of every kernel."""

    chunk: int
    exact: bool
    """Whether decays need more than float32."""
    segment: int
    """Chunks that one program of `outputs` walks over."""
    outputs: OutputVariant
    states: StateVariant
    gradients: SsdGradientVariant


class FusedSsd:
    """`Ssd` with Triton kernels."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(
        self,
        x_BTHD: Tensor,
        dt_BTH: Tensor,
        a_H: Tensor,
        b_BTGN: Tensor,
        c_BTGN: Tensor,
        skip_H: Tensor,
        documents_BT: Tensor | None = None,
        initial_state_BHDN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Same as `reference.ssd`."""
        head_dim, state = x_BTHD.shape[-1], b_BTGN.shape[-1]
        inputs = (x_BTHD, dt_BTH, a_H, b_BTGN, c_BTGN, skip_H)
        if not x_BTHD.numel() or why_not_these_sizes(x_BTHD.dtype, head_dim, state) is not None:
            return reference.ssd(*inputs, documents_BT, initial_state_BHDN)
        y_BTHD, final_BHDN = _Ssd.apply(self, *inputs, documents_BT, initial_state_BHDN)
        return y_BTHD, final_BHDN

    def tiles(self, x_BTHD: Tensor, groups: int, state: int) -> SsdTiles:
        """Tile sizes of a problem. A few large programs per SM are enough; where rows and heads are too few for
        that, rows are cut into segments, states into tiles and the heads of a group into parts."""
        rows, tokens, heads, head_dim = x_BTHD.shape
        enough = 3 * self.launch.multiprocessors(x_BTHD.device) // 2
        wide = x_BTHD.dtype == torch.float32
        columns, depth = (max(power_of_two(size), SMALLEST_TILE) for size in (head_dim, state))
        chunk = 32 if wide or columns * depth > 128 * 128 else 64
        chunks, columns = parts_of(tokens, chunk), min(columns, 64)
        programs = rows * heads * parts_of(head_dim, columns)
        segment = max(parts_of(chunks, parts_of(enough, programs)), min(SHORTEST_SEGMENT, chunks))
        narrow_state = wide or 2 * programs < enough
        repeats = heads // groups
        parts = next(
            (n for n in range(1, repeats) if repeats % n == 0 and rows * chunks * groups * n >= enough), repeats
        )
        return SsdTiles(
            chunk=chunk,
            exact=wide,
            segment=segment,
            outputs=OutputVariant(head_dim=columns, warps=8 if wide or depth > 128 else 4, stages=1),
            states=StateVariant(
                head_dim=columns, state=min(depth, 64 if narrow_state else 128), stages=2 if wide else 3
            ),
            gradients=SsdGradientVariant(parts=parts, warps=8 if wide else 4, stages=1 if chunk < 64 else 2),
        )


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedSsd,
        x_BTHD: Tensor,
        dt_BTH: Tensor,
        a_H: Tensor,
        b_BTGN: Tensor,
        c_BTGN: Tensor,
        skip_H: Tensor,
        documents_BT: Tensor | None,
        initial_BHDN: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_BTHD, dt_BTH, a_H, b_BTGN, c_BTGN, skip_H, documents_BT, initial_BHDN)
        ctx.fused = fused
        x, b, c = (_with_unit_stride(tensor) for tensor in (x_BTHD, b_BTGN, c_BTGN))
        tiles = fused.tiles(x, *b.shape[2:])
        dt_BTH, a_H, documents_BT, skip_H = _contiguous(dt_BTH, a_H, documents_BT, skip_H)
        decays = accumulate_decays(fused.launch, dt_BTH, a_H, documents_BT, tiles.chunk, exact=tiles.exact)
        (entering,) = _contiguous(initial_BHDN)
        if tiles.segment * tiles.chunk < x.shape[1]:
            entering, _ = scan_states(
                fused.launch, x, b, decays, entering, tiles.states, every=tiles.segment, dtype=torch.float32
            )
        return scan_outputs(
            fused.launch, x, b, c, skip_H, decays, entering, tiles.outputs, segment=tiles.segment
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTHD: Tensor | None, d_final_BHDN: Tensor | None) -> tuple[Tensor | None, ...]:
        fused: FusedSsd = ctx.fused
        x_BTHD, dt_BTH, a_H, b_BTGN, c_BTGN, skip_H, documents_BT, initial_BHDN = ctx.saved_tensors
        x, b, c = (_with_unit_stride(tensor) for tensor in (x_BTHD, b_BTGN, c_BTGN))
        dy = torch.zeros_like(x) if dy_BTHD is None else _with_unit_stride(dy_BTHD)
        tiles = fused.tiles(x, *b.shape[2:])
        dt_BTH, a_H, documents_BT, skip_H = _contiguous(dt_BTH, a_H, documents_BT, skip_H)
        decays = accumulate_decays(fused.launch, dt_BTH, a_H, documents_BT, tiles.chunk, exact=tiles.exact)
        initial, d_final = _contiguous(initial_BHDN, d_final_BHDN)
        d_initial = torch.empty_like(initial) if ctx.needs_input_grad[8] else None
        states, d_states = scan_states(
            fused.launch, x, b, decays, initial, tiles.states, every=1, dtype=x.dtype,
            gradient=StateGradient(dy, c, d_final), d_initial_BHDN=d_initial,
        )  # fmt: skip
        grads = chunk_gradients(fused.launch, x, b, c, skip_H, dy, decays, states, d_states, tiles.gradients)
        d_dt_BTH, d_a_H = time_step_gradients(fused.launch, grads.d_total_BHLQ, grads.d_step_BHLQ, dt_BTH, a_H)
        inputs = (grads.dx_BTHD, d_dt_BTH, d_a_H, grads.db_BTGN, grads.dc_BTGN, grads.d_skip_H)
        return None, *inputs, None, d_initial


def _with_unit_stride(x: Tensor) -> Tensor:
    """The tensor if its channels are adjacent, otherwise a contiguous copy. Other strides are arbitrary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)
