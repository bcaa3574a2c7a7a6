"""Divisibility rules: heads, channels, experts, tokens and samples must divide evenly over the parallel axes.

Pure functions of a run and its axis sizes. The caller has already checked that the number of ranks of the mesh
is a multiple of tp · cp · pp.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from braid import validators
from braid.architecture import SHAPE_OF, Trunk
from braid.choices import Dtype
from braid.config import Mesh, Run
from braid.errors import Problem
from braid.pattern import Kind
from braid.topology import standard_problems

Shape = TypeVar("Shape", bound=Trunk)


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Sizes of all parallel axes, including the derived ones (dp, edp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    """Expert data parallel: ranks with the same experts."""
    dense_copies: int
    """Replicas of each shard of dense weights (HSDP)."""
    expert_copies: int
    """Replicas of each shard of expert weights (HSDP)."""

    @property
    def slab(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp


def ranks_of(mesh: Mesh, world: int) -> range:
    """The ranks of a mesh, in a job of `world` ranks."""
    first, count = (0, world) if mesh.ranks is None else mesh.ranks
    return range(first, first + count)


def axis_sizes(mesh: Mesh, world: int) -> AxisSizes:
    """Sizes of all axes, for a mesh that fits its ranks of a job of `world`."""
    dp = len(ranks_of(mesh, world)) // (mesh.tp * mesh.cp * mesh.pp)
    edp = mesh.tp * mesh.cp * dp // (mesh.ep * mesh.etp)
    unsharded = mesh.shard == "none"
    return AxisSizes(
        tp=mesh.tp,
        cp=mesh.cp,
        dp=dp,
        pp=mesh.pp,
        etp=mesh.etp,
        ep=mesh.ep,
        edp=edp,
        dense_copies=dp * mesh.cp if unsharded else mesh.replicate,
        expert_copies=edp if unsharded else mesh.replicate,
    )


def tp_runs(model: Trunk, kinds: frozenset[Kind], tp: int) -> frozenset[int]:
    """Sizes of the tp subgroups that replicate weights because tp exceeds their number: adjacent ranks
    share a KV head, a group of B and C (Mamba-2), or a key head (gated delta net)."""
    counts = {
        Kind.ATTENTION: model.attention and model.attention.kv_heads,
        Kind.MAMBA2: model.mamba2 and model.mamba2.groups,
        Kind.DELTA_NET: model.delta_net and model.delta_net.key_heads,
    }
    return frozenset(tp // count for kind, count in counts.items() if kind in kinds and count and count < tp)


def most_ranks(run: Run) -> int:
    """A world size above which none fits. If the mesh has ranks of its own, nothing is said about others."""
    mesh = run.mesh
    # Every data-parallel rank has a sample of its own in a step.
    return sys.maxsize if mesh.ranks is not None else mesh.tp * mesh.cp * mesh.pp * run.train.batch_samples


def smallest_world(mesh: Mesh) -> int:
    """The smallest world size that fits the mesh."""
    if mesh.ranks is not None:
        return sum(mesh.ranks)
    dense, expert = mesh.tp * mesh.cp, mesh.ep * mesh.etp
    return mesh.pp * math.lcm(dense, expert)


def describe_mesh(mesh: Mesh, axes: AxisSizes) -> str:
    """The axes larger than 1: `tp 2 x dp 4, experts ep 4 x edp 2, sharded optimizer state`."""
    dense = {"tp": axes.tp, "cp": axes.cp, "dp": axes.dp, "pp": axes.pp}
    expert = {"etp": axes.etp, "ep": axes.ep, "edp": axes.edp}
    text = " x ".join(f"{name} {size}" for name, size in dense.items() if size > 1) or "one rank"
    if axes.etp * axes.ep > 1:
        text += ", experts " + " x ".join(f"{name} {size}" for name, size in expert.items() if size > 1)
    if axes.slab > 1:
        text += {
            "none": ", not sharded",
            "optimizer": ", sharded optimizer state",
            "gradients": ", sharded optimizer state and gradients",
            "all": ", sharded optimizer state, gradients and weights",
        }[mesh.shard]
    text += f", {mesh.replicate} replicas" if mesh.replicate > 1 else ""
    if mesh.ranks is None:
        return text
    first, count = mesh.ranks
    return f"{text}, on rank {first}" if count == 1 else f"{text}, on ranks {first} to {first + count - 1}"


def local_shape(model: Shape, axes: AxisSizes) -> Shape:
    """The model with the expert count and ffn size of one rank, from which expert kernels are chosen."""
    if model.moe is None:
        return model
    moe = replace(model.moe, experts=model.moe.experts // axes.ep, ffn=model.moe.ffn // axes.etp)
    return replace(model, moe=moe)


def fits(mesh: Mesh, world: int) -> Generator[Problem, None, AxisSizes | None]:
    """What keeps a mesh from its ranks of a job; returns the sizes of its axes if nothing does."""
    ranks = ranks_of(mesh, world)
    if ranks.stop > world:
        yield Problem(
            field="mesh.ranks",
            value=mesh.ranks,
            rule=f"ends with rank {ranks[-1]}, but the last rank of the job is {world - 1}",
            remedy=f"a first rank and a count that add up to {world} or less, or world to {ranks.stop}",
        )
        return None
    model_parallel = mesh.tp * mesh.cp * mesh.pp
    if len(ranks) % model_parallel:
        field = "world" if mesh.ranks is None else "mesh.ranks[1]"
        rule = "mesh.tp times mesh.cp times mesh.pp"
        yield from validators.multiple_of(field, len(ranks), model_parallel, rule)
        return None
    axes = axis_sizes(mesh, world)
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "dp": axes.dp, "pp": mesh.pp, "etp": mesh.etp, "ep": mesh.ep}
    wrong = list(standard_problems(**sizes, prefix="mesh."))
    yield from wrong
    return None if wrong else axes


def shapes(model: Trunk, kinds: frozenset[Kind]) -> Iterator[Problem]:
    """Kinds of layers in a pattern that have no shape, or that are not implemented."""
    shape_of = dict(SHAPE_OF)
    for kind in sorted(kinds, key=lambda kind: kind.value):
        if kind not in shape_of:
            name = kind.name.lower().replace("_", " ")
            yield Problem(
                field="model.pattern",
                value=model.pattern,
                rule=f"{kind.value} ({name}) can be parsed but is not built by this version",
                remedy="a pattern of " + " ".join(k.value for k in shape_of),
            )
        elif getattr(model, shape_of[kind]) is None:
            yield Problem(
                field=f"model.{shape_of[kind]}",
                value=None,
                rule=f"the pattern {model.pattern!r} contains {kind.value}, which needs a shape",
                remedy=f"{shape_of[kind]}={shape_of[kind].title().replace('_', '')}(...) in the recipe",
            )


def problems(
    run: Run, kinds: frozenset[Kind], axes: AxisSizes, *, adapts_experts: bool = False
) -> Iterator[Problem]:
    """Every divisibility rule that a language model violates."""
    yield from _samples(run, axes)
    yield from layers(run.model, run.mesh, run.train.dtype, kinds, axes, adapts_experts=adapts_experts)


def layers(
    model: Trunk,
    mesh: Mesh,
    dtype: Dtype,
    kinds: frozenset[Kind],
    axes: AxisSizes,
    *,
    adapts_experts: bool = False,
) -> Iterator[Problem]:
    """Every rule that layers violate, by the field names `model` and `mesh`. `adapts_experts`: experts have
    adapters."""
    yield from _experts(model, mesh, dtype, kinds, axes, adapts_experts)
    yield from _copies(mesh, axes)
    yield from _overlap(model, mesh, kinds)
    for kind, rule in (
        (Kind.ATTENTION, _attention),
        (Kind.LATENT_ATTENTION, _latent_attention),
        (Kind.MAMBA2, _mamba2),
        (Kind.DELTA_NET, _delta_net),
        (Kind.MLP, _mlp),
    ):
        if kind in kinds:
            yield from rule(model, axes)


def _samples(run: Run, axes: AxisSizes) -> Iterator[Problem]:
    if axes.dp > 1 and run.train.micro_batches >= 1:
        yield from validators.multiple_of(
            "train.batch_samples",
            run.train.batch_samples,
            axes.dp * run.train.micro_batches,
            "data-parallel ranks times train.micro_batches",
        )
    yield from validators.multiple_of(
        "data.sequence_tokens", run.data.sequence_tokens, axes.tp * axes.cp, "mesh.tp times mesh.cp"
    )


def _experts(
    model: Trunk, mesh: Mesh, dtype: Dtype, kinds: frozenset[Kind], axes: AxisSizes, adapted: bool
) -> Iterator[Problem]:
    moe = model.moe
    if Kind.MOE not in kinds or moe is None:
        for name, size in (("ep", axes.ep), ("etp", axes.etp)):
            if size > 1:
                rule = f"the pattern {model.pattern!r} has no experts to distribute"
                yield Problem(field=f"mesh.{name}", value=size, rule=rule, remedy="1")
        return
    if mesh.dispatcher == "deep_ep":
        for wrong, rule in (
            (dtype != "bf16", f"DeepEP supports only bf16, train.dtype is {dtype}"),
            (moe.pad_to_capacity, "DeepEP does not support model.moe.pad_to_capacity"),
        ):
            if wrong:
                yield Problem(field="mesh.dispatcher", value="deep_ep", rule=rule, remedy="all_to_all")
    # The remedy must also divide the ranks available to the axis: those of edp and its own.
    max_ep, max_etp = axes.ep * axes.edp, axes.etp * axes.edp
    yield from validators.divides("mesh.ep", axes.ep, moe.experts, "model.moe.experts", also=max_ep)
    yield from validators.divides("mesh.etp", axes.etp, moe.ffn, "model.moe.ffn", also=max_etp)
    if moe.shared_ffn:
        yield from validators.divides("mesh.tp", axes.tp, moe.shared_ffn, "model.moe.shared_ffn")
    shards = axes.edp // axes.expert_copies if axes.edp % axes.expert_copies == 0 else 1
    of_each = "ranks that shard the same experts"
    yield from validators.multiple_of("model.moe.ffn", moe.ffn, axes.etp * shards, f"mesh.etp times {of_each}")
    if moe.bias or adapted:
        field = "model.moe.latent" if moe.latent else "model.hidden"
        yield from validators.multiple_of(field, moe.latent or model.hidden, shards, of_each)


def _overlap(model: Trunk, mesh: Mesh, kinds: frozenset[Kind]) -> Iterator[Problem]:
    if mesh.overlap and kinds and Kind.MOE not in kinds:
        rule = f"the pattern {model.pattern!r} has no experts, so there is no all-to-all to overlap"
        yield Problem(field="mesh.overlap", value=True, rule=rule, remedy="False")


def _copies(mesh: Mesh, axes: AxisSizes) -> Iterator[Problem]:
    if mesh.shard == "none":
        if mesh.replicate > 1:
            rule = "mesh.shard none already replicates everything on every rank"
            yield Problem(field="mesh.replicate", value=mesh.replicate, rule=rule, remedy="1")
        return
    yield from validators.divides("mesh.replicate", mesh.replicate, axes.dp * axes.cp, "dp times mesh.cp")
    if axes.ep * axes.etp > 1:
        yield from validators.divides(
            "mesh.replicate", mesh.replicate, axes.edp, "ranks that hold the same experts"
        )


def _shared_heads(field: str, heads: int, tp: int) -> Iterator[Problem]:
    """Heads that several query or value heads share (KV heads, groups, key heads) are split over tp, or
    replicated if there are fewer than tp ranks: one number must divide the other."""
    if heads > 0 and heads % tp and tp % heads:
        below = [n for n in range(1, heads) if tp % n == 0]
        above = -(-heads // tp) * tp
        yield Problem(
            field=field,
            value=heads,
            rule=f"must divide mesh.tp ({tp}) or be a multiple of it",
            remedy=" or ".join(str(n) for n in (*below[-1:], above)),
        )


def _heads(field: str, heads: int, axes: AxisSizes) -> Iterator[Problem]:
    yield from validators.divides("mesh.tp times mesh.cp", axes.tp * axes.cp, heads, field)


def _attention(model: Trunk, axes: AxisSizes) -> Iterator[Problem]:
    if model.attention is not None:
        yield from _heads("model.attention.heads", model.attention.heads, axes)
        yield from _shared_heads("model.attention.kv_heads", model.attention.kv_heads, axes.tp)


def _latent_attention(model: Trunk, axes: AxisSizes) -> Iterator[Problem]:
    if model.latent_attention is not None:
        yield from _heads("model.latent_attention.heads", model.latent_attention.heads, axes)


def _mamba2(model: Trunk, axes: AxisSizes) -> Iterator[Problem]:
    if model.mamba2 is not None:
        yield from _heads("model.mamba2.heads", model.mamba2.heads, axes)
        yield from _shared_heads("model.mamba2.groups", model.mamba2.groups, axes.tp)


def _delta_net(model: Trunk, axes: AxisSizes) -> Iterator[Problem]:
    if model.delta_net is not None:
        yield from _heads("model.delta_net.value_heads", model.delta_net.value_heads, axes)
        yield from _shared_heads("model.delta_net.key_heads", model.delta_net.key_heads, axes.tp)


def _mlp(model: Trunk, axes: AxisSizes) -> Iterator[Problem]:
    if model.mlp is not None:
        yield from validators.divides("mesh.tp", axes.tp, model.mlp.ffn, "model.mlp.ffn")
