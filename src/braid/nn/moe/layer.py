"""The MoE layer: router, token dispatcher, routed experts, latent projections, shared expert.

    y = Σ_{e in top-k} p_e · expert_e(x) + shared(x)         (DeepSeekMoE, arXiv 2401.06066)
    routed experts with a latent: up(Σ p_e · expert_e(down(x)))

A block runs its parts in phases:

    mix       routing = moe.router(x_NC, tokens); plan = moe.dispatch_plan(routing, tokens)
              rows, probs = moe.pack(x_NC, routing.probs_NS, plan); shared_BtC = moe.shared_output(x_BtC)
    dispatch  rows, probs, plan = moe.dispatcher.dispatch(rows, probs, plan)
    experts   rows = moe.run_experts(rows, probs, plan)
    combine   rows = moe.dispatcher.combine(rows, plan)
    post      y_NC = moe.unpack(rows, plan), plus shared

Router and shared expert read the hidden channels, routed experts the latent ones.

Shapes: B rows, t tokens of this rank, N = B · t, S slots of a token, C hidden channels, L latent channels (C
without a latent). Dispatched tensors have any number of rows, of L channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups
from braid.kernels import glu, router
from braid.kernels.grouped_mlp import GroupedMlp
from braid.kernels.permute import PLAIN, Permute
from braid.nn.canonical import Canonical, under
from braid.nn.cost import (
    INDEX_BYTES,
    Cost,
    Workload,
    all_gather_calls,
    all_to_all_v_calls,
    in_phase,
    no_grad_call,
    reduce_scatter_calls,
)
from braid.nn.linear import Linear
from braid.nn.mlp import Mlp
from braid.nn.moe.all_gather import AllGather
from braid.nn.moe.balance import balance_cost, balance_work
from braid.nn.moe.capacity import capacity
from braid.nn.moe.dispatch_plan import CapacityPadding, Dispatcher, DispatchPlan, Slots, record_stream
from braid.nn.moe.experts import Experts
from braid.nn.moe.permute import combine, dispatch, permute_work, unpermute_work
from braid.nn.moe.router import Router, logit_dtype, probability_dtype, saves_input
from braid.nn.moe.routing import Routing
from braid.nn.moe.token_dispatcher import choose
from braid.nn.moe.token_ids import Tokens
from braid.nn.work import Work, gradient_sums, moved

NOT_REPEATED = (
    "dispatch of row counts",
    "dispatch of expert ids",
    "combine of rows",
    "combine of tokens",
    "expert counts",
    "expert counts of rows",
)
"""Purposes of collectives that recomputing a block does not repeat: the dispatch plan and expert counts are
kept, and nothing needs the results of combine."""


class Latent(nn.Module):
    """The projections around routed experts: down before dispatch, up after combine."""

    def __init__(
        self,
        hidden: int,
        latent: int,
        *,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.down = Linear(hidden, latent, copies=copies, device=device, dtype=dtype)
        self.up = Linear(latent, hidden, fill="residual", copies=copies, device=device, dtype=dtype)

    def canonical(self) -> dict[str, Canonical]:
        return under("down", "down", self.down.canonical()) | under("up", "up", self.up.canonical())

    def flops(self, tokens: int) -> int:
        return self.down.flops(tokens) + self.up.flops(tokens)


class Moe(nn.Module):
    """Router, routed experts, and an optional shared expert for every token."""

    def __init__(
        self,
        shape: architecture.Moe,
        hidden: int,
        grouped_mlp: GroupedMlp,
        dispatcher: Dispatcher | None = None,
        permute: Permute = PLAIN,
        activation: glu.MlpActivation = glu.PLAIN,
        router_kernels: router.RouterKernels = router.PLAIN,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dispatcher` defaults to the choice of `token_dispatcher.choose`."""
        super().__init__()
        self.shape, self.groups, self.permute = shape, groups, permute
        self.dispatcher = choose(shape, hidden, groups).function if dispatcher is None else dispatcher
        tp = groups.tp
        self.router = Router(shape, hidden, router_kernels, groups=groups, device=device, dtype=dtype)
        self.latent = self.shared = self.shared_gate = None
        if shape.latent:
            self.latent = Latent(hidden, shape.latent, copies=tp, device=device, dtype=dtype)
        channels = shape.latent or hidden
        self.experts = Experts(shape, channels, grouped_mlp, groups=groups, device=device, dtype=dtype)
        if shape.shared_ffn:
            shared = architecture.Mlp(ffn=shape.shared_ffn, activation=shape.activation, glu=shape.glu)
            self.shared = Mlp(shared, hidden, activation, groups=groups, device=device, dtype=dtype)
        if shape.shared_gate:
            self.shared_gate = Linear(hidden, 1, copies=tp, device=device, dtype=dtype)

    # -------------------------------------------------------------------------------------- parts

    def dispatch_plan(self, routing: Routing, tokens: Tokens, *, replayed: bool = False) -> DispatchPlan:
        """The dispatch plan of a routing. Replayed decisions may come from a run with another capacity, so the
        number of kept slots is not assumed for them."""
        shape, (experts_NS, _, kept_NS) = self.shape, routing.choice
        slots = Slots(experts_NS, kept_NS)
        if replayed:
            return self.dispatcher.dispatch_plan(slots)
        if shape.capacity_factor is None or not tokens.training:
            return self.dispatcher.dispatch_plan(slots._replace(kept=tokens.count * shape.top_k))
        if shape.pad_to_capacity:
            slots = slots._replace(padding=CapacityPadding(tokens.rows, self._capacity(tokens)))
        return self.dispatcher.dispatch_plan(slots)

    def _capacity(self, tokens: Tokens) -> int:
        """The maximum number of rows of an expert from this rank's tokens of one sequence."""
        return min(tokens.row_tokens, capacity(self.shape, tokens.row_tokens * self.groups.tp_cp.size))

    def pack(self, x_NC: Tensor, probs_NS: Tensor, dispatch_plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """Project to the latent and permute: the rows and probabilities to dispatch."""
        x_NL = x_NC if self.latent is None else self.latent.down(x_NC)
        if dispatch_plan.send_order is None:
            return x_NL, probs_NS
        return dispatch(x_NL, probs_NS, dispatch_plan.send_order, self.permute)

    def run_experts(self, rows: Tensor, probs: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """Apply the local experts to received rows; returns them in the order of arrival."""
        assert dispatch_plan.counts_E is not None
        if dispatch_plan.recv_order is None:
            return self.experts(rows, probs, dispatch_plan.counts_E)
        record_stream(
            dispatch_plan.recv_order.slot_M, dispatch_plan.recv_order.row_NS, dispatch_plan.recv_order.counts_E
        )
        rows, probs = dispatch(rows, probs, dispatch_plan.recv_order, self.permute)
        return combine(
            self.experts(rows, probs, dispatch_plan.counts_E), dispatch_plan.recv_order, self.permute
        )

    def unpack(self, rows: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        """Sum the combined rows of each token, and project from the latent."""
        y_NL = (
            rows if dispatch_plan.send_order is None else combine(rows, dispatch_plan.send_order, self.permute)
        )
        return y_NL if self.latent is None else self.latent.up(y_NL)

    def shared_output(self, x_BtC: Tensor) -> Tensor | None:
        """Output of the shared expert, if any."""
        if self.shared is None:
            return None
        y_BtC: Tensor = self.shared(x_BtC)
        return y_BtC if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_BtC)) * y_BtC

    # --------------------------------------------------------------------- introspection and cost

    def canonical(self) -> dict[str, Canonical]:
        tensors = under("router", "router", self.router.canonical())
        tensors |= under("experts", "experts", self.experts.canonical())
        for name, part in (("latent", self.latent), ("shared", self.shared), ("shared_gate", self.shared_gate)):
            tensors |= {} if part is None else under(name, name, part.canonical())
        return tensors

    def cost(self, workload: Workload) -> Cost:
        """Router, latent, shared expert and shared gate read the same input: parts that save it unchanged save
        one tensor, which is counted once."""
        shape, n = self.shape, workload.narrow
        tokens, hidden = workload.local_tokens(self.groups.tp_cp), self.router.weight.shape[1]
        normed, wide = tokens * hidden * n, probability_dtype(shape, workload.dtype).itemsize
        savers = int(saves_input(shape, workload))
        total = self.router.cost(workload) + balance_cost(shape, workload, wide, self.groups)
        total += self._dispatch_cost(workload, wide)
        if self.latent is not None:
            savers += 1
            total += Cost(kept=normed + tokens * self.experts.channels * n)
        if self.shared is not None:
            # With tp it saves a gathered copy; its own cost leaves out a recomputed norm.
            savers += self.groups.tp.size == 1 and not workload.recomputes("norm")
            total += self.shared.cost(workload)
        if self.shared_gate is not None:
            savers += 1
            total += Cost(kept=2 * normed + tokens * n)
        saved_once = 0 if workload.recomputes("norm") else 1
        return total + Cost(kept=-normed * max(0, savers - saved_once))

    def block_cost(self, workload: Workload) -> Cost:
        """What is saved if the whole block is recomputed: the dispatch plan, what the auxiliary losses need,
        and the input of the latent up-projection."""
        shape, wide = self.shape, probability_dtype(self.shape, workload.dtype).itemsize
        tokens = workload.local_tokens(self.groups.tp_cp)
        batch_losses = bool(shape.aux_loss) + bool(shape.global_aux_loss)
        orders = self._order_bytes(workload, recomputed=True)
        kept = orders + batch_losses * shape.experts * wide
        if shape.sequence_aux_loss:
            kept += tokens + workload.rows * (shape.experts + 1) * wide
        if shape.z_loss:
            narrow = logit_dtype(shape, workload.dtype).itemsize < wide
            kept += tokens * wide * (1 + shape.experts * narrow)
        if self.latent is not None:
            kept += tokens * self.experts.channels * workload.narrow
        # The plan stays for the replay. The token of each row is the unpermutation's own, if it has one.
        tokens_own = 0 if isinstance(self.dispatcher, AllGather) else self.dispatched_rows(workload)
        return Cost(kept=kept, staying=orders - tokens_own * INDEX_BYTES)

    def dispatched_rows(self, workload: Workload) -> int:
        """Dispatched rows, for balanced experts."""
        shape, tokens = self.shape, workload.local_tokens(self.groups.tp_cp)
        if not shape.pad_to_capacity:
            return tokens * shape.top_k * self.groups.etp.size
        row_tokens = workload.tokens // self.groups.tp_cp.size
        places = (
            len(self.experts.expert_ids) * workload.rows * min(row_tokens, capacity(shape, workload.tokens))
        )
        return self.groups.ep_etp.size * places

    def _order_bytes(self, workload: Workload, *, recomputed: bool) -> int:
        """Saved indices of the permutations. If experts are recomputed, the token of each received row is not
        saved."""
        group, rows, tokens_saved = self.groups.ep_etp, self.dispatched_rows(workload), not recomputed
        if isinstance(self.dispatcher, AllGather):
            slots = workload.local_tokens(self.groups.tp_cp) * self.shape.top_k
            return (2 * group.size * slots + rows * tokens_saved) * INDEX_BYTES
        received = 2 + tokens_saved if group.size > 1 and len(self.experts.expert_ids) > 1 else 0
        return (3 + received) * rows * INDEX_BYTES

    def _dispatch_cost(self, workload: Workload, wide: int) -> Cost:
        """Permutation, dispatch, experts and combine, for balanced experts."""
        shape, group, local_experts = self.shape, self.groups.ep_etp, len(self.experts.expert_ids)
        tokens = workload.local_tokens(self.groups.tp_cp)
        slots, channels = tokens * shape.top_k, self.experts.channels * workload.narrow
        rows = self.dispatched_rows(workload)
        total = self.experts.cost(workload, rows, wide) + Cost(
            kept=self._order_bytes(workload, recomputed=False)
        )
        if isinstance(self.dispatcher, AllGather):
            calls = (
                no_grad_call("all_gather", group, slots * INDEX_BYTES, "dispatch of expert ids")
                + in_phase(all_gather_calls(group, tokens * channels, "dispatch of tokens"), "dispatch")
                + in_phase(all_gather_calls(group, slots * wide, "dispatch of probabilities"), "dispatch")
                + in_phase(
                    reduce_scatter_calls(group, group.size * tokens * channels, "combine of tokens"), "combine"
                )
            )
            return total + Cost(calls=calls)
        counts = 0 if shape.pad_to_capacity else group.size * local_experts * INDEX_BYTES
        calls = (
            no_grad_call("all_to_all", group, counts, "dispatch of row counts", times=int(counts > 0))
            + in_phase(all_to_all_v_calls(group, rows * channels, "dispatch of rows"), "dispatch")
            + in_phase(all_to_all_v_calls(group, rows * wide, "dispatch of probabilities"), "dispatch")
            + in_phase(all_to_all_v_calls(group, rows * channels, "combine of rows"), "combine")
        )
        return total + Cost(calls=calls)

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row. Routed experts count top_k of them per token."""
        own = tokens // self.groups.tp_cp.size
        parts = (self.router, self.experts, self.latent, self.shared_gate)
        shared = 0 if self.shared is None else self.shared.flops(tokens)
        return shared + sum(part.flops(own) for part in parts if part is not None)

    def work(self, workload: Workload, load: float = 1.0) -> dict[str, Work]:
        """The work of each phase; dispatch and combine only send. The slowest rank of experts has `load` times
        the rows of balanced ones."""
        rows = round(load * self.dispatched_rows(workload))
        experts = self.experts.work(workload, rows)
        if self._permutes_received():
            experts = self._receive_work(workload, rows) + experts
        return {
            "mix": self._mix_work(workload),
            "dispatch": Work(),
            "experts": experts,
            "combine": Work(),
            "post": self._post_work(workload),
        }

    def _mix_work(self, workload: Workload) -> Work:
        """Router, dispatch plan, permutation and shared expert, which all read the same input."""
        shape, n, hidden = self.shape, workload.narrow, self.router.weight.shape[1]
        tokens, wide = (
            workload.local_tokens(self.groups.tp_cp),
            probability_dtype(self.shape, workload.dtype).itemsize,
        )
        work = self.router.work(workload) + balance_work(shape, workload, wide, self.groups)
        work += self._plan_work(workload)
        if self.latent is not None:
            work += self.latent.down.work(workload, tokens)
        if self._permutes_sent():
            work += permute_work(workload, tokens, self.dispatched_rows(workload), self.experts.channels, wide)
        users = 2
        if self.shared is not None:
            users += 1
            work += self.shared.work(workload)
        if self.shared_gate is not None:
            users += 1
            gated = tokens * hidden * n
            work += self.shared_gate.work(workload, tokens) + moved(2 * gated, 4 * gated, launches=(2, 4))
        return work + gradient_sums(users, tokens * hidden * n)

    def _plan_work(self, workload: Workload) -> Work:
        """Integers that sort slots by expert, and received rows by expert and rank: many small kernels."""
        slots = workload.local_tokens(self.groups.tp_cp) * self.shape.top_k * INDEX_BYTES
        if isinstance(self.dispatcher, AllGather):
            return moved(12 * self.groups.ep_etp.size * slots, launches=24)
        received = moved(14 * slots, launches=24) if self._permutes_received() else Work()
        return moved(12 * slots * self.groups.etp.size, launches=12) + received

    def _permutes_sent(self) -> bool:
        return not isinstance(self.dispatcher, AllGather)

    def _permutes_received(self) -> bool:
        """Whether rows do not arrive sorted by expert."""
        many = self.groups.ep_etp.size > 1 and len(self.experts.expert_ids) > 1
        return many or isinstance(self.dispatcher, AllGather)

    def _receive_work(self, workload: Workload, rows: int) -> Work:
        """Received rows, or the tokens of all ranks, to rows sorted by expert and back."""
        wide, tokens = probability_dtype(self.shape, workload.dtype).itemsize, rows
        if isinstance(self.dispatcher, AllGather):
            tokens = workload.local_tokens(self.groups.tp_cp) * self.groups.ep_etp.size
        channels = self.experts.channels
        there = permute_work(workload, tokens, rows, channels, wide)
        return there + unpermute_work(workload, tokens, rows, channels)

    def _post_work(self, workload: Workload) -> Work:
        """The rows of each token are summed, and the shared expert is added."""
        tokens, work = workload.local_tokens(self.groups.tp_cp), Work()
        if self._permutes_sent():
            work = unpermute_work(workload, tokens, self.dispatched_rows(workload), self.experts.channels)
        if self.latent is not None:
            work += self.latent.up.work(workload, tokens)
        if self.shared is not None:
            work += moved(3 * tokens * self.router.weight.shape[1] * workload.narrow)
        return work
