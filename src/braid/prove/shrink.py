"""The smallest run that is still the same: kinds of layers and their order, axes and options stay, sizes go.

    for small in shrink(run, world=2048):
        small.run, small.world, small.changes

Of equal layers in a row, a few are left (`prove.shorten`). What a size means is kept: query heads still share
key-value heads, key-value heads are still shared by tensor ranks, experts are still more than a token chooses,
and a window is still shorter than a sequence. An axis of the mesh becomes 2. Where all axes do not fit on the
ranks there are, several runs have some of them each, so that every two axes are in one run together.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import lcm, prod
from typing import Any, TypeVar

from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Moe, Trunk
from braid.config import Data, Mesh, Module, Optim, Run, difference
from braid.encoders import Encoder
from braid.errors import ConfigError
from braid.planning import divisibility
from braid.planning.plan import check
from braid.prove.shorten import shorten

MOST_RANKS = 8
VOCAB = 259
"""Bytes, the end of a document and one more. No number of tensor ranks but 7 divides it: there is padding."""
TOKENS = 32
"""Of a sequence, at least."""
STEPS = 2
"""Optimizer steps: the second shows what the first has left in weights and moments."""
LEARNING_RATE = 1e-2
"""Of both: large enough that the second step is another one than the first."""
STREAMS_EPS = 1e-3
"""Of AdamW with hyper-connections: residual streams begin as copies, so that gradients of their first mixings
are nothing but rounding, and not to be made steps of."""
AXES = ("tp", "cp", "pp", "dp")

TrunkT = TypeVar("TrunkT", bound=Trunk)


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A small run, and what makes it small."""

    run: Run
    world: int
    changes: Mapping[str, tuple[Any, Any]]
    """By field: what it was, and what it is."""


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """The sizes of the axes of a mesh."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int

    @property
    def sequence(self) -> int:
        """Ranks that split a sequence, and the heads of its mixers."""
        return self.tp * self.cp

    @property
    def stage(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp


def shrink(run: Run, world: int, most_ranks: int = MOST_RANKS, *, all_layers: bool = False) -> list[Shrunk]:
    """The small runs that together have what this run has on so many ranks, with all its layers if wanted.
    Raises a `ConfigError` if the run itself is refused, or if no small one is accepted."""
    if problems := check(run, world):
        raise ConfigError(problems)
    before = _ranks(run.mesh, world)
    if world <= most_ranks:
        return [_fitting(run, before, [(run.mesh, before)], all_layers, world)]
    if any(module.mesh != Mesh() for module in run.modules.values()) or run.mesh.ranks is not None:
        raise ConfigError(
            f"modules on ranks of their own are proven where they are, on at most {most_ranks} ranks, "
            f"and --world is {world}: give the smallest --world and meshes that place them the same way"
        )
    return [
        _fitting(run, before, list(_meshes(run.mesh, before, axes, most_ranks)), all_layers)
        for axes in _axes(before, most_ranks)
    ]


def _ranks(mesh: Mesh, world: int) -> _Ranks:
    sizes = divisibility.axis_sizes(mesh, world if mesh.ranks is None else mesh.ranks[1])
    return _Ranks(tp=mesh.tp, cp=mesh.cp, pp=mesh.pp, dp=sizes.dp, ep=mesh.ep, etp=mesh.etp)


# ------------------------------------------------------------------------------------------------ mesh


def _axes(ranks: _Ranks, most_ranks: int) -> list[tuple[str, ...]]:
    """The axes of each small run: all that there are, or as few sets of them as have every pair."""
    there = tuple(axis for axis in AXES if getattr(ranks, axis) > 1)
    room = most_ranks.bit_length() - 1
    if len(there) <= room:
        return [there]
    missing: set[tuple[str, ...]] = set(combinations(there, min(room, 2)))
    chosen = []
    while missing:
        best = max(combinations(there, room), key=lambda some: sum(set(pair) <= set(some) for pair in missing))
        chosen.append(best)
        missing = {pair for pair in missing if not set(pair) <= set(best)}
    return chosen


def _meshes(
    mesh: Mesh, before: _Ranks, axes: tuple[str, ...], most_ranks: int
) -> Iterator[tuple[Mesh, _Ranks]]:
    """Meshes with these axes, those first that keep most of how experts and replicas share ranks."""
    sizes = {axis: 2 if axis in axes else 1 for axis in AXES}
    if before.ep * before.etp < before.stage and prod(sizes.values()) * 2 <= most_ranks and "dp" in axes:
        sizes["dp"] = 4  # experts on some ranks, with copies on others
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    all_experts = before.ep * before.etp == before.stage
    wanted_etp = min(before.etp, 2)
    wanted_ep = stage // wanted_etp if all_experts and before.ep > 1 else min(before.ep, 2)
    wanted = (wanted_ep, wanted_etp, min(mesh.replicate, 2))
    choices = {wanted, (wanted_ep, 1, wanted[2]), (wanted_ep, wanted_etp, 1), (wanted_ep, 1, 1), (1, 1, 1)}
    for ep, etp, replicate in sorted(choices, reverse=True):
        if stage % (ep * etp) == 0 and sizes["dp"] % replicate == 0:
            small = replace(mesh, tp=sizes["tp"], cp=sizes["cp"], pp=sizes["pp"], ep=ep, etp=etp)
            small = replace(small, replicate=replicate)
            if sizes["pp"] == 1 and mesh.schedule == "dual_pipe_v":
                # What is left of DualPipeV without a pipeline.
                small = replace(small, schedule="auto", overlap=True, delay_weights=True)
            yield small, _Ranks(**sizes, ep=ep, etp=etp)


# ------------------------------------------------------------------------------------------- whole runs


def _fitting(
    run: Run,
    before: _Ranks,
    meshes: Iterable[tuple[Mesh, _Ranks]],
    all_layers: bool,
    job: int | None = None,
) -> Shrunk:
    """The first small run that is accepted, on a job of so many ranks, or of as many as its mesh has."""
    refused: list[Any] = []
    for mesh, ranks in meshes:
        for micro_batches in _micro_batches(run.train.micro_batches, ranks.pp):
            world = ranks.world if job is None else job
            small = _small(run, mesh, before, ranks, micro_batches, world)
            problems = check(small, world)
            if not problems:
                if not all_layers and not check(short := shorten(small), world):
                    small = short
                return Shrunk(run=small, world=world, changes=difference(run, small))
            refused = refused or problems
    raise ConfigError(
        "the run is accepted, but not the small one that would prove it: "
        + "; ".join(f"{problem.field} = {problem.value} {problem.rule}" for problem in refused)
    )


def _micro_batches(before: int, pp: int) -> list[int]:
    """Numbers to try, the smallest first: one stays one, more than one stay at least two."""
    if before == 1:
        return [1]
    return sorted({number for factor in (1, 2, 3, 4) if 2 <= (number := factor * pp) <= before} | {before})


def _small(run: Run, mesh: Mesh, before: _Ranks, after: _Ranks, micro_batches: int, world: int) -> Run:
    model = _small_trunk(run.model, before, after)
    modules = {
        name: _small_module(module, VOCAB + place, model.hidden, _ranks(module.mesh, world))
        for place, (name, module) in enumerate(run.modules.items())
    }
    samples = (
        micro_batches * after.dp * (2 if run.train.batch_samples > run.train.micro_batches * before.dp else 1)
    )
    return replace(
        run,
        model=replace(model, vocab=VOCAB + len(modules)),
        modules=modules,
        mesh=replace(mesh, dispatcher="all_to_all" if mesh.dispatcher == "deep_ep" else mesh.dispatcher),
        data=Data(packing=run.data.packing, sequence_tokens=_tokens(after)),
        optim=replace(
            run.optim,
            lr=LEARNING_RATE,
            schedule="cosine",
            warmup_steps=0,
            decay_steps=0,
            lr_by_kind=dict.fromkeys(run.optim.lr_by_kind, LEARNING_RATE),
            muon=replace(run.optim.muon, dtype="auto"),
            eps=max(run.optim.eps, Optim().eps if run.model.hyper is None else STREAMS_EPS),
        ),
        train=replace(
            run.train,
            steps=STEPS,
            batch_samples=samples,
            micro_batches=micro_batches,
            dtype="fp64",
            kernels=("auto",),
            eval_samples=max(2, after.dp),
            eval_every=0,
            exact_match=False,
            save_every=0,
        ),
    )


def _tokens(ranks: _Ranks) -> int:
    """A slice of a sequence has tokens for both halves that context parallelism deals out."""
    return max(TOKENS, 8 * ranks.sequence)


def _small_module(module: Module, token: int, width: int, ranks: _Ranks) -> Module:
    """On the ranks where it is."""
    items = "synthetic" if module.items == "image" else module.items
    numbers = 10 if items == "synthetic" else module.model.input  # what tones are made of has its own size
    encoder = _small_encoder(module.model, numbers, width, ranks)
    return replace(
        module, model=encoder, token=token, items=items, most_items=2, most_patches=8 * encoder.group
    )


def _small_encoder(encoder: Encoder, most_numbers: int, width: int, ranks: _Ranks) -> Encoder:
    small = _small_trunk(encoder, ranks, ranks)
    pixels = None if encoder.pixels is None else replace(encoder.pixels, patch=2)
    table = encoder.positions
    if table is not None:
        table = replace(table, rows=min(table.rows, 6), columns=min(table.columns, 6))
    return replace(
        small,
        pixels=pixels,
        input=min(encoder.input, most_numbers) if pixels is None else pixels.input,
        positions=table,
        prefix=min(encoder.prefix, 2),
        projector=replace(encoder.projector, width=width, ffn=min(encoder.projector.ffn, 8 * ranks.tp)),
    )


# ---------------------------------------------------------------------------------------------- layers


def _small_trunk(trunk: TrunkT, before: _Ranks, after: _Ranks) -> TrunkT:
    """Layers of sizes that the ranks can share."""
    shapes: dict[str, Any] = {}
    if trunk.attention is not None:
        shapes["attention"] = _small_attention(trunk.attention, before, after)
    if trunk.latent_attention is not None:
        shapes["latent_attention"] = _small_latent(trunk.latent_attention, after)
    if trunk.mamba2 is not None:
        shapes["mamba2"] = _small_mamba2(trunk.mamba2, before, after)
    if trunk.delta_net is not None:
        shapes["delta_net"] = _small_delta_net(trunk.delta_net, before, after)
    if trunk.mlp is not None:
        shapes["mlp"] = replace(trunk.mlp, ffn=8 * after.tp)
    if trunk.moe is not None:
        shapes["moe"] = _small_moe(trunk.moe, after)
    if trunk.hyper is not None:
        shapes["hyper"] = replace(trunk.hyper, streams=min(trunk.hyper.streams, 2))
    return replace(trunk, hidden=16, **shapes)


def _shared(few: int, before: int, after: int) -> int:
    """Heads or groups of which there are few: as many as ranks, or shared by ranks as they were."""
    return after if few >= before else max(1, few * after // before)


def _heads(many: int, few: int, before: _Ranks, after: _Ranks) -> tuple[int, int]:
    """Heads, and the fewer ones that they share: several to each if there were, a whole number to each rank."""
    small = _shared(few, before.sequence, after.sequence)
    return lcm(small * (2 if many > few else 1), after.sequence), small


def _small_attention(shape: Attention, before: _Ranks, after: _Ranks) -> Attention:
    heads, kv_heads = _heads(shape.heads, shape.kv_heads, before, after)
    rotated = (size for size in (4, 8, 16, 32, 64) if int(size * shape.rope_fraction) in range(2, 65, 2))
    return replace(
        shape,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=min(next(rotated, shape.head_dim), shape.head_dim),
        window=None if shape.window is None else min(shape.window, 5),
    )


def _small_latent(shape: LatentAttention, after: _Ranks) -> LatentAttention:
    most = {"kv_rank": 5, "nope_dim": 4, "rope_dim": 2, "v_dim": 3}
    return replace(
        shape,
        heads=after.sequence,
        q_rank=None if shape.q_rank is None else min(shape.q_rank, 6),
        **{name: min(getattr(shape, name), size) for name, size in most.items()},
    )


def _small_mamba2(shape: Mamba2, before: _Ranks, after: _Ranks) -> Mamba2:
    heads, groups = _heads(shape.heads, shape.groups, before, after)
    return replace(
        shape, heads=heads, groups=groups, head_dim=min(shape.head_dim, 4), state=min(shape.state, 3)
    )


def _small_delta_net(shape: DeltaNet, before: _Ranks, after: _Ranks) -> DeltaNet:
    values, keys = _heads(shape.value_heads, shape.key_heads, before, after)
    small = replace(shape, value_heads=values, key_heads=keys)
    return replace(small, key_dim=min(shape.key_dim, 4), value_dim=min(shape.value_dim, 4))


def _small_moe(shape: Moe, after: _Ranks) -> Moe:
    """Experts of which a token chooses some and leaves some, in groups if they were."""
    groups = min(shape.groups, 2)
    top_groups = 1 if shape.top_groups < shape.groups else groups
    top_k = min(shape.top_k, 2 * top_groups if shape.top_k > shape.top_groups else top_groups)
    experts = lcm(after.ep, groups) * 2
    while experts < min(shape.experts, 2 * top_k) or (experts // groups) * top_groups < top_k:
        experts += lcm(after.ep, groups)
    return replace(
        shape,
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        ffn=8 * after.etp,
        latent=min(shape.latent, 8),
        shared_ffn=min(shape.shared_ffn, 8 * after.tp),
    )
