"""Chunkwise gated delta rule in Triton: operands of products in the dtype of the inputs, sums in float32.

Forward computes the token pairs of all chunks in parallel (`device.pairs`), then states and outputs chunk by
chunk (`device.scan`). Saved for backward: the inputs and the inverse of every chunk, L entries per token and
value head. Backward computes the scores again, the gradients of states from the last chunk to the first, states
and deltas again, then all other gradients in parallel (`device.gradients`). On an H200, states and deltas take
a seventh of the whole; saved, they would be 1.5 times the inputs.

No sum depends on the order in which programs run, so results are deterministic.

Shapes: B rows, T tokens, G key heads, H value heads, K key channels, V value channels, N chunks of L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.delta_rule import MAX_CHANNELS, reference
from braid.kernels.delta_rule.device.gradients import (
    DeltaRuleGradientVariant,
    key_gradients,
    pair_gradients,
    query_gradients,
)
from braid.kernels.delta_rule.device.pairs import PairsVariant, token_pairs
from braid.kernels.delta_rule.device.scan import ScanVariant, outputs, state_gradients, states
from braid.kernels.launch import Launcher


@dataclass(frozen=True, kw_only=True)
class DeltaRuleTiles:
    """Tile sizes of each kernel."""

    inverse: PairsVariant
    scores: PairsVariant
    outputs: ScanVariant
    states: ScanVariant
    state_gradients: ScanVariant
    pair_gradients: DeltaRuleGradientVariant
    query_gradients: DeltaRuleGradientVariant
    key_gradients: DeltaRuleGradientVariant


ANY = DeltaRuleTiles(
    inverse=PairsVariant(registers=128),
    scores=PairsVariant(),
    outputs=ScanVariant(),
    states=ScanVariant(),
    state_gradients=ScanVariant(),
    pair_gradients=DeltaRuleGradientVariant(registers=128),
    query_gradients=DeltaRuleGradientVariant(),
    key_gradients=DeltaRuleGradientVariant(),
)
"""Tile sizes that fit for all heads."""
USUAL = replace(
    ANY,
    state_gradients=ScanVariant(channels=128, warps=8, stages=3),
    query_gradients=DeltaRuleGradientVariant(stages=2),
    key_gradients=DeltaRuleGradientVariant(stages=2),
)
"""The fastest on an H200 for heads of 128 channels."""


def tiles_for(key_dim: int, value_dim: int) -> DeltaRuleTiles:
    return USUAL if key_dim <= 128 and value_dim > 64 else ANY


@dataclass(frozen=True)
class FusedDeltaRule:
    """`DeltaRule` with Triton kernels."""

    tiles: DeltaRuleTiles | None = None
    """By default, those for the heads at hand."""
    launch: Launcher = field(default_factory=Launcher, compare=False, repr=False)

    def __call__(
        self,
        q_BTGK: Tensor,
        k_BTGK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTH: Tensor,
        beta_BTH: Tensor,
        documents_BT: Tensor | None = None,
        initial_state_BHKV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Same as `reference.delta_rule`."""
        inputs = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH, documents_BT, initial_state_BHKV)
        key_dim, value_dim = k_BTGK.shape[3], v_BTHV.shape[3]
        if max(key_dim, value_dim) > MAX_CHANNELS or not v_BTHV.numel() or not k_BTGK.numel():
            return reference.delta_rule(*inputs)
        tiles = self.tiles or tiles_for(key_dim, value_dim)
        result: tuple[Tensor, Tensor] = _DeltaRule.apply(self.launch, tiles, *inputs)
        return result


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        launch: Launcher,
        tiles: DeltaRuleTiles,
        q_BTGK: Tensor,
        k_BTGK: Tensor,
        v_BTHV: Tensor,
        log_decay_BTH: Tensor,
        beta_BTH: Tensor,
        documents_BT: Tensor | None,
        initial_BHKV: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q_BTGK, k_BTGK, v_BTHV = (_dense_heads(x) for x in (q_BTGK, k_BTGK, v_BTHV))
        scalars = (log_decay_BTH.contiguous(), beta_BTH.contiguous(), _contiguous(documents_BT))
        initial_BHKV = _contiguous(initial_BHKV)
        pairs = token_pairs(launch, q_BTGK, k_BTGK, *scalars, tiles.inverse, inverse=True)
        y_BTHV, final_BHKV = outputs(launch, q_BTGK, k_BTGK, v_BTHV, pairs, initial_BHKV, tiles.outputs)
        ctx.save_for_backward(q_BTGK, k_BTGK, v_BTHV, *scalars, initial_BHKV, pairs.inverse_BHNLS)
        ctx.launch, ctx.tiles = launch, tiles
        ctx.set_materialize_grads(False)
        return y_BTHV, final_BHKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTHV: Tensor | None, d_final_BHKV: Tensor | None) -> tuple[Tensor | None, ...]:
        q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH, documents_BT, initial_BHKV, inverse = ctx.saved_tensors
        if dy_BTHV is None and d_final_BHKV is None:
            return (None,) * 9
        launch, tiles = ctx.launch, ctx.tiles
        dy_BTHV = v_BTHV.new_zeros(v_BTHV.shape) if dy_BTHV is None else dy_BTHV.contiguous()
        scalars = (log_decay_BTH, beta_BTH, documents_BT)
        pairs = token_pairs(launch, q_BTGK, k_BTGK, *scalars, tiles.scores, inverse=False)
        pairs = pairs._replace(inverse_BHNLS=inverse)
        backward, d_initial_BHKV = state_gradients(
            launch, q_BTGK, k_BTGK, dy_BTHV, pairs, _contiguous(d_final_BHKV), tiles.state_gradients,
            initial=initial_BHKV is not None,
        )  # fmt: skip
        forward, kept_BHNV = states(
            launch, q_BTGK, k_BTGK, v_BTHV, pairs, initial_BHKV, backward.states_BHNVK, tiles.states
        )
        from_pairs, d_v_BTHV = pair_gradients(
            launch, q_BTGK, k_BTGK, v_BTHV, documents_BT, dy_BTHV, pairs,
            forward.deltas_BTHV, backward.deltas_BTHV, tiles.pair_gradients,
        )  # fmt: skip
        d_q_BTGK = query_gradients(
            launch, q_BTGK, k_BTGK, documents_BT, dy_BTHV, pairs, forward.states_BHNVK, from_pairs,
            tiles.query_gradients,
        )  # fmt: skip
        d_k_BTGK, *d_scalars = key_gradients(
            launch, q_BTGK, k_BTGK, *scalars, pairs, forward, backward, kept_BHNV, from_pairs,
            tiles.key_gradients,
        )  # fmt: skip
        if d_initial_BHKV is not None:
            d_initial_BHKV = d_initial_BHKV.to(initial_BHKV.dtype)
        return None, None, d_q_BTGK, d_k_BTGK, d_v_BTHV, *d_scalars, None, d_initial_BHKV


def _dense_heads(x_BTHD: Tensor) -> Tensor:
    """A tensor whose tokens are equally far apart, rows included, with contiguous channels."""
    dense = x_BTHD.stride(3) == 1 and x_BTHD.stride(0) == x_BTHD.shape[1] * x_BTHD.stride(1)
    return x_BTHD if dense else x_BTHD.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
