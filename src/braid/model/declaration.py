"""What a language model declares about itself before it is built: its units of weights, and the phases of a
step.

A **unit** is what is gathered, released and reduced together where weights are sharded. It is known by the path
of its module. `chains` lists the phases of every segment: what each reads and writes, the units that it
computes with, the parameters that it shares with other phases, and what of it can be recomputed. `units` lists
the units themselves. The schedule, the engine and the estimate know a model by this alone; `LanguageModel`
looks its units up here. Nothing of it needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from braid import architecture
from braid.pattern import Block, Kind, Layer, Layout
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
"""The sub-tree of canonical names that each kind of layer has within its block. No pattern has both kinds of
attention."""

MIXERS = frozenset({Kind.ATTENTION, Kind.LATENT_ATTENTION, Kind.MAMBA2, Kind.DELTA_NET})

EMBEDDING, HEAD, EXIT, FINAL_NORM = "embedding", "head", "exit", "final_norm"
"""Units around the blocks."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What units and phases of a model depend on, besides its layout."""

    tied: bool = False
    """Whether the head has the embedding's weight."""
    shared_experts: bool = False
    """Whether layers of experts have one that every token visits."""
    latent: bool = False
    """Whether what returns from experts goes through a projection."""
    dropout: bool = False
    hyper: bool = False
    """Whether there are several residual streams, with hyper-connections around layers."""
    learned_exit: bool = False
    """Whether streams become one by weights that are learned."""
    narrow: bool = False
    """Whether the model computes in a narrower dtype than float32: then what is float32 in every model is a
    unit of its own."""
    whole: bool = False
    """Whether all of a segment is one phase: where nothing has to happen between its blocks."""
    fine: bool = False
    """Whether blocks with experts go into phases that can run beside each other; else each is one phase."""
    posts: bool = False
    """With `fine`: whether `post` is a phase of its own, as it is with hyper-connections in any case."""
    late_weights: bool = False
    """Whether weight gradients of experts lie in two buckets."""
    training: bool = True
    """Whether there are MTP depths; an evaluation leaves them out."""


def form_of(model: architecture.Model, dtype: str, **choices: bool) -> Form:
    """The form of a model that computes in a dtype; `choices` are the fields that are not the model's own."""
    moe, hyper = model.moe, model.hyper
    return Form(
        tied=model.tied,
        shared_experts=bool(moe and moe.shared_ffn),
        latent=bool(moe and moe.latent),
        dropout=bool(model.dropout),
        hyper=hyper is not None,
        learned_exit=hyper is not None and hyper.exit == "learned",
        narrow=dtype == "bf16",
        **choices,
    )


# ----------------------------------------------------------------------------------------------- units


def units(layout: Layout, form: Form, segments: Sequence[int] | None = None) -> tuple[Unit, ...]:
    """The units of the segments that a rank holds, of all of them where nothing is said; inner ones first."""
    count = len(layout.segments)
    held = range(count) if segments is None else segments
    begins, ends = 0 in held, count - 1 in held
    depths = layout.mtp if ends else ()
    found: list[Unit] = []
    if begins or (ends and (form.tied or depths)):
        found.append(Unit(path=EMBEDDING))
    for segment in held:
        for block in layout.segments[segment].blocks:
            found += block_units(block, f"stack.blocks.{block.index}", form)
    for depth in depths:
        for block in depth.blocks:
            found += block_units(block, f"mtp.{depth.depth}.blocks.{block.index}", form)
        found += _exit_units(f"mtp.{depth.depth}.{EXIT}", form)
        found.append(Unit(path=f"mtp.{depth.depth}"))
    if ends:
        found += [*_exit_units(EXIT, form), Unit(path=FINAL_NORM)]
        found += [] if form.tied else [Unit(path=HEAD)]
    return tuple(found)


def block_units(block: Block, at: str, form: Form) -> Iterator[Unit]:
    """A block is a unit, but for its experts and for what is float32 in every model."""
    for layer in block.layers:
        inner = f"{at}.layers.{LAYER_NAMES[layer.kind]}.inner"
        if form.narrow and layer.kind in (Kind.MAMBA2, Kind.DELTA_NET):
            yield Unit(path=f"{inner}.scalars", wide=True)
        if layer.kind is Kind.MOE:
            if form.narrow:
                yield Unit(path=f"{inner}.router", wide=True)
            yield Unit(path=f"{inner}.experts", mesh="expert")
        if form.hyper:  # by itself in any dtype: a later block may need its streams made again
            yield Unit(path=_connection(at, layer), wide=True)
    yield Unit(path=at)


def _connection(at: str, layer: Layer) -> str:
    return f"{at}.layers.{LAYER_NAMES[layer.kind]}.connection"


def _exit_units(path: str, form: Form) -> Iterator[Unit]:
    if form.learned_exit:
        yield Unit(path=path, wide=True)


# ---------------------------------------------------------------------------------------------- phases


def chains(layout: Layout, form: Form) -> tuple[Chain, ...]:
    """One chain for each segment of the layout."""
    return tuple(_chain(layout, index, form) for index in range(len(layout.segments)))


def _chain(layout: Layout, index: int, form: Form) -> Chain:
    blocks = layout.segments[index].blocks
    begins, ends = index == 0, index == len(layout.segments) - 1
    if form.whole:
        held = tuple(unit.path for unit in units(layout, form, [index]))
        phase = Phase(kind="segment", reads=() if begins else (IN,), writes=() if ends else (OUT,), units=held)
        return Chain(first=(phase,))
    thread = _Thread(form, final=None if ends else _final(blocks, begins, form))
    first = [thread.embed()] if begins else []
    links = [thread.link(block, None) for block in blocks]
    if not ends:
        last = [thread.onward("pass")] if not first and not links else []
        return Chain(first=tuple(first), links=tuple(links), last=tuple(last))
    last = thread.scored(None)
    for depth in layout.mtp if form.training else ():
        # What was last now stands between two blocks.
        if links:
            links[-1] = replace(links[-1], after=(*links[-1].after, *last))
        else:
            first += last
        enter = thread.enter(depth.depth)
        more = [thread.link(block, depth.depth) for block in depth.blocks]
        links += [replace(more[0], before=(enter,)), *more[1:]]
        last = thread.scored(depth.depth)
    return Chain(first=tuple(first), links=tuple(links), last=tuple(last))


def _final(blocks: Sequence[Block], begins: bool, form: Form) -> str:
    """The phase that makes the output of a segment which is not the last."""
    if not blocks:
        return "embed" if begins else "pass"
    if not form.fine:
        kind = "block"
    elif _has_experts(blocks[-1]):
        kind = "post" if form.posts or form.hyper else "combine"
    else:
        kind = "mix"
    return phase_name(kind, blocks[-1].index)


def _has_experts(block: Block) -> bool:
    return block.layers[-1].kind is Kind.MOE


class _Uses:
    """The units of a block, by what it does with them."""

    def __init__(self, block: Block, depth: int | None, form: Form) -> None:
        at = f"stack.blocks.{block.index}" if depth is None else f"mtp.{depth}.blocks.{block.index}"
        found = tuple(block_units(block, at, form))
        self.every = tuple(unit.path for unit in found)
        self.experts = tuple(unit.path for unit in found if unit.mesh == "expert")
        self.dense = tuple(unit.path for unit in found if unit.mesh == "dense")
        self.own = (at,)
        """The unit of what is in no other."""
        self.ways = tuple(_connection(at, layer) for layer in block.layers) if form.hyper else ()
        self.form, self.kinds = form, frozenset(layer.kind for layer in block.layers)

    def mix_regions(self, whole: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What can be recomputed of a block, but for its experts; a whole block with these units."""
        found = [("block", whole), ("norm", self.dense)]
        if Kind.MLP in self.kinds or (Kind.MOE in self.kinds and self.form.shared_experts):
            found.append(("activation", self.dense))
        if not MIXERS.isdisjoint(self.kinds):
            found.append(("core", self.dense))
        if self.form.hyper:
            found.append(("hyper", self.ways))
        return tuple(found)


class _Thread:
    """Makes phases in order, and names the stream of hidden states that goes from one to the next."""

    def __init__(self, form: Form, *, final: str | None) -> None:
        self.form, self.final = form, final
        self.stream = IN
        self.posts = form.posts or form.hyper

    def onward(
        self,
        kind: str,
        *,
        block: int | None = None,
        depth: int | None = None,
        beside: tuple[str, ...] = (),
        waits: bool = False,
        **uses: Any,
    ) -> Phase:
        """A phase from the stream, and from tensors beside it, to the stream; `uses` are fields of it."""
        name = phase_name(kind, block, depth)
        reads, self.stream = (self.stream, *beside), OUT if name == self.final else name
        buckets = (name,) if waits else ()
        writes = (self.stream,)
        return Phase(kind=kind, block=block, depth=depth, reads=reads, writes=writes, buckets=buckets, **uses)

    def embed(self) -> Phase:
        shared, units = (f"{EMBEDDING}.weight",), (EMBEDDING,)
        phase = self.onward("embed", shared=shared, units=units, backward_reads=False)
        return replace(phase, reads=())

    def enter(self, depth: int) -> Phase:
        """The way into an MTP depth."""
        own = (f"mtp.{depth}",)
        return self.onward(
            "enter",
            depth=depth,
            shared=(f"{EMBEDDING}.weight",),
            units=(EMBEDDING, *own),
            regions=(("norm", own),),
            waits=True,
        )

    def scored(self, depth: int | None) -> list[Phase]:
        """A final norm, and a head that ends in a loss. What follows reads what the head reads; with
        hyper-connections, the streams that went into the norm. The norm of a depth is not recomputed: the head
        needs what it gave before the depth's weights are gathered."""
        at = "" if depth is None else f"mtp.{depth}."
        exits = tuple(unit.path for unit in _exit_units(f"{at}{EXIT}", self.form))
        norm_unit = FINAL_NORM if depth is None else f"mtp.{depth}"
        regions = (("norm", (norm_unit,)),) if depth is None else ()
        before = self.stream
        norm = self.onward("final_norm", depth=depth, units=(*exits, norm_unit), regions=regions)
        head_unit = EMBEDDING if self.form.tied else HEAD
        shared = (f"{head_unit}.weight",)
        head = Phase(kind="head", depth=depth, reads=(self.stream,), shared=shared, units=(head_unit,))
        if self.form.hyper:
            self.stream = before
        return [norm, head]

    def link(self, block: Block, depth: int | None) -> Link:
        where: dict[str, Any] = {"block": block.index, "depth": depth}
        uses = _Uses(block, depth, self.form)
        if not self.form.fine:
            again = (("experts", uses.experts),) if _has_experts(block) else ()
            regions = (*uses.mix_regions(uses.every), *again)
            return Link(mix=self.onward("block", **where, units=uses.every, regions=regions))
        if not _has_experts(block):
            regions = uses.mix_regions(uses.dense)
            return Link(mix=self.onward("mix", **where, units=uses.dense, regions=regions, waits=True))
        return self._expert_link(uses, where)

    def _expert_link(self, uses: _Uses, where: dict[str, Any]) -> Link:
        """The phases of a block with experts."""
        residual, rows, probs, arrived, arrived_probs, computed = (
            phase_name(tensor, **where)
            for tensor in ("residual", "rows", "probs", "arrived", "arrived_probs", "computed")
        )
        buckets = ("experts.down", "experts.in") if self.form.late_weights else ("experts",)
        shared = (phase_name("shared", **where),) if self.form.shared_experts else ()
        between = ("post_weights", "res_weights") if self.form.hyper else ()
        ways = tuple(phase_name(way, **where) for way in between)
        read, self.stream = self.stream, residual
        combine, post = self._return(uses, where, computed, (*shared, *ways))
        return Link(
            mix=Phase(
                kind="mix",
                **where,
                reads=(read,),
                writes=(residual, rows, probs, *shared, *ways),
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

    def _return(
        self, uses: _Uses, where: dict[str, Any], computed: str, beside: tuple[str, ...]
    ) -> tuple[Phase, Phase | None]:
        """What brings rows back from experts, and what takes them into the residual stream: one phase or two.
        With a latent, the latter has a projection of the block, whose weight gradients can wait."""
        latent, units = self.form.latent, uses.own if self.form.latent else ()
        regions: tuple[tuple[str, tuple[str, ...]], ...] = (("hyper", ()), ("block", units))
        if not self.form.hyper:
            regions = (("block", units),) if self.form.dropout else ()
        joining: dict[str, Any] = {**where, "waits": latent, "units": units, "regions": regions}
        if not self.posts:
            combine = self.onward("combine", beside=(computed, *beside), **joining)
            return replace(combine, stream=Stream.COMMUNICATION), None
        returned = phase_name("returned", **where)
        combine = Phase(
            kind="combine", **where, stream=Stream.COMMUNICATION, reads=(computed,), writes=(returned,)
        )
        return combine, self.onward("post", beside=(returned, *beside), **joining)
