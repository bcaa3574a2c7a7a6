"""Grouped-query attention (GQA, Ainslie et al., arXiv 2305.13245), the layer `*`.

    q, k, v, g = x · W_qkvg          optional: RMSNorm of q and k, per head or over all heads (QK-norm), RoPE
    y = softmax(q · kᵀ · scale) · v  within a document, causal (in encoders not), optionally within a sliding
                                     window and with attention sinks: learned logits in the denominators, one
                                     per query head
    out = (y · sigmoid(g)) · W_o     gate g optional

The scale is 1 / √D by default. One fused projection computes query, key, value and output gate. Its outputs are
ordered by key-value head: the query heads of its group, its key, its value, then the gates of those query
heads, so that a tp shard of the heads is one contiguous slice.

Parallelism: tp ranks split the heads with sequence parallelism between layers, cp ranks split the heads of
their tp rank (Ulysses); see `head_partition`. A group is a key-value head with its query heads.

    all-gather over tp        x_BtC to x_BSC, then the fused projection
    all-to-all over cp        q, k, v from all heads of some tokens to some heads of all tokens, then attention
    all-to-all over cp        back; gates never leave their tokens
    reduce-scatter over tp    the output projection, y_BtC

Shapes: B rows, T tokens, S = T / cp tokens of all tp ranks, t = S / tp tokens of this rank, Z cached tokens, C
hidden channels, K key-value heads and Q query heads of this tp rank, k and q of them that attend on this rank,
D head channels, F channels of a key-value head with its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups, all_gather, own_slice
from braid.kernels import rms_norm, rotary
from braid.kernels.activation_bytes import reference_attention_bytes
from braid.kernels.attention import Attend, Spans, attend_cached, fuses, pairs_seen
from braid.kernels.rms_norm import Normalize
from braid.kernels.rotary import Rotate
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload, all_gather_calls, all_to_all_calls, reduce_scatter_calls
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.kv_cache import TokenBuffer
from braid.nn.linear import Linear, RowLinear
from braid.nn.norm import RmsNorm
from braid.nn.qk_norm import QkNormOverHeads
from braid.nn.recompute import Recomputing
from braid.nn.rotary import Rotary, rotate
from braid.nn.work import Work, attention_work, exchange_copies, gather_copies, moved


@dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """The KV cache. It keeps all tokens, even with a sliding window."""

    keys: TokenBuffer
    values: TokenBuffer


class Attention(Recomputing):
    """Grouped-query attention."""

    def __init__(
        self,
        shape: architecture.Attention,
        hidden: int,
        eps: float,
        attend: Attend,
        *,
        normalize: Normalize = rms_norm.PLAIN,
        turn: Rotate = rotary.PLAIN,
        causal: bool = True,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups, self.causal = shape, groups, causal
        self.attend, self.turn = attend, turn
        self.partition = HeadPartition(all_groups=shape.kv_heads, all_heads=shape.heads, ranks=groups)
        dim, tp = shape.head_dim, groups.tp
        self.qkv_parts = (Part("q", dim), Part("k", dim, shared=True), Part("v", dim, shared=True))
        """The parts that are exchanged over cp. Gates follow them and stay with their tokens."""
        self.parts = (*self.qkv_parts, Part("gate", dim)) if shape.gate else self.qkv_parts
        outputs = (self.partition.groups, sum(self.partition.sizes(self.parts)))
        self.qkv = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        heads_dim, o_bias = self.partition.heads * dim, shape.has_o_bias
        self.o = RowLinear(heads_dim, hidden, tp, bias=o_bias, device=device, dtype=dtype)
        normed = partial(RmsNorm, dim, eps, normalize=normalize, copies=tp, device=device, dtype=dtype)
        per_head = shape.qk_norm and shape.qk_norm_over == "head"
        self.q_norm = normed() if per_head else None
        self.k_norm = normed() if per_head else None
        self.qk_norm: QkNormOverHeads | None = None
        if shape.qk_norm and not per_head:
            self.qk_norm = QkNormOverHeads(self.partition, self.qkv_parts, eps, device=device, dtype=dtype)
        sinks_Q = torch.empty(self.partition.heads, device=device, dtype=dtype) if shape.sinks else None
        self.sinks = None if sinks_Q is None else nn.Parameter(sinks_Q)

    def forward(
        self, x_BtC: Tensor, spans: Spans, rotary: Rotary | None, cache: AttentionCache | None = None
    ) -> Tensor:
        """`spans` and `rotary` cover all T tokens; `rotary` is None for attention without positions (NoPE).
        With a cache, each row continues its cached document; caches require tp = cp = 1, and a causal mask."""
        assert cache is None or (self.causal and self.groups.tp.size == self.groups.cp.size == 1)
        outputs_BSKF = self.qkv(all_gather(x_BtC, self.groups.tp, dim=1)).unflatten(-1, self.qkv.dims)
        qkv_BSKF, gate_BSKF = self._split_gate(outputs_BSKF)
        if self.qk_norm is not None:
            qkv_BSKF = self.qk_norm(qkv_BSKF)
        core = partial(self._core, spans, rotary, cache)
        y_BTqD = self.recomputed("core", core, self.partition.gather_sequence(qkv_BSKF, self.qkv_parts))
        y_BSQD = self.partition.scatter_sequence(y_BTqD)
        if gate_BSKF is not None:
            y_BSQD = self.recomputed("core", _gated, y_BSQD, gate_BSKF)
        return self.o(y_BSQD.flatten(2))

    def _split_gate(self, outputs_BSKF: Tensor) -> tuple[Tensor, Tensor | None]:
        # Without a gate it must not be a slice, whose backward would fill and copy a tensor of the same size.
        if not self.shape.gate:
            return outputs_BSKF, None
        qkv = sum(self.partition.sizes(self.qkv_parts))
        qkv_BSKF, gate_BSKF = outputs_BSKF.split([qkv, outputs_BSKF.shape[-1] - qkv], -1)
        return qkv_BSKF, gate_BSKF

    def _core(
        self, spans: Spans, rotary: Rotary | None, cache: AttentionCache | None, qkv_BTkF: Tensor
    ) -> Tensor:
        """QK-norm per head, RoPE and attention for the heads of this rank over the whole sequence."""
        q_BTkF, k_BTkD, v_BTkD = qkv_BTkF.split(self.partition.core_sizes(self.qkv_parts), -1)
        q_BTkgD = q_BTkF.unflatten(-1, (-1, self.shape.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTkgD, k_BTkD = self.q_norm(q_BTkgD), self.k_norm(k_BTkD)
        if rotary is not None:
            q_BTkgD, k_BTkD = (rotate(heads, rotary, self.turn) for heads in (q_BTkgD, k_BTkD))
        return self._attend(q_BTkgD.flatten(2, 3), k_BTkD, v_BTkD, spans, cache)

    def _attend(
        self, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor, spans: Spans, cache: AttentionCache | None
    ) -> Tensor:
        sinks_q = None if self.sinks is None else own_slice(self.sinks, self.groups.cp, 0)
        attend = partial(self.attend, scale=self.shape.score_scale, sinks_Q=sinks_q)
        if cache is None:
            return attend(q_BTqD, k_BTkD, v_BTkD, spans)
        k_BZkD, v_BZkD = cache.keys.append(k_BTkD), cache.values.append(v_BTkD)
        if k_BZkD.shape[1] == k_BTkD.shape[1]:
            return attend(q_BTqD, k_BTkD, v_BTkD, spans)
        window, scale = self.shape.window, self.shape.score_scale
        return attend_cached(q_BTqD, k_BZkD, v_BZkD, window=window, scale=scale, sinks_Q=sinks_q)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionCache:
        """An empty cache for `batch` rows."""
        dims = (batch, self.shape.kv_heads, self.shape.head_dim)
        return AttentionCache(
            keys=TokenBuffer.new(*dims, device=device, dtype=dtype),
            values=TokenBuffer.new(*dims, device=device, dtype=dtype),
        )

    def canonical(self) -> dict[str, Canonical]:
        partition = self.partition
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, partition.slices(self.parts), strict=True):
            held = self.qkv.canonical_part((slice(None), place), partition.span(part), partition.copies(part))
            tensors |= under(part.name, "qkv", held)
        tensors |= under("o", "o", self.o.canonical())
        if self.q_norm is not None and self.k_norm is not None:
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
            tensors |= under("k_norm", "k_norm", self.k_norm.canonical())
        if self.qk_norm is not None:
            tensors |= under("", "qk_norm", self.qk_norm.canonical())
        if self.sinks is not None:
            heads, first = partition.heads, self.groups.tp.rank * partition.heads
            tensors["sinks"] = Canonical(
                parameter="sinks", shape=(partition.all_heads,), fill="zeros", part=(heads,), offset=(first,)
            )
        return tensors

    def cost(self, workload: Workload) -> Cost:
        """The cost with fused kernels or SDPA, with or without sinks. Values are a view of the projection's
        (or all-to-all's) output and keep all of it alive."""
        partition, n, dim = self.partition, workload.narrow, self.shape.head_dim
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.qkv.channels_in
        all_tokens, cp_tokens = workload.local_tokens(), workload.local_tokens(cp)
        qkv = all_tokens * partition.core_groups * sum(partition.core_sizes(self.qkv_parts)) * n
        q, k = (all_tokens * heads * dim * n for heads in (partition.core_heads, partition.core_groups))
        y_local = cp_tokens * partition.heads * dim * n
        normed_input = workload.norm_output(cp_tokens * hidden * n, tp.size > 1)
        projected = cp_tokens * self.qkv.channels_out * n
        kept = normed_input + (qkv if cp.size > 1 else projected)
        if self.qk_norm is not None:
            kept = normed_input + self._qk_norm_kept(workload, qkv, projected)
        if workload.recomputes("core"):
            gates = projected if self.shape.gate and self.qk_norm is None else 0
            kept += y_local + gates if cp.size > 1 else 0
            return replace(self._cost(workload, qkv, q), kept=kept)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.cost(workload, all_tokens * partition.core_heads)
            norms += self.k_norm.cost(workload, all_tokens * partition.core_groups)
            in_place = 0 if self.q_norm.upcasts(workload) else q + k  # views of the projection, no copies
            kept += norms.kept - in_place + q + k
        elif self.shape.positions == "rope":
            kept += q + k
        elif 1 < partition.core_groups < partition.core_heads:
            kept += q  # queries of a group are neighbours in the projection: those of all heads are a copy
        kept += q + all_tokens * partition.core_heads * workload.wide  # output and logsumexp
        kept += (y_local if cp.size > 1 else 0) + (2 * y_local if self.shape.gate else 0)
        if not workload.may_fuse("attention"):
            kept += reference_attention_bytes(
                workload.rows,
                workload.tokens,
                partition.core_heads,
                inputs=(q + 2 * k) // n,
                narrow=n,
                wide=workload.wide,
            )
        return replace(self._cost(workload, qkv, q), kept=kept)

    def _qk_norm_kept(self, workload: Workload, qkv: int, projected: int) -> int:
        """Bytes saved up to attention if QK-norm is over all heads: its output, which values are a view of, and
        the projection, which it reads in place unless it upcasts."""
        assert self.qk_norm is not None
        kept = self.qk_norm.cost(workload).kept
        if workload.recomputes("core"):
            return kept + projected + (qkv if self.groups.cp.size > 1 else 0)
        return kept + qkv + (0 if workload.mixed else projected)

    def _cost(self, workload: Workload, qkv: int, q: int) -> Cost:
        """Transient bytes and collectives."""
        norms = () if self.qk_norm is None else self.qk_norm.cost(workload).calls
        tp, cp, hidden, n = self.groups.tp, self.groups.cp, self.qkv.channels_in, workload.narrow
        cp_tokens, sp_tokens = workload.local_tokens(cp), workload.local_tokens(tp, cp)
        gradients = q
        if fuses(workload.device, workload.dtype):
            gradients = qkv + workload.local_tokens() * self.partition.core_heads * workload.wide
        elif workload.device == "cuda":
            gradients = 5 * q  # SDPA accumulates that of q in float32, and has those of k and v per query head
        return Cost(
            passing=gradients,
            calls=all_gather_calls(tp, sp_tokens * hidden * n, "attention tokens")
            + norms
            + all_to_all_calls(cp, qkv, "attention heads")
            + all_to_all_calls(cp, q, "attention outputs")
            + reduce_scatter_calls(tp, cp_tokens * hidden * n, "attention sums"),
        )

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row: scores and weighted sums take 4 · heads · head_dim for each pair of
        query and key in the mask. Packed documents count as one document that fills the row."""
        own = tokens // self.groups.cp.size
        pairs = pairs_seen(tokens, self.shape.window, causal=self.causal)
        attention = 4 * self.partition.core_heads * self.shape.head_dim * pairs
        return self.qkv.flops(own) + attention + self.o.flops(own)

    def work(self, workload: Workload) -> Work:
        partition, n, dim = self.partition, workload.narrow, self.shape.head_dim
        tp, cp, tokens = self.groups.tp, self.groups.cp, workload.local_tokens(self.groups.cp)
        own = workload.local_tokens(tp, cp) * self.qkv.channels_in * n
        work = gather_copies(workload, tp, own) + self.qkv.work(workload, tokens)
        if self.qk_norm is not None:
            work += self.qk_norm.work(workload)
        y_local = tokens * partition.heads * dim * n
        work += self._core_work(workload) + exchange_copies(cp, y_local)
        if self.shape.gate:
            # A strided gate is copied; backward puts its gradient and those of q, k and v into one tensor.
            work += moved(7 * y_local, 9 * y_local, launches=3, region="core")
            work += moved(backward=2 * tokens * self.qkv.channels_out * n)
        return work + self.o.work(workload, tokens)

    def _core_work(self, workload: Workload) -> Work:
        """From the projection's output to that of attention. The gradients of q, k and v become one tensor."""
        partition, n, dim = self.partition, workload.narrow, self.shape.head_dim
        tokens, heads, kv_heads = workload.local_tokens(), partition.core_heads, partition.core_groups
        qkv = tokens * kv_heads * sum(partition.core_sizes(self.qkv_parts)) * n
        queries_keys = tokens * (heads + kv_heads) * dim * n
        work = exchange_copies(self.groups.cp, qkv) + moved(backward=2 * qkv)
        if self.q_norm is not None and self.k_norm is not None:
            work += self.q_norm.work(workload, tokens * heads, "core")
            work += self.k_norm.work(workload, tokens * kv_heads, "core")
        if self.shape.positions == "rope":
            work += moved(2 * queries_keys, 2 * queries_keys, launches=2, region="core")
        return work + attention_work(
            workload, heads, kv_heads, (dim, dim), window=self.shape.window, causal=self.causal
        )


def _gated(y_BSQD: Tensor, gate_BSKF: Tensor) -> Tensor:
    return y_BSQD * gate_BSKF.reshape(y_BSQD.shape).sigmoid()
