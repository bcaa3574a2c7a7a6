"""The routed experts: stacked MLP weights and the grouped GEMM kernel that applies them.

Expert parallelism (ep) splits the experts, expert tensor parallelism (etp) the ffn channels of each.

Shapes: M rows sorted by expert, E experts of this rank, C channels of a row, F ffn channels of this rank, G
projections into the ffn.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels.activation import projections
from braid.kernels.activation_bytes import saved_ffn_tensors
from braid.kernels.grouped_mlp import FusedGroupedMlp, GroupedMlp, grouped, reference, sizes
from braid.kernels.grouped_mlp.product import Adapters, WritesInPlace, put_wgrad, zeros
from braid.kernels.precision.block_experts import BlockGroupedMlp, operand_bytes
from braid.kernels.precision.grouped_mlp import LowPrecisionGroupedMlp
from braid.kernels.precision.products import accumulated
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload
from braid.nn.delayed_wgrad import DelayedWgrad, Delaying
from braid.nn.precision_work import experts_work
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, activation_work, linear_work, moved

SHARD_DIMS = MappingProxyType(
    {"w_in_EFGC": 1, "w_down_ECF": 2, "b_in_EFG": 1, "b_down_EC": 1, "down_ERI": 2, "up_EOR": 1}
)
"""The dim of each weight that FSDP shards, and of adapters. Never the expert dim: a rank may hold fewer experts
than there are ranks to shard over."""

BUCKETS = MappingProxyType({"w_in_EFGC": "in", "w_down_ECF": "down", "b_in_EFG": "in", "b_down_EC": "down"})
"""The wgrad bucket of each weight, for schedules that compute expert weight gradients in two parts."""


class Experts(Delaying, Recomputing):
    """One MLP per local expert."""

    def __init__(
        self,
        shape: architecture.Moe,
        channels: int,
        grouped_mlp: GroupedMlp,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.channels = shape, channels
        self.grouped_mlp = grouped_mlp
        self.projections = projections(shape.activation)
        self.etp = groups.etp
        experts, self.ffn = shape.experts // groups.ep.size, shape.ffn // groups.etp.size
        assert experts * groups.ep.size == shape.experts
        assert self.ffn * groups.etp.size == shape.ffn
        self.expert_ids = range(groups.ep.rank * experts, (groups.ep.rank + 1) * experts)
        """Global indices of the local experts."""

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *sizes, device=device, dtype=dtype))

        self.w_in_EFGC = parameter(self.ffn, len(self.projections), channels)
        self.w_down_ECF = parameter(channels, self.ffn)
        self.b_in_EFG = parameter(self.ffn, len(self.projections)) if shape.bias else None
        self.b_down_EC = parameter(channels) if shape.bias else None
        self.adapters = nn.ModuleDict()
        """Those of LoRA by projection, see `nn.lora`."""

    def forward(self, x_MC: Tensor, probs_M: Tensor, counts_E: Tensor) -> Tensor:
        """Expert outputs for rows sorted by expert. With etp these are partial sums; combine adds them up."""
        return self.recomputed("experts", partial(self._grouped_mlp, counts_E), x_MC, probs_M)

    def _grouped_mlp(self, counts_E: Tensor, x_MC: Tensor, probs_M: Tensor) -> Tensor:
        # With etp, the down bias must be added exactly once per row: by the first rank.
        adds_bias = self.etp.rank == 0
        if self.wgrad_store is not None:
            self.wgrad_store.assign_buckets(
                {each: BUCKETS[name] for name, each in self.named_parameters(recurse=False)}
            )
        y_MC = self._multiply()(
            x_MC,
            probs_M,
            counts_E,
            self.w_in_EFGC,
            self.w_down_ECF,
            self.shape.activation,
            glu=self.shape.glu,
            b_in_EFG=self.b_in_EFG,
            b_down_EC=self.b_down_EC if adds_bias else None,
            wgrad_store=self.wgrad_store,
        )
        if adds_bias or self.b_down_EC is None:
            return y_MC
        in_place = isinstance(self.grouped_mlp, WritesInPlace)
        y_MC = _ZeroBiasGrad.apply(self.wgrad_store, in_place, self.b_down_EC, y_MC)
        return y_MC

    def _multiply(self) -> GroupedMlp:
        """The kernel, with the adapters."""
        if not len(self.adapters):
            return self.grouped_mlp
        assert self.grouped_mlp in (reference.grouped_mlp, grouped.grouped_mlp)
        adapters: Adapters = {}
        for name, adapter in self.adapters.items():
            if self.wgrad_store is not None:
                bucket = "down" if name == "down" else "in"
                self.wgrad_store.assign_buckets(dict.fromkeys(adapter.parameters(), bucket))
            adapters = {**adapters, name: cast(Any, adapter).low_rank()}
        return partial(self.grouped_mlp, adapters=adapters)

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for expert, number in enumerate(self.expert_ids):
            for place, name in enumerate(self.projections):
                tensors |= self._projection(f"{number}.{name}", (expert, slice(None), place))
            tensors |= self._down(f"{number}.down", (expert,))
            for name, adapter in self.adapters.items():
                own = cast(Any, adapter).canonical(expert, tensors[f"{number}.{name}.weight"])
                tensors |= under(f"{number}.{name}", f"adapters.{name}", own)
        return tensors

    def _projection(self, name: str, index: tuple[int | slice, ...]) -> dict[str, Canonical]:
        start = self.etp.rank * self.ffn
        weight = Canonical(
            parameter="w_in_EFGC",
            shape=(self.shape.ffn, self.channels),
            fill="normal",
            index=index,
            part=(self.ffn, self.channels),
            offset=(start, 0),
        )
        bias = Canonical(
            parameter="b_in_EFG",
            shape=(self.shape.ffn,),
            fill="zeros",
            index=index,
            part=(self.ffn,),
            offset=(start,),
        )
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def _down(self, name: str, index: tuple[int]) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="w_down_ECF",
            shape=(self.channels, self.shape.ffn),
            # With a latent, the up-projection writes into the residual stream instead.
            fill="normal" if self.shape.latent else "residual",
            index=index,
            part=(self.channels, self.ffn),
            offset=(0, self.etp.rank * self.ffn),
        )
        bias = Canonical(
            parameter="b_down_EC", shape=(self.channels,), fill="zeros", index=index, copies=self.etp
        )
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if self.shape.bias else {})

    def cost(self, workload: Workload, rows: int, wide: int) -> Cost:
        """The cost of `rows` rows; probabilities have `wide` bytes."""
        channels, ffn = rows * self.channels * workload.narrow, rows * self.ffn * workload.narrow
        block = isinstance(self.grouped_mlp, BlockGroupedMlp)
        fused = block or isinstance(self.grouped_mlp, FusedGroupedMlp)
        # The fused backward holds the gradients of output, projections and input, and the activation at once.
        passing = 2 * channels + (len(self.projections) + 1) * ffn if fused else channels
        projected, experts = len(self.projections) * self.ffn, len(self.expert_ids)
        if block:
            passing += operand_bytes(rows, experts, self.channels, projected)
        if workload.recomputes("experts"):
            narrowed = (
                not fused and wide != workload.narrow
            )  # else the region saves the probabilities as they are
            adopted = rows * wide if narrowed else 0
            return Cost(kept=channels + rows * wide, adopted=adopted, passing=passing)
        if fused:
            kept = sizes.kept(rows, experts, self.channels, projected, narrow=workload.narrow, wide=wide)
            return Cost(kept=kept, passing=passing)
        if isinstance(self.grouped_mlp, LowPrecisionGroupedMlp):
            return Cost(kept=channels + self._emulated_bytes(workload, rows), passing=passing)
        low = rows * sum(cast(Any, adapter).rank for adapter in self.adapters.values()) * workload.narrow
        kept = 2 * channels + self._saved_ffn_tensors() * ffn + low
        return Cost(kept=kept + rows * workload.narrow, passing=passing)

    def _saved_ffn_tensors(self) -> int:
        """Those of `reference` and `grouped`. What an adapter is added to becomes a tensor of its own; the
        other slice of a product for gate and up, if it is saved, keeps all of it."""
        activation, glu = self.shape.activation, self.shape.glu
        adapted = [name for name in self.projections if name in self.adapters]
        if self.grouped_mlp is not grouped.grouped_mlp or not adapted:
            joined = self.grouped_mlp is grouped.grouped_mlp
            return saved_ffn_tensors(activation, glu, joined=joined)
        keeps_slice = adapted == ["up"] or (adapted == ["gate"] and (glu.limit is not None or not glu.offset))
        sliced = len(self.projections) > 1 and keeps_slice
        return saved_ffn_tensors(activation, glu, joined=False) + sliced

    def _emulated_bytes(self, workload: Workload, rows: int) -> int:
        """What the emulation in low precision saves besides its input: the activation, what that saves, and
        probabilities are wide; what is quantised is narrow. Wide copies of gate and up are two tensors."""
        narrow, wide = workload.narrow, accumulated(workload.dtype).itemsize
        tensors = saved_ffn_tensors(self.shape.activation, self.shape.glu, joined=narrow == wide)
        of_bias = rows * narrow if self.shape.bias else 0
        return rows * (self.ffn * (tensors * wide + narrow) + wide) + of_bias

    def flops(self, tokens: int) -> int:
        """Average FLOPs of this rank, if every rank has `tokens` tokens."""
        matrices = len(self.projections) + 1
        return 2 * tokens * self.shape.top_k * matrices * self.channels * self.shape.ffn

    def work(self, workload: Workload, rows: int) -> Work:
        """The grouped products of `rows` rows, as many for every expert. Fused kernels apply activation and
        probabilities where they write the products."""
        experts, projected = len(self.expert_ids), self.ffn * len(self.projections)
        each, narrow = -(-rows // experts), workload.narrow
        bias = (projected, self.channels) if self.shape.bias else (0, 0)
        if isinstance(self.grouped_mlp, LowPrecisionGroupedMlp):
            sizes = rows, experts, self.channels, self.ffn, len(self.projections)
            fused = isinstance(self.grouped_mlp, BlockGroupedMlp)
            work = experts_work(self.grouped_mlp.into, self.grouped_mlp.down, *sizes, fused=fused)
            work += moved(wgrad=rows * sum(bias) * narrow, launches=2)
        else:
            grouped = partial(linear_work, groups=experts, rows=rows)
            into = grouped(each, projected, self.channels, bias_bytes=rows * bias[0] * narrow)
            down = grouped(each, self.channels, self.ffn, bias_bytes=rows * bias[1] * narrow)
            work = into + down
        if not isinstance(self.grouped_mlp, FusedGroupedMlp | BlockGroupedMlp):
            scaled = rows * self.channels * narrow
            work += activation_work(workload, rows * self.ffn, len(self.projections))
            work += moved(2 * scaled, 5 * scaled, launches=(2, 3))
        return (work + moved(2 * rows * workload.wide, 2 * rows * workload.wide)).in_region("experts")


class _ZeroBiasGrad(torch.autograd.Function):
    """A zero gradient for a bias that another etp rank adds: the gradient is all-reduced over etp, so it must
    exist here. It takes the path of the other weight gradients, so that all have one dtype."""

    @staticmethod
    def forward(
        ctx: Any, wgrad_store: DelayedWgrad | None, in_place: bool, bias_EC: Tensor, y_MC: Tensor
    ) -> Tensor:
        ctx.wgrad_store, ctx.in_place, ctx.bias = wgrad_store, in_place, bias_EC
        return y_MC.view_as(y_MC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, Tensor]:
        gradient = zeros(ctx.bias)
        product = gradient if ctx.in_place else gradient.__call__
        needed = ctx.needs_input_grad[2]
        return None, None, put_wgrad(ctx.wgrad_store, ctx.bias, product) if needed else None, grads[0]
