"""`braid plan --trace`, `--svg` and `--html` on a cluster: predicted seconds, and a page that stands alone."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from braid import recipes
from braid.cli import main
from braid.cli.packed_timeline import TICKS
from braid.cli.plan_files import timeline_of
from braid.cli.plan_html import PageFacts, RankedMeshes, page
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.schedule.trace import Lane, lane_of
from braid.schedule.views import stream_of
from braid.timing.links import load_cluster
from braid.timing.predict import predict
from tests.cli.browser import chromium, pixels

RUN = ("qwen3-30b-a3b", "--world", "8", "--model.pattern", "[*E]x4", "--mesh.tp", "1", "--mesh.ep", "4")
RUN += (
    "--mesh.pp",
    "2",
    "--mesh.shard",
    "optimizer",
    "--train.micro-batches",
    "9",
    "--train.batch-samples",
    "36",
)
LARGEST = 3_000_000


class Written(NamedTuple):
    """The files of one plan."""

    trace: dict[str, Any]
    svg: str
    page: str
    file: Path
    told: dict[str, Any]
    """What `--json` prints."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("plan")
    names = [f"--{kind}={folder / f'plan.{kind}'}" for kind in ("trace", "svg", "html")]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        assert main(["plan", *RUN, "--cluster", "h100-ib", "--json", *names]) == 0
    trace, svg, html = (folder / f"plan.{kind}" for kind in ("trace", "svg", "html"))
    told = json.loads(next(line for line in lines if line.startswith("{")))
    return Written(json.loads(trace.read_text()), svg.read_text(), html.read_text(), html, told)


def spans(trace: dict[str, Any], thread: str, rank: int) -> list[dict[str, Any]]:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    own = (e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank)
    return [e for e in own if names[e["pid"], e["tid"]].split()[0] == thread]


def test_a_trace_has_the_seconds_of_the_table(written: Written) -> None:
    time = written.told["time"]
    computing = ("products", "attention", "scans", "memory", "ep_etp", "slab")
    for stage, rank in enumerate((0, 4)):
        (step,) = spans(written.trace, "step", rank)
        assert step["dur"] == pytest.approx(1e6 * time["seconds"], rel=1e-6)
        spent = sum(event["dur"] for event in spans(written.trace, "compute", rank))
        assert spent == pytest.approx(
            1e6 * sum(time["stages"][stage].get(part, 0.0) for part in computing), rel=1e-4
        )
        assert {e["args"]["micro_batch"] for e in spans(written.trace, "compute", rank)} == set(range(9))


def test_a_drawing_is_in_milliseconds(written: Written) -> None:
    length = float(re.search(r"([\d.]+) ms long", written.svg)[1])
    assert length == pytest.approx(1e3 * written.told["time"]["seconds"], rel=0.05)
    assert "forwards" not in written.svg.replace("live forwards", "")


def test_without_a_cluster_lengths_are_relative_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "tiny", "--html", str(page)]) == 0
    assert "lengths are relative; `braid plan --cluster NAME`" in capsys.readouterr().err
    text = page.read_text()
    assert "lengths are relative" in text
    assert data_of(text)["real"] is False
    assert "Where the time goes" not in text


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    for option, held in (("html", "<html>mine"), ("svg", "to do"), ("trace", '{"step": 1}')):
        notes.write_text(held)
        assert main(["plan", "tiny", f"--{option}", str(notes)]) == 2
        assert f"--{option} {notes} is a file of another kind, and would be lost" in capsys.readouterr().err
        assert notes.read_text() == held
        for earlier in ("", "its own"):  # an empty file, and the one that the first command wrote
            if not earlier:
                notes.write_text(earlier)
            assert main(["plan", "tiny", f"--{option}", str(notes)]) == 0
            capsys.readouterr()
    notes.write_text("to do")
    assert main(["train", "tiny", "--trace", str(notes), "--out", str(tmp_path / "run")]) == 2
    assert "is a file of another kind, and would be lost" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Tags(HTMLParser):
    """Tags that are open, and the tables of a page by the heading before them."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.heading = self.cell = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.cell = ""
        self.heading = "" if tag == "h2" else self.heading
        if tag == "tr":
            self.tables.setdefault(self.heading, []).append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.tables[self.heading][-1].append(self.cell)

    def handle_data(self, data: str) -> None:
        self.cell += data
        if self.open and self.open[-1] == "h2":
            self.heading += data


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    return tags


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.search(r'id="timeline-data">(.*?)</script>', text, re.DOTALL)[1])
    return found


def numbers(text: str) -> Iterator[int]:
    """The varints of a lane."""
    number = shift = 0
    for byte in b64decode(text):
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0


def test_a_page_needs_nothing_else(written: Written) -> None:
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?:|\bfetch\(|XMLHttp|import\(", written.page)
    assert "default-src 'none'" in written.page
    assert len(written.page) < LARGEST
    assert "$" not in re.sub(r"<script>.*</script>", "", written.page, flags=re.DOTALL), (
        "a place was left empty"
    )


def test_a_page_has_the_tables(written: Written) -> None:
    tables, told = parsed(written.page).tables, written.told
    columns, *parts = next(rows for name, rows in tables.items() if name.startswith("Where the time goes"))
    assert columns[:4] == ["part", "", "time", "share"]
    known = told["time"]["stages"][told["time"]["stage"]]
    shares = {row[0]: float(row[3].removesuffix("%")) for row in parts if row[0] in known}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert all(
        share == pytest.approx(100 * known[name] / told["time"]["seconds"], abs=0.06)
        for name, share in shares.items()
    )
    columns, *stages = next(rows for name, rows in tables.items() if name.startswith("Memory"))
    assert [row[0] for row in stages] == ["0", "1"]
    for row in stages:
        cells = dict(zip(columns, row, strict=True))
        held = ("parameters", "gathered", "gradients", "optimizer", "activations", "temporary")
        assert sum(float(cells[kind]) for kind in held) == pytest.approx(float(cells["peak"]), abs=0.031)
    for each in told["time"]["advice"]:
        assert f"<code>{escape(each['options'])}</code> saves" in written.page


def test_the_timeline_of_a_page_is_that_of_the_trace(written: Written) -> None:
    data = data_of(written.page)
    assert data["seconds"] == pytest.approx(written.told["time"]["seconds"])
    tick = 1e6 * data["seconds"] / TICKS
    for row in data["rows"]:
        for lane, text in row["lanes"].items():
            start, found = 0, []
            values = [*numbers(text)]
            for kind, batch, after, length in zip(
                values[::4], values[1::4], values[2::4], values[3::4], strict=True
            ):
                start += after
                _, before, behind = data["kinds"][kind]
                found.append((start * tick, length * tick, f"{before}{batch - 1 if batch else ''}{behind}"))
            wanted = [
                (e["ts"], e["dur"], e["name"]) for e in spans(written.trace, lane, row["rank"]) if e["dur"]
            ]
            assert len(found) == len(wanted) > 0
            for (start_found, length_found, name), (begin, length, known) in zip(
                sorted(found, key=lambda one: (one[2], one[0])),
                sorted(wanted, key=lambda one: (one[2], one[0])),
                strict=True,
            ):
                assert name == known
                assert start_found == pytest.approx(begin, abs=2 * tick)
                assert length_found == pytest.approx(length, abs=2 * tick)


def test_ranked_meshes_are_shown_as_given(written: Written) -> None:
    meshes = RankedMeshes(
        columns=("step", "MFU", "mesh"),
        numbers=("step", "MFU"),
        rows=(("24.1 s", "33 %", "pp 16 <best>"), ("30.0 s", "27 %", "pp 8")),
        seconds=(24.1, 30.0),
        notes=("970 candidates",),
    )
    made = plan(recipes.load("tiny"), 1)
    facts = PageFacts(
        name="tiny",
        header=["1 rank"],
        estimate=estimate(made),
        limit=None,
        prediction=None,
        faster=None,
        timeline=timeline_of(made, None),
        meshes=meshes,
    )
    rows = parsed(page(facts)).tables["The best meshes"]
    assert [[cell for cell in row if cell] for row in rows] == [list(meshes.columns), *map(list, meshes.rows)]
    assert "970 candidates" in page(facts)


# ------------------------------------------------------------------------------------------- in a browser

CANVAS = "#timeline canvas"


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_the_timeline_and_zooms(written: Written, dark: bool) -> None:
    with chromium(dark=dark) as browser:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        browser.get(written.file.as_uri())
        canvas = browser.find_element("css selector", CANVAS)
        data = data_of(written.page)
        ops = sum(len([*numbers(text)]) // 4 for row in data["rows"] for text in row["lanes"].values())
        assert canvas.get_attribute("data-ops") == str(ops)

        def shown() -> tuple[float, float]:
            """From when to when the timeline is shown, in seconds."""
            sizes = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
            words = browser.find_element("id", "timeline-view").text.split()
            return float(words[0]) * sizes[words[1]], float(words[3]) * sizes[words[4]]

        def settled(action: Any) -> tuple[float, float]:
            """What is shown after an action and the next frame."""
            action()
            browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
            return shown()

        whole = shown()
        assert whole == pytest.approx((0, data["seconds"]), rel=1e-3)
        expected = {"F": (143, 185, 234), "B": (239, 163, 90)} if not dark else {"F": (79, 134, 198)}
        assert set(expected.values()) <= pixels(browser, CANVAS)
        first, last = settled(lambda: canvas.send_keys("+"))
        assert last - first == pytest.approx(data["seconds"] / 2, rel=0.01)
        origin = ScrollOrigin.from_element(canvas)
        wheel = ActionChains(browser).scroll_from_origin(origin, 0, -100)
        nearer = settled(wheel.perform)
        assert first < nearer[0] < nearer[1] < last
        drag = ActionChains(browser).drag_and_drop_by_offset(canvas, -80, 0)
        moved = settled(drag.perform)
        assert moved[0] > nearer[0]
        assert moved[1] - moved[0] == pytest.approx(nearer[1] - nearer[0], rel=0.02)
        assert settled(lambda: canvas.send_keys("0")) == whole

        row = canvas.size["height"] // 2 - 34
        ActionChains(browser).move_to_element_with_offset(canvas, 0, -row).perform()
        tip = browser.find_element("css selector", "#timeline .tip").text.splitlines()
        names = {event["name"] for event in spans(written.trace, "compute", 0)}
        assert tip[0] in names
        assert tip[2] == "stage 0, rank 0, compute"
        assert browser.get_log("browser") == [], "no errors, and nothing that was not allowed"


@pytest.mark.long
def test_the_largest_page_is_small_and_opens(tmp_path: Path) -> None:
    """DeepSeek-V3 in DualPipeV over 16 stages with 120 micro-batches."""
    run = recipes.load("deepseek-v3")
    mesh = replace(run.mesh, pp=16, ep=64, shard="optimizer", schedule="dual_pipe_v", overlap=True)
    train = replace(run.train, micro_batches=120, batch_samples=15360)
    made = plan(replace(run, mesh=mesh, train=train), 2048)
    found = predict(made, load_cluster("h100-ib"))
    facts = PageFacts(
        name="deepseek-v3",
        header=[],
        estimate=estimate(made),
        limit=None,
        prediction=found,
        faster=None,
        timeline=timeline_of(made, found),
    )
    text = page(facts)
    assert len(text) < LARGEST
    data = data_of(text)
    computing = sum(len([*numbers(row["lanes"]["compute"])]) // 4 for row in data["rows"])
    assert computing == sum(
        span.end > span.start and lane_of(span.op, stream_of(made.schedule)(span.op)) is Lane.COMPUTE
        for each in found.timeline.spans
        for span in each
    )
    assert found.timeline.makespan == pytest.approx(found.seconds, rel=0.02), "all 120, not a shorter step"
    file = tmp_path / "plan.html"
    file.write_text(text)
    with chromium() as browser:
        browser.get(file.as_uri())
        assert int(browser.find_element("css selector", CANVAS).get_attribute("data-ops")) > computing
