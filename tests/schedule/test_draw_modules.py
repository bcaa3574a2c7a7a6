"""Pictures of several modules: a row for each station, a colour for each module, and nothing overlaps."""

from itertools import combinations

import pytest

from braid.schedule import Act, Costs, Edge, Segment, draw, draw_text, interleaved, multimodule, simulate
from braid.schedule.draw import held_stages, module_letters
from tests.schedule.module_cases import drawn
from tests.schedule.test_draw import boxes, elements, extent, number, picture


def example():
    """A language model on ranks 0 to 7, vision on 0 to 5, audio on 8 and 9."""

    def on(module, *ranks):
        return Segment(module=module, ranks=ranks)

    halves = [on("language", *range(4)), on("language", *range(4, 8))] * 2
    segments = (*halves, on("vision", *range(6)), on("audio", 8), on("audio", 9))
    edges = (Edge(name="vision", source=4, target=0), Edge(name="audio", source=6, target=0))
    return simulate(multimodule(interleaved(2, 2, 8), segments, edges))


def of_seed(seed):
    case = drawn(seed)
    return simulate(multimodule(case.language, case.segments, case.edges, ahead=case.aheads()))


@pytest.fixture(params=["example", 0, 1, 2, 7], scope="module")
def timeline(request):
    return example() if request.param == "example" else of_seed(request.param)


def fills(root):
    """The fill of each CSS class."""
    style = elements(root, "style")[0].text
    return dict(rule.strip().removeprefix(".").split("{fill:") for rule in style.split("}") if "{fill:" in rule)


def test_a_row_for_each_station_and_a_colour_for_each_module(timeline):
    root, graph = picture(timeline), timeline.schedule.graph
    texts = [text.text for text in elements(root, "text")]
    assert f"{len(graph.modules)} modules" in texts[0]
    assert f"{timeline.schedule.pp} station" in texts[0]
    letters = module_letters(graph.modules)
    assert {f"{letters[name]} {name}" for name in graph.modules[1:]} <= set(texts)
    assert {held_stages(graph, station) for station in range(timeline.schedule.pp)} <= set(texts)
    fill, module_of = fills(root), {}
    for group in elements(root, "g"):
        (rect,), title = elements(group, "rect"), elements(group, "title")[0].text
        segment = int(title.split("segment ")[1].split(" ")[0])
        module_of.setdefault(fill[rect.get("class")], set()).add(graph.segments[segment].module)
    assert all(len(modules) == 1 for modules in module_of.values())
    assert {name for modules in module_of.values() for name in modules} == set(graph.modules)


def test_every_computation_of_a_station_is_in_its_row():
    timeline = example()
    rows = boxes(picture(timeline))
    computed = [[s for s in spans if s.op.act.computes and s.end > s.start] for spans in timeline.spans]
    assert [len(rows[y]) for y in sorted(rows)] == [len(each) for each in computed if each]


def test_nothing_overlaps_and_everything_lies_inside(timeline):
    root = picture(timeline)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in elements(root, "rect"):
        if rect.get("x"):
            assert number(rect, "x") + number(rect, "width") <= width
            assert number(rect, "y") + number(rect, "height") <= height
    rows = {}
    for left, right, top, bottom in (extent(text) for text in elements(root, "text") if text.text):
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        rows.setdefault(round(bottom / 4), []).append((left, right))
    for row in rows.values():
        for (left, right), (other_left, other_right) in combinations(row[:200], 2):
            assert right <= other_left + 0.5 or other_right <= left + 0.5


def test_rows_are_labelled_with_stages_and_ranks():
    texts = [text.text for text in elements(picture(example()), "text")]
    assert {"language 0 + vision 0", "language 1 + vision 0", "language 1", "audio 0", "audio 1"} <= set(texts)
    assert {"V0", "A7", "3"} <= set(texts), "micro-batches of encoders have their letter"
    assert [each for each in texts if each in ("0-3", "4-5", "6-7", "8", "9", "ranks")].count("ranks") == 1
    assert {"0-3", "4-5", "6-7"} <= set(texts)
    scattered = Segment(module="language", ranks=tuple(range(0, 40, 2)))
    schedule = multimodule(interleaved(1, 1, 2), [scattered], [])
    assert "0,2,4,6," + "…" in draw(simulate(schedule))


def test_the_text_shows_who_computes_when():
    timeline = example()
    *rows, legend = draw_text(timeline, width=60).splitlines()
    assert legend.strip() == "L language, V vision, A audio; lower case: backward; · idle"
    assert [row.split()[0] for row in rows] == ["0-3", "4-5", "6-7", "8", "9"]
    cells = [row.split("  ")[-1] for row in rows]
    assert all(len(row) == 60 for row in cells)
    assert set(cells[0]) == set("VLvl·")
    assert set(cells[2]) == set("Ll·")
    assert set(cells[3]) == set("Aa·")
    for row, idle in zip(cells, timeline.idle, strict=True):
        assert row.count("·") / 60 == pytest.approx(idle / timeline.makespan, abs=0.12)


def test_the_text_of_a_single_computation():
    language = interleaved(1, 1, 1)
    schedule = multimodule(language, [Segment(module="language", ranks=(0,))], [])
    timeline = simulate(schedule, Costs(forward=2.0, backward=4.0))
    assert draw_text(timeline, width=6).splitlines()[0] == "0  LLllll"
    assert draw_text(timeline, width=3, colour=True).splitlines()[0] == (
        "0  \033[34mL\033[0m\033[34ml\033[0m\033[34ml\033[0m"
    )
    assert [span.op.act for span in timeline.spans[0]] == [Act.F, Act.B]
