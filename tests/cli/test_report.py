"""`braid report`: a page that stands alone, with the numbers of metrics.jsonl, also of failed runs."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.cli import main
from braid.cli.packed_curves import kept, packed_curves
from braid.config import Run
from braid.launch.diagnosis import Heartbeat, PeerState
from braid.train.launches import this_launch
from braid.train.records import Curves, describe_state, read_metrics, read_run
from braid.train.status import RunState, Status, StatusFile
from tests.cli.browser import chromium, pixels
from tests.cli.test_plan_page import parsed
from tests.runs import small_run

LARGEST = 5_000_000
STEPS = 10_000


def loss(step: int, run: int) -> float:
    return 1.5 + 0.1 * run + 4 * math.exp(-step / 500) + 0.05 * math.sin(step * (run + 1))


def written(folder: Path, steps: int, *, number: int = 0, of: int | None = None, lr: float = 1e-3) -> Path:
    """The folder of a run that has done so many steps."""
    folder.mkdir(parents=True)
    run = small_run()
    run = replace(run, train=replace(run.train, steps=of or steps), optim=replace(run.optim, lr=lr))
    launch = this_launch(run, step=0, world=2, device="abacus", command=f"braid train it --optim.lr {lr}")
    (folder / "launches.jsonl").write_text(json.dumps(asdict(launch)) + "\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            metrics: dict[str, object] = {"step": step, "loss": loss(step, number), "grad_norm": 1 + 1 / step}
            metrics |= {"lr": lr, "tokens_per_s": 1000.0 + step % 7, "tokens": 128 * step, "mfu": 0.4}
            metrics |= {"memory_bytes": 2**30, "moe_max_over_mean": 1.5, "skipped": 0, "spike": int(step == 7)}
            metrics |= {"val_loss": loss(step, number)} if step % 100 == 0 else {}
            file.write(json.dumps(metrics) + "\n")
    line = {"step": steps, "prompt": "def ", "text": "def <b>at\x1b[31m</b>", "seed": 0, "temperature": 0.8}
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def page_of(tmp_path: Path, *folders: Path) -> str:
    file = tmp_path / "report.html"
    assert main(["report", *map(str, folders), "--out", str(file)]) == 0
    return file.read_text()


def tables_of(text: str) -> dict[str, list[list[str]]]:
    """By the heading before them."""
    return parsed(re.sub(r"<(?:input|path)[^>]*>", "", text)).tables


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.search(r'id="curves">(.*?)</script>', text, re.DOTALL)[1])
    return found


def series(packed: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Steps and values of a series of a page."""
    values = np.frombuffer(b64decode(packed["values"]), dtype="<f4")
    if isinstance(packed["steps"], str):
        return np.frombuffer(b64decode(packed["steps"]), dtype="<i4").tolist(), values.tolist()
    first, count = packed["steps"]
    return [*range(first, first + count)], values.tolist()


def test_a_page_has_the_curves_of_every_run_and_needs_nothing_else(tmp_path: Path) -> None:
    folders = [written(tmp_path / f"r{n}", 300 - n, number=n, of=300, lr=1e-3 * (n + 1)) for n in range(2)]
    text = page_of(tmp_path, *folders)
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?:|\bfetch\(|XMLHttp|import\(", text)
    assert "default-src 'none'" in text
    assert "$" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL), "a place was left empty"
    runs = data_of(text)["runs"]
    assert [each["letter"] for each in runs] == ["A", "B"]
    for number, run in enumerate(runs):
        steps, values = series(run["series"]["loss"])
        assert steps == [*range(1, 301 - number)]
        assert values == pytest.approx([loss(step, number) for step in steps], rel=1e-6)
        steps, values = series(run["series"]["val_loss"])
        assert steps == [100, 200, 300][: 3 - number]
        assert run["marks"] == [[7, "spike"]]
    tables = tables_of(text)
    assert tables["Settings that differ"][1:] == [["optim.lr", "0.001", "0.002"]]
    assert "unfinished: step 299 of 300" in text
    assert "&lt;b&gt;at\N{REPLACEMENT CHARACTER}[31m" in text, "samples are text, not elements"
    assert "braid train it --optim.lr 0.002" in text
    assert "abacus" in text


def test_the_plan_is_that_of_the_launch(tmp_path: Path) -> None:
    text = page_of(tmp_path, written(tmp_path / "one", 5))
    assert "2 ranks: " in text
    assert 'id="timeline-0-data"' in text
    assert any(name.startswith("Memory of one rank") for name in tables_of(text))
    two = page_of(tmp_path, tmp_path / "one", written(tmp_path / "two", 5, lr=1.0))
    assert 'id="timeline-1-data"' not in two, "runs with one plan share it"
    run = small_run()
    muon = this_launch(
        replace(run, optim=replace(run.optim, name="muon")), step=0, world=2, device="", command=""
    )
    (written(tmp_path / "muon", 5) / "launches.jsonl").write_text(json.dumps(asdict(muon)) + "\n")
    text = page_of(tmp_path, tmp_path / "one", tmp_path / "two", tmp_path / "muon")
    assert "Plan of A and B<" in text
    assert "Plan of C<" in text, "Muon has one moment of a matrix, so its memory differs"


def test_lines_that_are_damaged_are_skipped_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "run", 6)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1], lines[3] = "{not json", '{"step": "four", "loss": 1}'
    (folder / "metrics.jsonl").write_text("\n".join([*lines, "[1]", lines[0].replace('"loss"', '"loss'), ""]))
    curves, damage = read_metrics(folder / "metrics.jsonl")
    assert curves.steps.tolist() == [1, 3, 5, 6]
    assert [each.line for each in damage] == [2, 4, 7, 8]
    text = page_of(tmp_path, folder)
    assert "4 lines that could not be read" in text
    assert "line 4: no step, but" in text
    assert "metrics.jsonl, line 2: is not JSON" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("\n".join(["{", *lines[2:3]] * 400))
    page_of(tmp_path, folder)
    told = capsys.readouterr().err
    assert "skipped 395 more of" in told
    assert len(told.splitlines()) < 10, "a file of something else does not flood the terminal"
    steps, _ = series(data_of(text)["runs"][0]["series"]["loss"])
    assert steps == [1, 3, 5, 6]


@pytest.mark.parametrize(
    "wrong", [{"world": "2"}, {"world": 0}, {"versions": None}, {"time": "never"}, {"time": "2030-01-01"}]
)
def test_launches_with_values_of_other_types_are_damaged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = written(tmp_path / "run", 2)
    file = folder / "launches.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong) + "\n")
    record = read_run(folder)
    assert (record.launches, [each.line for each in record.damage]) == ((), [1])
    beat = Heartbeat(rank=0, count=3, host="node-7", step=3, place=2, op="B1.0", done=None, since_s=0.25)
    StatusFile(folder / "status.json", 1).observe({0: PeerState(beat, 0.1)}, (), None)
    told = json.loads((folder / "status.json").read_text())
    assert Status.from_json(told).world == 1
    for name in ("time", "process", "host"):
        with pytest.raises(ValueError, match="not a status"):
            Status.from_json(told | {name: None})


def test_values_that_no_small_float_holds_are_drawn_at_its_end() -> None:
    curves = Curves(steps=np.array([1, 2]), columns={"grad_norm": np.array([1e300, -1e300])})
    packed = packed_curves(curves, ["grad_norm"], 1)["grad_norm"]["values"]
    assert np.isfinite(np.frombuffer(b64decode(packed), "<f4")).all()


def test_a_step_that_was_logged_twice_counts_once_and_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step":1,"loss":3}\n{"step":2,"loss":null}\n{"step":1,"loss":4}\n{"step":3,"loss":1e999}\n'
    )
    curves, damage = read_metrics(file)
    assert not damage
    assert curves.columns["loss"].tolist() == pytest.approx([4, math.nan, math.nan], nan_ok=True)
    assert read_metrics(tmp_path / "none.jsonl")[0].steps.tolist() == []


def test_folders_without_a_run_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    wrong = [tmp_path / "empty", tmp_path / "none", folder / "checkpoints" / "step-00000003"]
    out = tmp_path / "page.html"
    assert main(["report", *map(str, wrong), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert f"{wrong[0]} has no run" in told
    assert f"there is no folder {wrong[1]}" in told
    assert f"it lies in the run {folder}" in told
    assert not out.exists()
    assert main(["report", "--out", str(out)]) == 2
    assert main(["report", *[str(folder)] * 1, *(f"r{n}" for n in range(9))]) == 2
    assert "too many" in capsys.readouterr().err


def test_a_page_replaces_pages_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", 3)
    page_of(tmp_path, folder)
    page_of(tmp_path, folder)
    metrics = folder / "metrics.jsonl"
    before = metrics.read_text()
    assert main(["report", str(folder), "--out", str(metrics)]) == 2
    assert f"--out {metrics} is a file of another kind, and would be lost" in capsys.readouterr().err
    assert metrics.read_text() == before
    assert main(["report", "--out", str(tmp_path / "report.html"), str(folder)]) == 2
    assert "needs folders of runs before its options" in capsys.readouterr().err


def test_a_run_without_steps_or_settings_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    text = page_of(tmp_path, tmp_path / "new")
    assert "no step is recorded yet" in text
    bare = written(tmp_path / "old", 4)
    (bare / "launches.jsonl").unlink()
    text = page_of(tmp_path, bare, tmp_path / "new")
    assert "not known of A, B" in text
    assert series(data_of(text)["runs"][0]["series"]["lr"])[0] == [1, 2, 3, 4]


def different(run: Run) -> Run:
    return replace(run, model=replace(run.model, pattern="[*-]", moe=None))


def test_runs_of_different_models_share_axes(tmp_path: Path) -> None:
    folders = [written(tmp_path / f"r{n}", 5) for n in range(2)]
    launch = this_launch(different(small_run()), step=0, world=1, device="cpu", command="")
    (folders[1] / "launches.jsonl").write_text(json.dumps(asdict(launch)) + "\n")
    text = page_of(tmp_path, *folders)
    rows = tables_of(text)["Settings that differ"]
    values = {row[0]: row[1:] for row in rows[1:]}
    assert values["ranks"] == ["2", "1"]
    assert values["model.pattern"] == ["[*-][*E]", "[*-]"]
    assert values["model.moe.experts"] == ["4", "-"]
    assert 'id="timeline-1-data"' in text


def test_the_state_of_a_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 3, of=9)
    assert describe_state(read_run(folder)) == (None, "unfinished: step 3 of 9")
    beat = Heartbeat(rank=0, count=3, host="node-7", step=3, place=2, op="B1.0", done=None, since_s=0.25)
    with StatusFile(folder / "status.json", 1) as status:
        status.observe({0: PeerState(beat, 0.1)}, (), None)
        record = read_run(folder)
        assert describe_state(record)[0] is RunState.RUNNING
        assert record.status is not None
        state, text = describe_state(record, record.status.time + 3600)
        assert (state, text[:34]) == (RunState.FAILED, "no sign of life for 1h00m at step ")
    (folder / "status.json").write_text('{"state": "running"}')
    assert read_run(folder).status is None


def test_without_a_watchdog_the_process_tells_whether_a_run_goes_on(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 3, of=9)
    with StatusFile(folder / "status.json", 1):
        record = read_run(folder)
    assert record.status is not None
    later = record.status.time + 3600
    assert describe_state(record, later) == (RunState.RUNNING, "running: step 3 of 9")
    gone = replace(record, status=replace(record.status, process=2**22 + 1))  # above the largest of Linux
    assert describe_state(gone, later)[0] is RunState.FAILED
    elsewhere = replace(record, status=replace(record.status, host="node-7", process=1))
    assert describe_state(elsewhere, later)[0] is None


def test_buckets_keep_the_least_and_the_greatest() -> None:
    rng = np.random.default_rng(0)
    steps, values = np.arange(1, 100_004), rng.normal(size=100_003)
    values[[0, 50_000, 100_002]] = [math.nan, 77.0, -77.0]
    found, chosen = kept(steps, values, 2_000)
    assert len(found) <= 2_000
    assert (np.diff(found) > 0).all()
    assert (chosen == values[found - 1]).all()
    assert {77.0, -77.0} <= set(chosen)
    size = -(-100_002 // 999)
    for start in range(0, 100_002 - size, size):
        bucket = values[1 + start : 1 + start + size]
        assert {bucket.min(), bucket.max()} <= set(chosen)
    steps, values = kept(np.arange(5), np.array([1.0, math.nan, 2, 3, 4]), 10)
    assert len(steps) == 5, "gaps stay gaps"


def three(tmp_path: Path) -> Sequence[Path]:
    return [written(tmp_path / f"r{n}", STEPS, number=n, lr=1e-3 * (n + 1)) for n in range(3)]


def test_three_runs_of_10_000_steps_are_small(tmp_path: Path) -> None:
    text = page_of(tmp_path, *three(tmp_path))
    assert len(text.encode()) < LARGEST
    assert [len(series(run["series"]["loss"])[0]) for run in data_of(text)["runs"]] == [STEPS] * 3
    curves, _ = read_metrics(tmp_path / "r0" / "metrics.jsonl")
    packed = packed_curves(curves, ["loss"], 8)
    assert len(series(packed["loss"])[0]) <= 36_000 // 8


# ------------------------------------------------------------------------------------------- in a browser

CANVAS = '[data-metric="loss"] canvas'


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_zooms_and_tells_values(tmp_path: Path, dark: bool) -> None:
    page_of(tmp_path, *three(tmp_path))
    with chromium(dark=dark, size=(1280, 1200)) as browser:
        from selenium.webdriver.common.action_chains import ActionChains

        browser.get((tmp_path / "report.html").as_uri())
        canvas = browser.find_element("css selector", CANVAS)
        colours = {(121, 174, 240), (240, 160, 90)} if dark else {(44, 99, 168), (184, 90, 6)}
        assert colours <= pixels(browser, CANVAS)

        def view() -> tuple[float, float]:
            browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
            low, high = map(float, canvas.get_attribute("data-view").split())
            return low, high

        assert view() == (1, STEPS)
        readout = browser.find_element("css selector", '[data-metric="loss"] .readout')
        last = [word for n in range(3) for word in ("ABC"[n], f"{loss(STEPS, n):.5g}")]
        assert readout.text.split() == ["last", *last]
        width = canvas.size["width"]
        left, right = 54, 24

        def x_of(share: float) -> int:
            return round(left + share * (width - left - right) - width / 2)

        drag = ActionChains(browser).move_to_element_with_offset(canvas, x_of(0.25), 0).click_and_hold()
        drag.move_to_element_with_offset(canvas, x_of(0.5), 0).release().perform()
        low, high = view()
        assert low == pytest.approx(STEPS / 4, abs=20)
        assert high == pytest.approx(STEPS / 2, abs=20)
        other = browser.find_element("css selector", '[data-metric="grad_norm"] canvas')
        browser.execute_script("arguments[0].scrollIntoView()", other)
        view()
        assert other.get_attribute("data-view") == canvas.get_attribute("data-view"), "all charts zoom together"
        browser.execute_script("arguments[0].scrollIntoView()", canvas)
        canvas.send_keys("0")
        assert view() == (1, STEPS)
        for _ in range(10):
            canvas.send_keys("+")
        low, high = view()
        assert high - low == pytest.approx((STEPS - 1) / 2**10, rel=0.01)
        ActionChains(browser).move_to_element_with_offset(canvas, x_of(0.5), 0).perform()
        view()
        words = readout.text.replace(",", "").split()
        step = int(words[1])
        assert low <= step <= high
        for number, letter in enumerate("ABC"):
            assert words[words.index(letter) + 1] == f"{loss(step, number):.5g}"
        browser.find_element("css selector", '.key input[value="1"]').click()
        view()
        assert "B" not in readout.text.split()
        assert browser.get_log("browser") == [], "no errors, and nothing that was not allowed"


@pytest.mark.long
def test_three_runs_of_10_000_steps_are_interactive_in_two_seconds(tmp_path: Path) -> None:
    page_of(tmp_path, *three(tmp_path))
    with chromium() as browser:
        # Seconds of the page's own thread: other work on the machine does not count.
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        browser.get((tmp_path / "report.html").as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") is not None
        found = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        spent = {each["name"]: each["value"] for each in found}
        assert 0 < spent["ScriptDuration"] < spent["TaskDuration"] < 2
