"""Freezing and learning rates: which tensors `run.trained` names, and at what share of `optim.lr` they learn.

Both are globs over canonical names. Several tensors may be stored as one parameter (query, key and value; the
experts of a layer); they are trained together, or not at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from braid.config import Run
from braid.errors import Problem
from braid.pattern import Layout

if TYPE_CHECKING:
    from braid.model.language import LanguageModel

EVERYTHING = ("*",)
"""The default of `run.trained`."""

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

    def parameters(self, model: LanguageModel) -> frozenset[str]:
        """Names of the trained parameters of a rank's part of the model."""
        tensors = model.canonical().items()
        return frozenset(tensor.parameter for name, tensor in tensors if name in self.tensors)

    def shares_of(self, model: LanguageModel) -> dict[str, float]:
        """`shares`, by the parameters of a rank's part of the model."""
        tensors = model.canonical().items()
        return {tensor.parameter: self.shares[name] for name, tensor in tensors if name in self.shares}


def select(run: Run, layout: Layout) -> Selection | None:
    """What a run without problems trains; None for everything, at one rate."""
    if run.trained == EVERYTHING and not run.lr_share:
        return None
    model = _whole_model(run, layout)
    tensors = {name: each for name, each in model.canonical().items() if matches(name, run.trained)}
    return Selection(
        tensors=frozenset(tensors),
        shares={name: share for name in tensors if (share := _share(name, run.lr_share)) != 1},
        frozen_units=_frozen_units(model, {tensor.parameter for tensor in tensors.values()}),
    )


def problems(run: Run, layout: Layout) -> Iterator[Problem]:
    """What is wrong with `trained` and `lr_share`, for a run that has no other problems."""
    if run.trained == EVERYTHING and not run.lr_share:
        return
    model = _whole_model(run, layout)
    tensors, learned = model.canonical(), dict(model.named_parameters())
    yield from _unmatched("trained", run.trained, tensors)
    yield from _unmatched("lr_share", run.lr_share, tensors)
    if not any(matches(name, run.trained) for name, tensor in tensors.items() if tensor.parameter in learned):
        rule = "no weight is trained, so there is nothing to do in a step"
        yield Problem(field="trained", value=run.trained, rule=rule, remedy="globs that match a weight")
    by_parameter: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        by_parameter.setdefault(tensor.parameter, []).append(name)
    stored_together = list(by_parameter.values())
    trained = {name: matches(name, run.trained) for name in tensors}
    shares = {name: _share(name, run.lr_share) for name in tensors}
    yield from _divided("trained", run.trained, stored_together, trained)
    yield from _divided("lr_share", run.lr_share, stored_together, shares)


def _whole_model(run: Run, layout: Layout) -> LanguageModel:
    import torch

    from braid.kernels import references
    from braid.model.language import LanguageModel

    # The dtype decides which parameters have units of their own.
    dtype = torch.bfloat16 if run.train.dtype == "bf16" else torch.float32
    return LanguageModel(run.model, layout, references(), device=torch.device("meta"), dtype=dtype)


def _frozen_units(model: LanguageModel, trained: set[str]) -> frozenset[str]:
    from braid.engine.weights import parameters_of_units

    held = parameters_of_units(model, [unit.path for unit in model.units()])
    return frozenset(unit for unit, names in held.items() if trained.isdisjoint(names))


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether any of the globs matches a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def _share(name: str, shares: Mapping[str, float]) -> float:
    return next((share for glob, share in shares.items() if fnmatchcase(name, glob)), 1.0)


def _unmatched(field: str, globs: Iterable[str], names: Iterable[str]) -> Iterator[Problem]:
    known = list(names)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            near = difflib.get_close_matches(glob, known, n=NEAREST, cutoff=0)
            rule = f"matches no tensor of the model; the nearest are {', '.join(near)}"
            yield Problem(field=field, value=glob, rule=rule, remedy="a glob over canonical names: blocks.3.*")


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
