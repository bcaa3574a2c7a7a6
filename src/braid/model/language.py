"""The language model: embedding, stack, final norm, head, loss.

Between layers a rank holds t of the T tokens of its rows (see `context`); the head sees those of all tp ranks.

Shapes: B rows, T tokens, t tokens of this rank, s tokens of all tp ranks, C hidden channels, S streams, V
vocabulary. What is called `stream` is the residual stream: BtC, or BtSC with hyper-connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import ALONE, Groups, all_gather, own_slice
from braid.kernels import Kernels
from braid.model import declaration
from braid.model.block import Block
from braid.model.context import Cache, Context, MicroBatch, Whole
from braid.model.mtp import Mtp, targets
from braid.model.stack import Stack
from braid.model.streams import Exit, leaving
from braid.nn.canonical import Canonical, Shard, under
from braid.nn.cost import Cost, Portion, gather_cost
from braid.nn.embedding import Embedding, Head, Vocabulary, check_ids
from braid.nn.hyper_connection import expand
from braid.nn.init import initialize
from braid.nn.loss import cross_entropy, cross_entropy_cost
from braid.nn.moe.balance import Balance
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.moe.layer import Moe
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.recompute import Recomputing, Replays, hand_replays
from braid.pattern import Kind, Layer, Layout
from braid.schedule.phases import Phase, Unit
from braid.schedule.recompute import span_ends, span_starts


@dataclass(frozen=True, kw_only=True)
class PartOfStep:
    """How much of its step a micro-batch is: what its means weigh. By itself it is all of it."""

    tokens: float = 1.0
    """Of the tokens that are not padding."""
    rows: float = 1.0
    """Of the rows that are not padding alone."""

    def of(self, loss: str) -> float:
        """The weight of an auxiliary loss, which is a mean over tokens or over rows."""
        return self.rows if loss == "sequence_balance" else self.tokens


WHOLE_STEP = PartOfStep()
"""A micro-batch that is its step."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What a rank's part of a micro-batch costs, before anybody divides."""

    loss_sum: Tensor
    """Cross-entropy, summed over the tokens that count."""
    token_count: Tensor
    """How many count."""
    aux: dict[str, Tensor]
    """Further losses by name: weighted, and means over the whole micro-batch rather than sums. A rank has its
    part of them: they add up over all ranks that share the micro-batch."""
    balances: Mapping[Layer, Balance]
    """What each MoE layer did to its experts."""
    mtp: tuple[tuple[Tensor, Tensor], ...] = ()
    """For each MTP depth its loss sum and the tokens that count."""
    mtp_weight: float = 0.0
    """What the mean over the depths is multiplied with."""

    def share(
        self, step_tokens: int, mtp_step_tokens: Sequence[int] = (), part: PartOfStep = WHOLE_STEP
    ) -> Tensor:
        """This micro-batch's part of the step's loss, where the whole step counts `step_tokens` tokens, and
        `mtp_step_tokens` in each MTP depth. The parts of all micro-batches add up to the loss of the step;
        where no token counts, that is zero."""
        loss = self.loss_sum / max(step_tokens, 1)
        for name, value in self.aux.items():
            loss = loss + value * (part.of(name) if step_tokens else 0.0)
        for (loss_sum, _), tokens in zip(self.mtp, mtp_step_tokens, strict=True):
            loss = loss + loss_sum * (self.mtp_weight / len(self.mtp) / max(tokens, 1))
        return loss

    def metrics(
        self, step_tokens: int, mtp_step_tokens: Sequence[int] = (), part: PartOfStep = WHOLE_STEP
    ) -> dict[str, Tensor]:
        """This micro-batch's part of every figure of the step, without gradients; the parts add up as well."""
        parts = {"loss": self.loss_sum.detach() / max(step_tokens, 1)}
        for name, value in self.aux.items():
            parts[f"aux_{name}"] = value.detach() * part.of(name)
        for depth, ((loss_sum, _), tokens) in enumerate(zip(self.mtp, mtp_step_tokens, strict=True)):
            parts[f"mtp_{depth}_loss"] = loss_sum.detach() / max(tokens, 1)
        return parts


@dataclass(frozen=True, kw_only=True)
class Size:
    """Weights of a model."""

    total: int
    """All, MTP depths included."""
    active: int
    """Those of the main model that one token meets: of the routed experts, only as many as it visits."""
    mtp: int
    """Those of the MTP depths."""


class LanguageModel(Recomputing):
    """A model of the next token. Weights are uninitialised until `initialize` or a checkpoint fills them."""

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
        """Activations are of `dtype`. Weights are too, or are `stored` in another one where whoever shards them
        brings them into `dtype` for every use. `dispatcher` is needed where experts are shared by ranks,
        `segments` are those of the layout that this rank holds: all of them where nothing is said."""
        super().__init__()
        self.shape = shape
        self.layout = layout
        self.kernels = kernels
        self.groups = groups
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.segments = tuple(range(len(layout.segments)) if segments is None else segments)
        begins, ends = 0 in self.segments, len(layout.segments) - 1 in self.segments
        on: dict[str, Any] = {"device": device, "dtype": self.dtype if stored is None else stored}
        self.embedding: Embedding | None = None
        self.exit: Exit | None = None
        self.final_norm: RmsNorm | LayerNorm | None = None
        self.head: Head | None = None
        depths = layout.mtp if ends else ()
        if begins or (ends and (shape.tied or depths)):
            # Both ends of a folded pipeline are here: one weight, and no copy.
            copies = groups.ends if (shape.tied or layout.mtp) and not (begins and ends) else ALONE
            self.embedding = Embedding(shape.vocab, shape.hidden, groups=groups, copies=copies, **on)
        self.stack = Stack(layout, self.segments, shape, kernels, dispatcher, groups=groups, **on)
        if ends:
            self.exit = leaving(shape, kernels, {"groups": groups, **on})
            normalize = kernels.rms_norm.function
            self.final_norm = norm(shape.norm, shape.hidden, shape.norm_eps, normalize, copies=groups.tp, **on)
            self.head = None if shape.tied else Head(shape.vocab, shape.hidden, groups=groups, **on)
        self.mtp = nn.ModuleDict(
            {str(d.depth): Mtp(d, shape, kernels, dispatcher, groups=groups, **on) for d in depths}
        )
        self.device = torch.get_default_device() if device is None else device
        """Where micro-batches go; whoever moves the weights sets it."""

    # ------------------------------------------------------------------------------------ forward

    def prepare(
        self, batch: MicroBatch, caches: Mapping[Layer, Cache] | None = None, whole: Whole | None = None
    ) -> Context:
        """The context of a micro-batch, which should still be on the host: ids are checked there. With caches,
        its rows go on where the caches stand. `whole` is the micro-batch of which these are this rank's rows,
        where there are others."""
        self.check(batch)
        documents_BT = batch.documents_BT.cpu()
        return Context(
            batch=batch.to(self.device),
            groups=self.groups,
            whole=Whole.of(documents_BT) if whole is None else whole,
            host_documents_BT=documents_BT,
            dtype=self.dtype,
            caches={} if caches is None else caches,
        )

    def check(self, batch: MicroBatch) -> None:
        """Refuse a micro-batch with ids that the model does not know."""
        check_ids(batch.tokens_BT, self.shape.vocab)
        labels_BT = batch.labels_BT
        if not (self.layout.mtp and batch.training):  # depths read all of them as tokens
            labels_BT = labels_BT.where(batch.loss_mask_BT, 0)
        check_ids(labels_BT, self.shape.vocab)

    def new_caches(self, rows: int) -> dict[Layer, Cache]:
        """What generation remembers of `rows` documents that have not begun."""
        blocks = (cast(Block, block) for block in self.stack.blocks.values())
        return {
            layer: mixer.new_cache(rows, self.device, self.dtype)
            for block in blocks
            for layer, mixer in block.mixers()
        }

    def forward(self, batch: MicroBatch) -> Losses:
        return self.losses(self.prepare(batch))

    def losses(self, context: Context) -> Losses:
        """Run a prepared micro-batch through the whole model."""
        return self.run(self.segments, None, context)[1]

    def run(
        self, segments: Sequence[int], stream: Tensor | None, context: Context
    ) -> tuple[Tensor | None, Losses]:
        """Run segments that follow one another. The first of the model embeds tokens, all others read what the
        one before them returned; the last of the model returns nothing. Losses are of these segments alone."""
        with self.watched():
            return self._run(segments, stream, context)

    def _run(
        self, segments: Sequence[int], given: Tensor | None, context: Context
    ) -> tuple[Tensor | None, Losses]:
        before = set(context.balances)
        stream = self._through(segments, given, context)
        (loss_sum, count), mtp = self.zero_loss(), tuple[tuple[Tensor, Tensor], ...]()
        ends = segments[-1] == len(self.layout.segments) - 1
        if ends:
            batch, hidden_BtC = context.batch, self.normed(stream)
            loss_sum, count = self.head_loss(hidden_BtC, batch.labels_BT, batch.loss_mask_BT)
            shown = hidden_BtC if self.exit is None else stream
            mtp = tuple(self._mtp_losses(shown, context)) if batch.training else ()
        balances = {layer: balance for layer, balance in context.balances.items() if layer not in before}
        return None if ends else stream, Losses(
            loss_sum=loss_sum,
            token_count=count,
            aux=summed_losses([balance.losses for balance in balances.values()]),
            balances=balances,
            mtp=mtp,
            mtp_weight=self.shape.mtp_loss,
        )

    def _through(self, segments: Sequence[int], stream: Tensor | None, context: Context) -> Tensor:
        """The residual stream after these segments."""
        if segments[0] == 0:
            stream = self.embedded(context)
        assert stream is not None
        after: Tensor = self.stack(stream, segments, context)
        return after

    def embedded(self, context: Context) -> Tensor:
        """The residual stream at its beginning."""
        assert self.embedding is not None
        x_BtC: Tensor = self.embedding(context.batch.tokens_BT)
        return x_BtC if self.shape.hyper is None else expand(x_BtC, self.shape.hyper.streams)

    def normed(self, stream: Tensor) -> Tensor:
        """After the final norm: what the head is shown, and the first MTP depth, unless that reads streams."""
        assert self.final_norm is not None
        x_BtC = stream if self.exit is None else self.exit(stream)
        hidden_BtC: Tensor = self.recomputed("norm", self.final_norm, x_BtC)
        return hidden_BtC

    def zero_loss(self) -> tuple[Tensor, Tensor]:
        """Loss sum and token count where no head is."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.zeros((), dtype=wide, device=self.device), torch.zeros((), device=self.device).long()

    def _mtp_losses(self, before: Tensor, context: Context) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, module in enumerate(self.mtp.values()):
            assert self.embedding is not None
            shown = targets(context.batch, depth)
            before, hidden_BtC = module(before, self.embedding(shown.tokens_BT), context)
            yield self.head_loss(hidden_BtC, shown.labels_BT, shown.loss_mask_BT)

    def head_loss(self, hidden_BtC: Tensor, labels_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Loss sum and token count of what a hidden state tells: the same on all tp ranks."""
        labels_Bs, mask_Bs = (own_slice(each, self.groups.cp, dim=1) for each in (labels_BT, mask_BT))
        logits_BsV, vocabulary = self.head_logits(hidden_BtC), Vocabulary(self.shape.vocab, self.groups.tp)
        return cross_entropy(logits_BsV.flatten(0, 1), labels_Bs.flatten(), mask_Bs.flatten(), vocabulary)

    def hidden(self, context: Context) -> Tensor:
        """The state of this rank's tokens after the final norm, for a model in one piece."""
        return self.read(self.segments, None, context)

    def read(self, segments: Sequence[int], stream: Tensor | None, context: Context) -> Tensor:
        """`run` without losses: what the next segment reads; after the last, the state that the head tells."""
        stream = self._through(segments, stream, context)
        return self.normed(stream) if segments[-1] == len(self.layout.segments) - 1 else stream

    def head_logits(self, hidden_BtC: Tensor) -> Tensor:
        """The head: for the tokens of all tp ranks, scores of the part of the vocabulary that is held here."""
        hidden_BsC = all_gather(hidden_BtC, self.groups.tp, dim=1)
        if self.head is not None:
            scores_BsV: Tensor = self.head(hidden_BsC)
            return scores_BsV
        assert self.embedding is not None
        return self.embedding.logits(hidden_BsC)

    def logits(self, context: Context) -> Tensor:
        """Scores of every next token, for every token."""
        return self.head_logits(self.hidden(context))

    def recompute(self, replays: Replays | None, span: int = 1) -> None:
        """Run regions through these from now on; None takes them back. Streams are kept between spans of so
        many blocks, where it is hyper-connections that are recomputed."""
        hand_replays(self, replays)
        whole = replays is None or "block" in replays.names
        ends = span_ends(self.layout, 1 if whole else span)
        for depth, blocks in ((None, self.stack.blocks), *((d.depth, d.blocks) for d in self._depths())):
            for index, block in blocks.items():
                cast(Block, block).closes = (depth, int(index)) in ends

    def _depths(self) -> Iterator[Mtp]:
        return (cast(Mtp, depth) for depth in self.mtp.values())

    # -------------------------------------------------------------------------------------- facts

    def units(self) -> tuple[Unit, ...]:
        """What is gathered and released together where weights are sharded; inner units come first."""
        dtype = "bf16" if self.dtype.itemsize < torch.float32.itemsize else "fp32"
        return declaration.units(self.layout, declaration.form_of(self.shape, dtype), self.segments)

    def canonical(self) -> dict[str, Canonical]:
        """Every tensor of a checkpoint of this model, by its canonical name, and where it lives."""
        tensors: dict[str, Canonical] = {}
        if self.embedding is not None:
            tensors |= under("embedding", "embedding", self.embedding.canonical())
        tensors |= under("", "stack", self.stack.canonical())
        if self.exit is not None:
            tensors |= under("exit", "exit", self.exit.canonical())
        if self.final_norm is not None:
            tensors |= under("final_norm", "final_norm", self.final_norm.canonical())
        if self.head is not None:
            tensors |= under("head", "head", self.head.canonical())
        for depth, module in self.mtp.items():
            tensors |= under(f"mtp.{depth}", f"mtp.{depth}", cast(Mtp, module).canonical())
        return tensors

    def moes(self) -> Iterator[tuple[Layer, Moe]]:
        """Every layer of experts, MTP depths included."""
        stacks = (self.stack.blocks, *(cast(Mtp, depth).blocks for depth in self.mtp.values()))
        for blocks in stacks:
            for block in blocks.values():
                found = cast(Block, block).moe()
                if found is not None:
                    yield found

    def tensors(self) -> dict[str, Tensor]:
        """Everything that `canonical` lists places in: parameters, and the selection biases, which are none."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def initialize(
        self,
        seed: int,
        into: Mapping[str, Tensor] | None = None,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        """Set every weight to where a run with this seed starts; or, by parameter name, copies that somebody
        keeps in a wider dtype, or shards of them."""
        parameters = self.tensors() if into is None else into
        layers, std = len(self.layout.layers), self.shape.init_std
        initialize(parameters, self.canonical(), seed=seed, std=std, layers=layers, shards=shards)

    def size(self) -> Size:
        """How many weights there are, and how many of them one token meets. For a model on one process."""
        counts = {name: prod(tensor.shape) for name, tensor in self.canonical().items()}
        mtp = sum(count for name, count in counts.items() if name.startswith("mtp."))
        main = sum(counts.values()) - mtp
        routed = sum(n for name, n in counts.items() if name.startswith("blocks.") and ".moe.experts." in name)
        idle = 0 if self.shape.moe is None else routed * (1 - self.shape.moe.top_k / self.shape.moe.experts)
        return Size(total=main + mtp, active=round(main - idle), mtp=mtp)

    def decaying(self) -> frozenset[str]:
        """Names of the parameters that weight decay applies to: the matrices."""
        return frozenset(tensor.parameter for tensor in self.canonical().values() if tensor.decays)

    def costs(self, portion: Portion) -> dict[str, Cost]:
        """What each part held here costs, by its canonical name, in the order of forward. `head` has the final
        norm and the loss, a depth its own embedding and loss; `positions` are the tables that layers share."""
        parts = {"positions": self._positions_cost(portion)}
        embedded = Cost() if self.embedding is None else self.embedding.cost(portion)
        if 0 in self.segments:
            parts["embedding"] = embedded
        begins = span_starts(self.layout, portion.span)
        for segment in self.segments:
            held = self.layout.segments[segment].blocks
            within = replace(portion, span=min(portion.span, max(len(held), 1)))
            for block in held:
                built = cast(Block, self.stack.blocks[str(block.index)])
                parts[f"blocks.{block.index}"] = built.cost(within, given=(None, block.index) in begins)
        if self.final_norm is not None:
            head_loss, tokens = self._told_cost(portion), portion.places(self.groups.tp_cp)
            head = self._head_cost(portion, self.final_norm.cost(portion, tokens) + head_loss)
            parts["head"] = head if self.exit is None else self.exit.cost(portion) + head
            for number, (depth, module) in enumerate(self.mtp.items()):
                starts = {index for at, index in begins if at == int(depth)}
                own = cast(Mtp, module).cost(portion, self.groups, first=number == 0, starts=starts)
                parts[f"mtp.{depth}"] = embedded + own + head_loss
        return parts

    def _head_cost(self, portion: Portion, every: Cost) -> Cost:
        """Where the final norm is made again, what it is given is kept, but neither what it keeps itself nor
        what the head sees of it, unless that was gathered first."""
        assert self.final_norm is not None
        if not portion.again("norm"):
            return every
        tokens, stream = portion.places(self.groups.tp_cp), self.shape.hidden * portion.narrow
        seen = portion.places(self.groups.cp) * stream
        kept = every.kept - self.final_norm.cost(portion, tokens).kept + tokens * stream
        return replace(every, kept=kept - seen + portion.normed(seen, self.groups.tp.size > 1))

    def _told_cost(self, portion: Portion) -> Cost:
        """Head and loss."""
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.shape.hidden * portion.narrow
        calls = gather_cost(tp, portion.places(tp, cp) * hidden, "tokens to the head")
        seen = Cost(kept=portion.places(cp) * hidden, calls=calls)
        return seen + cross_entropy_cost(portion, portion.places(cp), Vocabulary(self.shape.vocab, tp))

    def _positions_cost(self, portion: Portion) -> Cost:
        channels, kinds = 0, self.layout.kinds()
        plain, latent = self.shape.attention, self.shape.latent_attention
        if Kind.ATTENTION in kinds and plain is not None and plain.positions == "rope":
            channels = plain.rope_dim
        elif Kind.LATENT_ATTENTION in kinds and latent is not None:
            channels = latent.rope_dim
        return Cost(kept=2 * portion.places() * channels * portion.wide)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the forward pass of one row. Training takes three times as many."""
        head = 2 * tokens * self.shape.hidden * self.shape.vocab
        depths = sum(cast(Mtp, module).flops(tokens) + head for module in self.mtp.values())
        leave = 0 if self.exit is None else self.exit.flops(tokens)
        return self.stack.flops(tokens) + leave + head + depths

    def phase_flops(self, phase: Phase, tokens: int) -> int:
        """What `flops` counts of a phase that is a whole block, or stands around the blocks."""
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
                return 2 * tokens * self.shape.hidden * self.shape.vocab
            case _:
                return 0


def summed_losses(losses: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Losses of several layers, added up by name."""
    names = {name: None for each in losses for name in each}
    return {name: torch.stack([each[name] for each in losses if name in each]).sum() for name in names}
