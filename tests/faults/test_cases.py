"""Every case of the specification has a test, and docs/reliability.md has its line."""

import ast
from pathlib import Path

import pytest

from tests.faults.cases import CASES, FINDINGS, PAGE, ROOT, Case, replaced


def test_there_are_as_many_cases_as_the_specification_has():
    assert len(CASES) == 29
    assert len(FINDINGS) >= 10


@pytest.mark.parametrize("case", [*CASES, *FINDINGS], ids=lambda case: case.fault)
def test_a_case_has_tests_that_exist(case: Case):
    assert case.tests
    for test in case.tests:
        file, _, name = test.partition("::")
        functions = {
            node.name for node in ast.walk(tree_of(ROOT / "tests" / file)) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_the_page_has_the_table():
    page = PAGE.read_text()
    assert replaced(page) == page, "run python -m tests.faults.cases"
