"""`braid plan` of runs with modules: stations, edges and choices of `ahead`, for a person and for a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from braid.cli import main
from braid.errors import ExitCode

RECIPES = """
from dataclasses import replace

from braid.config import Mesh, Run
from tests.planning.modules import run_with


def colocated() -> Run:
    return run_with({"vision": Mesh(tp=2)}, Mesh(pp=2, tp=2))


def disjoint() -> Run:
    return run_with({"vision": Mesh(ranks=(2, 2))}, Mesh(pp=2, ranks=(0, 2)))


def without_mtp() -> Run:
    run = disjoint()
    return replace(run, model=replace(run.model, pattern="[M-][*-]"))


def shares() -> Run:
    run = run_with({"vision": Mesh()}, lr_share={"projector.*": 0.1})
    return replace(run, lr_share={"blocks.*": 0.5})


def two() -> Run:
    return run_with({"vision": Mesh(ranks=(0, 3)), "audio": Mesh(ranks=(3, 1))}, Mesh(pp=2))


def pairs() -> Run:
    return replace(shares(), lr_share=(("blocks.*", 0.5),))


def wrong() -> Run:
    return run_with({"vision": Mesh(ranks=(2, 3))}, Mesh(pp=2, ranks=(0, 2)), token=999, most_patches=15)
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipes") / "modules.py"
    file.write_text(RECIPES)
    return file


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words, "--device", "cpu"]) == ExitCode.OK
    return capsys.readouterr().out


def rows(text: str, title: str) -> list[dict[str, str]]:
    """The rows of the table under a title, by the places of its columns."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(title)) + 1
    header, found = lines[start], []
    names = [name for name in header.split("  ") if name]
    places = [header.index(name.strip()) for name in names]
    for line in lines[start + 1 :]:
        if not line.strip() or line.startswith("host memory"):
            break
        cells = [line[a:b].strip() for a, b in zip(places, [*places[1:], None], strict=True)]
        found.append(dict(zip((name.strip() for name in names), cells, strict=True)))
    return found


def test_a_colocated_plan(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, f"{recipes}:colocated", "--world", "4")
    assert "4 ranks, 2 stations, 4 micro-batches of 4 samples per step" in text
    assert "language: ranks 0 to 3 = pp 2 x dp 1 x cp 1 x tp 2; experts edp 2 x ep 1 x etp 1" in text
    assert "vision: ranks 0 to 3 = pp 1 x dp 2 x cp 1 x tp 2; experts edp 4" in text
    assert "at most 32 patches per dp rank" in text
    memory = rows(text, "memory of one rank per station")
    assert [row["ranks"] for row in memory if row["ranks"]] == ["0-1", "2-3"]
    assert [row["holds"] for row in memory[:3]] == ["language 0 + vision 0", "language 0", "vision 0"]
    for kind in ("parameters", "optimizer"):
        station, *modules = (float(row[kind]) for row in memory[:3])
        assert station == pytest.approx(sum(modules), abs=0.02)
    (edge,) = rows(text, "edges")
    assert (edge["from ranks"], edge["to ranks"], edge["width"], edge["rows"]) == ("0-3", "0-1", "128", "32")
    assert (edge["micro-batch"], edge["step"]) == ("16.0 KiB", "128.0 KiB")
    choices = rows(text, "simulated step")
    assert [row["vision"] for row in choices] == ["2", "4"], "the lead, and all micro-batches"
    assert "planned" in text
    assert "L language, V vision; lower case: backward" in text
    assert "rows and their gradients" in text


def test_a_disjoint_plan(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, f"{recipes}:disjoint", "--world", "4")
    memory = rows(text, "memory of one rank per station")
    assert [(row["ranks"], row["holds"]) for row in memory] == [
        ("0", "language 0"),
        ("1", "language 1"),
        ("2-3", "vision 0"),
    ]
    assert [row["vision"] for row in rows(text, "simulated step")] == ["4"]
    assert "no part of the model" not in text, "no rank is idle"


def test_mtp_depths_are_noted_where_there_are_some(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "note: MTP depths embed placeholders as plain ids"
    assert note in told(capsys, f"{recipes}:disjoint", "--world", "4")
    assert note not in told(capsys, f"{recipes}:without_mtp", "--world", "4")
    assert note not in told(capsys, "tiny")


def test_json(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{recipes}:colocated", "--world", "4", "--device-memory", "1MiB", "--json")
    found: dict[str, Any] = json.loads(told(capsys, *words))
    assert "stages" not in found
    assert {name: module["ranks"] for name, module in found["modules"].items()} == {
        "language": [0, 4],
        "vision": [0, 4],
    }
    assert [station["ranks"] for station in found["stations"]] == [[0, 1], [2, 3]]
    for station in found["stations"]:
        parts = [module["memory"]["parameters"] for module in station["modules"].values()]
        assert station["memory"]["parameters"] == sum(parts)
        assert station["memory"]["peak"] <= found["peak"]
    (edge,) = found["edges"]
    assert edge["step_bytes"] == 8 * edge["bytes"] == 8 * 32 * 128 * 4
    assert [choice["chosen"] for choice in found["ahead"]] == [False, True]
    assert found["fits"] is False
    assert found["advice"], "what would need less"


def test_shares_of_the_command_line_replace_those_of_the_recipe(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> dict[str, Any]:
        assert main(["show", f"{recipes}:shares", *words, "--json"]) == ExitCode.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {"": found["lr_share"], "vision": found["modules"]["vision"]["lr_share"]}

    assert shown() == {"": {"blocks.*": 0.5}, "vision": {"projector.*": 0.1}}
    words = ("--lr-share", "blocks.0.*", "0.3", "final_norm.*", "2", "--modules.vision.lr-share")
    assert shown(*words) == {"": {"blocks.0.*": 0.3, "final_norm.*": 2.0}, "vision": {}}


@pytest.mark.parametrize("words", [["0.5"], ["*", "fast"]], ids=str)
def test_shares_are_pairs_of_a_glob_and_a_number(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "tiny", "--lr-share", *words])
    assert stopped.value.code == ExitCode.CONFIG


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("command", [["plan"], ["train", "--help"]], ids=" ".join)
def test_a_wrong_type_in_a_recipe_is_one_error(
    recipes: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([command[0], f"{recipes}:pairs", *command[1:]]) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[0]) == ("", f"braid: {recipes}:pairs: invalid settings: 1 problem")
    assert "must be a mapping of names to numbers" in said.err


def test_what_is_trained_is_told_of_every_module(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{recipes}:shares", "--modules.vision.trained", "blocks.1.*", "--trained", "final_norm.*")
    text, found = told(capsys, *words), json.loads(told(capsys, *words, "--json"))
    for name, module in found["modules"].items():
        owner = "the language model" if name == "language" else name
        assert f"\ntrained: {module['trained']}\n" in text
        assert f" parameters of {owner}" in module["trained"]
    assert found["modules"]["vision"]["trained"].endswith("of vision; no backward before blocks.1")
    notes = [note for note in found["notes"] if "lr_share" in note]
    assert [note.partition(" ")[0] for note in notes] == [
        "lr_share[blocks.*]",
        "modules.vision.lr_share[projector.*]",
    ]
    assert all(f"\nnote: {note}\n" in text for note in notes)
    assert "language alone: trained as here" in text


def test_a_frozen_module_and_one_that_is_all_trained(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, f"{recipes}:disjoint", "--world", "4", "--modules.vision.trained")
    (line,) = (line for line in text.splitlines() if line.startswith("trained: "))
    assert line.startswith("trained: 0 of ")
    assert line.endswith(" parameters of vision; no backward")
    assert "lr_share" not in told(capsys, f"{recipes}:shares"), "shares of what is trained have an effect"
    frozen = told(capsys, f"{recipes}:disjoint", "--world", "4", "--trained")
    assert "language alone: all of it trained" in frozen


def test_the_timeline_has_a_row_for_each_station(
    recipes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    told(capsys, f"{recipes}:disjoint", "--world", "4", "--svg", str(svg), "--trace", str(trace))
    text = svg.read_text()
    for label in ("language 0", "language 1", "vision 0"):
        assert f">{label}</text>" in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_every_problem_is_listed_at_once(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{recipes}:wrong", "--world", "4", "--device-memory", "lots"]) == ExitCode.CONFIG
    text = capsys.readouterr().err
    for field in ("modules.vision.token", "modules.vision.mesh.ranks", "modules.vision.most_patches"):
        assert field in text
    assert "device-memory = 'lots'" in text


def test_ops_of_a_rank_name_its_stages_peers_and_edges(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, _, *lines = told(capsys, f"{recipes}:disjoint", "--world", "4", "--ops", "0").splitlines()
    assert header.startswith("rank 0 of 4, language 0: ")
    found = {line.split("  ")[-1].strip() for line in lines}
    assert {
        "receive rows of vision from ranks 2-3",
        "send gradients of rows of vision to ranks 2-3",
        "send activations to rank 1",
        "receive gradients from rank 1",
    } <= found
    header, _, *lines = told(capsys, f"{recipes}:disjoint", "--world", "4", "--ops", "3").splitlines()
    assert header.startswith("rank 3 of 4, vision 0: ")
    assert header.endswith("the same on ranks 2-3")
    assert any(line.endswith("start the all-gather of weights over dp and cp (2 ranks)") for line in lines)
    assert any(line.endswith("send rows of vision to rank 0") for line in lines)
    found = json.loads(told(capsys, f"{recipes}:disjoint", "--world", "4", "--ops", "3", "--json"))
    assert (found["rank"], found["station"]) == (3, 2)


# ------------------------------------------------------------------------------------------------ grid


def test_grid_shows_what_each_rank_holds(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", f"{recipes}:disjoint", "--world", "4"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "vision: ranks 2-3, tp 1 x cp 1 x dp 2 x pp 1" in text
    held = [line.split("  ", 1)[1].strip() for line in text.splitlines()[-4:]]
    assert [line.startswith("stage 0: tp 0  cp 0  dp 0") for line in held] == [True, False, False, False]
    assert held[1].startswith("stage 1: ")
    assert [line.startswith("-") for line in held] == [False, False, True, True]
    assert held[3].endswith("stage 0: tp 0  cp 0  dp 1")


def test_grid_of_one_rank_has_the_groups_of_each_module(
    recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grid", f"{recipes}:colocated", "--world", "4", "--rank", "3", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["modules"]["language"]["coordinates"]["dense"] == {"tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert found["modules"]["vision"]["coordinates"]["dense"] == {"tp": 1, "cp": 0, "dp": 1, "pp": 0}
    assert found["modules"]["vision"]["families"]["dp"] == [1, 3]
    assert main(["grid", f"{recipes}:colocated", "--world", "4", "--rank", "3"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert text.index("\nlanguage\n") < text.index("\nvision\n")
    assert main(["grid", f"{recipes}:colocated", "--world", "4", "--json"]) == ExitCode.OK
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["language"]["dense"]["pp"] for rank in ranks] == [0, 0, 1, 1]
    assert main(["grid", f"{recipes}:colocated", "--world", "4", "--rank", "4"]) == ExitCode.CONFIG
    assert "0 to 3" in capsys.readouterr().err


def test_grid_of_a_run_without_modules(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--world", "4", "--mesh.ranks", "2", "2", "--mesh.pp", "2")
    assert main(["grid", "tiny", *words]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1].strip()[:7] for line in lines[-4:]] == ["-", "-", "stage 0", "stage 1"]
    assert main(["grid", "tiny", *words, "--rank", "0"]) == ExitCode.OK
    assert "rank 0 of 4 holds no module" in capsys.readouterr().out


def test_grid_is_printed_whole(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", f"{recipes}:two", "--world", "4"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "audio: rank 3, tp 1" in text
    assert "vision: ranks 0-2, tp 1" in text
    assert " ".join(text.splitlines()[-1].split()) == "3 stage 1: tp 0 cp 0 dp 1 - stage 0: tp 0 cp 0 dp 0"


def test_help_of_grid_begins_with_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grid", "--help"])
    assert capsys.readouterr().out.startswith("braid grid RECIPE --world N")


def test_grid_lists_every_problem(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", f"{recipes}:wrong", "--world", "4"]) == ExitCode.CONFIG
    text = capsys.readouterr().err
    assert "modules.vision.token" in text
    assert "modules.vision.mesh.ranks" in text


def test_show_counts_the_parameters_of_each_module(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{recipes}:colocated", "--world", "4"]) == ExitCode.OK
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("param")]
    counts = {name: int(text.strip().partition(", ")[0].replace(",", "")) for name, text in lines}
    total, *modules = counts.values()
    assert [*counts] == ["parameters", "parameters of the language model", "parameters of modules.vision"]
    assert total == sum(modules)
    assert all(modules)
