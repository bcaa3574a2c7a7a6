"""Every test draws its random numbers from a seed of its own, so that neither order nor company changes them."""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="", help="other random inputs for every test: how tight is a bound?")


@pytest.fixture(autouse=True)
def own_seed(request: pytest.FixtureRequest) -> None:
    import torch

    torch.manual_seed(zlib.crc32((request.node.nodeid + request.config.getoption("--seed")).encode()))
