"""plan(run, world): what follows from a run, and every problem of it at once."""

from dataclasses import replace

import pytest

from braid.architecture import HyperConnections
from braid.choices import BYTE_VOCAB
from braid.data import ByteTokenizer
from braid.errors import ConfigError, ExitCode
from braid.pattern import parse
from braid.planning.plan import check, phase_flops, plan, whole_model
from braid.schedule import Act
from tests.runs import small_run


def changed(**fields):
    """The small run with dotted fields (`model__hidden`) replaced."""
    run = small_run()
    for dotted, value in fields.items():
        *path, name = dotted.split("__")
        parts = [run]
        for step in path:
            parts.append(getattr(parts[-1], step))
        for part, outer in zip(reversed(parts), [*reversed(path), None], strict=True):
            value = replace(part, **{name: value})
            name = outer
        run = value
    return run


def problems(world=1, **fields):
    return {problem.field: problem for problem in check(changed(**fields), world)}


def test_a_sound_run_is_worked_out():
    worked_out = plan(changed(model__pattern="[*-]|[*E]", mesh__pp=2), world=4)
    assert (worked_out.axes.dp, worked_out.micro_batch_samples, worked_out.step_tokens) == (2, 2, 128)
    assert [str(stage.segments[0]) for stage in worked_out.stages] == ["[*-]", "[*E]"]


def test_what_reorders_phases_needs_a_schedule_that_has_them():
    for name in ("delay_weights", "early_release", "paired_ends"):
        assert problems(**{f"mesh__{name}": True})[f"mesh.{name}"].remedy == "mesh.overlap as well"
        assert problems(**{f"mesh__{name}": True, "mesh__overlap": True, "model__pattern": "[*E][*E]"}) == {}
    folded = {"mesh__schedule": "dual_pipe_v", "mesh__pp": 2, "model__pattern": "[*-]|*|-|[*E]"}
    assert problems(2, **folded, mesh__delay_weights=True) == {}


def test_a_size_of_zero_is_a_problem_and_nothing_is_divided_by_it():
    assert list(problems(train__micro_batches=0)) == ["train.micro_batches"]


def test_the_layout_is_cut_for_the_pipeline():
    assert str(plan(changed(mesh__pp=2), world=2).layout) == "[*-]|[*E]"


@pytest.mark.parametrize("pattern", ["[*-][*E]/*E/*E", "[*-]|[*E]/*E/*E", "||[*-]|[*E]|/*E/*E"])
def test_without_a_pipeline_there_is_one_segment_whatever_the_pattern_says(pattern):
    worked_out = plan(changed(model__pattern=pattern), world=2)
    assert worked_out.layout == parse("[*-][*E]/*E/*E")
    assert [stage.segments for stage in worked_out.stages] == [worked_out.layout.segments]
    assert worked_out.schedule == plan(changed(model__pattern="[*-][*E]/*E/*E"), world=2).schedule


def test_a_fold_is_cut_into_two_segments_for_each_rank_and_the_first_holds_both_ends():
    folded = {"mesh__schedule": "dual_pipe_v", "mesh__pp": 2, "model__pattern": "[*-]|*|-|[*E]"}
    stages = plan(changed(**folded), world=2).stages
    assert [[str(segment) for segment in stage.segments] for stage in stages] == [["[*-]", "[*E]"], ["*", "-"]]


def test_units_are_the_weights_of_the_model_with_the_mesh_that_shares_them():
    worked_out = plan(changed(model__tied=False, train__dtype="bf16"), world=2)
    inner = "stack.blocks.1.layers.moe.inner"
    assert [(unit.path, unit.mesh, unit.wide) for unit in worked_out.units] == [
        ("embedding", "dense", False),
        ("stack.blocks.0", "dense", False),
        (f"{inner}.router", "dense", True),
        (f"{inner}.experts", "expert", False),
        ("stack.blocks.1", "dense", False),
        ("final_norm", "dense", False),
        ("head", "dense", False),
    ]


def test_all_problems_come_at_once_with_value_rule_and_remedy():
    run = changed(
        model__pattern="[*-][**]",
        model__hidden=0,
        optim__lr=-1.0,
        train__batch_samples=3,
        optim__warmup_steps=99,
    )
    with pytest.raises(ConfigError) as caught:
        plan(run, world=0)
    error = caught.value
    assert [problem.field for problem in error.problems] == [
        "model.hidden",
        "train.batch_samples",
        "optim.lr",
        "model.pattern",
        "world",
        "optim.warmup_steps",
    ]
    assert error.exit_code is ExitCode.CONFIG
    assert "optim.lr = -1.0\n  rule  must be a number above 0\n  set   " in str(error)
    assert "        [*-][**]\n              ^" in str(error)
    assert all(problem.rule and problem.remedy for problem in error.problems)


@pytest.mark.parametrize("world", ["2", 2.0, None, True])
def test_a_world_that_is_no_whole_number_is_refused(world):
    assert problems(world)["world"].rule == "must be int"


def test_sparse_attention_parses_but_is_refused_by_name():
    problem = problems(model__pattern="D-")["model.pattern"]
    assert "D (sparse attention)" in problem.rule
    assert "not built" in problem.rule


def test_mtp_depths_need_the_shapes_of_their_layers_too():
    assert problems(model__pattern="[*-]/*E") == {}
    assert "E" in problems(model__pattern="[*-]/*E", model__moe=None)["model.moe"].rule


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("*", "attention"),
        ("+", "latent_attention"),
        ("M", "mamba2"),
        ("G", "delta_net"),
        ("-", "mlp"),
        ("E", "moe"),
    ],
)
def test_a_kind_without_its_shape_is_named(pattern, shape):
    fields = {"model__pattern": pattern, f"model__{shape}": None}
    assert pattern in problems(**fields)[f"model.{shape}"].rule


@pytest.mark.parametrize(
    ("fields", "world", "field", "remedy"),
    [
        ({"model__attention__kv_heads": 3}, 1, "model.attention.kv_heads", "2 or 4"),
        ({"model__attention__head_dim": 5}, 1, "model.attention.head_dim", "4 or 6"),
        ({"model__moe__top_k": 5}, 1, "model.moe.top_k", "1 to 4"),
        ({"train__batch_samples": 5}, 1, "train.batch_samples", "4 or 6"),
        ({}, 4, "train.batch_samples", "8"),
        ({"mesh__pp": 2}, 3, "world", "2 or 4"),
        ({"model__dropout": 1.0}, 1, "model.dropout", "0 to below 1"),
        ({"optim__schedule": "wsd"}, 1, "optim.decay_steps", "1 or more"),
        ({"optim__schedule": "wsd", "optim__decay_steps": 7}, 1, "optim.warmup_steps", "at most 1"),
        ({"optim__lr": float("nan")}, 1, "optim.lr", "a number above 0"),
        ({"data__weights": (1.0,)}, 1, "data.weights", "0 weights, or none"),
        ({"model__vocab": 1}, 1, "model.vocab", "257 or more"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(fields, world, field, remedy):
    assert remedy in problems(world, **fields)[field].remedy


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"optim__schedule": "Cosine"}, "optim.schedule", "must be one of 'cosine', 'wsd'"),
        ({"model__norm": "batch"}, "model.norm", "must be one of 'rms', 'layer'"),
        ({"data__sources": "folder"}, "data.sources", "must be a tuple of strings"),
        ({"train__steps": 6.5}, "train.steps", "must be an integer"),
        ({"train__steps": True}, "train.steps", "must be an integer"),
        ({"optim__lr": "3e-4"}, "optim.lr", "must be a number"),
        ({"optim__betas": (0.9,)}, "optim.betas", "must be a tuple of 2 numbers"),
        ({"model__attention__window": 2.5}, "model.attention.window", "must be an integer or None"),
        ({"model__mlp": 3}, "model.mlp", "must be Mlp or None"),
        ({"optim": None}, "optim", "must be Optim"),
    ],
)
def test_values_of_a_wrong_type_are_named_before_any_rule_is_tried(fields, field, rule):
    assert problems(**fields)[field].rule == rule


@pytest.mark.parametrize(
    "field", ["optim__clip", "optim__weight_decay", "model__moe__aux_loss", "model__mtp_loss"]
)
def test_infinite_numbers_are_refused(field):
    assert field.replace("__", ".") in problems(**{field: float("inf")})


def test_the_plan_knows_the_byte_tokenizers_vocabulary():
    assert ByteTokenizer().vocab == BYTE_VOCAB


def test_a_model_without_layers_is_refused():
    assert "at least one layer" in problems(model__pattern="")["model.pattern"].rule


def test_warm_up_and_decay_may_fill_a_run():
    wsd = {"optim__schedule": "wsd", "optim__warmup_steps": 2}
    assert not problems(**wsd, optim__decay_steps=6)
    assert "optim.warmup_steps" in problems(**wsd, optim__decay_steps=7)


@pytest.mark.parametrize("pp", [2, 4])
def test_paired_ends_are_for_a_step_without_a_pipeline(pp):
    mesh = {"mesh__overlap": True, "mesh__paired_ends": True, "train__micro_batches": 4}
    pattern = "[*E]" * pp
    assert "mesh.paired_ends" in problems(pp, **mesh, mesh__pp=pp, model__pattern=pattern)
    assert not problems(1, **mesh)


@pytest.mark.parametrize(
    ("tied", "pattern", "summed"),
    [(False, "[*-]|[*E]", False), (True, "[*-]|[*E]", True), (False, "[*-]|[*E]/*E", True)],
)
def test_an_embedding_that_both_ends_use_is_summed(tied, pattern, summed):
    schedule = plan(changed(mesh__pp=2, model__tied=tied, model__pattern=pattern), world=2).schedule
    acts = {op.act for ops in schedule.ops for op in ops}
    assert (Act.SUM_COPIES in acts) is summed


@pytest.mark.parametrize("hyper", [None, HyperConnections(streams=3)])
def test_phases_share_the_operations_of_the_whole_model(hyper):
    pattern = {"model__pattern": "[*-]|[*E]/*E", "model__vocab": 300, "model__hyper": hyper}
    worked_out = plan(changed(mesh__pp=2, **pattern), world=2)
    first, last = phase_flops(worked_out)
    assert sum(first.values()) + sum(last.values()) == whole_model(worked_out).flops(32)
    assert first.keys() == {"0.block"}
    exits = {"final_norm", "mtp0.final_norm"} if hyper else set()
    assert last.keys() == {"1.block", "head", "mtp0.enter", "mtp0.0.block", "mtp0.head"} | exits
    assert last["head"] == last["mtp0.head"] == 2 * 32 * 16 * 300


def test_dispatchers_have_nothing_to_say_where_experts_are_not_shared():
    """DeepEP cannot repeat what it sends; a rank that has all experts sends nothing."""
    chosen = {"mesh__dispatcher": "deep_ep", "train__recompute": ("block",), "train__dtype": "bf16"}
    assert "train.recompute" in problems(2, **chosen, mesh__ep=2)
    assert not problems(2, **chosen)


@pytest.mark.parametrize(("seconds", "refused"), [(0.0, False), (0.5, True), (1.0, False), (-1.0, True)])
def test_a_stall_is_looked_for_after_a_second_or_never(seconds, refused):
    assert ("train.stall_timeout_s" in problems(train__stall_timeout_s=seconds)) is refused
