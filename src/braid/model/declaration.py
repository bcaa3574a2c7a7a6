"""The structure of a model for FSDP and pipeline schedules, declared without building it: units and phases.

A **unit** is an FSDP unit: parameters that are unsharded, resharded and reduce-scattered together, identified
by the path of their module. `units` lists them. `chains` lists the phases of every segment: the tensors that
each reads and writes, the units it computes with, the parameters it shares with other phases, and the regions
of it that can be recomputed. Schedules, engine and memory estimate know a model only through this declaration;
`LanguageModel` looks its units up here. Nothing in this module needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from braid import architecture
from braid.encoders import Encoder
from braid.pattern import Block, Kind, Layer, Layout, parse
from braid.schedule.phases import IN, OUT, Chain, Link, Phase, Stream, Unit, phase_name

LAYER_NAMES = MappingProxyType(
    {
        Kind.MAMBA2: "mamba2",
        Kind.DELTA_NET: "delta_net",
        Kind.ATTENTION: "attention",
        Kind.LATENT_ATTENTION: "attention",
        Kind.MLP: "mlp",
        Kind.MOE: "moe",
    }
)
"""The name of each kind of layer within its block, in module paths and canonical names. No pattern has both
kinds of attention."""

EMBEDDING, HEAD, EXIT, FINAL_NORM = "embedding", "head", "exit", "final_norm"
PATCHES, PROJECTOR = "patches", "projector"
"""Units outside the blocks. An encoder has the last two in place of embedding and head."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Everything besides the layout that units and phases depend on."""

    encoder: bool = False
    """Whether patches are projected in place of an embedding, and rows in place of a head and its loss."""
    final_norm: bool = True
    """Whether there is a norm behind the last layer."""
    activated: bool = False
    """Whether the projector of an encoder has an activation: whether it is an MLP."""
    modules: tuple[str, ...] = ()
    """The modules whose rows are merged into the embeddings: tensors that the first segment reads."""
    tied: bool = False
    """Whether the head is tied to the embedding."""
    shared_experts: bool = False
    """Whether MoE layers have a shared expert."""
    latent: bool = False
    """Whether MoE layers have latent projections around their routed experts."""
    dropout: bool = False
    hyper: bool = False
    """Whether layers have hyper-connections, which make several residual streams."""
    post_normed: frozenset[int] = frozenset()
    """`Layer.stream` of the MoE layers whose norm is on their output."""
    layer_scale: bool = False
    """Whether learned factors scale the output of each layer."""
    learned_exit: bool = False
    """Whether learned weights merge the streams at the end."""
    narrow: bool = False
    """Whether the compute dtype is narrower than float32. FSDP2 casts a unit as a whole, so parameters that
    stay float32 then need units of their own."""
    whole: bool = False
    """Whether a segment is a single phase."""
    fine: bool = False
    """Whether MoE blocks are split into phases that can overlap; otherwise a block is one phase."""
    posts: bool = False
    """With `fine`: whether `post` is a phase of its own. With hyper-connections it always is."""
    late_weights: bool = False
    """Whether weight gradients of experts are split into two buckets."""
    training: bool = True
    """Whether MTP depths run; evaluation leaves them out."""


def form_of(model: architecture.Trunk, dtype: str, **choices: Any) -> Form:
    """The form of a model with a compute dtype; `choices` are the fields that the model does not determine."""
    moe, hyper = model.moe, model.hyper
    return Form(
        encoder=isinstance(model, Encoder),
        final_norm=model.final_norm,
        activated=isinstance(model, Encoder) and bool(model.projector.ffn),
        tied=isinstance(model, architecture.Model) and model.tied,
        shared_experts=bool(moe and moe.shared_ffn),
        latent=bool(moe and moe.latent),
        dropout=bool(model.dropout),
        hyper=hyper is not None,
        post_normed=_post_normed(model),
        layer_scale=model.layer_scale is not None,
        learned_exit=hyper is not None and hyper.exit == "learned",
        narrow=dtype == "bf16",
        **choices,
    )


def _post_normed(model: architecture.Trunk) -> frozenset[int]:
    layout = parse(model.pattern)
    layers = [*layout.layers, *(layer for depth in layout.mtp for layer in depth.layers)]
    return frozenset(layer.stream for layer in layers if layer.kind is Kind.MOE and model.has_post_norm(layer))


# ----------------------------------------------------------------------------------------------- units


def units(layout: Layout, form: Form, segments: Sequence[int] | None = None) -> tuple[Unit, ...]:
    """The units of a rank's segments, of all segments by default. Inner units come before outer ones, in the
    order in which `fully_shard` must wrap them."""
    count = len(layout.segments)
    held = range(count) if segments is None else segments
    first, last = 0 in held, count - 1 in held
    depths = layout.mtp if last else ()
    result: list[Unit] = []
    if first or (last and (form.tied or depths)):
        result.append(Unit(path=PATCHES if form.encoder else EMBEDDING))
    for segment in held:
        for block in layout.segments[segment].blocks:
            result += block_units(block, f"stack.blocks.{block.index}", form)
    for depth in depths:
        for block in depth.blocks:
            result += block_units(block, f"mtp.{depth.depth}.blocks.{block.index}", form)
        result += _exit_units(f"mtp.{depth.depth}.{EXIT}", form)
        result.append(Unit(path=f"mtp.{depth.depth}"))
    if last:
        result += [*_exit_units(EXIT, form), *([Unit(path=FINAL_NORM)] if form.final_norm else [])]
        result += [] if form.tied else [Unit(path=PROJECTOR if form.encoder else HEAD)]
    return tuple(result)


def block_units(block: Block, at: str, form: Form) -> Iterator[Unit]:
    """One unit per block, except for experts (another mesh) and parameters that stay float32."""
    for layer in block.layers:
        inner = f"{at}.layers.{LAYER_NAMES[layer.kind]}.inner"
        if form.narrow and layer.kind in (Kind.MAMBA2, Kind.DELTA_NET):
            yield Unit(path=f"{inner}.scalars", wide=True)
        if layer.kind is Kind.MOE:
            if form.narrow:
                yield Unit(path=f"{inner}.router", wide=True)
            yield Unit(path=f"{inner}.experts", mesh="expert")
        if form.hyper:  # a unit of its own in any dtype: a later block may recompute its streams
            yield Unit(path=_connection_path(at, layer), wide=True)
    yield Unit(path=at)


def _connection_path(at: str, layer: Layer) -> str:
    return f"{at}.layers.{LAYER_NAMES[layer.kind]}.connection"


def _exit_units(path: str, form: Form) -> Iterator[Unit]:
    if form.learned_exit:
        yield Unit(path=path, wide=True)


# ---------------------------------------------------------------------------------------------- phases


def chains(layout: Layout, form: Form) -> tuple[Chain, ...]:
    """The phases of every segment."""
    return tuple(_chain(layout, index, form) for index in range(len(layout.segments)))


def _chain(layout: Layout, index: int, form: Form) -> Chain:
    blocks = layout.segments[index].blocks
    first, last = index == 0, index == len(layout.segments) - 1
    if form.whole:
        held = tuple(unit.path for unit in units(layout, form, [index]))
        writes = () if last and not form.encoder else (OUT,)
        phase = Phase(kind="segment", reads=form.modules if first else (IN,), writes=writes, units=held)
        return Chain(first=(phase,))
    builder = _ChainBuilder(form, final=None if last else _last_phase(blocks, first, form))
    head = []
    if first:
        head = [builder.embed_patches() if form.encoder else builder.embed()]
    links = [builder.link(block, None) for block in blocks]
    if not last:
        tail = [builder.phase("pass")] if not head and not links else []
        return Chain(first=tuple(head), links=tuple(links), last=tuple(tail))
    tail = builder.project() if form.encoder else builder.head(None)
    for depth in layout.mtp if form.training else ():
        # The head before an MTP depth runs between two blocks.
        if links:
            links[-1] = replace(links[-1], after=(*links[-1].after, *tail))
        else:
            head += tail
        enter = builder.enter(depth.depth)
        depth_links = [builder.link(block, depth.depth) for block in depth.blocks]
        links += [replace(depth_links[0], before=(enter,)), *depth_links[1:]]
        tail = builder.head(depth.depth)
    return Chain(first=tuple(head), links=tuple(links), last=tuple(tail))


def _last_phase(blocks: Sequence[Block], first: bool, form: Form) -> str:
    """The phase that writes the output of a segment other than the last one."""
    if not blocks:
        return "embed" if first else "pass"
    if not form.fine:
        kind = "block"
    elif _has_moe(blocks[-1]):
        kind = "post" if form.posts or form.hyper else "combine"
    else:
        kind = "mix"
    return phase_name(kind, blocks[-1].index)


def _has_moe(block: Block) -> bool:
    return block.layers[-1].kind is Kind.MOE


class _BlockUnits:
    """The units of a block by purpose."""

    def __init__(self, block: Block, depth: int | None, form: Form) -> None:
        at = f"stack.blocks.{block.index}" if depth is None else f"mtp.{depth}.blocks.{block.index}"
        units = tuple(block_units(block, at, form))
        self.every = tuple(unit.path for unit in units)
        self.experts = tuple(unit.path for unit in units if unit.mesh == "expert")
        self.dense = tuple(unit.path for unit in units if unit.mesh == "dense")
        self.own = (at,)
        """The block's own unit: parameters that are in no inner unit."""
        self.connections = tuple(_connection_path(at, layer) for layer in block.layers) if form.hyper else ()
        post_normed = block.layers[-1].stream in form.post_normed
        self.post = self.own if form.latent or form.layer_scale or post_normed else ()
        """What an MoE needs after its experts: the up-projection of latent experts, a norm and factors on its
        output."""
        self.form, self.kinds = form, frozenset(layer.kind for layer in block.layers)

    def mix_regions(self, block_region: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The regions of a block other than its experts, each with the units that its replay needs;
        `block_region` are those of the region `block`."""
        regions = [("block", block_region), ("norm", self.dense)]
        if Kind.MLP in self.kinds or (Kind.MOE in self.kinds and self.form.shared_experts):
            regions.append(("activation", self.dense))
        if any(kind.is_mixer for kind in self.kinds):
            regions.append(("core", self.dense))
        if self.form.hyper:
            regions.append(("hyper", self.connections))
        return tuple(regions)


class _ChainBuilder:
    """Builds phases in order; `stream` is the name of the residual stream that the last one wrote."""

    def __init__(self, form: Form, *, final: str | None) -> None:
        self.form, self.final = form, final
        self.stream = IN
        self.posts = form.posts or form.hyper

    def phase(
        self,
        kind: str,
        *,
        block: int | None = None,
        depth: int | None = None,
        more_reads: tuple[str, ...] = (),
        delays_wgrad: bool = False,
        **fields: Any,
    ) -> Phase:
        """A phase that reads the stream and `more_reads`, and writes the stream."""
        name = phase_name(kind, block, depth)
        reads, self.stream = (self.stream, *more_reads), OUT if name == self.final else name
        buckets = (name,) if delays_wgrad else ()
        writes = (self.stream,)
        return Phase(kind=kind, block=block, depth=depth, reads=reads, writes=writes, buckets=buckets, **fields)

    def embed(self) -> Phase:
        shared, units = (f"{EMBEDDING}.weight",), (EMBEDDING,)
        phase = self.phase("embed", shared=shared, units=units, backward_reads=False)
        return replace(phase, reads=self.form.modules)

    def embed_patches(self) -> Phase:
        """The input of an encoder."""
        return replace(self.phase("embed", units=(PATCHES,)), reads=())

    def project(self) -> list[Phase]:
        """The final norm of an encoder, if it has one, and its projector, which writes the rows."""
        exits = tuple(unit.path for unit in _exit_units(EXIT, self.form))
        norms = (FINAL_NORM,) if self.form.final_norm else ()
        regions = (("norm", norms),) if norms else ()
        before = []
        if norms or self.form.hyper:
            before = [self.phase("final_norm", units=(*exits, *norms), regions=regions)]
        own = (PROJECTOR,)
        regions = (("activation", own),) if self.form.activated else ()
        return [*before, Phase(kind="head", reads=(self.stream,), writes=(OUT,), units=own, regions=regions)]

    def enter(self, depth: int) -> Phase:
        """The input projection of an MTP depth."""
        own = (f"mtp.{depth}",)
        return self.phase(
            "enter",
            depth=depth,
            shared=(f"{EMBEDDING}.weight",),
            units=(EMBEDDING, *own),
            regions=(("norm", own),),
            delays_wgrad=True,
        )

    def head(self, depth: int | None) -> list[Phase]:
        """A final norm, and a head with its loss. The next MTP depth reads the normed hidden state as well;
        with hyper-connections, the streams before the norm. The final norm of an MTP depth is not recomputed:
        the head's backward needs its output before the depth's weights are unsharded."""
        at = "" if depth is None else f"mtp.{depth}."
        exits = tuple(unit.path for unit in _exit_units(f"{at}{EXIT}", self.form))
        norm_unit = FINAL_NORM if depth is None else f"mtp.{depth}"
        regions = (("norm", (norm_unit,)),) if depth is None else ()
        before_norm = self.stream
        norm = self.phase("final_norm", depth=depth, units=(*exits, norm_unit), regions=regions)
        head_unit = EMBEDDING if self.form.tied else HEAD
        shared = (f"{head_unit}.weight",)
        head = Phase(kind="head", depth=depth, reads=(self.stream,), shared=shared, units=(head_unit,))
        if self.form.hyper:
            self.stream = before_norm
        return [norm, head]

    def link(self, block: Block, depth: int | None) -> Link:
        where: dict[str, Any] = {"block": block.index, "depth": depth}
        uses = _BlockUnits(block, depth, self.form)
        if not self.form.fine:
            experts = (("experts", uses.experts),) if _has_moe(block) else ()
            regions = (*uses.mix_regions(uses.every), *experts)
            return Link(mix=self.phase("block", **where, units=uses.every, regions=regions))
        if not _has_moe(block):
            regions = uses.mix_regions(uses.dense)
            return Link(mix=self.phase("mix", **where, units=uses.dense, regions=regions, delays_wgrad=True))
        return self._moe_link(uses, where)

    def _moe_link(self, uses: _BlockUnits, where: dict[str, Any]) -> Link:
        residual, rows, probs, arrived, arrived_probs, computed = (
            phase_name(tensor, **where)
            for tensor in ("residual", "rows", "probs", "arrived", "arrived_probs", "computed")
        )
        buckets = ("experts.down", "experts.in") if self.form.late_weights else ("experts",)
        shared = (phase_name("shared", **where),) if self.form.shared_experts else ()
        names = ("post_weights", "res_weights") if self.form.hyper else ()
        mappings = tuple(phase_name(name, **where) for name in names)
        read, self.stream = self.stream, residual
        combine, post = self._combine(uses, where, computed, (*shared, *mappings))
        return Link(
            mix=Phase(
                kind="mix",
                **where,
                reads=(read,),
                writes=(residual, rows, probs, *shared, *mappings),
                units=uses.dense,
                regions=uses.mix_regions(uses.dense),
                buckets=(phase_name("mix", **where),),
            ),
            dispatch=Phase(
                kind="dispatch",
                **where,
                stream=Stream.COMMUNICATION,
                reads=(rows, probs),
                writes=(arrived, arrived_probs),
                regions=(("block", ()),),
            ),
            experts=Phase(
                kind="experts",
                **where,
                reads=(arrived, arrived_probs),
                writes=(computed,),
                units=uses.experts,
                regions=(("block", uses.experts), ("experts", uses.experts)),
                buckets=tuple(phase_name(bucket, **where) for bucket in buckets),
            ),
            combine=combine,
            post=post,
        )

    def _combine(
        self, uses: _BlockUnits, where: dict[str, Any], computed: str, more_reads: tuple[str, ...]
    ) -> tuple[Phase, Phase | None]:
        """Combine, which returns rows from experts, and post, which adds them to the residual stream: one phase
        or two. With latent experts, post has the up-projection, whose weight gradients can be delayed; it has
        the norm of an MoE with post-norm."""
        latent, units = self.form.latent, uses.post
        regions: tuple[tuple[str, tuple[str, ...]], ...] = (("hyper", ()), ("block", units))
        if not self.form.hyper:
            regions = (("block", units),) if self.form.dropout else ()
        post: dict[str, Any] = {**where, "delays_wgrad": latent, "units": units, "regions": regions}
        if not self.posts:
            combine = self.phase("combine", more_reads=(computed, *more_reads), **post)
            return replace(combine, stream=Stream.COMMUNICATION), None
        returned = phase_name("returned", **where)
        combine = Phase(
            kind="combine", **where, stream=Stream.COMMUNICATION, reads=(computed,), writes=(returned,)
        )
        return combine, self.phase("post", more_reads=(returned, *more_reads), **post)
