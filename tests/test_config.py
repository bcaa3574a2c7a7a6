"""A run as data: it cannot change, it goes through JSON and back, and two runs can be compared."""

import dataclasses
import inspect
import json
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from braid import architecture, config, encoders, yarn
from braid.choices import RECOMPUTE, recomputed
from braid.config import Mesh, Run, difference, flatten, from_json, to_json, type_problems
from braid.errors import ConfigError
from braid.recipes import load
from braid.recipes.vision import radio_h
from tests.runs import small_run

PARTS = [
    kind
    for module in (config, architecture, encoders, yarn)
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
]


def test_a_run_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        small_run().model.hidden = 3


@pytest.mark.parametrize("kind", [kind for kind in PARTS if kind is not Run], ids=lambda kind: kind.__name__)
def test_every_field_of_every_part_has_a_docstring(kind):
    source = inspect.getsource(inspect.getmodule(kind))
    body = (
        re.split(rf"class {kind.__name__}\b.*:", source)[1].partition("\n\n    def ")[0].partition("\n\n\n")[0]
    )
    for field in kind.__annotations__:  # its own ones: those that it inherits are its parent's
        after = body.partition(f"\n    {field}: ")[2].splitlines()
        assert after[1].startswith('    """'), f"{kind.__name__}.{field} has no docstring under it"


def test_json_and_back_is_the_identity():
    run = small_run()
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["optim"].update(lrr=1), r"run\.optim\.lrr is not a known field; did you mean 'lr'\?"),
        (lambda d: d["model"].pop("hidden"), r"run\.model\.hidden is missing"),
        (lambda d: d.pop("train"), r"run\.train is missing"),
        (lambda d: d["model"].update(hidden="16"), r"run\.model\.hidden = '16': must be of type int"),
        (lambda d: d["model"].update(hidden=True), r"run\.model\.hidden = True: must be of type int"),
        (lambda d: d["model"].update(norm="batch"), r"run\.model\.norm = 'batch': must be one of rms, layer"),
        (lambda d: d["optim"].update(betas=[0.9]), r"run\.optim\.betas = \[0.9\]: must have 2 values"),
        (lambda d: d["optim"].update(betas=3), r"run\.optim\.betas = 3: must be a list"),
        (lambda d: d.update(data=[]), r"run\.data = \[\]: must be an object"),
    ],
)
def test_json_that_is_no_run_is_refused_by_name(change, message):
    data = json.loads(json.dumps(to_json(small_run())))
    change(data)
    with pytest.raises(ConfigError, match=message):
        from_json(data)


def test_a_run_that_was_written_before_a_field_came_reads_with_its_default():
    run = small_run()
    data = json.loads(json.dumps(to_json(run)))
    del data["mesh"]["late_weights"], data["model"]["hyper"], data["optim"]["clip"]
    assert from_json(data) == run
    other = replace(run, mesh=replace(run.mesh, late_weights=True), optim=replace(run.optim, clip=0.5))
    assert set(difference(from_json(data), other)) == {"mesh.late_weights", "optim.clip"}


def test_mappings_keep_their_order_and_are_named_by_key():
    """The first glob that matches counts, so order has a meaning."""
    run = replace(small_run(), lr_share={"head.*": 2.0, "*": 0.5}, trained=("blocks.*", "head.*"))
    again = from_json(json.loads(json.dumps(to_json(run))))
    assert again == run
    assert list(again.lr_share) == ["head.*", "*"]
    assert flatten(run)["lr_share[head.*]"] == 2.0
    assert difference(small_run(), run) == {
        "trained": (("*",), ("blocks.*", "head.*")),
        "lr_share[head.*]": (None, 2.0),
        "lr_share[*]": (None, 0.5),
    }
    data = to_json(run)
    with pytest.raises(ConfigError, match=r"run\.lr_share\[\*\] = 'x': must be of type float"):
        from_json({**data, "lr_share": {"*": "x"}})
    with pytest.raises(ConfigError, match=r"run\.lr_share = \[\]: must be an object"):
        from_json({**data, "lr_share": []})
    rates = replace(run, optim=replace(run.optim, lr_by_kind={"head": 1e-2, "heads": 1.0}))
    assert from_json(json.loads(json.dumps(to_json(rates)))) == rates
    assert flatten(rates)["optim.lr_by_kind[head]"] == 1e-2
    assert [(each.field, each.value) for each in rates.problems()] == [("optim.lr_by_kind", "heads")]
    muon = replace(run.optim, name="muon", muon=replace(run.optim.muon, iterations=0))
    assert [each.field for each in replace(run, optim=muon).problems()] == ["optim.muon.iterations"]


def test_flatten_names_fields_as_on_the_command_line():
    flat = flatten(small_run())
    assert flat["model.attention.kv_heads"] == 2
    assert flat["optim.betas"] == (0.9, 0.95)


def test_difference_names_fields_and_both_values():
    run = small_run()
    other = replace(run, optim=replace(run.optim, lr=1.0), model=replace(run.model, moe=None))
    changed = difference(run, other)
    assert changed["optim.lr"] == (0.01, 1.0)
    assert changed["model.moe.experts"] == (4, None)
    assert difference(run, run) == {}
    assert difference(other, run)["model.moe.experts"] == (None, 4)


def test_a_value_of_another_type_is_refused_with_what_may_stand_there():
    run = small_run()
    run = replace(run, train=replace(run.train, recompute=("norms",)), optim=replace(run.optim, betas=(1,)))
    rules = {problem.field: problem.rule for problem in type_problems(run)}
    assert rules["train.recompute"].startswith("must be a tuple of any of 'norm', 'activation', ")
    assert rules["optim.betas"] == "must be a tuple of 2 numbers"


def test_ranks_begin_at_0_and_are_some():
    assert [problem.field for problem in Mesh(ranks=(-1, 0)).problems("mesh")] == [
        "mesh.ranks[0]",
        "mesh.ranks[1]",
    ]
    assert not [*Mesh(ranks=(0, 1)).problems("mesh")]


def test_full_recompute_means_every_kind():
    assert recomputed(["full"]) == recomputed(["norm", "full"]) == frozenset(RECOMPUTE)
    assert recomputed(["norm", "core"]) == {"norm", "core"}
    assert recomputed([]) == frozenset()
    with pytest.raises(AssertionError, match="everything"):
        recomputed(["everything"])


@pytest.mark.parametrize(
    ("normed", "encoder", "expected"),
    [
        (False, {}, ("none", 1e-5)),
        (True, {}, ("rms", 1e-5)),
        (True, {"norm": "layer", "norm_eps": 1e-6}, ("layer", 1e-6)),
    ],
)
def test_projectors_of_earlier_runs_have_the_norm_of_their_encoder(normed, encoder, expected):
    """Their norm was on or off, and of the kind that the layers have."""
    data = json.loads(json.dumps(to_json(load("tiny-multimodal"))))
    model = data["modules"]["vision"]["model"]
    for name in ("norm", "norm_eps"):
        del model["projector"][name]
    model |= {**encoder, "projector": {**model["projector"], "norm": normed}}
    projector = from_json(data).modules["vision"].model.projector
    assert (projector.norm, projector.norm_eps) == expected


def test_a_run_with_an_encoder_of_images_goes_through_json_and_back():
    run = load("tiny-multimodal")
    vision = replace(run.modules["vision"], model=replace(radio_h(width=128), layer_scale=0.5))
    run = replace(run, modules={"vision": vision})
    assert not list(type_problems(run))
    assert from_json(json.loads(json.dumps(to_json(run)))) == run
