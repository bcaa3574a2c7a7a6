"""Kernels run on a GPU or interpreted; elsewhere, their tests are skipped."""

import pytest

from tests.kernels.interpreting import GPU, INTERPRETED


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and not (GPU or INTERPRETED):
        pytest.skip("kernels need a GPU or the interpreter")
