"""Modules on grids of their own: one plan, whose schedule is proven, and every problem told at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from braid.config import Mesh, from_json, to_json
from braid.encoders import Encoder, Pixels
from braid.errors import ConfigError
from braid.planning.plan import check, evaluation_schedule, item_flops, plan, training_flops
from braid.schedule import check as proven
from tests.planning.modules import TOKEN, encoder, run_with

PLACEMENTS = {
    "one rank": (1, Mesh(), {"vision": Mesh()}, [(0,)], [(0, 1)]),
    "colocated": (2, Mesh(), {"vision": Mesh(tp=2)}, [(0, 1)], [(0, 1)]),
    "disjoint": (
        4,
        Mesh(pp=2, ranks=(0, 2)),
        {"vision": Mesh(ranks=(2, 2))},
        [(0,), (1,), (2, 3)],
        [(0,), (1,), (2,)],
    ),
    "one encoder on all ranks, one on the last": (
        4,
        Mesh(pp=2),
        {"vision": Mesh(tp=2), "audio": Mesh(ranks=(3, 1))},
        [(0, 1), (2,), (3,)],
        [(0, 2), (1, 2), (1, 2, 3)],
    ),
    "partly": (
        6,
        Mesh(tp=2, pp=2, ranks=(0, 4)),
        {"vision": Mesh(ranks=(2, 4), pp=2)},
        [(0, 1), (2, 3), (4, 5)],
        [(0,), (1, 2), (3,)],
    ),
}
"""World, mesh of the language model, those of encoders; ranks and segments of each station."""


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stations_hold_the_stages_of_their_ranks_and_run_a_proven_schedule(placement: str) -> None:
    world, mesh, meshes, ranks, held = PLACEMENTS[placement]
    made = plan(run_with(meshes, mesh), world)
    for schedule in (made.schedule, evaluation_schedule(made, 3)):
        assert not proven(schedule).faults
        assert list(schedule.graph.ranks) == ranks
        assert list(schedule.graph.held) == held
        assert [edge.name for edge in schedule.graph.edges] == list(meshes)
        assert [edge.target for edge in schedule.graph.edges] == [0] * len(meshes)
    assert list(made.encoders) == list(meshes)


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(pp=2, schedule="dual_pipe_v")], ids=["1f1b", "dual"])
@pytest.mark.parametrize("recompute", [(), ("norm", "activation"), ("full",)], ids=str)
def test_recompute_and_pipelines_of_phases(mesh: Mesh, recompute: tuple[str, ...]) -> None:
    run = run_with({"vision": Mesh(tp=2, shard="optimizer")}, mesh)
    run = replace(run, train=replace(run.train, recompute=recompute))
    assert not proven(plan(run, 4).schedule).faults


def test_a_run_with_modules_is_read_as_it_was_written() -> None:
    run = run_with({"vision": Mesh(tp=2)}, trained=("projector.*",), lr_share={"projector.*": 0.5})
    assert from_json(to_json(run)) == run


def test_units_of_several_modules_on_a_rank_have_names_of_their_own() -> None:
    made = plan(run_with({"vision": Mesh(), "audio": Mesh()}), 2)
    units = made.schedule.units(0)
    assert len(set(units)) == len(units)
    assert {unit.partition("/")[0] for unit in units if "/" in unit} == {"vision", "audio"}


def seeing(*, input: int = 12, group: int = 4, **pixels: Any) -> Encoder:
    """An encoder of images."""
    return encoder(128, input=input, group=group, pixels=Pixels(**{"patch": 2, **pixels}))


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"token": 300}, "modules.vision.token", "model.vocab is 300"),
        ({"model": encoder(24)}, "modules.vision.model.projector.width", "model.hidden is"),
        ({"mesh": Mesh(ranks=(2, 3))}, "modules.vision.mesh.ranks", "last rank of the job is 3"),
        (
            {"mesh": Mesh(tp=3, ranks=(0, 3))},
            "modules.vision.mesh.tp times",
            "must divide modules.vision.model",
        ),
        ({"mesh": Mesh(overlap=True)}, "modules.vision.mesh.overlap", "whole turns"),
        ({"mesh": Mesh(dispatcher="all_gather")}, "modules.vision.mesh.dispatcher", "hold different items"),
        ({"most_patches": 15}, "modules.vision.most_patches", "whole groups of 2"),
        ({"most_patches": 1026}, "modules.vision.most_patches", "513 rows of 2 patches, and a sample has 256"),
        ({"most_items": 9}, "modules.vision.most_items", "an item has a row of 2 patches or more"),
        ({"items": "files"}, "modules.vision.items", "made up from the text"),
        (
            {"items": "image"},
            "modules.vision.items",
            "says how images become patches",
        ),
        ({"model": seeing(input=13)}, "modules.vision.model.input", "frames x channels x patch²"),
        ({"model": seeing(group=2)}, "modules.vision.model.group", "a square of patches"),
        ({"model": seeing(std=(1.0,))}, "modules.vision.model.pixels.std", "one for each channel"),
        ({"model": seeing(std=(1.0, 0.0, 1.0))}, "modules.vision.model.pixels.std[1]", "above 0"),
        ({"model": seeing(channels=2)}, "modules.vision.model.pixels.channels", "colours or are grey"),
        ({"model": seeing(patch=0)}, "modules.vision.model.pixels.patch", "at least 1"),
        ({"ahead": 1, "mesh": Mesh()}, "modules.vision.ahead", "micro-batches in flight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_problem_names_its_field_and_rule(changes: dict[str, object], field: str, rule: str) -> None:
    found = check(run_with({"vision": Mesh()}, Mesh(pp=2), **changes), 4)
    assert any(problem.field.startswith(field) and rule in problem.rule for problem in found), found


def test_the_images_of_the_data_are_those_of_one_module() -> None:
    run = run_with({"vision": Mesh(), "sight": Mesh()}, model=seeing(), items="image")
    (found,) = check(run, 1)
    assert found.field == "modules.sight.items"
    assert "one module" in found.rule
    assert not check(run_with({"vision": Mesh()}, model=seeing(), items="image"), 1)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"model": encoder(128, group=64), "most_patches": 32}, "64"),
        ({"model": encoder(128, group=64), "most_patches": 130}, "128"),
        ({"most_patches": 1026}, "at most 512, or data.sequence_tokens to 513 or more"),
        ({"most_items": 9}, "at most 8, or modules.vision.most_patches to 18 or more"),
        ({"token": 2**62}, "an id below 300 that no text has, or a larger model.vocab"),
        ({"trained": ("blocks.7.*",)}, "a glob over canonical names: blocks.1.*"),
        ({"trained": ("modules.vision.projector.*",)}, "projector.*"),
    ],
    ids=str,
)
def test_remedies_of_modules_can_be_set(changes: dict[str, object], remedy: str) -> None:
    problem, *_ = check(run_with({"vision": Mesh()}, **changes), 1)
    assert problem.remedy == remedy
    assert "of the model" not in problem.rule


def test_limits_that_a_sample_can_just_hold_are_no_problem() -> None:
    assert not check(run_with({"vision": Mesh()}, most_patches=512, most_items=256), 1)


def test_globs_of_another_module_name_its_option() -> None:
    run = replace(run_with({"eyes": Mesh()}), trained=("modules.eyes.projector.*",))
    assert check(run, 1)[0].remedy == "--modules.eyes.trained 'projector.*'"
    run = replace(run, trained=("*",), lr_share={"modules.eyes.*": 0.5})
    assert check(run, 1)[0].remedy == "--modules.eyes.lr-share '*'"
    assert "blocks." in check(replace(run, modules={}), 1)[0].remedy, "there is no such module"


def test_modules_are_a_mapping() -> None:
    (problem,) = check(replace(run_with({}), modules=None), 1)  # type: ignore[arg-type]
    assert problem.rule == "must be a mapping of names to Module"


def test_modules_share_no_placeholder_and_leave_no_rank_out() -> None:
    run = run_with({"vision": Mesh(ranks=(0, 1)), "audio": Mesh(ranks=(1, 1))}, Mesh(ranks=(0, 2)), token=TOKEN)
    with pytest.raises(ConfigError, match=r"modules\.audio\.token(.|\n)*modules\.vision\.token is the same"):
        plan(run, 2)
    with pytest.raises(ConfigError, match="ranks 2 to 3 hold no module"):
        plan(run, 4)


def test_an_encoder_has_one_segment_per_pipeline_rank() -> None:
    run = run_with({"vision": Mesh(pp=2)})
    module = run.modules["vision"]
    four = replace(module, model=replace(module.model, pattern="*-|*-|*-|*-"))
    (problem,) = check(replace(run, modules={"vision": four}), 4)
    assert problem.field == "modules.vision.model.pattern"
    assert "4 segments" in problem.rule


def test_flops_of_items_leave_out_what_is_frozen() -> None:
    """A frozen trunk runs forward only; a frozen language model passes gradients on to a trained encoder."""
    whole = item_flops(plan(run_with({"vision": Mesh()}), 1), "vision")(8)
    frozen = item_flops(plan(run_with({"vision": Mesh()}, trained=()), 1), "vision")(8)
    projector = item_flops(plan(run_with({"vision": Mesh()}, trained=("projector.*",)), 1), "vision")(8)
    assert 3 * frozen == whole
    assert frozen < projector < whole
    run = run_with({"vision": Mesh()})
    everything, passing = (training_flops(plan(replace(run, trained=each), 1)) for each in (("*",), ()))
    assert everything / 3 < passing < everything


@pytest.mark.parametrize("pp", [1, 2])
def test_backwards_in_the_order_of_turns_leave_out_what_is_frozen(pp: int) -> None:
    """The schedule places turns by what they cost."""

    def shares(language: tuple[str, ...], vision: tuple[str, ...]) -> tuple[list[float], list[float]]:
        """Backwards by forwards, of the language model's segments and of the encoder's."""
        run = replace(run_with({"vision": Mesh(pp=pp)}, trained=vision), trained=language)
        made = plan(run, 2)
        of_all = [each.backward / each.forward for each in made.schedule.graph.segments]
        first = made.encoders["vision"].first_segment
        return of_all[:first], of_all[first:]

    everything, nothing, projector = ("*",), (), ("projector.*",)
    assert shares(everything, everything) == ([2.0], [2.0] * pp)
    language, vision = shares(nothing, everything)
    assert language == pytest.approx([1], rel=1e-3), "it passes gradients on"
    assert vision == [2.0] * pp
    language, vision = shares(nothing, projector)
    assert language == pytest.approx([1], rel=1e-3)
    assert 0 < vision[-1] < 0.8, "its blocks have no backward"
    assert vision[:-1] == pytest.approx([0] * (pp - 1), abs=1e-3)
    language, vision = shares(everything, ("blocks.0.*",))
    assert language == [2.0]
    assert 1 < vision[0] < 2, "patches have no backward" if pp > 1 else "and what follows passes gradients on"
    assert vision[1:] == pytest.approx([1] * (pp - 1), rel=1e-3)
