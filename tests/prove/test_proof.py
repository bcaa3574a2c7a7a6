"""`braid prove` as a person uses it: it holds on meshes, fails with a sabotage, and says what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.cli import main
from braid.config import Mesh
from braid.planning.plan import plan
from braid.prove.compare import FP64_BOUND
from braid.prove.sabotage import SABOTAGES
from braid.prove.shrink import shrink
from scripts.prove_recipes import cases
from tests.prove.test_shrink import on

SMALL = ("--train.batch-samples", "16", "--train.micro-batches", "4")
SHALLOW = ("--model.pattern", "[*E][M-]")


def prove(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """The exit code, and what is printed as JSON."""
    code = main(["prove", *words, *SMALL, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_mesh_holds_and_the_table_says_so(capsys):
    assert main(["prove", "tiny-multimodal", "--world", "2", "--mesh.tp", "2", *SMALL]) == 0
    told = capsys.readouterr()
    assert "run 1 of 1: 2 of 2 ranks, tp 2" in told.out
    for line in ("model.hidden", "loss, step 1", "gradients", "validation loss", "saved moments"):
        assert f"\n{line}" in told.out.replace("\n  ", "\n")
    assert "the mesh does not change the answer: at most " in told.out
    assert "two steps in one process, then on 2 ranks" in told.err


@pytest.mark.parametrize("name", SABOTAGES)
@pytest.mark.long
def test_every_sabotage_is_seen(name, capsys):
    axis = {"gradients": "dp", "loss": "dp"}.get(name, name)
    mesh = () if axis == "dp" else (f"--mesh.{axis}", "2")
    code, told = prove("tiny", "--world", "2", *mesh, *SHALLOW, "--sabotage", name, capsys=capsys)
    assert (code, told["holds"]) == (1, False)
    assert told["worst"] > 1e6 * FP64_BOUND


def test_a_sabotage_without_its_axis_is_refused(capsys):
    assert main(["prove", "tiny", "--world", "2", "--mesh.tp", "2", *SMALL, "--sabotage", "pp"]) == 2
    said = capsys.readouterr().err
    assert "--sabotage pp: this mesh has no such sum; it has gradients" in said
    assert "tp (outputs of row-parallel layers)" in said
    with pytest.raises(SystemExit):
        main(["prove", "tiny", "--world", "2", "--sabotage", "dp"])
    assert "('none', 'gradients', 'loss', 'tp', 'cp', 'ep', 'pp')" in " ".join(capsys.readouterr().err.split())


def test_sabotages_are_offered_where_their_sums_are():
    def there(mesh: Mesh, world: int) -> set[str]:
        (small,) = shrink(on("tiny", mesh, micro_batches=2, samples=16), world)
        worked_out = plan(small.run, small.world)
        return {name for name, sabotage in SABOTAGES.items() if sabotage.there(worked_out)}

    assert there(Mesh(), 1) == set()
    assert there(Mesh(), 2) == {"gradients", "loss"}
    assert there(Mesh(tp=2), 2) == {"gradients", "tp"}  # of experts, which see other tokens
    assert there(Mesh(tp=2, ep=2), 2) == {"tp", "ep"}
    assert there(Mesh(cp=2), 2) == {"gradients", "cp"}
    assert there(Mesh(pp=2), 2) == {"pp"}


@pytest.mark.parametrize("words", [("--world", "0"), ("--ranks", "1"), ("--ranks", "65")])
def test_impossible_numbers_of_ranks_are_refused(words, capsys):
    assert main(["prove", "tiny", *words]) == 2
    assert words[0].removeprefix("--") in capsys.readouterr().err


@pytest.mark.drawn("case", cases, 1, legal=lambda case: case.legal)
@pytest.mark.long
def test_recipes_hold_on_meshes(case, capsys):
    code = main(["prove", *case.words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["holds"]) == (0, True)
    assert told["worst"] <= FP64_BOUND


def test_the_page_has_the_figures_of_the_record():
    """That was made by `python -m scripts.prove_recipes`."""
    root = Path(__file__).parents[2]
    record = json.loads((root / "benchmarks/results/prove.json").read_text())
    assert {each["sabotage"] for each in record["sabotages"]} == set(SABOTAGES)
    assert all(each["exit"] == 1 for each in record["sabotages"])
    cases: dict[str, list[dict]] = {}
    for case in record["cases"]:
        assert case["holds"], case
        assert case["worst"] < FP64_BOUND
        cases.setdefault(case["recipe"], []).append(case)
    lines = (root / "docs/prove.md").read_text().splitlines()
    for name, three in cases.items():
        took = [f"{case['seconds']:.0f}, {case['cpu_seconds']:.0f}" for case in three]
        wanted = [f"{max(case['worst'] for case in three):.1e}", *took]
        (line,) = [line for line in lines if line.startswith((f"| {name} |", f"| {name} ("))]
        assert line.strip("| ").split(" | ")[1:] == wanted
