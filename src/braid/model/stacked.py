"""What language models and encoders have in common: a stack of blocks, a final norm, weights by canonical name.

Schedules, engine, checkpoints and the memory estimate know a model by this interface: `run` computes segments,
`units` are its FSDP units, `canonical` its tensors, `costs` and `flops` what they take.

Shapes: B rows, t tokens of this rank, C hidden channels. `stream` is the residual stream: BtC, or BtSC with
hyper-connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels import Kernels
from braid.lora import Lora
from braid.model import declaration
from braid.model.block import Block, BlockCosts
from braid.model.names import renamed, ungrouped_names
from braid.model.stack import Stack
from braid.model.streams import Exit, build_exit
from braid.nn.canonical import Canonical, Shard, under
from braid.nn.cost import Cost, Workload
from braid.nn.hyper_connection import expand_work
from braid.nn.init import initialize
from braid.nn.lora import adapt
from braid.nn.moe.layer import Moe
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.precision import LossTally
from braid.nn.recompute import Recomputing, Replays, set_replays
from braid.nn.work import Work
from braid.pattern import Kind, Layer, Layout
from braid.precision import Precision
from braid.schedule.phases import Unit
from braid.schedule.recompute import span_ends, span_starts


class StackedModel(Recomputing):
    """A stack of blocks between an input and an output. Subclasses build the modules, in forward order."""

    stack: Stack

    def __init__(
        self,
        shape: architecture.Trunk,
        layout: Layout,
        kernels: Kernels,
        *,
        groups: Groups = Groups(),
        segments: Sequence[int] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layout = layout
        self.kernels = kernels
        self.groups = groups
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.segments = tuple(range(len(layout.segments)) if segments is None else segments)
        self.exit: Exit | None = None
        self.losses_of_precision: LossTally | None = None
        """What quantisation loses in a step, if blocks of this rank are in low precision."""
        self.final_norm: RmsNorm | LayerNorm | None = None
        self.device = torch.get_default_device() if device is None else device
        """Where micro-batches are moved; code that moves the weights updates it."""

    def _build_final_norm(self, on: dict[str, Any]) -> None:
        """The exit of hyper-connections and the final norm, if any; `on` has device and dtype."""
        shape, kernels, groups = self.shape, self.kernels, self.groups
        self.exit = build_exit(shape, kernels, {"groups": groups, **on})
        if shape.final_norm:
            normalize = kernels.rms_norm.function
            self.final_norm = norm(shape.norm, shape.hidden, shape.norm_eps, normalize, copies=groups.tp, **on)

    # ------------------------------------------------------------------------------------ forward

    def apply_final_norm(self, stream: Tensor) -> Tensor:
        """Merge the streams, if there are several, and apply the final norm, if there is one."""
        x_BtC = stream if self.exit is None else self.exit(stream)
        if self.final_norm is None:
            return x_BtC
        hidden_BtC: Tensor = self.recomputed("norm", self.final_norm, x_BtC)
        return hidden_BtC

    def zero_loss(self) -> tuple[Tensor, Tensor]:
        """Loss sum and token count of segments without a head."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.zeros((), dtype=wide, device=self.device), torch.zeros((), device=self.device).long()

    def recompute(self, replays: Replays | None, span: int = 1) -> None:
        """Turn recompute on, or off with None. If hyper-connections are recomputed, streams are saved once
        every `span` blocks."""
        if replays is None and self.replays is None:
            return
        set_replays(self, replays)
        every_block = replays is None or "block" in replays.names
        ends = span_ends(self.layout, 1 if every_block else span)
        for depth, blocks in self.block_stacks():
            for index, block in blocks.items():
                cast(Block, block).saves_stream = (depth, int(index)) in ends

    def adapt(self, lora: Lora) -> None:
        """Give the layers that LoRA names their adapters."""
        if lora.rank:
            adapt(self, self.canonical(), lora, self.groups.tp)

    def set_precision(self, precision: Precision) -> None:
        """Quantise the products of blocks of the stack, from the next forward on."""
        choice = self.kernels.low_precision
        kernels = None if choice is None else choice.function
        for index, block in self.stack.blocks.items():
            if precision.quantises(int(index), len(self.layout.blocks)):
                self.losses_of_precision = self.losses_of_precision or LossTally()
                cast(Block, block).set_precision(precision, self.losses_of_precision, kernels)

    # --------------------------------------------------------------------- introspection and cost

    def block_stacks(self) -> Iterator[tuple[int | None, nn.ModuleDict]]:
        """Blocks by index: those of the stack."""
        yield None, self.stack.blocks

    def units(self) -> tuple[Unit, ...]:
        """The FSDP units of this rank, inner ones first."""
        dtype = "bf16" if self.dtype.itemsize < torch.float32.itemsize else "fp32"
        return declaration.units(self.layout, declaration.form_of(self.shape, dtype), self.segments)

    def canonical(self) -> dict[str, Canonical]:
        """Every checkpoint tensor of this rank by canonical name, and where it is stored."""
        raise NotImplementedError

    def stack_canonical(self) -> dict[str, Canonical]:
        """Those of the blocks, the exit and the final norm."""
        tensors = under("", "stack", self.stack.canonical())
        if self.exit is not None:
            tensors |= under("exit", "exit", self.exit.canonical())
        if self.final_norm is not None:
            tensors |= under("final_norm", "final_norm", self.final_norm.canonical())
        return tensors

    def moe_layers(self) -> Iterator[tuple[Layer, Moe]]:
        """All MoE layers."""
        for _, blocks in self.block_stacks():
            for block in blocks.values():
                found = cast(Block, block).moe()
                if found is not None:
                    yield found

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `canonical` refers to: parameters, and selection biases, which are buffers."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def initialize(
        self,
        seed: int,
        into: Mapping[str, Tensor] | None = None,
        shards: Mapping[str, Shard] | None = None,
        *,
        prefix: str = "",
    ) -> None:
        """Initialize all weights from a seed; or the tensors of `into`, by parameter name: main copies in a
        wider dtype, or `shards` of them. Weights are drawn by their names after `prefix`, `modules.vision.`
        for a module of that name."""
        layers = ungrouped_names(self.layout)
        initialize(
            self.tensors() if into is None else into,
            self.canonical(),
            seed=seed,
            std=self.shape.init_std,
            layers=len(self.layout.layers),
            shards=shards,
            drawn_as=lambda name: prefix + renamed(name, layers=layers),
        )

    def decaying(self) -> frozenset[str]:
        """Names of the parameters with weight decay: the matrices."""
        return frozenset(tensor.parameter for tensor in self.canonical().values() if tensor.decays)

    def block_costs(self, known: BlockCosts) -> dict[str, Cost]:
        """The cost of each block of the stack."""
        starts, parts = span_starts(self.layout, known.workload.span), dict[str, Cost]()
        for segment in self.segments:
            held = self.layout.segments[segment].blocks
            for block in held:
                built, saved = cast(Block, self.stack.blocks[str(block.index)]), (None, block.index) in starts
                parts[f"blocks.{block.index}"] = known.of(built, len(held), input_saved=saved)
        return parts

    def block_works(self, workload: Workload, load: float) -> Iterator[tuple[str, dict[str, Work]]]:
        """The work of each block by kind of phase, MTP depths included; equal blocks are counted once."""
        known: dict[object, dict[str, Work]] = {}
        for depth, blocks in self.block_stacks():
            at = "" if depth is None else f"mtp.{depth}."
            for index, module in blocks.items():
                block = cast(Block, module)
                if block.form not in known:
                    known[block.form] = block.work(workload, load)
                yield f"{at}blocks.{index}", known[block.form]

    def expand_work(self, workload: Workload) -> Work:
        """The streams of hyper-connections, as copies of the embedding."""
        if self.shape.hyper is None:
            return Work()
        tokens = workload.local_tokens(self.groups.tp_cp)
        return expand_work(workload, tokens, self.shape.hidden, self.shape.hyper.streams)

    def final_norm_work(self, workload: Workload) -> Work:
        """The exit of hyper-connections and the final norm, if there are any."""
        tokens = workload.local_tokens(self.groups.tp_cp)
        work = Work() if self.exit is None else self.exit.work(workload)
        return work if self.final_norm is None else work + self.final_norm.work(workload, tokens, "norm")

    def positions_cost(self, workload: Workload) -> Cost:
        """The rotary tables, which layers share."""
        channels, kinds = 0, self.layout.kinds()
        plain, latent = self.shape.attention, self.shape.latent_attention
        if Kind.ATTENTION in kinds and plain is not None and plain.positions == "rope":
            channels = plain.rope_dim
        elif Kind.LATENT_ATTENTION in kinds and latent is not None:
            channels = latent.rope_dim
        return Cost(kept=2 * workload.local_tokens() * channels * workload.wide)
