"""The language model: embedding, stack of blocks, final norm, vocab-parallel head and loss, MTP depths.

A rank builds only the pipeline segments that it holds. Between layers it has t of the T tokens of its rows
(sequence and context parallelism, see `context`); the head all-gathers the tokens of all tp ranks.

Shapes: B rows, T tokens, t tokens of this rank, s tokens of all tp ranks, C hidden channels, S streams, V
vocabulary. `stream` is the residual stream: BtC, or BtSC with hyper-connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import ALONE, Groups, all_gather, own_slice
from braid.kernels import Kernels
from braid.kernels.host import to_device
from braid.model.block import Block, BlockCosts
from braid.model.context import Cache, Context, MicroBatch, MicroBatchTotals
from braid.model.mtp import Mtp, targets
from braid.model.multimodal import NO_ROWS, Rows, merge, placeholders
from braid.model.stack import Stack
from braid.model.stacked import StackedModel
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload, all_gather_calls, in_phase
from braid.nn.embedding import Embedding, Head, check_ids
from braid.nn.hyper_connection import expand
from braid.nn.loss import linear_cross_entropy_cost, linear_cross_entropy_work, saves_hidden
from braid.nn.moe.balance import Balance
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.vocabulary import Vocabulary
from braid.nn.work import Work, gather_copies
from braid.pattern import Layer, Layout
from braid.schedule.phases import Phase
from braid.schedule.recompute import span_starts


@dataclass(frozen=True, kw_only=True)
class StepFraction:
    """The fraction of its step that a micro-batch is: the weight of its mean losses."""

    tokens: float = 1.0
    """Fraction of the step's tokens, without padding."""
    rows: float = 1.0
    """Fraction of the step's rows, without rows of padding only."""


FULL_STEP = StepFraction()
"""A step of one micro-batch."""

Number = float | Tensor
"""A number of the host, or a 0-D tensor on the device: a CUDA graph reads it anew in every replay."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """What the losses of a micro-batch are divided by and multiplied with, as part of a step."""

    tokens: Number
    """Unmasked tokens of the step, at least 1."""
    mtp_tokens: tuple[Number, ...] = ()
    """The same of each MTP depth."""
    mtp_weights: tuple[Number, ...] = ()
    """Weight of the loss sum of each MTP depth."""
    fraction_tokens: Number = 1.0
    """The micro-batch's fraction of the step's tokens."""
    fraction_rows: Number = 1.0
    """The micro-batch's fraction of the step's rows."""
    any: Number = 1.0
    """1, or 0 if all tokens of the step are masked."""

    @staticmethod
    def of(
        tokens: int, mtp_tokens: Sequence[int], mtp_weight: float, fraction: StepFraction = FULL_STEP
    ) -> LossScale:
        """From the counts of a step; `mtp_weight` is that of one depth."""
        return LossScale(
            tokens=max(tokens, 1),
            mtp_tokens=tuple(max(each, 1) for each in mtp_tokens),
            mtp_weights=tuple(mtp_weight / max(each, 1) for each in mtp_tokens),
            fraction_tokens=fraction.tokens,
            fraction_rows=fraction.rows,
            any=float(tokens > 0),
        )

    def numbers(self) -> list[float]:
        """All numbers in a fixed order, which `of_numbers` reads."""
        head = (self.tokens, self.fraction_tokens, self.fraction_rows, self.any)
        return [float(each) for each in (*head, *self.mtp_tokens, *self.mtp_weights)]

    @staticmethod
    def of_numbers(numbers_K: Tensor) -> LossScale:
        """The same numbers as 0-D tensors, from one tensor that has them all."""
        tokens, fraction_tokens, fraction_rows, some, *mtp = numbers_K.unbind()
        depths = len(mtp) // 2
        return LossScale(
            tokens=tokens,
            mtp_tokens=tuple(mtp[:depths]),
            mtp_weights=tuple(mtp[depths:]),
            fraction_tokens=fraction_tokens,
            fraction_rows=fraction_rows,
            any=some,
        )

    def of_depth(self, depth: int | None) -> LossScale:
        """The scale of a phase: one of an MTP depth knows only that depth."""
        if depth is None:
            return self
        kept = slice(depth, depth + 1)
        return replace(self, mtp_tokens=self.mtp_tokens[kept], mtp_weights=self.mtp_weights[kept])

    def fraction(self, loss: str) -> Number:
        """The weight of an auxiliary loss, which is a mean over tokens or over rows."""
        return self.fraction_rows if loss == "sequence_balance" else self.fraction_tokens


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of this rank's part of a micro-batch, as unnormalized sums: only the step knows the
    denominator."""

    loss_sum: Tensor
    """Cross-entropy summed over unmasked tokens."""
    token_count: Tensor
    """Number of unmasked tokens."""
    aux: dict[str, Tensor]
    """Auxiliary losses by name, weighted. Each is this rank's part of a mean over the micro-batch: the parts of
    all ranks add up to it."""
    balances: Mapping[Layer, Balance]
    """Auxiliary losses and expert counts of each MoE layer."""
    mtp: tuple[tuple[Tensor, Tensor], ...] = ()
    """Loss sum and token count of each MTP depth."""
    mtp_weight: float = 0.0
    """Weight of the mean over MTP depths."""

    def share(
        self, step_tokens: int, mtp_step_tokens: Sequence[int] = (), fraction: StepFraction = FULL_STEP
    ) -> Tensor:
        """This micro-batch's contribution to the loss of a step with `step_tokens` unmasked tokens, and
        `mtp_step_tokens` in each MTP depth. The contributions of all micro-batches add up to the step's loss,
        which is zero if all its tokens are masked."""
        return self.scaled(self._scale(step_tokens, mtp_step_tokens, fraction))

    def metrics(
        self, step_tokens: int, mtp_step_tokens: Sequence[int] = (), fraction: StepFraction = FULL_STEP
    ) -> dict[str, Tensor]:
        """This micro-batch's contribution to the step's metrics, detached; contributions add up likewise."""
        return self.scaled_metrics(self._scale(step_tokens, mtp_step_tokens, fraction))

    def _scale(self, tokens: int, mtp_tokens: Sequence[int], fraction: StepFraction) -> LossScale:
        return LossScale.of(tokens, mtp_tokens, self.mtp_weight / max(len(self.mtp), 1), fraction)

    def scaled(self, scale: LossScale) -> Tensor:
        """`share`, of a step whose counts may be on the device."""
        loss = self.loss_sum / scale.tokens
        for name, value in self.aux.items():
            loss = loss + value * (scale.fraction(name) * scale.any)
        for (loss_sum, _), weight in zip(self.mtp, scale.mtp_weights, strict=True):
            loss = loss + loss_sum * weight
        return loss

    def scaled_metrics(self, scale: LossScale) -> dict[str, Tensor]:
        """`metrics`, of a step whose counts may be on the device."""
        metrics = {"loss": self.loss_sum.detach() / scale.tokens}
        for name, value in self.aux.items():
            metrics[f"aux_{name}"] = value.detach() * scale.fraction(name)
        for depth, ((loss_sum, _), tokens) in enumerate(zip(self.mtp, scale.mtp_tokens, strict=True)):
            metrics[f"mtp_{depth}_loss"] = loss_sum.detach() / tokens
        return metrics


@dataclass(frozen=True, kw_only=True)
class Size:
    """Parameter counts of a model."""

    total: int
    """All parameters, MTP depths included."""
    active: int
    """Parameters of the main model per token: top_k of the routed experts."""
    mtp: int
    """Parameters of the MTP depths."""


class LanguageModel(StackedModel):
    """A causal language model. Weights are uninitialized until `initialize` or a checkpoint fills them."""

    shape: architecture.Model

    def __init__(
        self,
        shape: architecture.Model,
        layout: Layout,
        kernels: Kernels,
        *,
        groups: Groups = Groups(),
        dispatcher: Dispatcher | None = None,
        segments: Sequence[int] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the compute dtype. Weights have it too, unless they are `stored` in another one and FSDP2
        casts them when it unshards. `dispatcher` is required with expert parallelism. `segments` are the
        virtual pipeline stages of this rank, by default all."""
        held_on: dict[str, Any] = {"groups": groups, "segments": segments, "device": device, "dtype": dtype}
        super().__init__(shape, layout, kernels, **held_on)
        first, last = 0 in self.segments, len(layout.segments) - 1 in self.segments
        on: dict[str, Any] = {"device": device, "dtype": self.dtype if stored is None else stored}
        self.embedding: Embedding | None = None
        self.head: Head | None = None
        depths = layout.mtp if last else ()
        if first or (last and (shape.tied or depths)):
            # The last stage needs a copy of the embedding for a tied head or for MTP. If this rank holds both
            # ends (a single stage, or the V shape of DualPipeV) they share one weight.
            copies = groups.ends if (shape.tied or layout.mtp) and not (first and last) else ALONE
            held: dict[str, Any] = {"scale": shape.embedding_scale, "groups": groups, "copies": copies, **on}
            self.embedding = Embedding(shape.vocab, shape.hidden, **held)
        self.stack = Stack(layout, self.segments, shape, kernels, dispatcher, groups=groups, **on)
        if last:
            self._build_final_norm(on)
            self.head = None if shape.tied else Head(shape.vocab, shape.hidden, groups=groups, **on)
        self.mtp = nn.ModuleDict(
            {str(d.depth): Mtp(d, shape, kernels, dispatcher, groups=groups, **on) for d in depths}
        )

    # ------------------------------------------------------------------------------------ forward

    def prepare(
        self,
        batch: MicroBatch,
        caches: Mapping[Layer, Cache] | None = None,
        totals: MicroBatchTotals | None = None,
        modules: Mapping[str, int] = MappingProxyType({}),
    ) -> Context:
        """Validate a micro-batch and create its context. The batch should still be on the host, where checking
        ids does not synchronize with the device. With caches, rows continue where the caches end. `totals` are
        the sizes over all ranks; by default the batch is on this rank only. `modules` are the placeholder ids
        of the modules whose rows are merged."""
        self.check(batch)
        documents_BT = batch.documents_BT.cpu()
        indices = placeholders(batch.tokens_BT, modules, self.groups.tp_cp)
        return Context(
            batch=batch.to(self.device),
            groups=self.groups,
            totals=MicroBatchTotals.of(documents_BT) if totals is None else totals,
            host_documents_BT=documents_BT,
            dtype=self.dtype,
            caches={} if caches is None else caches,
            placeholders={name: to_device(index_R, self.device) for name, index_R in indices.items()},
        )

    def check(self, batch: MicroBatch) -> None:
        """Raise a DataError if a token or label is outside the vocabulary."""
        check_ids(batch.tokens_BT, self.shape.vocab)
        labels_BT = batch.labels_BT
        if not (self.layout.mtp and batch.training):  # MTP depths embed labels, masked ones included
            labels_BT = labels_BT.where(batch.loss_mask_BT, 0)
        check_ids(labels_BT, self.shape.vocab)

    def new_caches(self, rows: int) -> dict[Layer, Cache]:
        """Empty caches for generating `rows` documents."""
        blocks = (cast(Block, block) for block in self.stack.blocks.values())
        return {
            layer: mixer.new_cache(rows, self.device, self.dtype)
            for block in blocks
            for layer, mixer in block.mixers()
        }

    def forward(self, batch: MicroBatch) -> Losses:
        """The losses of a micro-batch; `logits` returns logits."""
        return self.losses(self.prepare(batch))

    def losses(self, context: Context, rows: Rows = NO_ROWS) -> Losses:
        return self.run(self.segments, None, context, rows)[1]

    def run(
        self, segments: Sequence[int], stream: Tensor | None, context: Context, rows: Rows = NO_ROWS
    ) -> tuple[Tensor | None, Losses]:
        """Run consecutive segments. `stream` is the output of the segment before them, None for the model's
        first, which merges the `rows` of modules. Returns the output stream, None after the last segment, and
        the losses of these segments."""
        with self.save_hooks():
            return self._run(segments, stream, context, rows)

    def _run(
        self, segments: Sequence[int], stream: Tensor | None, context: Context, rows: Rows
    ) -> tuple[Tensor | None, Losses]:
        earlier = set(context.balances)
        stream = self._forward_segments(segments, stream, context, rows)
        (loss_sum, count), mtp = self.zero_loss(), tuple[tuple[Tensor, Tensor], ...]()
        last = segments[-1] == len(self.layout.segments) - 1
        if last:
            batch, hidden_BtC = context.batch, self.apply_final_norm(stream)
            loss_sum, count = self.head_loss(hidden_BtC, batch.labels_BT, batch.loss_mask_BT)
            mtp_input = hidden_BtC if self.exit is None else stream
            mtp = tuple(self._mtp_losses(mtp_input, context)) if batch.training else ()
        balances = {layer: balance for layer, balance in context.balances.items() if layer not in earlier}
        return None if last else stream, Losses(
            loss_sum=loss_sum,
            token_count=count,
            aux=sum_losses([balance.losses for balance in balances.values()]),
            balances=balances,
            mtp=mtp,
            mtp_weight=self.shape.mtp_loss,
        )

    def _forward_segments(
        self, segments: Sequence[int], stream: Tensor | None, context: Context, rows: Rows = NO_ROWS
    ) -> Tensor:
        if segments[0] == 0:
            stream = self.embed(context, rows)
        assert stream is not None
        after: Tensor = self.stack(stream, segments, context)
        return after

    def embed(self, context: Context, rows: Rows = NO_ROWS) -> Tensor:
        """Embed the tokens and merge the rows of modules: the initial residual stream."""
        assert self.embedding is not None
        x_BtC: Tensor = merge(self.embedding(context.batch.tokens_BT), context.placeholders, rows)
        return x_BtC if self.shape.hyper is None else expand(x_BtC, self.shape.hyper.streams)

    def _mtp_losses(self, before: Tensor, context: Context) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, module in enumerate(self.mtp.values()):
            assert self.embedding is not None
            shifted = targets(context.batch, depth)
            before, hidden_BtC = module(before, self.embedding(shifted.tokens_BT), context)
            yield self.head_loss(hidden_BtC, shifted.labels_BT, shifted.loss_mask_BT)

    def head_loss(self, hidden_BtC: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and token count of the head's predictions; identical on all tp ranks."""
        labels_Bs, mask_Bs = (own_slice(each, self.groups.cp, dim=1) for each in (labels_BT, mask_BT))
        hidden_BsC = all_gather(hidden_BtC, self.groups.tp, dim=1)
        function, scale = self.kernels.linear_cross_entropy.function, self.shape.logits_scale
        return self._head().loss(function, hidden_BsC, labels_Bs, mask_Bs, scale)

    def hidden(self, context: Context, rows: Rows = NO_ROWS) -> Tensor:
        """The final hidden state of this rank's tokens, for a model that is not pipelined."""
        return self.apply_final_norm(self._forward_segments(self.segments, None, context, rows))

    def head_logits(self, hidden_BtC: Tensor) -> Tensor:
        """The vocab-parallel head: logits of this rank's part of the vocabulary, for the tokens of all tp
        ranks."""
        logits_BsV = self._head().logits(all_gather(hidden_BtC, self.groups.tp, dim=1))
        return logits_BsV if self.shape.logits_scale == 1 else logits_BsV / self.shape.logits_scale

    def _head(self) -> Head | Embedding:
        """The head, or the embedding that it is tied to."""
        if self.head is not None:
            return self.head
        assert self.embedding is not None
        return self.embedding

    def logits(self, context: Context, rows: Rows = NO_ROWS) -> Tensor:
        """The logits of every token, for a model that is not pipelined: `prepare` makes the context."""
        return self.head_logits(self.hidden(context, rows))

    def block_stacks(self) -> Iterator[tuple[int | None, nn.ModuleDict]]:
        """Blocks by index: those of the stack, and those of each MTP depth."""
        yield from super().block_stacks()
        for depth in self.mtp.values():
            yield cast(Mtp, depth).depth, cast(Mtp, depth).blocks

    # --------------------------------------------------------------------- introspection and cost

    def canonical(self) -> dict[str, Canonical]:
        """Every checkpoint tensor of this rank by canonical name, and where it is stored."""
        tensors: dict[str, Canonical] = {}
        if self.embedding is not None:
            tensors |= under("embedding", "embedding", self.embedding.canonical())
        tensors |= self.stack_canonical()
        if self.head is not None:
            tensors |= under("head", "head", self.head.canonical())
        for depth, module in self.mtp.items():
            tensors |= under(f"mtp.{depth}", f"mtp.{depth}", cast(Mtp, module).canonical())
        return tensors

    def size(self) -> Size:
        """Parameter counts, for a model that is not sharded."""
        counts = {name: prod(tensor.shape) for name, tensor in self.canonical().items()}
        mtp = sum(count for name, count in counts.items() if name.startswith("mtp."))
        main = sum(counts.values()) - mtp
        routed = sum(n for name, n in counts.items() if name.startswith("blocks.") and ".moe.experts." in name)
        idle = 0 if self.shape.moe is None else routed * (1 - self.shape.moe.top_k / self.shape.moe.experts)
        return Size(total=main + mtp, active=round(main - idle), mtp=mtp)

    def costs(self, workload: Workload) -> dict[str, Cost]:
        """The cost of each part of this rank by canonical name, in forward order. `head` includes the final
        norm and the loss, an MTP depth its embedding and loss; `positions` are the shared rotary tables."""
        parts = {"positions": self.positions_cost(workload)}
        embedding = Cost() if self.embedding is None else self.embedding.cost(workload)
        if 0 in self.segments:
            parts["embedding"] = embedding
        blocks = BlockCosts(workload)
        parts |= self.block_costs(blocks)
        if self.final_norm is not None:
            head_loss, tokens = self._head_loss_cost(workload), workload.local_tokens(self.groups.tp_cp)
            head = self._head_cost(workload, self.final_norm.cost(workload, tokens) + head_loss)
            parts["head"] = head if self.exit is None else self.exit.cost(workload) + head
            for number, (depth, module) in enumerate(self.mtp.items()):
                own_starts = {
                    index for at, index in span_starts(self.layout, workload.span) if at == int(depth)
                }
                own = cast(Mtp, module).cost(blocks, self.groups, first=number == 0, starts=own_starts)
                entered = replace(embedding, calls=in_phase(embedding.calls, "enter"))
                parts[f"mtp.{depth}"] = entered + own + head_loss
        return parts

    def _head_cost(self, workload: Workload, full: Cost) -> Cost:
        """A recomputed final norm saves its input, but neither its intermediates nor its output, unless the
        head reads an all-gathered copy of that."""
        assert self.final_norm is not None
        if not workload.recomputes("norm"):
            return full
        tokens, stream = workload.local_tokens(self.groups.tp_cp), self.shape.hidden * workload.narrow
        seen = self._saved_hidden(workload)
        kept = full.kept - self.final_norm.cost(workload, tokens).kept + tokens * stream
        return replace(full, kept=kept - seen + workload.norm_output(seen, self.groups.tp.size > 1))

    def _saved_hidden(self, workload: Workload) -> int:
        """Bytes of hidden states that the head saves."""
        tokens, hidden = workload.local_tokens(self.groups.cp), self.shape.hidden
        saved = saves_hidden(self.kernels.linear_cross_entropy.function, tokens, hidden)
        return tokens * hidden * workload.narrow if saved else 0

    def _head_loss_cost(self, workload: Workload) -> Cost:
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.shape.hidden * workload.narrow
        calls = in_phase(all_gather_calls(tp, workload.local_tokens(tp, cp) * hidden, "head tokens"), "head")
        return Cost(kept=self._saved_hidden(workload), calls=calls) + linear_cross_entropy_cost(
            self.kernels.linear_cross_entropy.function,
            workload,
            workload.local_tokens(cp),
            self.shape.hidden,
            Vocabulary(self.shape.vocab, tp),
            self.shape.logits_scale,
        )

    def works(self, workload: Workload, load: float = 1.0) -> dict[str, dict[str, Work]]:
        """The work of each part of this rank by kind of phase, in forward order. Parts are those of `costs`
        without `positions`; blocks of MTP depths have their own, `mtp.0.blocks.1`. The slowest rank of experts
        has `load` times the rows of balanced ones."""
        parts, blocks = dict[str, dict[str, Work]](), dict(self.block_works(workload, load))
        embedding = Work() if self.embedding is None else self.embedding.work(workload)
        if 0 in self.segments:
            parts["embedding"] = {"embed": embedding + self.expand_work(workload)}
        parts |= {name: work for name, work in blocks.items() if not name.startswith("mtp.")}
        if self.final_norm is not None:
            head = self._head_work(workload)
            parts["head"] = {"final_norm": self.final_norm_work(workload), "head": head}
            for depth, module in self.mtp.items():
                mtp = cast(Mtp, module)
                entered = embedding + mtp.enter_work(workload)
                ends = {"enter": entered, "final_norm": mtp.final_norm_work(workload), "head": head}
                parts[f"mtp.{depth}"] = ends
                parts |= {name: work for name, work in blocks.items() if name.startswith(f"mtp.{depth}.")}
        return parts

    def _head_work(self, workload: Workload) -> Work:
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.shape.hidden
        own = workload.local_tokens(tp, cp) * hidden * workload.narrow
        function, vocabulary = self.kernels.linear_cross_entropy.function, Vocabulary(self.shape.vocab, tp)
        loss = linear_cross_entropy_work(function, workload, workload.local_tokens(cp), hidden, vocabulary)
        return gather_copies(workload, tp, own) + loss

    def flops(self, tokens: int) -> int:
        """Forward FLOPs of this rank for one row; a training step takes three times as many."""
        head = self._head_flops(tokens) if len(self.layout.segments) - 1 in self.segments else 0
        depths = sum(cast(Mtp, module).flops(tokens) + head for module in self.mtp.values())
        leave = 0 if self.exit is None else self.exit.flops(tokens)
        return self.stack.flops(tokens) + leave + head + depths

    def _head_flops(self, tokens: int) -> int:
        """Those of this rank's part of the vocabulary, for the tokens of all tp ranks."""
        held = Vocabulary(self.shape.vocab, self.groups.tp).held
        return 2 * (tokens // self.groups.cp.size) * self.shape.hidden * held

    def phase_flops(self, phase: Phase, tokens: int) -> int:
        """The share of `flops` in a phase; phases of a split MoE block are not counted."""
        depth = None if phase.depth is None else cast(Mtp, self.mtp[str(phase.depth)])
        leave = self.exit if depth is None else depth.exit
        match phase.kind:
            case "segment":
                return self.flops(tokens)
            case "block":
                blocks = self.stack.blocks if depth is None else depth.blocks
                return cast(Block, blocks[str(phase.block)]).flops(tokens)
            case "enter":
                assert depth is not None
                return depth.enter_flops(tokens)
            case "final_norm":
                return 0 if leave is None else leave.flops(tokens)
            case "head":
                return self._head_flops(tokens)
            case _:
                return 0


def sum_losses(losses: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the losses of several layers by name."""
    names = {name: None for each in losses for name in each}
    return {name: torch.stack([each[name] for each in losses if name in each]).sum() for name in names}
