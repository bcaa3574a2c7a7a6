"""Planted faults: those written by hand fit the sources, and those that are drawn are what they should be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.mutants.by_hand import FAULTS
from scripts.mutants.drawing import LEAST, draw, quotas
from scripts.mutants.equivalent import EQUIVALENT
from scripts.mutants.mutant import SOURCES, Fault, StaleFaultError, package_of, planted
from scripts.mutants.operators import OPERATORS
from scripts.mutants.record import Finding, Record, key_of, known, open_record
from scripts.mutants.report import lines, share_missed
from scripts.mutants.running import CannotRunError, Job, run_jobs
from scripts.mutants.scratch import copy_of, planted_in
from scripts.mutants.selection import MARKERS, Stage, own_files, stages
from scripts.mutants.sites import candidates, read_sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(
    {package_of(path.relative_to(ROOT / SOURCES).as_posix()) for path in (ROOT / SOURCES).rglob("*.py")}
    - {"__init__"}
)

CODE = b'''"""A module: 1 + 1."""

LIMIT = 3 + 4


def shared(x: int | None, *, dim: int = 0) -> int:
    """One more: 1 + 1."""
    assert x is not None and x > 0
    if x.is_cuda:
        x = x + 5
    if x < 7:
        raise ValueError(f"{x + 6} is less than {7}")
    total = x * 8
    total += 9
    return total
'''


@pytest.fixture
def repository(tmp_path):
    """A small one."""
    (tmp_path / SOURCES / "inner").mkdir(parents=True)
    (tmp_path / SOURCES / "one.py").write_bytes(CODE)
    (tmp_path / SOURCES / "inner" / "two.py").write_bytes(CODE)
    (tmp_path / "tests" / "inner").mkdir(parents=True)
    for name in ("test_one.py", "inner/test_two.py", "inner/test_shared.py"):
        (tmp_path / "tests" / name).write_text("def test_it():\n    pass\n")
    return tmp_path


# ---------------------------------------------------------------------------------------------- by hand


def test_every_fault_written_by_hand_fits_the_sources():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        mutant = planted(fault, ROOT)
        ast.parse(mutant.applied((ROOT / SOURCES / fault.file).read_bytes()))
        assert fault.old != fault.new
        assert fault.why


def test_every_package_has_faults_written_by_hand():
    counts = Counter(package_of(fault.file) for fault in FAULTS)
    assert sum(counts.values()) >= 70
    assert {package for package in PACKAGES if counts[package] < 2} == set()


@pytest.mark.parametrize(("old", "found"), [("total = 1", "0 times"), ("x", "times")])
def test_a_fault_without_one_place_of_its_own_is_refused(old, found, repository):
    fault = Fault(name="it", file="one.py", old=old, new="y", kind="comparison", why="it hurts")
    with pytest.raises(StaleFaultError, match=found):
        planted(fault, repository)


# ------------------------------------------------------------------------------------------------ drawn


@pytest.mark.parametrize(
    ("operator", "code", "replacements"),
    [
        ("comparison", "a < b", ["a <= b"]),
        ("comparison", "a is None", ["a is not None"]),
        ("comparison", "0 <= a < 1", ["0 < a < 1", "0 <= a <= 1"]),
        ("arithmetic", "a + b", ["a - b"]),
        ("arithmetic", "a // b", ["a * b"]),
        ("arithmetic", "'a' + b", []),
        ("arithmetic", "[a] * b", []),
        ("dropped term", "a + b", ["a", "b"]),
        ("dropped term", "a - b", ["a"]),
        ("dropped term", "a and b and c", ["b and c", "a and c", "a and b"]),
        ("logic", "a or b", ["a and b"]),
        ("logic", "not a", ["a"]),
        ("logic", "a if b else c", ["c if b else a"]),
        ("constant", "1", ["2", "0"]),
        ("constant", "0", ["1"]),
        ("constant", "True", []),
        ("called", "min(a, b)", ["max(a, b)"]),
        ("called", "x.sum(0)", ["x.mean(0)"]),
        ("called", "sum(a)", []),
        ("keyword", "f(a, dim=1, device=b)", ["f(a, device=b)"]),
        ("keyword", "Point(x=1)", []),
        ("keyword", "f(split=1, join=2)", ["f(join=2)", "f(split=1)", "f(split=2, join=1)"]),
        ("argument", "f(q_BTC, k_BTC)", ["f(k_BTC, q_BTC)"]),
        ("argument", "f(axes.tp, axes.cp)", ["f(axes.cp, axes.tp)"]),
        ("argument", "f(model, context)", []),
        ("argument", "min(axes.tp, axes.cp)", []),
    ],
)
def test_operators_of_expressions(operator, code, replacements):
    found = [ast.unparse(each) for each in OPERATORS[operator](ast.parse(code, mode="eval").body)]
    assert found == replacements


@pytest.mark.parametrize(
    ("code", "dropped"),
    [
        ("x.add_(1)", True),
        ("x += 1", True),
        ("x[0] = 1", True),
        ("x = x + 1", True),
        ("raise error", True),
        ("yield problem", True),
        ("x = y + 1", False),
        ("return x", False),
    ],
)
def test_statements_that_are_dropped(code, dropped):
    found = [ast.unparse(each) for each in OPERATORS["statement"](ast.parse(code).body[0])]
    assert found == (["pass"] if dropped else [])


def test_text_types_invariants_choices_and_gpus_are_left_alone(repository):
    found = list(candidates(read_sources(repository)))
    assert {mutant.function for mutant in found} == {"shared"}
    by_line = {line: {mutant.old for mutant in found if mutant.line == line} for line in range(1, 16)}
    assert {line for line, olds in by_line.items() if olds} == {11, 12, 13, 14}
    assert by_line[12] == {'raise ValueError(f"{x + 6} is less than {7}")'}


def test_only_the_node_changes(repository):
    for mutant in candidates(read_sources(repository)):
        after = mutant.applied(CODE).decode()
        ast.parse(after)
        before, new = CODE.decode().splitlines(), after.splitlines()
        assert [i for i, (one, other) in enumerate(zip(before, new, strict=True), 1) if one != other] == [
            mutant.line
        ]


def test_the_same_seed_draws_the_same_mutants(repository):
    names = [[mutant.name for mutant in draw(repository, seed, 6).mutants] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 6


def test_small_packages_get_their_share():
    assert quotas({"large": 900, "small": 100}, 12) == {"large": 9, "small": 3}
    assert quotas({"large": 10_000, "tiny": 1}, 10)["tiny"] == LEAST


def test_equivalent_mutants_have_reasons():
    assert all(each.why for each in EQUIVALENT)


# -------------------------------------------------------------------------------------------------- runs


def test_mutants_face_what_make_test_selects():
    (recipe,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if '-m pytest -n 2 -m "not' in line
    ]
    assert f'-m "{MARKERS}"' in recipe


def test_every_package_has_tests_that_its_mutants_face():
    for package in PACKAGES:
        faults = [fault for fault in FAULTS if package_of(fault.file) == package]
        assert own_files(ROOT, planted(faults[0], ROOT)), package


def test_near_tests_come_first(repository):
    fault = Fault(
        name="it", file="inner/two.py", old="total += 9", new="pass", kind="dropped term", why="it hurts"
    )
    (own,) = stages(planted(fault, repository), repository, {})
    assert own.files == ("tests/inner/test_two.py", "tests/inner/test_shared.py")


def test_a_copy_has_the_fault_and_loses_it_again(repository, tmp_path):
    copy = copy_of(repository, repository, tmp_path / "copy")
    fault = Fault(name="it", file="one.py", old="total += 9", new="pass", kind="dropped term", why="it hurts")
    stale = copy / SOURCES / "__pycache__" / "one.cpython-311.pyc"
    stale.parent.mkdir()
    with planted_in(copy, planted(fault, repository)):
        assert "total += 9" not in (copy / "braid" / "one.py").read_text()
        stale.touch()
    assert (copy / SOURCES / "one.py").read_bytes() == CODE == (repository / SOURCES / "one.py").read_bytes()
    assert not stale.exists()


def test_a_run_without_pytest_catches_nothing(repository, tmp_path, monkeypatch):
    def no_pytest(*_, **__):
        raise ModuleNotFoundError("No module named '_pytest._argcomplete'")

    monkeypatch.setattr(pytest, "main", no_pytest)
    job = Job(name="as they are", mutant=None, stages=(Stage(name="own", files=("tests/test_one.py",)),))
    copy = copy_of(repository, repository, tmp_path / "copy")
    with pytest.raises(CannotRunError, match=r"_argcomplete.*as they are"):
        list(run_jobs(iter([job]), [copy], lambda _: 60.0, confirms=True))


def test_what_fails_without_a_fault_can_be_left_out(repository, tmp_path):
    (repository / "tests" / "test_one.py").write_text(
        "def test_a():\n    assert False\n\n\ndef test_b():\n    pass\n\n\ndef test_c():\n    assert False\n"
    )
    (repository / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["long: l", "exhaustive: e"]\n'
    )
    # A program of its own: within this run of pytest, another one ends at its first failure.
    done = subprocess.run(
        [sys.executable, "-c", LEAVING_OUT, str(repository)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == [
        "caught tests/test_one.py::test_a tests/test_one.py::test_c",
        "missed",
    ], done.stderr


LEAVING_OUT = """
import sys
from pathlib import Path
from scripts.mutants.running import Job, run_jobs
from scripts.mutants.scratch import copy_of
from scripts.mutants.selection import Stage

root = Path(sys.argv[1])
job = Job(name="as they are", mutant=None, stages=(Stage(name="own", files=("tests/test_one.py",)),))
copies, left_out = [copy_of(root, root, root / "copy")], ()
for _ in range(2):
    (result,) = run_jobs(iter([job]), copies, lambda _: 60.0, confirms=True, left_out=left_out)
    left_out = result.failures
    print(result.verdict, *left_out)
"""


def test_what_was_found_is_found_again(repository, tmp_path):
    first, *_ = mutants = draw(repository, 1, 4).mutants
    record = Record(file=tmp_path / "found.jsonl")
    for place, mutant in enumerate(mutants):
        record.add(Finding(key=key_of(mutant, repository), verdict="missed" if place == 0 else "caught"))
    record.add_baseline({"tests/inner/test_two.py": 0.5})
    record.leave_out(["tests/inner/test_two.py::test_it"])
    again = open_record(record.file, resume=True, retry_missed=False)
    assert (again.findings, again.seconds, again.left_out) == (record.findings, record.seconds, record.left_out)
    found = known(mutants, again, repository)
    assert share_missed(found) == 0.25
    text = "\n".join(lines(found, [], repository, seed=1, seconds=3.0))
    assert first.place in text
    assert "1 of 4 mutants missed: 25.0%, above the limit of 5%" in text
    retried = open_record(record.file, resume=True, retry_missed=True)
    assert [mutant for mutant, _ in known(mutants, retried, repository)] == mutants[1:]
