"""Freezing and learning rates: which tensors `trained` names, and at what share of `optim.lr` they learn.

The language model and every module have both, as globs over their own canonical names. Several tensors may be
stored as one parameter (query, key and value; the experts of a layer); they are trained together, or not at
all.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from braid.errors import Problem
from braid.lora import Lora
from braid.model.names import layers_by_name
from braid.pattern import Kind, Layout

if TYPE_CHECKING:
    from braid.model.stacked import StackedModel

Globs = tuple[str, ...]
EVERYTHING: Globs = ("*",)
"""The default of `trained`."""

NEAREST = 3
"""Names that are listed where a glob matches none."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tensors that a run trains, by canonical name."""

    tensors: frozenset[str]
    """Selection biases of experts included, which move by the load and not by a gradient."""
    shares: Mapping[str, float]
    """The learning rate of a tensor as a share of the run's; 1 for those that are not listed."""
    frozen_units: frozenset[str]
    """FSDP units of which nothing is trained."""

    def parameters(self, model: StackedModel) -> frozenset[str]:
        """Names of the trained parameters of a rank's part of the model."""
        tensors = model.canonical().items()
        return frozenset(tensor.parameter for name, tensor in tensors if name in self.tensors)

    def shares_of(self, model: StackedModel) -> dict[str, float]:
        """`shares`, by the parameters of a rank's part of the model."""
        tensors = model.canonical().items()
        return {tensor.parameter: self.shares[name] for name, tensor in tensors if name in self.shares}


def parameters_of(model: StackedModel, selection: Selection | None) -> frozenset[str]:
    """Names of the trained parameters of a rank's part of a model."""
    every = frozenset(name for name, _ in model.named_parameters())
    return every if selection is None else selection.parameters(model)


def buffers_of(model: StackedModel, selection: Selection | None) -> frozenset[str]:
    """Names of the buffers of a rank's part of a model that steps may change."""
    every = frozenset(name for name, _ in model.named_buffers())
    return every if selection is None else every & selection.parameters(model)


def select(build: Callable[[], StackedModel], globs: Globs, shares: Mapping[str, float]) -> Selection | None:
    """What is trained of a model without problems; None for everything, at one rate. `build` makes the
    unsharded model, in the compute dtype, which decides which parameters have units of their own."""
    if globs == EVERYTHING and not shares:
        return None
    model = build()
    tensors = {name: each for name, each in model.canonical().items() if matches(name, globs)}
    return Selection(
        tensors=frozenset(tensors),
        shares={name: share for name in tensors if (share := _share(name, shares)) != 1},
        frozen_units=_frozen_units(model, {tensor.parameter for tensor in tensors.values()}),
    )


def problems(
    model: StackedModel,
    globs: Globs,
    shares: Mapping[str, float],
    at: str = "",
    modules: Iterable[str] = (),
) -> Iterator[Problem]:
    """What is wrong with `trained` and `lr_share`, whose names begin with `at`; those of modules begin with any
    of `modules`."""
    if globs == EVERYTHING and not shares:
        return
    tensors = model.canonical()
    for field, given in (("trained", globs), ("lr_share", shares)):
        for glob in given:
            if not any(fnmatchcase(name, glob) for name in tensors):
                yield _unmatched(at, field, glob, list(tensors), modules)
    by_parameter: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        by_parameter.setdefault(tensor.parameter, []).append(name)
    stored_together = list(by_parameter.values())
    trained = {name: matches(name, globs) for name in tensors}
    learns = {name: _share(name, shares) for name in tensors}
    yield from _divided(f"{at}trained", globs, stored_together, trained)
    yield from _divided(f"{at}lr_share", shares, stored_together, learns)


def adapter_problems(model: StackedModel, lora: Lora) -> Iterator[Problem]:
    """Targets of LoRA that name no linear layer, or a part of the experts of a layer."""
    from braid.nn.lora import adaptable

    if not lora.rank:
        return
    tensors = model.canonical()
    found = adaptable(model, tensors, lora.targets)
    if not found:
        rule = "match no linear layer; routers, embeddings and heads have no adapters"
        remedy = "globs over projections, such as *.attention.q *.mlp.*"
        yield Problem(field="train.lora.targets", value=lora.targets, rule=rule, remedy=remedy)
    of_projections: dict[tuple[str, str], list[str]] = {}
    for name, (path, _) in adaptable(model, tensors, ("*.experts.*",)).items():
        stem = name.removesuffix(".weight")
        of_projections.setdefault((path, stem.rpartition(".")[2]), []).append(stem)
    matched = {stem: f"{stem}.weight" in found for stems in of_projections.values() for stem in stems}
    yield from _divided("train.lora.targets", lora.targets, of_projections.values(), matched)


def adapts_experts(lora: Lora, layout: Layout) -> bool:
    """Whether any target names projections of routed experts."""
    if not lora.rank:
        return False
    layers = [name for name, layer in layers_by_name(layout).items() if layer.kind is Kind.MOE]
    stems = (f"{name}.experts.0.{projection}" for name in layers for projection in ("gate", "up", "down"))
    return any(matches(stem, lora.targets) for stem in stems)


def nothing_trained(models: Iterable[tuple[StackedModel, Globs]]) -> Iterator[Problem]:
    """The problem of a run that trains no weight of any of its models, the language model first."""
    pairs = list(models)
    if not any(_trains(model, globs) for model, globs in pairs):
        rule = "no weight is trained, so there is nothing to do in a step"
        yield Problem(field="trained", value=pairs[0][1], rule=rule, remedy="globs that match a weight")


def _trains(model: StackedModel, globs: Globs) -> bool:
    learned = dict(model.named_parameters())
    tensors = model.canonical().items()
    return any(matches(name, globs) for name, tensor in tensors if tensor.parameter in learned)


def _frozen_units(model: StackedModel, trained: set[str]) -> frozenset[str]:
    from braid.nn.units import parameters_of_units

    held = parameters_of_units(model, [unit.path for unit in model.units()])
    return frozenset(unit for unit, names in held.items() if trained.isdisjoint(names))


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether any of the globs matches a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def governed(names: Iterable[str], shares: Mapping[str, float]) -> dict[str, list[str]]:
    """The tensors whose share each glob gives: those that it is the first to match."""
    first = {name: next((glob for glob in shares if fnmatchcase(name, glob)), None) for name in names}
    return {glob: [name for name, own in first.items() if own == glob] for glob in shares}


def _share(name: str, shares: Mapping[str, float]) -> float:
    return next((share for glob, share in shares.items() if fnmatchcase(name, glob)), 1.0)


def _unmatched(at: str, field: str, glob: str, names: list[str], modules: Iterable[str]) -> Problem:
    """A glob that matches no tensor. One with the name that a module's tensors have in checkpoints belongs to
    that module, without the prefix."""
    near = difflib.get_close_matches(glob, names, n=NEAREST, cutoff=0)
    rule = f"matches no tensor of {at.rstrip('.') or 'the model'}; the nearest are {', '.join(near)}"
    remedy = f"a glob over canonical names: {_example(names)}"
    if (module := next((each for each in modules if glob.startswith(each)), None)) is not None:
        own = glob.removeprefix(module)
        remedy = own if module == at else f"--{module}{field.replace('_', '-')} '{own}'"
    return Problem(field=f"{at}{field}", value=glob, rule=rule, remedy=remedy)


def _example(names: list[str]) -> str:
    """A glob for a block that the model has."""
    blocks = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    return f"blocks.{min(3, max(blocks))}.*" if blocks else names[0]


def _divided(
    field: str, given: object, stored_together: Iterable[list[str]], values: Mapping[str, float]
) -> Iterator[Problem]:
    """The first parameter whose tensors have different values."""
    for first, *others in stored_together:
        other = next((name for name in others if values[name] != values[first]), None)
        if other is not None:
            yield Problem(
                field=field,
                value=given,
                rule=f"{first} and {other} are stored as one parameter, but only one of them is matched",
                remedy=f"the same for all tensors of a parameter, as with {_common([first, *others])}",
            )
            return


def _common(names: list[str]) -> str:
    """A glob that matches all of these names."""
    parts = [name.split(".") for name in names]
    return ".".join(each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=False))
