"""Small runs have fewer equal layers in a row, and everything else that the layers of a run have."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.config import Mesh, Run
from braid.pattern import Kind, parse
from braid.planning.plan import plan
from braid.prove.shorten import without_repeats
from braid.prove.shrink import shrink
from braid.recipes import load
from tests.prove.test_shrink import on


def small(run: Run, world: int = 1) -> Run:
    (only,) = shrink(run, world)
    return only.run


def of_pattern(pattern: str, mesh: Mesh | None = None, recipe: str = "tiny") -> Run:
    run = on(recipe, Mesh() if mesh is None else mesh, micro_batches=4, samples=16)
    return replace(run, model=replace(run.model, pattern=pattern))


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [
        ("deepseek-v3", "[+-]x3[+E]x3/+E"),
        ("glm-4-5-air", "[*-][*E]x3/*E"),
        ("nemotron-h-8b", "M-M-M*-M-M*-M-M-"),
        ("qwen3-next-80b-a3b", "[GE]x3[*E][GE]x3[*E]"),
        ("hybrid-300m", "[M-][GE][*-][ME][G-][*E][M-][GE][*-][ME][G-][*E]/*E"),
    ],
)
def test_repeated_blocks_are_kept_two_or_three_times(recipe, pattern):
    assert parse(small(load(recipe)).model.pattern) == parse(pattern)


words = st.lists(st.sampled_from("ab-"), min_size=1, max_size=4)
texts = st.lists(
    st.tuples(words, st.integers(1, 9)).map(lambda each: each[0] * each[1]), min_size=1, max_size=5
)


@given(texts.map(lambda each: list(chain(*each))), st.integers(1, 5))
def test_what_differs_is_kept_and_so_is_what_follows_what(labels, fewest):
    kept = without_repeats(labels, fewest)
    left = [labels[place] for place in kept]
    assert kept == sorted(set(kept))
    assert (left[0], left[-1]) == (labels[0], labels[-1])
    assert set(pairwise(left)) == set(pairwise(labels))
    for kind in set(labels):  # of equal ones in a row, what was there, or so many
        before, after = (max(_in_a_row(each, kind)) for each in (labels, left))
        assert after >= min(before, max(2, fewest))


def _in_a_row(labels: list[str], kind: str) -> list[int]:
    return [len(list(same)) for label, same in groupby(labels) if label == kind]


def test_nothing_is_left_that_is_repeated_more_often():
    assert len(without_repeats("a" * 1000)) == 3
    assert len(without_repeats("ab" * 1000)) == 4
    assert len(without_repeats(("aaab" * 5 + "c") * 9)) == 2 * 9


def test_windows_and_full_attention_follow_one_another_as_before():
    run = on("gpt-oss-20b", Mesh(pp=2), micro_batches=4, samples=256)
    short, long = (_windows(each) for each in (small(run, 4), run))
    assert len(short) == 8 < len(long) == 24
    assert [window is None for window in short] == [window is None for window in long[:8]]


def _windows(run: Run) -> list[int | None]:
    layers = [layer for layer in parse(run.model.pattern).layers if layer.kind is Kind.ATTENTION]
    return [run.model.attention.of_layer(layer.nth).window for layer in layers]


@pytest.mark.parametrize("pattern", ["[*-]x5[M-]x7|[M-]x9[*-]", "[*-]x5[M-]x7[M-]x9[*-]"])
def test_every_segment_of_a_pipeline_keeps_what_it_has(pattern):
    """Its blocks in their order, and its place: also where the pipeline is cut by the work of blocks."""
    run = of_pattern(pattern, Mesh(pp=2))
    (whole,), (short,) = shrink(run, 2, all_layers=True), shrink(run, 2)
    before, after = (plan(each.run, 2).layout.segments for each in (whole, short))
    assert len(before) == len(after) == 2
    for one, other in zip(before, after, strict=True):
        runs = [
            [(text, len(list(same))) for text, same in groupby(map(str, each.blocks))] for each in (one, other)
        ]
        assert [(text, min(count, 3)) for text, count in runs[0]] == runs[1]


def test_layers_that_are_named_by_number_are_all_kept():
    run = of_pattern("[*-]x9")
    for same in (
        replace(run, trained=("blocks.7.*",)),
        replace(run, lr_share={"blocks.?.mlp.*": 0.5}),
    ):
        assert small(same).model.pattern == "[*-]x9"
    assert small(replace(run, trained=("blocks.*.mlp.*",))).model.pattern == "[*-]x3"


def test_some_activations_of_few_blocks_are_offloaded_and_some_are_not():
    run = of_pattern("[*-]x20", Mesh(pp=2))
    run = replace(run, train=replace(run.train, offload=0.1))
    (short,) = shrink(run, 2)
    assert short.changes["train.offload"] == (0.1, 0.5)
    made = plan(short.run, 2)
    for segment, offloaded in zip(made.layout.segments, made.schedule.offloaded, strict=True):
        assert 0 < len(offloaded) < len(segment.blocks)


def test_blocks_outnumber_a_span_of_recompute():
    run = of_pattern("[*-]x20", recipe="tiny-mhc")
    run = replace(run, train=replace(run.train, recompute=("hyper",), recompute_span=5))
    assert small(run).model.pattern == "[*-]x6"


def test_layers_of_encoders_are_shortened_too():
    run = load("tiny-multimodal")
    (name, module), *_ = run.modules.items()
    deep = replace(module, model=replace(module.model, pattern="[*-]x27"))
    assert small(replace(run, modules={name: deep})).modules[name].model.pattern == "[*-]x3"
