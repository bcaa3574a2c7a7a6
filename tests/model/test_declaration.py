"""What a model declares before it is built, against the model that is built: its units are the modules with
weights, each weight is in one of them, and phases name nothing that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from braid.architecture import HyperConnections, Model
from braid.choices import RECOMPUTE
from braid.kernels import references
from braid.model import nodes
from braid.model.declaration import Form, chains, form_of, units
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.nn.units import parameters_of_units
from braid.pattern import Layout, parse
from braid.schedule import Phase, round_robin, segments_of, v_shape
from tests.covers import cover
from tests.model.cases import batch, build
from tests.model.test_hybrid import HYBRID

PATTERNS = (
    "[MG*-]E|[*E]||-",
    "[G+E]|M|[+-]|E/+E",
    "*|-|[M*E]|G/M*-/M*-",
    "|[*E]|E|",
    "[MG-]|||/E/E",
    "*|-||M/*E-E",
)
"""Every kind of layer, in and out of groups; segments without blocks, and every kind of depth: of one block and
of two, as experts end a block."""
EXITS = (None, "learned", "mean")
HOLDERS = {
    "one rank": (0, 0, 0, 0),
    "dealt": round_robin(2, 4),
    "folded": v_shape(2),
    "four ranks": round_robin(4, 4),
}


class Point(NamedTuple):
    pattern: str
    hyper: str | None
    """How streams become one, where there are several."""
    latent: int
    shared_ffn: int
    tied: bool
    dtype: str
    norm: str
    holder: str

    @property
    def shape(self) -> Model:
        assert HYBRID.moe is not None
        return replace(
            HYBRID,
            pattern=self.pattern,
            tied=self.tied,
            norm=self.norm,
            moe=replace(HYBRID.moe, latent=self.latent, shared_ffn=self.shared_ffn),
            hyper=None if self.hyper is None else HyperConnections(streams=2, exit=self.hyper),
        )

    @property
    def layout(self) -> Layout:
        return parse(self.pattern)

    def forms(self) -> Iterator[Form]:
        """As a schedule may have it: phases of every grain."""
        for fine, posts, late in product((False, True), repeat=3):
            yield form_of(self.shape, self.dtype, fine=fine, posts=posts, late_weights=late)
        yield form_of(self.shape, self.dtype, whole=True)

    def models(self) -> Iterator[tuple[LanguageModel, tuple[int, ...]]]:
        """What each rank holds of it, without memory."""
        holder = HOLDERS[self.holder]
        for rank in range(max(holder) + 1):
            segments = segments_of(holder, rank)
            on = {"device": torch.device("meta"), "dtype": DTYPES[self.dtype]}
            yield LanguageModel(self.shape, self.layout, references(), segments=segments, **on), segments


def every() -> list[Point]:
    choices = (PATTERNS, EXITS, (0, 6), (0, 5), (False, True), ("bf16", "fp32"), ("rms", "layer"), HOLDERS)
    return [Point(*chosen) for chosen in product(*choices)]


def quick() -> list[Point]:
    return cover(every(), Point._asdict)


def phases_of(point: Point, form: Form, segments: tuple[int, ...]) -> list[Phase]:
    found = chains(point.layout, form)
    return [phase for segment in segments for phase in found[segment].phases]


# ------------------------------------------------------------------------------------------------ units


def check_units(point: Point) -> None:
    for model, segments in point.models():
        declared = units(point.layout, form_of(point.shape, point.dtype), segments)
        assert declared == model.units()
        found = parameters_of_units(model, [unit.path for unit in declared])
        assert len(found) == len(declared), "each is declared once"
        assert all(found.values()), "a unit has weights of its own"
        parameters = dict(model.named_parameters())
        assert sorted(name for names in found.values() for name in names) == sorted(parameters)
        for unit in declared:
            experts = {".inner.experts." in name for name in found[unit.path]}
            assert experts == {unit.mesh == "expert"}
            wide = {parameters[name].dtype is torch.float32 for name in found[unit.path]}
            if point.dtype == "bf16":
                assert wide == {unit.wide}, f"{unit.path} computes in one dtype"
            elif unit.wide:
                assert point.hyper, "what is float32 anyway needs no unit of its own"
                assert unit.path.endswith((".connection", "exit"))


@pytest.mark.parametrize("point", quick(), ids=str)
def test_every_weight_is_in_one_unit_and_every_unit_has_weights(point):
    check_units(point)


@pytest.mark.long
@pytest.mark.drawn("point", every, 200)
def test_every_weight_of_other_models_is_in_one_unit(point):
    check_units(point)
    check_phases(point)


# ----------------------------------------------------------------------------------------------- phases


def check_phases(point: Point) -> None:
    for model, segments in point.models():
        parameters = dict(model.named_parameters())
        paths = {unit.path for unit in model.units()}
        for form in point.forms():
            phases = phases_of(point, form, segments)
            assert all(
                len({phase.name for phase in each.phases}) == len(each.phases)
                for each in chains(point.layout, form)
            )
            assert {unit for phase in phases for unit in phase.units} == paths, "none is left unused"
            for phase in phases:
                assert set(phase.shared) <= parameters.keys()
                assert all(name.rpartition(".")[0] in phase.units for name in phase.shared)
                assert {name for name, _ in phase.regions} <= set(RECOMPUTE) - {"full"}
                assert len(dict(phase.regions)) == len(phase.regions), "each name once"
                assert all(set(needed) <= set(phase.units) for _, needed in phase.regions)


@pytest.mark.parametrize("point", quick(), ids=str)
def test_phases_compute_with_every_unit_and_with_nothing_else(point):
    check_phases(point)


@pytest.mark.parametrize("point", [point for point in quick() if "/" in point.pattern], ids=str)
def test_an_evaluation_computes_with_every_unit_but_those_of_depths(point):
    form = replace(form_of(point.shape, point.dtype), training=False)
    last = len(point.layout.segments) - 1
    for model, segments in point.models():
        used = {unit for phase in phases_of(point, form, segments) for unit in phase.units}
        left = {unit.path for unit in model.units()} - used
        assert {path for path in left if not path.startswith("mtp.")} == (
            {"embedding"} if last in segments and 0 not in segments and not point.tied else set()
        )


@pytest.mark.parametrize("fine", [False, True])
def test_parameters_that_several_phases_use_are_told(fine):
    for tied, head in ((True, "embedding.weight"), (False, "head.weight")):
        (chain,) = chains(parse("-/-"), Form(tied=tied, fine=fine))
        shared = {phase.name: phase.shared for phase in chain.phases if phase.shared}
        assert shared == {
            "embed": ("embedding.weight",),
            "head": (head,),
            "mtp0.enter": ("embedding.weight",),
            "mtp0.head": (head,),
        }


def test_experts_are_recomputed_by_the_phase_that_has_them():
    for fine, phase in ((True, "0.experts"), (False, "0.block")):
        (chain,) = chains(parse("[*E]"), Form(fine=fine))
        unit = "stack.blocks.0.layers.moe.inner.experts"
        found = {
            each.name: dict(each.regions)["experts"] for each in chain.phases if "experts" in dict(each.regions)
        }
        assert found == {phase: (unit,)}


# ------------------------------------------------------------------------------------- what phases do


SPREAD = (
    ("[MG*-][*E]/*E", False, {"fine": True}),
    ("[G+E]-/+", True, {"fine": True, "posts": True}),
    ("[M+E]E/+E/+E", True, {}),
    ("[M*E]*", False, {}),
    ("[MG*E]*/*E", True, {"whole": True}),
)
"""Patterns, whether the head is tied, and how fine phases are."""


def parameters_with_gradients(
    model: LanguageModel, phases: Sequence[Phase]
) -> Iterator[tuple[Phase, set[str]]]:
    """Each phase by itself, on a graph of its own: the parameters that its backward reaches."""
    context, tensors = model.prepare(batch([[7, 6], [9]])), dict[str, Tensor]()
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for phase in phases:
        given = {name: tensors[name].detach().requires_grad_() for name in phase.reads}
        written, losses = nodes.run(model, phase, context, given)
        roots = [tensor.double().sum() for tensor in written.values() if tensor.requires_grad]
        if losses is not None:
            roots.append(losses.share(20, [20] * len(losses.mtp)))
        tensors |= written
        found: Sequence[Tensor | None] = ()
        if any(root.requires_grad for root in roots):
            found = torch.autograd.grad(torch.stack(roots).sum(), [*names], allow_unused=True)
        yield phase, {name for name, grad in zip(names.values(), found, strict=False) if grad is not None}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("latent", "shared_ffn"), [(0, 0), (6, 5)])
@pytest.mark.parametrize("hyper", EXITS)
@pytest.mark.parametrize(("pattern", "tied", "choices"), SPREAD)
def test_the_backward_of_a_phase_adds_to_its_units_and_to_all_of_them(
    pattern, tied, choices, hyper, latent, shared_ffn, dtype
):
    point = Point(pattern, hyper, latent, shared_ffn, tied, dtype, "rms", "one rank")
    model = build(pattern, point.shape, DTYPES[dtype])
    form = form_of(point.shape, dtype, **choices)
    of_units = parameters_of_units(model, [unit.path for unit in model.units()])
    unit_of = {name: unit for unit, names in of_units.items() for name in names}
    (chain,) = chains(point.layout, form)
    for phase, reached in parameters_with_gradients(model, chain.phases):
        assert {unit_of[name] for name in reached} == set(phase.units), phase.name
