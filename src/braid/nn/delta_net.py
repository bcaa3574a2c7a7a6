"""Gated delta net (Yang et al., arXiv 2412.06464), the layer `G`: linear attention with a gated delta rule.

    q, k, v, b, a, z = x · W                 q, k, v ← SiLU(causal conv)
    β = sigmoid(b), or 2 · sigmoid(b)        with negative eigenvalues (Grazzi et al., arXiv 2411.12537)
    q ← q / (|q| · √K), k ← k / |k|          in the kernel
    α_t = exp(-exp(A_log) · softplus(a_t + dt_bias))                          decay, per value head
    S_t = α_t · (S_{t-1} - β_t · k_t ⊗ (k_tᵀ · S_{t-1})) + β_t · k_t ⊗ v_t
    y_t = q_tᵀ · S_t
    out = (RMSNorm(y) · SiLU(z)) · W_o

One fused projection computes query, key, value, the scalars b and a per value head, and the output gate z. Its
outputs are ordered by key head: query, key, then values, scalars and gates of the value heads of its group. The
channels of the convolution are ordered alike. A tp shard of the key heads is then one contiguous slice of each.

Parallelism: tp ranks split the value heads with sequence parallelism between layers, cp ranks split those of
their tp rank (Ulysses); see `head_partition`.

    all-gather over tp        x_BtC to x_BSC, then the fused projection all-to-all over cp        q, k, v, b, a
    from all heads of some tokens to some heads of all tokens; conv, rule all-to-all over cp        back; the
    gate z never leaves its tokens reduce-scatter over tp    the output projection, y_BtC

Shapes: B rows, T tokens, S = T / cp tokens of all tp ranks, t = S / tp tokens of this rank, C hidden channels,
G key heads and H value heads of this tp rank, g and h of them that this rank computes, r = h / g, K key
channels, V value channels, F channels of a key head with its value heads, I those of its values or gates, J
convolved channels of a key head, E = g · J, P taps, Q = P - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid import architecture
from braid.distributed.collectives import Groups, all_gather
from braid.kernels import causal_conv, gated_norm
from braid.kernels.activation_bytes import (
    CHUNK,
    delta_rule_bytes,
    fused_delta_rule_bytes,
    fused_delta_rule_workspace,
    padded_to_chunks,
)
from braid.kernels.causal_conv import CausalConv
from braid.kernels.delta_rule import DeltaRule, fuses, step
from braid.kernels.gated_norm import GatedNorm
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload, all_gather_calls, all_to_all_calls, reduce_scatter_calls
from braid.nn.gated_norm import NormThenGate
from braid.nn.grouped_conv import GroupedConv
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.head_scalars import HeadScalars
from braid.nn.linear import Linear, RowLinear
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, exchange_copies, gather_copies, kernel_work, moved


@dataclass(frozen=True, kw_only=True)
class DeltaNetCache:
    """The recurrent state for generation, of constant size; updated in place."""

    conv_BEQ: Tensor
    """The last Q inputs of the convolution."""
    state_BHKV: Tensor
    """The state S, float32 or better."""


class DeltaRuleInputs(NamedTuple):
    """Arguments of the delta rule."""

    q_BTgK: Tensor
    k_BTgK: Tensor
    v_BThV: Tensor
    log_decay_BTh: Tensor
    beta_BTh: Tensor


class DeltaNet(Recomputing):
    """A gated delta net mixer."""

    def __init__(
        self,
        shape: architecture.DeltaNet,
        hidden: int,
        eps: float,
        delta_rule: DeltaRule,
        *,
        conv: CausalConv = causal_conv.PLAIN,
        gate: GatedNorm = gated_norm.PLAIN,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.delta_rule = delta_rule
        self.partition = HeadPartition(all_groups=shape.key_heads, all_heads=shape.value_heads, ranks=groups)
        q, k = Part("q", shape.key_dim, shared=True), Part("k", shape.key_dim, shared=True)
        v, z = Part("v", shape.value_dim), Part("z", shape.value_dim)
        self.parts = (q, k, v, Part("b", 1), Part("a", 1), z)
        """The outputs of the fused projection for every key head. All but the gate are exchanged over cp."""
        outputs = (self.partition.groups, sum(self.partition.sizes(self.parts)))
        self.qkvbaz = Linear(hidden, outputs, device=device, dtype=dtype)
        self.conv = GroupedConv(self.partition, (q, k, v), shape.conv, conv=conv, device=device, dtype=dtype)
        self.scalars = HeadScalars(
            self.partition, {"A_log": "decay_log", "dt_bias": "time_step"}, device=device, dtype=dtype
        )
        gate_eps = eps if shape.gate_norm_eps is None else shape.gate_norm_eps
        self.gate_norm = NormThenGate(
            shape.value_dim, gate_eps, gated_norm=gate, copies=groups.tp, device=device, dtype=dtype
        )
        inner = self.partition.heads * shape.value_dim
        self.o = RowLinear(inner, hidden, groups.tp, device=device, dtype=dtype)

    def forward(
        self, x_BtC: Tensor, documents_BT: Tensor | None = None, cache: DeltaNetCache | None = None
    ) -> Tensor:
        """`documents_BT` is None if every row is a single document. With a cache, rows continue from its state,
        which is updated in place; caches require tp = cp = 1."""
        assert documents_BT is None or cache is None, "a row that continues from a cache is one document"
        assert cache is None or self.groups.tp.size == self.groups.cp.size == 1
        x_BSC = all_gather(x_BtC, self.groups.tp, dim=1)
        outputs_BSGF = self.qkvbaz(x_BSC).unflatten(-1, self.qkvbaz.dims)
        *recurrent, gate = self.partition.sizes(self.parts)
        qkvba_BSGF, z_BSGI = outputs_BSGF.split([sum(recurrent), gate], -1)
        qkvba_BTgF = self.partition.gather_sequence(qkvba_BSGF, self.parts[:-1])
        rule = partial(self._delta_rule, documents_BT, cache)
        y_BThV = self.recomputed("core", rule, qkvba_BTgF, *self.scalars())
        y_BSHV = self.partition.scatter_sequence(y_BThV)
        return self.o(self.recomputed("core", self._norm_and_gate, y_BSHV, z_BSGI))

    # -------------------------------------------------------------------------------------- parts

    def _delta_rule(
        self,
        documents_BT: Tensor | None,
        cache: DeltaNetCache | None,
        qkvba_BTgF: Tensor,
        a_log_h: Tensor,
        dt_bias_h: Tensor,
    ) -> Tensor:
        heads = self._rule_inputs(qkvba_BTgF, (a_log_h, dt_bias_h), documents_BT, cache)
        if cache is not None:
            return self._continue_from_cache(heads, cache)
        return self.delta_rule(*heads, documents_BT)[0]

    def _rule_inputs(
        self,
        qkvba_BTgF: Tensor,
        scalars: tuple[Tensor, Tensor],
        documents_BT: Tensor | None,
        cache: DeltaNetCache | None,
    ) -> DeltaRuleInputs:
        """Convolution, decay and β for the heads of this rank over the whole sequence."""
        *convolved, b_size, a_size = self.partition.core_sizes(self.parts[:-1])
        qkv_BTgJ, b_BTgr, a_BTgr = qkvba_BTgF.split([sum(convolved), b_size, a_size], -1)
        q_BTgK, k_BTgK, v_BTgI = self.conv(qkv_BTgJ, documents_BT, None if cache is None else cache.conv_BEQ)
        beta_BTh = b_BTgr.flatten(2).sigmoid()
        return DeltaRuleInputs(
            q_BTgK=q_BTgK,
            k_BTgK=k_BTgK,
            v_BThV=v_BTgI.flatten(2).unflatten(2, (-1, self.shape.value_dim)),
            log_decay_BTh=self._log_decay(a_BTgr.flatten(2), *scalars),
            beta_BTh=2 * beta_BTh if self.shape.negative_eigenvalues else beta_BTh,
        )

    def _log_decay(self, a_BTh: Tensor, a_log_h: Tensor, dt_bias_h: Tensor) -> Tensor:
        wide = torch.promote_types(a_BTh.dtype, torch.float32)
        return -a_log_h.to(wide).exp() * F.softplus(a_BTh.to(wide) + dt_bias_h.to(wide))

    def _continue_from_cache(self, heads: DeltaRuleInputs, cache: DeltaNetCache) -> Tensor:
        """Apply the rule from the cached state and update it: one recurrent step, or chunks for a longer
        prompt."""
        if heads.v_BThV.shape[1] == 1:
            q_BgK, k_BgK, v_BhV, log_decay_Bh, beta_Bh = (x.squeeze(1) for x in heads)
            y_BhV, state_BHKV = step(q_BgK, k_BgK, v_BhV, log_decay_Bh, beta_Bh, cache.state_BHKV)
            y_BThV = y_BhV.unsqueeze(1)
        else:
            y_BThV, state_BHKV = self.delta_rule(*heads, initial_state_BHKV=cache.state_BHKV)
        cache.state_BHKV.copy_(state_BHKV.detach())
        return y_BThV

    def _norm_and_gate(self, y_BSHV: Tensor, z_BSGI: Tensor) -> Tensor:
        """RMSNorm(y) · SiLU(z) per head; returns heads concatenated."""
        repeats = y_BSHV.shape[2] // z_BSGI.shape[2]
        y_BSGrV, z_BSGrV = y_BSHV.unflatten(2, (-1, repeats)), z_BSGI.unflatten(-1, (repeats, -1))
        return self.gate_norm(y_BSGrV, z_BSGrV).flatten(2)

    # --------------------------------------------------------------------- introspection and cost

    def new_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> DeltaNetCache:
        """An empty cache; `dtype` is that of the activations."""
        shape = self.shape
        state = (rows, shape.value_heads, shape.key_dim, shape.value_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return DeltaNetCache(
            conv_BEQ=self.conv.new_state(rows, device, dtype),
            state_BHKV=torch.zeros(state, device=device, dtype=wide),
        )

    def canonical(self) -> dict[str, Canonical]:
        partition = self.partition
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, partition.slices(self.parts), strict=True):
            held = self.qkvbaz.canonical_part(
                (slice(None), place), partition.span(part), partition.copies(part)
            )
            tensors |= under(part.name, "qkvbaz", held)
        tensors |= under("conv", "conv", self.conv.canonical())
        tensors |= under("", "scalars", self.scalars.canonical())
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def cost(self, workload: Workload) -> Cost:
        """The cost with the reference rule is dominated by the token pairs within chunks."""
        partition, shape, n, w = self.partition, self.shape, workload.narrow, workload.wide
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.qkvbaz.channels_in
        all_tokens, cp_tokens = workload.local_tokens(), workload.local_tokens(cp)
        sp_tokens = workload.local_tokens(tp, cp)
        heads, inner = partition.core_heads, partition.heads * shape.value_dim
        rule = (workload.rows, workload.tokens, heads, partition.core_groups, shape.key_dim, shape.value_dim)
        exchanged = all_tokens * partition.core_groups * sum(partition.core_sizes(self.parts[:-1])) * n
        normed_input = workload.norm_output(cp_tokens * hidden * n, tp.size > 1)
        fused = workload.may_fuse("delta_rule") and fuses(
            workload.device, workload.dtype, shape.key_dim, shape.value_dim
        )
        rule_bytes = fused_delta_rule_bytes if fused else delta_rule_bytes
        pairwise_decays = all_tokens * heads * CHUNK * 4
        passing = fused_delta_rule_workspace(*rule, narrow=n) if fused else pairwise_decays
        kept = normed_input + self.conv.cost(workload).kept
        kept += all_tokens * heads * (2 * w + n) + 2 * heads * w + rule_bytes(*rule, narrow=n, wide=w)
        kept += self.gate_norm.cost(workload, cp_tokens * partition.heads).kept + cp_tokens * inner * n
        conv, gate = self.conv.fuses(workload), self.gate_norm.fuses(workload)
        if gate or not workload.mixed or (conv and cp.size == 1):
            # The gate and the input of a fused convolution are slices of the projection's output.
            kept += cp_tokens * self.qkvbaz.channels_out * n
        if not gate and not workload.mixed:
            kept -= cp_tokens * inner * n  # the norm counts the gate
        if conv and cp.size > 1:
            kept += exchanged
        if not workload.mixed and cp.size == 1:
            kept += (padded_to_chunks(workload.tokens) - workload.tokens) * workload.rows * inner * n
        if workload.recomputes("core"):
            kept = normed_input + cp_tokens * self.qkvbaz.channels_out * n + 2 * heads * w
            kept += exchanged + cp_tokens * inner * n if cp.size > 1 else 0
        return Cost(
            kept=kept,
            passing=passing,
            calls=all_gather_calls(tp, sp_tokens * hidden * n, "delta net tokens")
            + all_to_all_calls(cp, exchanged, "delta net heads")
            + all_to_all_calls(cp, all_tokens * heads * shape.value_dim * n, "delta net outputs")
            + reduce_scatter_calls(tp, cp_tokens * hidden * n, "delta net sums"),
        )

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row. A token reads a head's state twice and updates it once, with
        2 · key_dim · value_dim FLOPs each."""
        own = tokens // self.groups.cp.size
        rule = 6 * tokens * self.partition.core_heads * self.shape.key_dim * self.shape.value_dim
        return self.qkvbaz.flops(own) + self.conv.flops(tokens) + rule + self.o.flops(own)

    def work(self, workload: Workload) -> Work:
        partition, n, tp, cp = self.partition, workload.narrow, self.groups.tp, self.groups.cp
        tokens, all_tokens = workload.local_tokens(cp), workload.local_tokens()
        own = workload.local_tokens(tp, cp) * self.qkvbaz.channels_in * n
        exchanged = all_tokens * partition.core_groups * sum(partition.core_sizes(self.parts[:-1])) * n
        outputs, inner = (
            tokens * self.qkvbaz.channels_out * n,
            tokens * partition.heads * self.shape.value_dim * n,
        )
        work = gather_copies(workload, tp, own) + self.qkvbaz.work(workload, tokens)
        # Gradients of the gate and of all else become one tensor, as do those of the parts of the latter.
        work += moved(backward=2 * (outputs + exchanged), launches=2)
        work += exchange_copies(cp, exchanged) + self.conv.work(workload) + self._rule_work(workload)
        work += exchange_copies(cp, inner) + self.gate_norm.work(workload, tokens * partition.heads)
        return work + self.o.work(workload, tokens)

    def _rule_work(self, workload: Workload) -> Work:
        """The rule, and before it ops of torch on two numbers per head. Forward writes the inverse of each
        chunk; backward reads it, and writes and reads states, deltas and token pairs."""
        shape, partition, n, w = self.shape, self.partition, workload.narrow, workload.wide
        tokens, heads, groups = workload.local_tokens(), partition.core_heads, partition.core_groups
        rule = (workload.rows, workload.tokens, heads, groups, shape.key_dim, shape.value_dim)
        qk, v = 2 * tokens * groups * shape.key_dim * n, tokens * heads * shape.value_dim * n
        inverses = workload.rows * -(-workload.tokens // CHUNK) * CHUNK * CHUNK * heads * n
        flops, scalars = 6 * tokens * heads * shape.key_dim * shape.value_dim, tokens * heads * w
        workspace = 2 * fused_delta_rule_workspace(*rule, narrow=n)
        return moved(10 * scalars, 13 * scalars, launches=9, region="core") + kernel_work(
            "delta_rule",
            {"key_dim": shape.key_dim, "value_dim": shape.value_dim},
            flops=(flops, 2 * flops),
            moves=(2 * (qk + v + inverses) + 2 * scalars, 4 * (qk + v) + inverses + workspace + 4 * scalars),
            launches=(2, 6),
            region="core",
        )
