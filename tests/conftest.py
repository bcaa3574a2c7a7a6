"""What holds for all tests: random numbers from a seed of each test's own, cases that are drawn from the
commit, and at the end what the tests cost."""

from __future__ import annotations

import os
import shlex
import sys
import zlib
from collections.abc import Iterator
from typing import Any

# Threads of models this small wait for each other longer than they work: one process, one core. Before torch is
# imported, so that processes which tests start have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests import costs
from tests.covers import always, commit, sample
from tests.topology import report

# How long an example takes says more about the machine than about the code.
settings.register_profile("braid", deadline=None)
settings.load_profile("braid")

DRAW = pytest.StashKey[str]()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="", help="other random inputs for every test: how tight is a bound?")
    parser.addoption("--draw", default="", help="draw sampled cases from this, not from the commit")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist are handed the seed, so that all of them collect the same tests.
    given = getattr(config, "workerinput", {}).get("draw")
    config.stash[DRAW] = given or config.getoption("--draw") or commit()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["draw"] = node.config.stash[DRAW]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Costly files first: one that comes last would keep one worker busy while the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("costly") is None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`listed(name, points)`: all points. `drawn(name, points, count, legal=...)`: a sample of a product, or
    all of it where count is None. Points are made only when they are asked for: that takes seconds or more."""
    wanted = not _left_out(metafunc)
    for mark in metafunc.definition.iter_markers("listed"):
        name, points = mark.args
        metafunc.parametrize(name, points() if wanted else [], ids=str)
    for mark in metafunc.definition.iter_markers("drawn"):
        name, points, count = mark.args
        legal, chosen = mark.kwargs.get("legal", always), []
        if wanted and count is not None:
            chosen = sample(points(), count, metafunc.config.stash[DRAW], legal=legal)
        elif metafunc.config.getoption("-m") == "exhaustive":
            chosen = [point for point in points() if legal(point)]
        metafunc.parametrize(name, chosen, ids=str)


def _left_out(metafunc: pytest.Metafunc) -> bool:
    """Whether `-m` leaves a test out, as `make test` and `make test-long` do."""
    words = metafunc.config.getoption("-m")
    if any(
        f"not {name}" in words and metafunc.definition.get_closest_marker(name)
        for name in ("long", "exhaustive")
    ):
        return True
    return words == "long" and metafunc.definition.get_closest_marker("long") is None


@pytest.fixture(autouse=True)
def own_seed(request: pytest.FixtureRequest) -> None:
    import torch

    torch.manual_seed(zlib.crc32((request.node.nodeid + request.config.getoption("--seed")).encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = costs.now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    made: pytest.TestReport = yield
    if made.when == "teardown" and STARTED in item.stash:
        made.user_properties.append(costs.property_of(item, costs.now() - item.stash[STARTED]))
    if made.failed:
        made.sections.append(("repeat it", repeating(item)))
    return made


def repeating(item: pytest.Item) -> str:
    """The command that runs this test again, on the same cases."""
    words = [os.path.relpath(sys.executable), "-m", "pytest", item.nodeid]
    if item.get_closest_marker("exhaustive"):
        words += ["-m", "exhaustive"]  # without it, there are no such cases
    elif item.get_closest_marker("drawn"):
        words += ["--draw", item.config.stash[DRAW]]
    if seed := item.config.getoption("--seed"):
        words += ["--seed", seed]
    return shlex.join(words)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    for kind, title in report.TITLES.items():
        if rows := report.rows_of(reports, kind):
            terminalreporter.section(f"{len(rows)} {title}")
            for line in report.lines(rows):
                terminalreporter.write_line(line)
    costs.tell(terminalreporter)
    terminalreporter.write_line(f"sampled cases are drawn from {terminalreporter.config.stash[DRAW]} (--draw)")
