"""A model in training, under their names: its weights, and the state of its optimizer.

Beside a weight `NAME` files may hold `optimizer.state.fp32_param.NAME`, the main parameter, and its moments
`optimizer.state.exp_avg.NAME` and `optimizer.state.exp_avg_sq.NAME`. Each of these sets may have a spelling of
its own. `optimizer.state.step` tells how many updates there were.

A main parameter always takes the place of its weight, which may be narrower: what a run goes on from has never
been through bfloat16. Everything that does not fit, in any set, is told in one error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import Model, Trunk
from braid.checkpoint.parts import CODES
from braid.encoders import Encoder
from braid.errors import CheckpointError
from braid.interchange.convert import OTHER_TENSORS, Lazy, apart, check, copy_faults, name_faults, together
from braid.interchange.moves import of_moments
from braid.interchange.sliced import Renamed
from braid.interchange.spelling import spelled
from braid.interchange.tables import Adapter, NameLink, links
from braid.kernels import references
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.model.stacked import StackedModel
from braid.pattern import joined, parse

STATE = "optimizer.state."
WEIGHT, MAIN, FIRST, SECOND = "", f"{STATE}fp32_param.", f"{STATE}exp_avg.", f"{STATE}exp_avg_sq."
"""What stands before their names, for each set of tensors."""
MOMENTS = MappingProxyType({FIRST: "optimizer.exp_avg.", SECOND: "optimizer.exp_avg_sq."})
"""What stands before our names, for the sets of moments."""
UPDATES = f"{STATE}step"
CHAINED = re.compile(r"chained_\d+\.(?=optimizer\.state\.)")
"""Several optimizers may share a model; which of them holds a name does not matter."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What files hold, by canonical names."""

    tensors: Mapping[str, Tensor]
    """Weights and, where they are wanted, the moments `optimizer.<moment>.<name>`; made when asked for."""
    updates: int | None
    """How many the optimizer has made; None where nothing tells."""


class Target(NamedTuple):
    """What a run saves under a canonical name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    updated: bool
    """Whether the optimizer updates it, and so has moments of it."""


def targets(shape: Trunk, dtype: torch.dtype) -> dict[str, Target]:
    """What a run of this dtype saves of a language model or an encoder, by canonical name."""
    on: dict[str, Any] = {"device": torch.device("meta"), "dtype": dtype}
    model: StackedModel
    if isinstance(shape, Encoder):
        model = EncoderModel(shape, joined(parse(shape.pattern)), references(), **on)
    else:
        assert isinstance(shape, Model)
        model = LanguageModel(shape, parse(shape.pattern), references(), **on)
    parameters, tensors = dict(model.named_parameters()), model.tensors()
    found = {}
    for name, tensor in model.canonical().items():
        updated, here = tensor.parameter in parameters, tensors[tensor.parameter].dtype
        saved = torch.promote_types(here, torch.float32) if updated else here
        found[name] = Target(tensor.shape, saved, updated)
    return found


def has_moments(names: Collection[str]) -> bool:
    """Whether the state of an optimizer is among their names."""
    return any(CHAINED.sub("", name, count=1).startswith((FIRST, SECOND)) for name in names)


# ------------------------------------------------------------------------------------------------- in


class TrainedPart(NamedTuple):
    """One set of their tensors, and how ours lie in it."""

    held: Mapping[str, Tensor]
    seen: Mapping[str, Tensor]
    """The same without numbers, or once more."""
    table: Sequence[NameLink]
    """The links whose tensor is there."""
    faults: Sequence[str]


def to_ours(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Trunk,
    *,
    dtype: torch.dtype | None = None,
    outlines: Mapping[str, Tensor] | None = None,
) -> Trained:
    """Read a model of this shape. With a dtype the optimizer's state is read too, and all is as a run of that
    dtype saves it; without one, weights have the dtype that they have in the files. `outlines` are the same
    tensors without numbers, for those who would rather not read a file twice."""
    found = examine(tensors, adapter, shape, dtype=dtype, outlines=outlines)
    only_narrow = all(fault.startswith("narrow ") for fault in found.faults)
    remedy = "--no-optimizer, to import the weights alone" if only_narrow else OTHER_TENSORS
    check(f"{adapter.name} tensors do not fit the model's shape", found.faults, remedy)
    check("these tensors contradict their config.json", found.contradictions(adapter, shape))
    return Trained(
        tensors=found.tensors(cast=dtype is not None),
        updates=_updates(tensors[UPDATES]) if dtype is not None and UPDATES in tensors else None,
    )


class Examined(NamedTuple):
    """Files of a model, sorted into sets, with everything that does not fit."""

    parts: Mapping[str, TrainedPart]
    wanted: Mapping[str, Target]
    faults: Sequence[str]

    def contradictions(self, adapter: Adapter, shape: Trunk) -> list[str]:
        """Tensors that differ from what they should be a copy of."""
        return copy_faults(self.parts[WEIGHT].held, adapter, shape)

    def tensors(self, *, cast: bool) -> Mapping[str, Tensor]:
        """All sets as one, by canonical names; `cast` gives them the dtypes of a run."""
        return _joined(self.parts, self.wanted, cast=cast)


def examine(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Trunk,
    *,
    dtype: torch.dtype | None = None,
    outlines: Mapping[str, Tensor] | None = None,
) -> Examined:
    """What `to_ours` reads, before anybody is told what does not fit."""
    wanted = targets(shape, torch.float32 if dtype is None else dtype)
    sets, faults = _sets(tensors.keys(), adapter.wrapper)
    parts = {}
    for kind in (WEIGHT, MAIN) if dtype is None else (WEIGHT, MAIN, FIRST, SECOND):
        held = Renamed(tensors, sets[kind])
        seen = held if outlines is None else Renamed(outlines, sets[kind])
        parts[kind] = _part(kind, held, seen, adapter, shape, wanted)
        faults += [*parts[kind].faults, *_dtype_faults(kind, parts[kind], wanted)]
    faults += [] if dtype is None else _narrow_faults(parts[WEIGHT], parts[MAIN], wanted)
    return Examined(parts, wanted, faults)


def _sets(names: Collection[str], wrapper: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """For each set its names, without what stands before them, each with the one that files have; and what is
    said of names that come twice."""
    sets: dict[str, dict[str, str]] = {kind: {} for kind in (MAIN, FIRST, SECOND, WEIGHT)}
    faults = []
    for full in names:
        bare = CHAINED.sub("", full, count=1)
        if bare == UPDATES:
            continue
        kind = next(kind for kind in sets if bare.startswith(kind))
        name = bare.removeprefix(kind)
        while wrapper and name.startswith(wrapper):
            name = name.removeprefix(wrapper)
        if name in sets[kind]:
            faults.append(f"twice    {kind}{name}: as {sets[kind][name]} and as {full}")
        sets[kind][name] = full
    return sets, faults


def _part(
    kind: str,
    held: Mapping[str, Tensor],
    seen: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Trunk,
    wanted: Mapping[str, Target],
) -> TrainedPart:
    told = spelled(adapter, shape, seen)
    if kind == MAIN:  # Weights that are wide enough have none.
        told = [each for each in told if any(link.theirs in seen for link in each)]
    table = [link for each in told for link in each]
    if kind in MOMENTS:
        table = of_the_optimizer(table, wanted)
    faults = [_placed(line, kind) for line in name_faults(seen, table, adapter, shape)]
    there = [link for link in table if link.theirs in seen]
    return TrainedPart(held, seen, there, [*faults, *_shape_faults(kind, apart(seen, there), wanted)])


def of_the_optimizer(table: Sequence[NameLink], wanted: Mapping[str, Target]) -> list[NameLink]:
    """The links of what the optimizer updates, as its moments go."""
    return [replace(link, move=of_moments(link.move)) for link in table if wanted[link.ours[0]].updated]


def _placed(line: str, kind: str) -> str:
    """What is said of a name, with what stands before the names of its set."""
    word, _, name = line.partition(" ")
    return f"{word:<8} {kind}{name.strip()}"


def _shape_faults(kind: str, ours: Mapping[str, Tensor], wanted: Mapping[str, Target]) -> list[str]:
    """Every tensor of ours that has another shape than the model's; where one of theirs cannot even be taken
    apart, that one, once."""
    found = {}
    for name in ours:
        try:
            given = tuple(ours[name].shape)
        except CheckpointError as error:
            found[str(error)] = f"shape    {kind}{error}"
            continue
        if given != wanted[name].shape:
            found[name] = f"shape    {kind}{name}: has {list(given)}, wanted {list(wanted[name].shape)}"
    return sorted(found.values())


def _dtype_faults(kind: str, part: TrainedPart, wanted: Mapping[str, Target]) -> list[str]:
    """Tensors whose numbers are whole, or of a dtype that braid does not have, where the model's are not."""
    real = [link for link in part.table if wanted[link.ours[0]].dtype.is_floating_point]
    dtypes = {link.theirs: part.seen[link.theirs].dtype for link in real}
    floating = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES if dtype.is_floating_point)
    return sorted(
        f"dtype    {kind}{name}: is of none of {floating}"
        for name, dtype in dtypes.items()
        if not dtype.is_floating_point
    )


def _narrow_faults(weights: TrainedPart, mains: TrainedPart, wanted: Mapping[str, Target]) -> list[str]:
    """Weights that an optimizer updates, in a narrow dtype, and whose main parameters are lost."""
    main = {name for link in mains.table for name in link.ours}
    lost = [link for link in weights.table if not main.issuperset(link.ours) and wanted[link.ours[0]].updated]
    dtypes = {link.theirs: weights.seen[link.theirs].dtype for link in lost}
    return sorted(
        f"narrow   {name}: has the dtype {dtype}, and {MAIN}{name} is not there"
        for name, dtype in dtypes.items()
        if dtype.itemsize < torch.float32.itemsize
    )


def _joined(
    parts: Mapping[str, TrainedPart], wanted: Mapping[str, Target], *, cast: bool
) -> Mapping[str, Tensor]:
    """All sets as one, in the dtypes of a run where asked for."""

    def made(ours: Mapping[str, Tensor], name: str) -> Tensor:
        return ours[name].to(wanted[name].dtype) if cast else ours[name]

    makers: dict[str, Callable[[], Tensor]] = {}
    for kind, part in parts.items():  # The main parameters come after the weights, and take their place.
        ours = apart(part.held, part.table)
        makers |= {MOMENTS.get(kind, "") + name: partial(made, ours, name) for name in ours}
    return Lazy(makers)


def _updates(told: Tensor) -> int:
    numbers = set(told.flatten().tolist())
    if len(numbers) != 1 or min(numbers) < 0 or min(numbers) % 1:
        raise CheckpointError(f"{UPDATES} holds {sorted(numbers)[:5]}, wanted one whole number, from 0")
    return int(min(numbers))


# ------------------------------------------------------------------------------------------------ out


def to_theirs(
    tensors: Mapping[str, Tensor], adapter: Adapter, shape: Trunk, *, updates: int
) -> Mapping[str, Tensor]:
    """The optimizer's state of a run under the names of an adapter."""
    return optimizer_state(tensors, list(links(adapter, shape)), shape, updates=updates)


def optimizer_state(
    tensors: Mapping[str, Tensor], every: Sequence[NameLink], shape: Trunk, *, updates: int
) -> Mapping[str, Tensor]:
    """The optimizer's state of a run under their names: main parameters, both moments, how many updates. The
    dtype of a checkpoint does not matter here: what it holds are the main parameters."""
    wanted = targets(shape, torch.float32)
    table = [link for link in every if wanted[link.ours[0]].updated]
    updated = [name for name, target in wanted.items() if target.updated]
    lost = [
        f"missing  {ours}{n}" for ours in ("", *MOMENTS.values()) for n in updated if ours + n not in tensors
    ]
    check("the checkpoint does not hold the optimizer's state", lost, "the weights alone, without --optimizer")
    makers: dict[str, Callable[[], Tensor]] = {}
    for kind in (MAIN, *MOMENTS):
        ours = Renamed(tensors, {name: MOMENTS.get(kind, "") + name for name in updated})
        theirs = together(ours, table if kind == MAIN else of_the_optimizer(table, wanted))
        makers |= {kind + name: partial(theirs.__getitem__, name) for name in theirs}
    return Lazy({**makers, UPDATES: partial(torch.tensor, updates)})
