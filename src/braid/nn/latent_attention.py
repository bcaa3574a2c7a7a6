"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), the layer `+`.

Keys and values of a token are low-rank: all heads project them up from one latent vector, and share one rotary
key:

    x ──► q latent ──► norm ──► q up ──► per head: NoPE part, RoPE part
      ──► kv latent ─► norm ──► k up ──► per head: NoPE part             k = [NoPE part; shared RoPE part]
      │                    └──► v up ──► per head: value
      ──► k rope ─────────────► RoPE part, shared by all heads

Without `q_rank`, queries are projected from x directly. The three projections from x without heads are fused
into `down`; those into heads are ordered by head, so that a tp shard of the heads is one contiguous slice.

Parallelism: tp ranks split the heads and replicate `down`. Each computes the latents of its own tokens, and the
latents are all-gathered: they are much smaller than hidden states, which are gathered only without `q_rank`. cp
ranks split the heads of their tp rank (Ulysses).

Generation caches only the kv latent and the rotary key and uses the absorbed form: `k up` is folded into the
query and `v up` is applied after the weighted sum, so that attention runs as multi-query attention on the
cached latents. It is mathematically equal, takes more FLOPs per pair of tokens and reads far less memory.

Shapes: B rows, T tokens, S = T / cp tokens of all tp ranks, t = S / tp tokens of this rank, Z cached tokens, C
hidden channels, H heads of this tp rank, h of them that attend on this rank, P channels of a head's NoPE part,
R of its RoPE part, D = P + R, V of its value, E = P + V, L channels of the kv latent, W = L + R cached per
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_gather, all_to_all
from braid.kernels import rms_norm, rotary
from braid.kernels.activation_bytes import reference_attention_bytes
from braid.kernels.attention import Attend, Spans, attend_cached, fuses, pairs_seen
from braid.kernels.rms_norm import Normalize
from braid.kernels.rotary import Rotate
from braid.nn.canonical import Canonical, RowSpan, under
from braid.nn.cost import Cost, Workload, all_gather_calls, all_to_all_calls, reduce_scatter_calls
from braid.nn.kv_cache import TokenBuffer
from braid.nn.linear import Linear, RowLinear
from braid.nn.norm import RmsNorm
from braid.nn.recompute import Recomputing
from braid.nn.rotary import Rotary, rotate
from braid.nn.work import Work, attention_work, exchange_copies, gather_copies, moved


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """The latent KV cache."""

    latents: TokenBuffer
    """The normed kv latent and the rotated shared key: [B, Z, 1, W]."""


class LatentAttention(Recomputing):
    """Multi-head latent attention."""

    def __init__(
        self,
        shape: architecture.LatentAttention,
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
        tp, q_rank = groups.tp, shape.q_rank or 0
        self.heads = shape.heads // tp.size
        """Heads of this tp rank."""
        assert shape.heads % (tp.size * groups.cp.size) == 0
        self.down = Linear(
            hidden, q_rank + shape.kv_rank + shape.rope_dim, copies=tp, device=device, dtype=dtype
        )
        eps = eps if shape.norm_eps is None else shape.norm_eps
        normed = partial(RmsNorm, eps=eps, normalize=normalize, copies=tp, device=device, dtype=dtype)
        self.q_norm = normed(q_rank) if q_rank else None
        self.kv_norm = normed(shape.kv_rank)
        q_dim, kv_dim = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.v_dim
        self.q = Linear(q_rank or hidden, (self.heads, q_dim), device=device, dtype=dtype)
        self.kv_up = Linear(shape.kv_rank, (self.heads, kv_dim), device=device, dtype=dtype)
        self.o = RowLinear(self.heads * shape.v_dim, hidden, tp, device=device, dtype=dtype)

    def forward(self, x_BtC: Tensor, spans: Spans, rotary: Rotary, cache: LatentCache | None = None) -> Tensor:
        """`spans` and `rotary` (for rope_dim channels) cover all T tokens. With a cache, each row continues its
        cached document: prefill uses the plain form, decoding the absorbed form. Caches require tp = cp = 1,
        and a causal mask."""
        cp = self.groups.cp
        assert cache is None or (self.causal and self.groups.tp.size == cp.size == 1)
        q_BSHD, latent_BSL, k_BSR = self._latents(x_BtC)
        q_BThD = all_to_all(q_BSHD, cp, split=2, join=1)
        k_BT1R = rotate(all_gather(k_BSR, cp, dim=1).unsqueeze(2), rotary, self.turn)
        cached_BZ1W = None
        if cache is not None:
            cached_BZ1W = cache.latents.append(torch.cat([latent_BSL.unsqueeze(2), k_BT1R], -1))
        if cached_BZ1W is None or cached_BZ1W.shape[1] == k_BT1R.shape[1]:
            kv_BSHE = self.kv_up(latent_BSL).unflatten(-1, self.kv_up.dims)
            kv_BThE = all_to_all(kv_BSHE, cp, split=2, join=1)
            y_BThV = self.recomputed("core", partial(self._attend, spans, rotary), q_BThD, kv_BThE, k_BT1R)
        else:
            y_BThV = self._attend_absorbed(self._rotate_query(q_BThD, rotary), cached_BZ1W)
        return self.o(all_to_all(y_BThV, cp, split=1, join=2).flatten(2))

    def _latents(self, x_BtC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, kv latent and shared key of all tp ranks' tokens, before RoPE."""
        shape = self.shape
        sizes = [shape.q_rank or 0, shape.kv_rank, shape.rope_dim]
        q_latent, latent_BtL, k_BtR = self.down(x_BtC).split(sizes, -1)
        q_from = x_BtC if self.q_norm is None else self.q_norm(q_latent)
        q_from, latent_BSL, k_BSR = self._gather_sequence(q_from, self.kv_norm(latent_BtL), k_BtR)
        return self.q(q_from).unflatten(-1, self.q.dims), latent_BSL, k_BSR

    def _gather_sequence(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-gather several tensors over tp in one collective."""
        if self.groups.tp.size == 1:
            return tensors
        gathered = all_gather(torch.cat(tensors, -1), self.groups.tp, dim=1)
        return gathered.split([tensor.shape[-1] for tensor in tensors], -1)

    def _rotate_query(self, q_BThD: Tensor, rotary: Rotary) -> Tensor:
        q_BThP, q_BThR = q_BThD.split([self.shape.nope_dim, self.shape.rope_dim], -1)
        return torch.cat([q_BThP, rotate(q_BThR, rotary, self.turn)], -1)

    def _attend(self, spans: Spans, rotary: Rotary, q_BThD: Tensor, kv_BThE: Tensor, k_BT1R: Tensor) -> Tensor:
        """The plain form, with materialized keys and values. The shared key is rotated already."""
        shape, q_BThD = self.shape, self._rotate_query(q_BThD, rotary)
        k_BThP, v_BThV = kv_BThE.split([shape.nope_dim, shape.v_dim], -1)
        k_BThD = torch.cat([k_BThP, k_BT1R.expand(-1, -1, k_BThP.shape[2], -1)], -1)
        # A kernel may have padded the value dim. Copy here, inside the region: the output projection would
        # otherwise make a contiguous copy outside, which autograd saves.
        return self.attend(q_BThD, k_BThD, v_BThV, spans, shape.score_scale).contiguous()

    def _attend_absorbed(self, q_BThD: Tensor, cached_BZ1W: Tensor) -> Tensor:
        """The absorbed form: multi-query attention on the cached latents."""
        shape = self.shape
        up_HEL = self.kv_up.merged().unflatten(0, self.kv_up.dims)
        k_up_HPL, v_up_HVL = up_HEL.split([shape.nope_dim, shape.v_dim], 1)
        q_BThP, q_BThR = q_BThD.split([shape.nope_dim, shape.rope_dim], -1)
        q_BThL = torch.einsum("bthp,hpl->bthl", q_BThP, k_up_HPL)
        q_BThW = torch.cat([q_BThL, q_BThR], -1)
        latents_BZ1L = cached_BZ1W[..., : shape.kv_rank]
        y_BThL = attend_cached(q_BThW, cached_BZ1W, latents_BZ1L, scale=shape.score_scale)
        return torch.einsum("bthl,hvl->bthv", y_BThL, v_up_HVL)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> LatentCache:
        """An empty cache for `batch` rows."""
        channels = self.shape.kv_rank + self.shape.rope_dim
        return LatentCache(latents=TokenBuffer.new(batch, 1, channels, device=device, dtype=dtype))

    def canonical(self) -> dict[str, Canonical]:
        shape = self.shape
        q_rank, kv_end = shape.q_rank or 0, (shape.q_rank or 0) + shape.kv_rank
        (_, q_dim), (_, kv_dim) = self.q.dims, self.kv_up.dims
        tensors: dict[str, Canonical] = {}
        if self.q_norm is not None:
            tensors |= under("q_down", "down", self.down.canonical_part((slice(0, q_rank),)))
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
        tensors |= under("q" if self.q_norm is None else "q_up", "q", self._part(self.q, 0, q_dim))
        tensors |= under("kv_down", "down", self.down.canonical_part((slice(q_rank, kv_end),)))
        tensors |= under("kv_norm", "kv_norm", self.kv_norm.canonical())
        tensors |= under("k_rope", "down", self.down.canonical_part((slice(kv_end, None),)))
        tensors |= under("k_up", "kv_up", self._part(self.kv_up, 0, shape.nope_dim))
        tensors |= under("v_up", "kv_up", self._part(self.kv_up, shape.nope_dim, kv_dim))
        return tensors | under("o", "o", self.o.canonical())

    def _part(self, linear: Linear, start: int, stop: int) -> dict[str, Canonical]:
        """The canonical tensors of some channels of every head."""
        channels = stop - start
        span = RowSpan(self.groups.tp.rank * self.heads * channels, self.shape.heads * channels)
        return linear.canonical_part((slice(None), slice(start, stop)), span)

    def cost(self, workload: Workload) -> Cost:
        """The cost of the plain form with SDPA. On a CPU, keys or values are padded to equal head dims."""
        shape, n, hidden = self.shape, workload.narrow, self.down.channels_in
        tp, cp = self.groups.tp, self.groups.cp
        all_tokens, cp_tokens = workload.local_tokens(), workload.local_tokens(cp)
        sp_tokens = workload.local_tokens(tp, cp)
        heads, q_rank = self.heads // cp.size, shape.q_rank or 0
        q_dim, kv_dim = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.v_dim
        q, kv = all_tokens * heads * q_dim * n, all_tokens * heads * kv_dim * n
        y, y_local = all_tokens * heads * shape.v_dim * n, cp_tokens * self.heads * shape.v_dim * n
        exchanged = y_local if cp.size > 1 else 0
        norms = self.kv_norm.cost(workload, sp_tokens)
        if self.q_norm is not None:
            norms += self.q_norm.cost(workload, sp_tokens)
        # Norms that do not upcast save views of the output of `down`, which keep its rope channels alive too.
        in_place = 0 if self.kv_norm.upcasts(workload) else sp_tokens * shape.rope_dim * n
        latents = (q_rank or hidden) + shape.kv_rank
        if tp.size > 1 and workload.rows == 1:
            latents += shape.rope_dim  # views of one gathered tensor
        elif tp.size == 1 and not q_rank:
            latents -= hidden
        normed_input = workload.norm_output(sp_tokens * hidden * n, False)
        kept = normed_input + norms.kept + in_place + cp_tokens * latents * n
        logsumexp = all_tokens * heads * workload.wide
        if workload.recomputes("core"):
            kept += q + kv + all_tokens * shape.rope_dim * n + exchanged
        elif workload.device == "cpu" and q_dim != shape.v_dim:
            kept += logsumexp + 3 * all_tokens * heads * max(q_dim, shape.v_dim) * n
            kept += q + y_local if q_dim > shape.v_dim else kv + exchanged
        else:
            kept += logsumexp + 2 * q + kv + y + exchanged
        if not workload.may_fuse("attention") and not workload.recomputes("core"):
            kept += reference_attention_bytes(
                workload.rows, workload.tokens, heads, inputs=(2 * q + y) // n, narrow=n, wide=workload.wide
            )
        down = (q_rank or hidden) + shape.kv_rank + shape.rope_dim
        # Gradients of q, k and v in their own dtype, or that of q in float32 as well; then that of kv.
        gradients = 2 * q + y + logsumexp if fuses(workload.device, workload.dtype) else 3 * q
        return Cost(
            kept=kept,
            passing=(q if workload.device == "cpu" else gradients) + kv,
            calls=all_gather_calls(tp, sp_tokens * down * n, "latents")
            + all_gather_calls(cp, cp_tokens * shape.rope_dim * n, "latent attention, shared keys")
            + all_to_all_calls(cp, q, "latent attention, queries")
            + all_to_all_calls(cp, kv, "latent attention, keys and values")
            + all_to_all_calls(cp, y, "latent attention, outputs")
            + reduce_scatter_calls(tp, cp_tokens * hidden * n, "latent attention, sums"),
        )

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row, in the plain form: scores and weighted sums take 2 · heads · (D + V)
        for each pair of query and key in the mask. Packed documents count as one document that fills the
        row."""
        shape, tp, cp = self.shape, self.groups.tp.size, self.groups.cp.size
        channels = shape.nope_dim + shape.rope_dim + shape.v_dim
        attention = 2 * (self.heads // cp) * channels * pairs_seen(tokens, None, causal=self.causal)
        into_heads = sum(linear.flops(tokens // cp) for linear in (self.q, self.kv_up, self.o))
        return self.down.flops(tokens // (tp * cp)) + into_heads + attention

    def work(self, workload: Workload) -> Work:
        shape, n, tp, cp = self.shape, workload.narrow, self.groups.tp, self.groups.cp
        own, tokens = workload.local_tokens(tp, cp), workload.local_tokens(cp)
        latents = (shape.q_rank or self.down.channels_in) + shape.kv_rank + shape.rope_dim
        work = self.down.work(workload, own) + self.kv_norm.work(workload, own)
        # The gradients of both latents and of the shared key become one tensor.
        work += moved(backward=2 * own * self.down.channels_out * n)
        if self.q_norm is not None:
            work += self.q_norm.work(workload, own)
        if tp.size > 1:  # they are concatenated, and their gradients too
            work += moved(2 * own * latents * n, 2 * tokens * latents * n)
            work += gather_copies(workload, tp, own * latents * n)
        work += self.q.work(workload, tokens) + self.kv_up.work(workload, tokens)
        return work + self._core_work(workload) + self.o.work(workload, tokens)

    def _core_work(self, workload: Workload) -> Work:
        """RoPE of queries and the shared key, keys of both parts, attention. Queries and keys are put together
        after RoPE, and the gradients of their parts after attention."""
        shape, n, cp = self.shape, workload.narrow, self.groups.cp
        tokens, heads = workload.local_tokens(), self.heads // cp.size
        q_dim, kv_dim = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.v_dim
        q, kv, y = (tokens * heads * channels * n for channels in (q_dim, kv_dim, shape.v_dim))
        rotated = tokens * (heads + 1) * shape.rope_dim * n
        work = exchange_copies(cp, q) + exchange_copies(cp, kv)
        work += moved(2 * rotated, 2 * rotated, launches=2, region="core")
        work += moved(4 * q, 2 * q + 2 * kv + rotated, launches=(2, 3), region="core")
        dims = (q_dim, shape.v_dim)
        work += attention_work(workload, heads, heads, dims, window=None, causal=self.causal)
        return work + exchange_copies(cp, y)
