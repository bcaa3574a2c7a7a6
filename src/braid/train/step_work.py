"""What the executor calls for the ops of a step or an evaluation: the computation of each module's phases.

`LanguageStep` and `EncoderStep` train a module, `LanguageEvaluation` and `EncoderEvaluation` only run forward.
`ModulesWork` gives every op to the work of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from braid.config import Run
from braid.engine.node import PhaseFn, StepWork
from braid.engine.streams import Streams
from braid.kernels.host import to_device
from braid.model import nodes
from braid.model.context import Context, MicroBatch, MicroBatchTotals, StackContext
from braid.model.encoder import EncoderContext, EncoderModel, Items
from braid.model.language import LanguageModel, Losses, LossScale, StepFraction
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.offload import Offloads
from braid.nn.recompute import Hold, Replays
from braid.optim import gradients
from braid.planning.plan import Plan, span_of
from braid.schedule import Act, Op, Phase, Turn
from braid.schedule.graph import LANGUAGE
from braid.schedule.offload import block_of
from braid.topology.items import ItemTable
from braid.train.counts import Counts
from braid.train.expert_load import ExpertLoad
from braid.train.module_state import ModuleState
from braid.train.state import JobState, State

DEVIATION = "hyper_deviation"
"""The only metric that is a maximum over layers, micro-batches and ranks; all others are sums."""


WITHOUT_ROOM = "offload_without_room_bytes"
"""What stayed on the devices because experts received more rows than the host pool has room for."""


class ModuleStep(StepWork):
    """A training step of one module."""

    model: LanguageModel | EncoderModel
    new_main: Callable[[Tensor], Tensor] | None = None
    """The memory of main gradients, if they have some already."""

    def __init__(
        self,
        state: JobState,
        module: ModuleState,
        counts: Counts,
        micro_batches: int,
        streams: Streams | None = None,
    ) -> None:
        """`streams` are those of the state, unless a CUDA graph is captured on others."""
        run, plan = state.plan.run, state.plan
        self.state, self.module = state, module
        self.streams = state.streams if streams is None else streams
        self.model = module.model
        self.counts, self.micro_batches = counts, micro_batches
        self.contexts: dict[int, StackContext] = {}
        self.metrics: dict[str, Tensor] = {}
        self.loads = ExpertLoad()
        self.pieces: dict[Turn, list[Losses]] = {}
        """Losses of the phases of each segment that have run so far."""
        names = run.train.recompute
        pool, regions = state.host_pool, run.train.offload_regions
        self.offloads = None if pool is None else Offloads(pool, state.streams, regions)
        saves = bool(names) or self.offloads is not None
        self.replays = Replays(names, planned=True, offloads=self.offloads) if saves else None
        self.away = state.program.away
        segments = [module.first_segment + each for each in self.model.segments]
        backwards = [each for each in segments if plan.schedule.has_backward(each)]
        self.last_segment = min(backwards, default=max(segments))
        """Backwards come in reverse order; a segment without one is done after its forward."""
        if self.model.losses_of_precision is not None:
            self.model.losses_of_precision.start()
        mains = module.keeper.mains
        delays = mains or plan.schedule.delayed
        self.wgrad_store = DelayedWgrad(mains, self.new_main) if delays else None
        self.attach()

    def attach(self) -> None:
        """Have the model's layers recompute and delay weight gradients through this step."""
        self.model.recompute(self.replays, self.span())
        set_wgrad_store(self.model, self.wgrad_store)

    def span(self) -> int:
        """Blocks per recompute span of hyper-connections."""
        raise NotImplementedError

    def prepare(self, micro_batch: int) -> StackContext:
        """The context of a micro-batch."""
        raise NotImplementedError

    def fraction(self, micro_batch: int) -> StepFraction:
        """A micro-batch's fraction of the step, for auxiliary losses."""
        raise NotImplementedError

    def scale(self, micro_batch: int) -> LossScale:
        """What the losses of a micro-batch are divided by."""
        return LossScale.of(self.counts.tokens, (), 0.0, self.fraction(micro_batch))

    # ------------------------------------------------------------------------------------- forward

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        micro_batch, _ = turn
        context = self.context(micro_batch)
        self.pieces.setdefault(turn, [])
        # Overlapped schedules interleave two micro-batches, but each layer sees them in order: these are the
        # counts of all earlier ones.
        context.earlier_E = self.loads.raw_counts_E
        if phase.kind == "experts" and micro_batch + 1 < self.micro_batches:
            self.context(micro_batch + 1)  # prefetch: starts the copy to the device

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Tensor | None]:
            node = nullcontext() if self.replays is None else self.replays.node((*turn, phase.name))
            with node, self.saving(turn, phase):
                written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is None:
                return written, None
            cost = losses.scaled(_scale_of(losses, self.scale(micro_batch).of_depth(phase.depth)))
            self.pieces[turn].append(nodes.detach_losses(losses))
            self.loads = self.loads.plus(losses.balances)
            return written, cost if cost.requires_grad else None

        return run

    def context(self, micro_batch: int) -> StackContext:
        if micro_batch not in self.contexts:
            context = self.prepare(micro_batch)
            context.deviations = None if self.model.shape.hyper is None else {}
            self.contexts[micro_batch] = context
        return self.contexts[micro_batch]

    def after_forward(self, turn: Turn) -> None:
        losses = nodes.merge_losses(self.model, self.pieces.pop(turn))
        for name, value in losses.scaled_metrics(_scale_of(losses, self.scale(turn[0]))).items():
            # All tp ranks compute the same head losses: only one of them may contribute to the sum over ranks.
            part = value if name.startswith("aux_") or self.model.groups.tp.rank == 0 else 0 * value
            self.add_metric(name, part)

    def add_metric(self, name: str, value: Tensor) -> None:
        self.metrics[name] = self.metrics[name] + value if name in self.metrics else value

    # ------------------------------------------------------------------------------------- offload

    def saving(self, turn: Turn, phase: Phase) -> AbstractContextManager[None]:
        """A context in which what a phase saves is offloaded, if the schedule offloads its block."""
        block = block_of(phase)
        if self.offloads is None or block is None or (*turn, block) not in self.away:
            return nullcontext()
        return self.offloads.saving((*turn, block), nodes.weights_of_block(self.model, phase), phase.stream)

    def copy_block(self, op: Op) -> None:
        assert self.offloads is not None
        assert op.micro_batch is not None
        assert op.segment is not None
        assert op.phase is not None
        key = (op.micro_batch, op.segment, op.phase)
        if op.act is Act.FREE:
            self.offloads.free(key)
            return
        assert op.slot is not None
        if op.act is Act.OFFLOAD:
            self.offloads.offload(key, op.slot, list(self.contexts[op.micro_batch].shared()))
        else:
            self.offloads.reload(key, op.slot)

    def await_block(self, turn: Turn, phase: Phase) -> None:
        block = block_of(phase)
        if self.offloads is not None and block is not None:
            self.offloads.wait((*turn, block))

    # ------------------------------------------------------------------------------------ backward

    def parameter(self, turn: Turn, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def weights_of(self, turn: Turn, phase: Phase) -> Sequence[Tensor]:
        return nodes.weights_after_combine(self.model, phase)

    def delay_wgrad(self, turn: Turn, phase: Phase) -> AbstractContextManager[None]:
        assert self.wgrad_store is not None
        buckets = tuple(_layer_bucket(bucket) for bucket in phase.buckets)
        return self.wgrad_store.node((*turn, phase.name), buckets)

    def run_wgrad(self, turn: Turn, phase: Phase, bucket: str) -> None:
        assert self.wgrad_store is not None
        self.wgrad_store.drain((*turn, phase.name), _layer_bucket(bucket))

    def replay(self, turn: Turn, phase: Phase, hold: Hold) -> None:
        assert self.replays is not None
        tally = self.model.losses_of_precision
        with nullcontext() if tally is None else tally.paused():
            self.replays.replay((*turn, phase.name), hold)

    def after_turn(self, turn: Turn) -> None:
        """Free the context of a micro-batch after its last op on this rank."""
        micro_batch, segment = turn
        if segment == self.last_segment:
            for deviation in (self.contexts.pop(micro_batch).deviations or {}).values():
                self.metrics[DEVIATION] = torch.maximum(self.metrics.get(DEVIATION, deviation), deviation)

    def end(self) -> None:
        """Clean up after the last op."""
        self.model.recompute(None)
        set_wgrad_store(self.model, None)
        if self.wgrad_store is not None:
            self.wgrad_store.finish()
        if self.replays is not None:
            self.replays.finish()
        if self.offloads is not None:
            self.offloads.finish()
            left = torch.tensor(self.offloads.without_room, dtype=torch.float64, device=self.model.device)
            self.add_metric(WITHOUT_ROOM, left)
        if self.model.losses_of_precision is not None:
            for name, number in self.model.losses_of_precision.metrics().items():
                self.add_metric(name, torch.as_tensor(number, dtype=torch.float64, device=self.model.device))
        self.module.optimizer.accumulate_grads()


def _scale_of(losses: Losses, scale: LossScale) -> LossScale:
    """The scale of losses that may have no MTP depths."""
    return scale if losses.mtp else replace(scale, mtp_tokens=(), mtp_weights=())


def _layer_bucket(bucket: str) -> str:
    """The layer's own name for a wgrad bucket of a phase."""
    return bucket.rpartition(".")[2]


class LanguageStep(ModuleStep):
    """A training step of the language model."""

    model: LanguageModel

    def __init__(
        self,
        state: State,
        run: Run,
        batches: Sequence[MicroBatch],
        counts: Counts,
        streams: Streams | None = None,
    ) -> None:
        self.run, self.batches = run, batches
        super().__init__(state, state.language, counts, len(batches), streams)
        self.scales = self.device_scales()

    def span(self) -> int:
        return span_of(self.run, self.model.layout)

    def prepare(self, micro_batch: int) -> Context:
        totals, tokens = self.counts.totals[micro_batch], placeholder_ids(self.state.plan)
        return self.model.prepare(self.batches[micro_batch], totals=totals, modules=tokens)

    def fraction(self, micro_batch: int) -> StepFraction:
        return self.counts.fractions[micro_batch]

    def scale(self, micro_batch: int) -> LossScale:
        return self.scales[micro_batch]

    def host_scale(self, micro_batch: int) -> LossScale:
        """The scale of a micro-batch in numbers of the host."""
        counts, shape = self.counts, self.model.shape
        weight = shape.mtp_loss / max(len(self.model.layout.mtp), 1)
        return LossScale.of(counts.tokens, counts.mtp_tokens, weight, counts.fractions[micro_batch])

    def device_scales(self) -> list[LossScale]:
        """The scales of all micro-batches on the device, with and without CUDA graphs: CUDA divides by a number
        of the host by multiplying with its reciprocal, which rounds differently.

        Shapes: M micro-batches, K numbers of each."""
        numbers_MK = [self.host_scale(each).numbers() for each in range(len(self.batches))]
        wide = torch.promote_types(self.model.dtype, torch.float32)
        made_MK = to_device(torch.tensor(numbers_MK, dtype=torch.float64).to(wide), self.model.device)
        return [LossScale.of_numbers(each_K) for each_K in made_MK.unbind()]

    def sum_copies(self, op: Op) -> None:
        """All-reduce gradients that the first and last stage share; `train_step` sums copies within a stage."""
        self.module.optimizer.accumulate_grads()
        ends = [each for each in self.module.copies if each.group is self.model.groups.ends]
        gradients.sum_copies_(self.module.optimizer.gradients(), ends)


class EncoderStep(ModuleStep):
    """A training step of an encoder."""

    model: EncoderModel

    def __init__(self, state: JobState, module: ModuleState, items: Sequence[Items], counts: Counts) -> None:
        assert isinstance(module.model, EncoderModel)
        self.items, self.tables = items, counts.tables[module.name]
        self.tokens = [encoder_totals(module.model, table).tokens for table in self.tables]
        super().__init__(state, module, counts, len(items))

    def span(self) -> int:
        return max(self.state.plan.run.train.recompute_span, 1)

    def prepare(self, micro_batch: int) -> EncoderContext:
        return self.model.prepare(
            self.items[micro_batch], totals=encoder_totals(self.model, self.tables[micro_batch])
        )

    def message(self, micro_batch: int) -> Tensor:
        """A receive buffer for this rank's slice of a pack."""
        return pack_message(self.model, self.context(micro_batch))

    def fraction(self, micro_batch: int) -> StepFraction:
        tokens = self.tokens[micro_batch] / max(1, sum(self.tokens))
        return StepFraction(tokens=tokens, rows=tokens)

    def add_metric(self, name: str, value: Tensor) -> None:
        if name.startswith("aux_"):  # an encoder predicts nothing, so it has no other loss
            super().add_metric(f"{self.module.name}.{name}", value)


def encoder_totals(model: EncoderModel, table: ItemTable) -> MicroBatchTotals:
    """The size of a micro-batch over all lanes, each of which has one row."""
    tokens = sum(model.shape.tokens(patches) for patches in table.patches)
    return MicroBatchTotals(tokens=tokens, rows=model.groups.dp.size)


def pack_message(model: EncoderModel, context: StackContext) -> Tensor:
    """An empty residual stream of a lane's pack, in the slice of this rank."""
    patches = context.batch.documents_BT.shape[1] // model.groups.tp_cp.size
    return torch.empty(1, patches, *model.shape.stream, dtype=model.dtype, device=model.device)


def placeholder_ids(plan: Plan) -> dict[str, int]:
    return {name: each.module.token for name, each in plan.encoders.items()}


class EvaluationWork(StepWork):
    """Forwards of the language model that add up two numbers over the micro-batches of an evaluation."""

    def __init__(self, state: State, batches: Sequence[MicroBatch]) -> None:
        self.model, self.streams, self.batches = state.model, state.streams, batches
        self.tokens = placeholder_ids(state.plan)
        self.contexts: dict[int, Context] = {}
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        """To be summed over all ranks."""

    def context(self, micro_batch: int) -> Context:
        if micro_batch not in self.contexts:
            self.contexts[micro_batch] = self.model.prepare(self.batches[micro_batch], modules=self.tokens)
        return self.contexts[micro_batch]

    def after_turn(self, turn: Turn) -> None:
        micro_batch, segment = turn
        if segment == self.model.segments[-1]:
            del self.contexts[micro_batch]


class LanguageEvaluation(EvaluationWork):
    """The loss of an evaluation: `totals` are its sum and the token count, zero on all but one tp rank."""

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        context = self.context(turn[0])

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is not None and self.model.groups.tp.rank == 0:  # all tp ranks have the same losses
                self.totals += torch.stack([losses.loss_sum.double(), losses.token_count.double()])
            return written, None

        return run


class EncoderEvaluation(StepWork):
    """The forwards of an encoder in an evaluation."""

    def __init__(
        self, state: JobState, module: ModuleState, items: Sequence[Items], tables: Sequence[ItemTable]
    ) -> None:
        assert isinstance(module.model, EncoderModel)
        self.module, self.model, self.streams = module, module.model, state.streams
        self.items, self.tables = items, tables
        self.contexts: dict[int, EncoderContext] = {}

    def context(self, micro_batch: int) -> EncoderContext:
        if micro_batch not in self.contexts:
            totals = encoder_totals(self.model, self.tables[micro_batch])
            self.contexts[micro_batch] = self.model.prepare(self.items[micro_batch], totals=totals)
        return self.contexts[micro_batch]

    def message(self, micro_batch: int) -> Tensor:
        """A receive buffer for this rank's slice of a pack."""
        return pack_message(self.model, self.context(micro_batch))

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        context = self.context(turn[0])

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            return nodes.run(self.model, phase, context, tensors)[0], None

        return run

    def after_turn(self, turn: Turn) -> None:
        micro_batch, segment = turn
        if segment == self.module.first_segment + self.model.segments[-1]:
            del self.contexts[micro_batch]


class ModulesWork(StepWork):
    """The work of all modules of a rank."""

    def __init__(self, state: JobState, works: Mapping[str, StepWork]) -> None:
        self.works, self.streams = works, state.streams
        self._modules = [segment.module for segment in state.plan.schedule.graph.segments]

    def of(self, turn: Turn) -> StepWork:
        """The work of the module that a turn is of."""
        return self.works[self._modules[turn[1]]]

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        return self.of(turn).function(turn, phase)

    def after_forward(self, turn: Turn) -> None:
        self.of(turn).after_forward(turn)

    def after_turn(self, turn: Turn) -> None:
        self.of(turn).after_turn(turn)

    def parameter(self, turn: Turn, name: str) -> nn.Parameter:
        return self.of(turn).parameter(turn, name)

    def weights_of(self, turn: Turn, phase: Phase) -> Sequence[Tensor]:
        return self.of(turn).weights_of(turn, phase)

    def delay_wgrad(self, turn: Turn, phase: Phase) -> AbstractContextManager[Any]:
        return self.of(turn).delay_wgrad(turn, phase)

    def run_wgrad(self, turn: Turn, phase: Phase, bucket: str) -> None:
        self.of(turn).run_wgrad(turn, phase, bucket)

    def replay(self, turn: Turn, phase: Phase, hold: Callable[[Tensor], None]) -> None:
        self.of(turn).replay(turn, phase, hold)

    def copy_block(self, op: Op) -> None:
        assert op.micro_batch is not None
        assert op.segment is not None
        self.of((op.micro_batch, op.segment)).copy_block(op)

    def await_block(self, turn: Turn, phase: Phase) -> None:
        self.of(turn).await_block(turn, phase)

    def sum_copies(self, op: Op) -> None:
        self.works[LANGUAGE].sum_copies(op)  # only a language model has weights at both ends of its pipeline
