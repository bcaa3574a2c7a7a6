"""`train.precision`: what settings ask for, and what is wrong with others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.cli import main
from braid.config import Run, from_json, to_json
from braid.kernels.precision import FORMATS
from braid.precision import BLOCK_TOKENS, FORMAT_NAMES, Precision, ProductFormats, described, precision_of
from tests.runs import small_run


def formats(*each: str | None) -> ProductFormats:
    forward, input_grad, weight_grad = each
    return ProductFormats(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


@pytest.mark.parametrize(
    ("settings", "dense", "experts"),
    [
        ("", (None, None, None), (None, None, None)),
        ("fp8", (None, None, None), (None, None, None)),
        ("fp8_block", ("fp8_block",) * 3, ("fp8_block", "fp8_block", None)),
        ("fp8_row", ("fp8_row", "fp8_row", None), ("fp8_row", "fp8_row", None)),
        ("mxfp8 experts=bf16", ("mxfp8",) * 3, (None, None, None)),
        ("mxfp8 dense.weight_grad=bf16", ("mxfp8", "mxfp8", None), ("mxfp8", "mxfp8", None)),
        ("experts=fp8_row experts.weight_grad=mxfp8", (None,) * 3, ("fp8_row", "fp8_row", "mxfp8")),
        ("dense=mxfp8 bf16", (None,) * 3, (None,) * 3),
    ],
)
def test_a_setting_is_for_everything_or_for_a_kind_and_later_ones_win(settings, dense, experts):
    wanted = Precision(dense=formats(*dense), experts=formats(*experts), experts_down=formats(*experts))
    assert precision_of(settings.split()) == wanted
    assert precision_of([*settings.split(), "ends"]) == replace(wanted, ends=True)


def test_the_last_layer_of_experts_may_have_products_of_its_own():
    block = formats("fp8_block", "fp8_block", None)
    precision = precision_of(["fp8_block", "experts.down.input_grad=bf16"])
    assert precision.experts == block
    assert precision.experts_down == formats("fp8_block", None, None)
    assert precision_of(["experts.down=fp8_block"]) == Precision(experts_down=block)
    assert precision_of(["experts.down=fp8_block"]).quantised
    assert precision_of(["fp8_block", "experts.down=mxfp8", "experts=fp8_block"]).experts_down == block
    *_, down, _ = described(["fp8_block", "experts.down.input_grad=bf16"])
    assert down == "experts.down: forward fp8_block, input_grad bf16, weight_grad bf16"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("fp4", "'fp4' is no format"),
        ("head=mxfp8", "'head' is no kind of product"),
        ("dense.dgrad=mxfp8", "'dgrad' is no product"),
        ("experts=fp8", "'fp8' is no format"),
        ("experts.up.forward=mxfp8", "'up.forward' is no product"),
        ("dense.down.forward=mxfp8", "'down.forward' is no product"),
        ("mxfp8=dense", "'dense' is no format"),
    ],
)
def test_a_setting_that_means_nothing_says_what_would(setting, said):
    run = small_run()
    run = replace(run, train=replace(run.train, precision=("fp8_block", setting)))
    (problem,) = run.problems()
    assert problem.field == "train.precision"
    assert said in problem.rule
    assert "mxfp8" in problem.rule


def test_first_and_last_block_are_left_out():
    precision = precision_of(["mxfp8"])
    assert [precision.quantises(block, 4) for block in range(4)] == [False, True, True, False]
    assert all(precision_of(["mxfp8", "ends"]).quantises(block, 4) for block in range(4))
    assert not precision_of(["bf16", "ends"]).quantises(1, 4)


def test_what_a_run_does_is_said():
    assert described([]) == []
    assert described(["fp8"]) == [
        "not quantised, because `braid train` picks what pays on its GPU, and `braid plan --cluster` for that "
        "of a cluster"
    ]
    dense, experts, where = described(["fp8_block"])
    assert dense == "dense: forward fp8_block, input_grad fp8_block, weight_grad fp8_block"
    assert experts == "experts: forward fp8_block, input_grad fp8_block, weight_grad bf16"
    assert where == (
        "in all blocks but the first and the last; emulated, which is slower than bf16, but for "
        "fp8_block on Hopper"
    )


def test_settings_and_formats_have_the_same_names_and_blocks():
    assert set(FORMATS) == set(FORMAT_NAMES)
    assert {name: form.block for name, form in FORMATS.items()} == dict(BLOCK_TOKENS)


def test_a_run_keeps_its_precision_and_an_older_one_has_none():
    run = small_run()
    run = replace(run, train=replace(run.train, precision=("mxfp8", "ends")))
    stored = to_json(run)
    assert from_json(stored) == run
    del stored["train"]["precision"]
    older: Run = from_json(stored)
    assert older.train.precision == ()


def test_show_and_plan_say_what_is_quantised(capsys):
    for command, said in (
        ("show", "if fp8_saturated_* in metrics.jsonl is large"),
        ("plan", "emulated, which is slower than bf16"),
    ):
        assert main([command, "tiny", "--train.precision", "mxfp8", "experts=bf16"]) == 0
        out = capsys.readouterr().out
        assert "dense: forward mxfp8, input_grad mxfp8, weight_grad mxfp8" in out
        assert said in out
