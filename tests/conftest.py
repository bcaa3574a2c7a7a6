"""Every test draws its random numbers from a seed of its own, so that neither order nor company changes them.
What the invariance matrix found is shown as a table at the end."""

from __future__ import annotations

import zlib

import pytest

from tests.topology import report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="", help="other random inputs for every test: how tight is a bound?")


@pytest.fixture(autouse=True)
def own_seed(request: pytest.FixtureRequest) -> None:
    import torch

    torch.manual_seed(zlib.crc32((request.node.nodeid + request.config.getoption("--seed")).encode()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    for kind, title in report.TITLES.items():
        if rows := report.rows_of(reports, kind):
            terminalreporter.section(f"{len(rows)} {title}")
            for line in report.lines(rows):
                terminalreporter.write_line(line)
