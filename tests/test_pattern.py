"""The layer-pattern language: every row of its table, and what holds for every pattern."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.pattern import Kind, PatternError, compact, cut, parse, stages

LEGAL = {
    # text: (physical, logical, segments as lists of blocks, MTP depths, MTP layers)
    "M*M*": (4, 4, [["M", "*", "M", "*"]], 0, ""),
    "[*-][*E]": (4, 2, [["[*-]", "[*E]"]], 0, ""),
    "M[M*]-": (4, 3, [["M", "[M*]", "-"]], 0, ""),
    "[M*E]": (3, 1, [["[M*E]"]], 0, ""),
    "[E]": (1, 1, [["[E]"]], 0, ""),
    "[*-]|[*E]/*E": (4, 2, [["[*-]"], ["[*E]"]], 1, "*E"),
    "[*-][*-]|[*-][*-]|[*E][*E]|[*E][*E]": (16, 8, [["[*-]"] * 2] * 2 + [["[*E]"] * 2] * 2, 0, ""),
    "[*E][*E]|/*E": (4, 2, [["[*E]", "[*E]"], []], 1, "*E"),
    "M||M": (2, 2, [["M"], [], ["M"]], 0, ""),
    "|M*": (2, 2, [[], ["M", "*"]], 0, ""),
    "M*/MM/MM": (2, 2, [["M", "*"]], 2, "MM"),
    "M*/": (2, 2, [["M", "*"]], 0, ""),
    "M*//": (2, 2, [["M", "*"]], 0, ""),
    "/MM": (0, 0, [[]], 1, "MM"),
    "": (0, 0, [[]], 0, ""),
    None: (0, 0, [[]], 0, ""),
    "+D": (2, 2, [["+", "D"]], 0, ""),
    "[-*]": (2, 1, [["[-*]"]], 0, ""),
    "[M-E]": (3, 1, [["[M-E]"]], 0, ""),
    "[G*E]|G-": (5, 3, [["[G*E]"], ["G", "-"]], 0, ""),
    "D|[+-]/DE/DE": (3, 2, [["D"], ["[+-]"]], 2, "DE"),
}

ILLEGAL = {
    # text: (where the caret stands, words of the rule)
    "[MM]": (2, "share the checkpoint keys"),
    "[**]": (2, "share the checkpoint keys"),
    "[M*M]": (3, "share the checkpoint keys"),
    "[--]": (2, "share the checkpoint keys"),
    "[+D]": (2, "share the checkpoint keys"),
    "[*-]*+": (5, "one attention family"),
    "[*+]": (2, "one attention family"),
    "*|D": (2, "one attention family"),
    "*E/+E": (3, "one attention family"),
    "/+*": (2, "one attention family"),
    "[E*]": (1, "E must be the last"),
    "[EE]": (1, "E must be the last"),
    "[]": (0, "empty"),
    "M[]": (1, "empty"),
    "[*": (0, "never closed"),
    "[*|-]": (0, "not closed before"),
    "[*/-]": (0, "not closed before"),
    "*]": (1, "never opened"),
    "[*E]]": (4, "never opened"),
    "[*[-]]": (2, "do not nest"),
    "M*/[*E]": (3, "has no groups"),
    "M*/M|M": (4, "has no |"),
    "M*/MM/M*": (6, "must be identical"),
    "M*/MM//MM": (6, "must be identical"),
    "M*/MM/": (6, "must be identical"),
    "M*//MM": (4, "must be identical"),
    "Mm": (1, "did you mean 'M'"),
    " M*": (0, "' ' is not a symbol"),
    "M*X": (2, "'X' is not a symbol"),
    "M*\n": (2, "is not a symbol"),
    "M*/Mx": (4, "'x' is not a symbol"),
    "é": (0, "'é' is not a symbol"),
}


@pytest.mark.parametrize("text", LEGAL, ids=repr)
def test_legal_patterns(text):
    layout = parse(text)
    physical, logical, segments, depths, mtp = LEGAL[text]
    assert len(layout.layers) == physical
    assert len(layout.blocks) == logical
    assert [[str(block) for block in segment.blocks] for segment in layout.segments] == segments
    assert len(layout.mtp) == depths
    assert {str(depth) for depth in layout.mtp} == ({mtp} if depths else set())


@pytest.mark.parametrize("text", ILLEGAL, ids=repr)
def test_illegal_patterns_say_which_rule_and_where(text):
    position, rule = ILLEGAL[text]
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert caught.value.position == position
    assert rule in caught.value.rule
    *_, shown, caret = str(caught.value).splitlines()
    assert len(shown) == len(text) + 2
    assert caret == " " * (2 + position) + "^"


def test_pattern_errors_are_value_errors():
    assert issubclass(PatternError, ValueError)


def test_numbers_are_physical_from_1_and_blocks_logical_from_0():
    layout = parse("M[M*]-")
    assert [(layer.kind.value, layer.number, layer.block) for layer in layout.layers] == [
        ("M", 1, 0),
        ("M", 2, 1),
        ("*", 3, 1),
        ("-", 4, 2),
    ]


def test_mtp_numbers_start_again_in_every_depth_and_stand_on_the_last_segment():
    layout = parse("M*|M-/*E/*E")
    for depth in (0, 1):
        assert [(x.kind.value, x.number, x.block, x.segment, x.depth) for x in layout.mtp[depth].layers] == [
            ("*", 1, 0, 1, depth),
            ("E", 2, 0, 1, depth),
        ]
    assert {layer.depth for layer in layout.layers} == {None}


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("/*E", ["[*E]"]),
        ("/MM", ["M", "M"]),
        ("/*-*E", ["[*-]", "[*E]"]),
        ("/-M", ["-", "M"]),
        ("/M*M", ["[M*]", "M"]),
    ],
)
def test_a_depth_is_gathered_into_as_few_blocks_as_the_group_rules_allow(text, blocks):
    assert [str(block) for block in parse(text).mtp[0].blocks] == blocks


@pytest.mark.parametrize("text", ["[*-][*-]/*-", "[*E]|-/*E/*E/*E", "*"])
def test_random_masks_of_no_two_layers_are_alike(text):
    layout = parse(text)
    streams = [layer.stream for part in (layout, *layout.mtp) for layer in part.layers]
    assert len(set(streams)) == len(streams)


def test_a_layout_cannot_be_changed_and_compares_by_value():
    layout = parse("[*-]")
    with pytest.raises(FrozenInstanceError):
        layout.segments = ()
    assert layout == parse("[*-]")
    assert hash(layout) == hash(parse("[*-]"))
    assert layout != parse("*-")


def test_kinds_flatten_groups_and_count_mtp():
    assert parse("M[*-]/*E").kinds() == {Kind.MAMBA2, Kind.ATTENTION, Kind.MLP, Kind.MOE}


# ------------------------------------------------------------------------------------------ pipeline


def test_segments_are_dealt_to_ranks_in_turn():
    layout = parse("[*-][*-]|[*-][*-]|[*E][*E]|[*E][*E]")
    held = [[segment.index for segment in stage.segments] for stage in stages(layout, 2)]
    assert held == [[0, 2], [1, 3]]
    last = stages(layout, 2)[1].segments[1]
    assert (last.index, last.layers_before, last.blocks_before) == (3, 12, 6)


def test_without_pipes_the_split_is_equal_in_layers():
    layout = cut(parse("[*-]M-[*E]MM/*E"), 2)
    assert str(layout) == "[*-]M-|[*E]MM/*E"
    assert [layer.segment for layer in layout.layers] == [0] * 4 + [1] * 4
    assert {layer.segment for layer in layout.mtp[0].layers} == {1}
    assert stages(parse("M*M*"), 2)[1].segments[0].layers_before == 2


def test_one_rank_holds_every_segment_as_its_virtual_stages():
    (stage,) = stages(parse("M||M"), 1)
    assert [str(segment) for segment in stage.segments] == ["M", "", "M"]


@pytest.mark.parametrize(
    ("text", "pp", "position", "rule"),
    [
        ("M[M*]-", 2, 1, "would cut this group"),
        ("M*M", 2, 3, "split equally"),
        ("M|M|M", 2, 5, "multiple of 2"),
        ("M|M|M/*", 2, 5, "multiple of 2"),
        ("M*", 0, 2, "at least one rank"),
    ],
)
def test_patterns_that_do_not_fit_the_pipeline(text, pp, position, rule):
    for ask in (cut, stages):
        with pytest.raises(PatternError, match=rule) as caught:
            ask(parse(text), pp)
        assert caught.value.position == position


def test_first_and_last_stage_counts_do_not_exist():
    with pytest.raises(TypeError):
        cut(parse("M*M*M*"), 2, first=1, last=1)


# ---------------------------------------------------------------------------------------- properties

mixers = st.sampled_from(["MG*", "MG+D"])


@st.composite
def patterns(draw):
    """Legal patterns, built from the rules and not from the parser."""
    family = draw(mixers)

    def group():
        kinds = draw(st.permutations([*family, "-"]).map(lambda p: p[: draw(st.integers(0, 3))]))
        if "+" in kinds and "D" in kinds:
            kinds.remove("D")
        kinds += draw(st.sampled_from([[], ["E"]])) or ([] if kinds else ["E"])
        return "[" + "".join(kinds) + "]"

    def segment():
        items = draw(st.lists(st.sampled_from([*family, "-", "E", "["]), max_size=5))
        return "".join(group() if item == "[" else item for item in items)

    main = "|".join(segment() for _ in range(draw(st.integers(1, 4))))
    depth = draw(st.text(alphabet=family + "-E", min_size=1, max_size=4))
    return main + ("/" + depth) * draw(st.integers(0, 3))


def check_round_trip(text):
    layout = parse(text)
    assert str(layout) == text
    assert parse(str(layout)) == layout


def check_parses_or_points(text):
    try:
        layout = parse(text)
    except PatternError as error:
        assert 0 <= error.position <= len(text)
        assert error.text == text
    else:
        assert parse(str(layout)) == layout


@given(patterns())
def test_print_and_parse_again_is_the_identity(text):
    check_round_trip(text)


@given(patterns())
def test_numbering_is_a_bijection(text):
    layout = parse(text)
    assert [layer.number for layer in layout.layers] == list(range(1, len(layout.layers) + 1))
    assert [block.index for block in layout.blocks] == list(range(len(layout.blocks)))
    symbols = [c for c in text.split("/")[0] if c not in "[]|"]
    assert [layer.kind.value for layer in layout.layers] == symbols
    for segment in layout.segments:
        for block in segment.blocks:
            assert {(layer.block, layer.segment) for layer in block.layers} == {(block.index, segment.index)}


@given(patterns(), st.integers(1, 6))
def test_stages_hold_every_segment_exactly_once(text, pp):
    try:
        layout = cut(parse(text), pp)
    except PatternError:
        return
    held = [segment for stage in stages(layout, pp) for segment in stage.segments]
    assert sorted(segment.index for segment in held) == list(range(len(layout.segments)))
    assert layout.layers == tuple(
        layer for segment in sorted(held, key=lambda s: s.index) for layer in segment.layers
    )
    assert [layer.kind for layer in layout.layers] == [layer.kind for layer in parse(text).layers]


@given(st.one_of(st.text(), st.text(alphabet="MG*+D-E[]|/ mX")))
def test_every_text_parses_or_gets_a_positioned_error(text):
    check_parses_or_points(text)


@pytest.mark.long
@settings(max_examples=4_000, deadline=None)
@given(st.text(alphabet="MG*+D-E[]|/", max_size=24))
def test_every_text_parses_or_gets_a_positioned_error_at_length(text):
    check_parses_or_points(text)


@pytest.mark.long
@settings(max_examples=2_000, deadline=None)
@given(patterns())
def test_print_and_parse_again_is_the_identity_at_length(text):
    check_round_trip(text)


# --------------------------------------------------------------------------------------------- repeats


@pytest.mark.parametrize(
    ("pattern", "written_out"),
    [
        ("Mx3", "MMM"),
        ("[*-]x2|[*E]x3*", "[*-][*-]|[*E][*E][*E]*"),
        ("Mx1*", "M*"),
        ("[+-]x3[+E]x58/+E", "[+-]" * 3 + "[+E]" * 58 + "/+E"),
    ],
)
def test_x_repeats_the_layer_or_group_before_it(pattern: str, written_out: str) -> None:
    assert parse(pattern) == parse(written_out)


@given(patterns())
def test_a_compact_pattern_means_the_same(text: str) -> None:
    layout = parse(text)
    assert parse(compact(layout)) == layout
    assert len(compact(layout)) <= len(str(layout))


@pytest.mark.parametrize(
    ("pattern", "rule", "position"),
    [
        ("x3", "'x' is not a symbol", 0),
        ("M|x3", "'x' is not a symbol", 2),
        ("Mx", "write a number from 1 to 10,000 behind it", 1),
        ("Mx0", "write a number from 1 to 10,000 behind it", 1),
        ("Mx10001", "write a number from 1 to 10,000 behind it", 1),
        ("Mx" + "9" * 5000, "write a number from 1 to 10,000 behind it", 1),
        ("Mx2x3", "repeated already", 3),
        ("[Mx2*]", "a group is repeated as a whole", 2),
        ("M/*x2", "'x' is not a symbol", 3),
    ],
)
def test_wrong_repeats(pattern: str, rule: str, position: int) -> None:
    with pytest.raises(PatternError, match=rule) as raised:
        parse(pattern)
    assert raised.value.position == position


TOO_LONG = ("*-" * 10_001, "[*-]x10000M", "M|[*-]x5000|[*-]x5000", "*x10000" * 2000, "M" * 300_000)


@pytest.mark.parametrize("text", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_pattern_that_no_memory_holds_is_refused(text):
    with pytest.raises(PatternError, match=r"more than 20,000 layers|at most 100,000") as error:
        parse(text)
    assert len(str(error.value)) < 400


def test_a_pattern_may_have_as_many_layers_as_that():
    assert len(parse("[*-]x10000").layers) == 20_000
