"""The oracle of the engine: a step as one would write it without a plan.

    state = hooked_state(planned, groups, meshes)       weights that FSDP2's own hooks gather and reduce
    figures, loads = backward(state, run, batches, counts)

Segments run whole, each with one autograd graph; a schedule says no more than whose turn it is. Everything that
backward needs is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from braid.config import Run
from braid.distributed.collectives import Groups
from braid.distributed.links import open_channels
from braid.engine import fsdp2
from braid.engine.executor import PipelineLinks
from braid.engine.weights import ModelWeights, ResidentWeights
from braid.model.context import Context, MicroBatch
from braid.model.language import Losses
from braid.nn.delayed_wgrad import DelayedWgrad, Mains, set_wgrad_store
from braid.nn.moe.experts import Experts
from braid.optim import gradients
from braid.optim.adamw import AdamW
from braid.planning.plan import Plan
from braid.schedule import (
    DUAL_PIPE_V,
    Act,
    Op,
    Schedule,
    Turn,
    build,
    channel_of,
    evaluation,
    v_shape,
    with_sums,
)
from braid.schedule.builders import with_messages
from braid.schedule.dual import slots
from braid.train.build import _shard, make_model
from braid.train.device import choose_device
from braid.train.expert_load import ExpertLoad
from braid.train.state import State
from braid.train.step import DEVIATION, Counts
from tests.states import language_state

# ------------------------------------------------------------------------------------------- schedules


def in_segments(planned: Plan) -> Schedule:
    """The order of a plan, in ops about whole segments: that of 1F1B where the plan overlaps."""
    run, schedule = planned.run, planned.schedule
    pp, segments, micro_batches = schedule.pp, schedule.segments, schedule.micro_batches
    if run.mesh.schedule == DUAL_PIPE_V:
        whole = dual_pipe_v_of_segments(pp, micro_batches)
    else:
        name = "1f1b" if segments == pp else "interleaved"
        whole = build(name, pp=pp, virtual=segments // pp, micro_batches=micro_batches)
    shared = run.model.tied or bool(planned.layout.mtp)
    return with_sums(whole, {"embedding": (whole.holder[0], whole.holder[-1])} if shared else {})


def dual_pipe_v_of_segments(pp: int, micro_batches: int) -> Schedule:
    """The order of DualPipeV where a backward has its weight gradients with it."""
    holder = v_shape(pp)
    order = [
        [
            (act, turn)
            for slot in slots(rank, pp, micro_batches)
            for act, turn in ((Act.F, slot.forward), (Act.B, slot.backward))
            if turn
        ]
        for rank in range(pp)
    ]
    return Schedule(
        name=DUAL_PIPE_V,
        micro_batches=micro_batches,
        holder=holder,
        backward=True,
        live_bound=(min(2 * micro_batches, 2 * pp + 1),) * pp,
        ops=tuple(with_messages(rank, order[rank], holder) for rank in range(pp)),
    )


# ----------------------------------------------------------------------------------------------- hooks


class Hooks:
    """What keeps the weights of a model that runs by FSDP2's hooks: nothing of ours."""

    def __init__(self, root: nn.Module) -> None:
        self.mains: Mains = _OfExperts(root)


class _OfExperts(fsdp2.AccumulatedGrads):
    """Main gradients of experts alone. Hooks reduce the gradients of a unit as they find them, and want one
    dtype: with those of a norm beside them, those of linear layers have to go by way of `.grad`."""

    def get(self, parameter: Tensor) -> Any:
        main = super().get(parameter)
        of_experts = main is not None and isinstance(main._param._module_info.module, Experts)
        return main if of_experts else None


def hooked_state(planned: Plan, groups: Groups, meshes: Mapping[str, DeviceMesh]) -> State:
    """As `make_state` makes it, with hooks."""
    device = choose_device("cpu")
    model = make_model(planned, device, groups)
    _shard(model, planned.run.mesh.shard, device, meshes)
    assert isinstance(model, FSDPModule)
    for method in ("run", "logits"):
        register_fsdp_forward_method(model, method)
    for ends in (model.embedding, model.head):
        if ends is not None:
            register_fsdp_forward_method(ends, "logits")
            register_fsdp_forward_method(ends, "loss")
    fsdp2.init_root(model)
    optim = planned.run.optim
    optimizer = AdamW(
        dict(model.named_parameters()),
        decaying=model.decaying(),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    channels = open_channels(planned.grid, groups.world.rank, in_segments(planned).channels())
    keeper = cast(ModelWeights, Hooks(model))
    return language_state(planned, model, optimizer, keeper, device.torch, channels)


def switch(modules: Iterable[nn.Module], strategy: str, *, last: bool) -> None:
    """What the next backward does with gradients and gathered weights of these units. `last` is the last
    micro-batch that they see in a step."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or strategy in ("gradients", "all"), recurse=False)
            module.set_reshard_after_backward(last or strategy == "all", recurse=False)


def release(root: nn.Module) -> None:
    """Let go of gathered weights, so that the next forward gathers what the optimizer has made of them."""
    for module in fsdp2.fsdp_modules(root):
        module.reshard()


# ----------------------------------------------------------------------------------------------- steps


def backward(
    state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts
) -> tuple[dict[str, Tensor], ExpertLoad]:
    """Leave the gradient of the whole step in the optimizer; tell this rank's figures, and the load of experts
    over all ranks."""
    step = Step(state, run, batches, counts)
    links = state.links(len(batches[0].sample_B), run)
    Interpreter(in_segments(state.plan), state.model.groups.pp.rank, step, links).run()
    step.end()
    return step.metrics, step.loads.all_reduce(state.model.groups.slab)


@torch.no_grad()
def evaluate(state: State, batches: Sequence[MicroBatch]) -> Tensor:
    """Loss sum and token count of what this rank tells."""
    groups, totals = state.model.groups, torch.zeros(2, dtype=torch.float64)

    class Forwards:
        def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            y, losses = state.model.run((turn[1],), x, state.model.prepare(batches[turn[0]]))
            if groups.tp.rank == 0:
                totals.add_(torch.stack([losses.loss_sum.double(), losses.token_count.double()]))
            return y, None

    schedule = evaluation(in_segments(state.plan).holder, len(batches))
    links = state.links(len(batches[0].sample_B), state.plan.run)
    Interpreter(schedule, groups.pp.rank, Forwards(), links).run()  # type: ignore[arg-type]
    release(state.model)
    return totals


class Step:
    """One step's work, segment by segment."""

    def __init__(self, state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts) -> None:
        self.state, self.run, self.model = state, run, state.model
        self.batches, self.counts = batches, counts
        self.contexts: dict[int, Context] = {}
        self.metrics: dict[str, Tensor] = {}
        self.loads = ExpertLoad()
        mains = state.language.keeper.mains
        self.wgrad_store = DelayedWgrad(mains) if mains else None
        set_wgrad_store(self.model, self.wgrad_store)
        once = run.mesh.shard in ("none", "optimizer")
        self.late = [each for each in self._reused() if once and isinstance(each, FSDPModule)]
        """Units that FSDP2 would reduce twice in the last backward: first what others have left."""
        self.modules = {segment: self._units(segment) for segment in self.model.segments}
        self.before: int | None = None
        """The micro-batch of the last backward."""

    def _units(self, segment: int) -> list[nn.Module]:
        """The units whose last backward of a micro-batch is that of this segment."""
        phases = self.state.plan.schedule.phases
        first = {unit: s for s in reversed(self.model.segments) for phase in phases[s] for unit in phase.units}
        return [self.model.get_submodule(unit) for unit, at in first.items() if at == segment]

    def _reused(self) -> list[nn.Module]:
        """Units that one backward of a segment comes to several times: their gradients are whole at its end."""
        model, depths = self.model, len(self.model.mtp)
        if model.head is not None:
            return [model.head] if depths else []
        if model.embedding is None or model.final_norm is None:
            return []
        return [model.embedding] if 0 in model.segments or depths else []

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        micro_batch, segment = turn
        context = self._context(micro_batch)
        context.earlier_E = self.loads.raw_counts_E
        y, losses = self.model.run((segment,), x, context)
        self.loads = self.loads.plus(losses.balances)
        part = self.counts.fractions[micro_batch]
        for name, figure in losses.metrics(*self._counted(losses), part).items():
            told = figure if name.startswith("aux_") or self.model.groups.tp.rank == 0 else 0 * figure
            self.metrics[name] = self.metrics[name] + told if name in self.metrics else told
        cost = losses.share(*self._counted(losses), part)
        return y, cost if cost.requires_grad else None

    def _context(self, micro_batch: int) -> Context:
        if micro_batch not in self.contexts:
            whole = self.counts.totals[micro_batch]
            context = self.model.prepare(self.batches[micro_batch], totals=whole)
            context.deviations = None if self.model.shape.hyper is None else {}
            self.contexts[micro_batch] = context
        return self.contexts[micro_batch]

    def _counted(self, losses: Losses) -> tuple[int, Sequence[int]]:
        return self.counts.tokens, self.counts.mtp_tokens if losses.mtp else ()

    def before_backward(self, turn: Turn) -> None:
        if isinstance(self.state.keeper, ResidentWeights) and self.before != turn[0]:
            self.state.optimizer.accumulate_grads()  # micro-batches are never summed in the model's dtype
        self.before = turn[0]
        last, strategy = turn[0] == len(self.batches) - 1, self.run.mesh.shard
        at_once = [module for module in self.modules[turn[1]] if module not in self.late]
        switch(self.late, strategy, last=False)
        switch(at_once, strategy, last=last)
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(self._is_done(turn))

    def _is_done(self, turn: Turn) -> bool:
        """Whether this is the last backward of the step on this rank."""
        return turn == (len(self.batches) - 1, self.model.segments[0])

    def after_backward(self, turn: Turn) -> None:
        if turn[0] == len(self.batches) - 1:
            for module in self.modules[turn[1]]:
                if module in self.late:
                    assert isinstance(module, FSDPModule)
                    fsdp2.post_backward(module, reduce=True)
                    module.reshard()
        if self._is_done(turn):
            if self.late:
                assert isinstance(self.model, FSDPModule)
                fsdp2.finalize_backward(self.model)
            self.state.optimizer.accumulate_grads()
        if turn[1] == self.model.segments[0]:
            for found in (self.contexts.pop(turn[0]).deviations or {}).values():
                self.metrics[DEVIATION] = torch.maximum(self.metrics.get(DEVIATION, found), found)

    def sum_copies(self) -> None:
        ends = [each for each in self.state.language.copies if each.group is self.model.groups.ends]
        gradients.sum_copies_(self.state.optimizer.gradients(), ends)

    def end(self) -> None:
        set_wgrad_store(self.model, None)


class _Held(NamedTuple):
    """What a forward leaves for its backward."""

    x: Tensor | None
    y: Tensor | None
    cost: Tensor | None


class Interpreter:
    """Runs a list of ops about whole segments."""

    def __init__(self, schedule: Schedule, rank: int, step: Step, links: PipelineLinks) -> None:
        self.schedule, self.rank, self.step, self.links = schedule, rank, step, links
        self.inputs: dict[Turn, Tensor] = {}
        self.gradients: dict[Turn, Tensor] = {}
        self.held: dict[Turn, _Held] = {}
        self.outgoing: list[tuple[dist.Work, Tensor]] = []

    def run(self) -> None:
        for op in self.schedule.ops[self.rank]:
            if op.act is Act.SUM_COPIES:
                self.step.sum_copies()
                continue
            assert op.micro_batch is not None
            assert op.segment is not None
            self._run(op, (op.micro_batch, op.segment))
        for sending, _ in self.outgoing:
            sending.wait()
        assert not [*self.inputs, *self.gradients, *self.held]

    def _run(self, op: Op, turn: Turn) -> None:
        micro_batch, segment = turn
        match op.act:
            case Act.F:
                self._forward(turn)
            case Act.B:
                self._backward(turn)
            case Act.SEND_F:
                self._send(op, self.inputs.pop((micro_batch, segment + 1)))
            case Act.SEND_B:
                self._send(op, self.gradients.pop((micro_batch, segment - 1)))
            case Act.RECV_F:
                self.inputs[turn] = self._receive(op)
            case Act.RECV_B:
                self.gradients[turn] = self._receive(op)

    def _forward(self, turn: Turn) -> None:
        x = self.inputs.pop(turn, None)
        if x is not None and self.schedule.backward:
            x = x.detach().requires_grad_()
        y, cost = self.step.forward(turn, x)
        if y is not None:
            self.inputs[turn[0], turn[1] + 1] = y.detach()
        if self.schedule.backward:
            self.held[turn] = _Held(x, y, cost)

    def _backward(self, turn: Turn) -> None:
        x, y, cost = self.held.pop(turn)
        self.step.before_backward(turn)
        roots: list[tuple[Tensor, Tensor | None]] = []
        if y is not None:
            roots.append((y, self.gradients.pop(turn)))
        if cost is not None:
            roots.append((cost, None))
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        if x is not None:
            assert x.grad is not None
            self.gradients[turn[0], turn[1] - 1] = x.grad
        self.step.after_backward(turn)

    def _send(self, op: Op, message: Tensor) -> None:
        group = self.links.channels[channel_of(self.rank, op)]
        message = message.contiguous()
        sending = dist.isend(message, group=group.handle, group_dst=1 - group.rank)
        assert sending is not None
        self.outgoing.append((sending, message))

    def _receive(self, op: Op) -> Tensor:
        group = self.links.channels[channel_of(self.rank, op)]
        message = self.links.message((op.micro_batch or 0, op.segment or 0))
        dist.recv(message, group=group.handle, group_src=1 - group.rank)
        return message
