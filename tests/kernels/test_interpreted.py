"""All tests of Triton kernels once more, interpreted, where there is no GPU to run them on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreting import GPU, INTERPRETED

pytestmark = [
    pytest.mark.skipif(GPU or INTERPRETED, reason="kernels run here as they are"),
    pytest.mark.costly("the only run of Triton kernels where there is no GPU"),
]

HERE = Path(__file__).parent


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_under_the_interpreter(which: str) -> None:
    """One process for many tests: it takes seconds to start."""
    pytest.importorskip("triton")
    selected = ("-m", f"kernels and {which} and not exhaustive", str(HERE))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *selected],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
