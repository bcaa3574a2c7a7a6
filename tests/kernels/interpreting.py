"""Where Triton kernels are tested: on a GPU, or interpreted in a process of their own. Triton asks whether to
interpret when it is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason="kernels need a GPU or the interpreter")
where_kernels_cannot_run = pytest.mark.skipif(GPU or INTERPRETED, reason="runs where kernels cannot")

if INTERPRETED:
    from triton.runtime import interpreter

    set_attribute = interpreter._LangPatchScope.set_attr

    def set_and_mend(scope: Any, of: object, name: str, value: object) -> None:
        """Triton 3.6 makes an index of an array with one entry, which numpy 2.4 no longer does."""
        set_attribute(scope, of, name, (lambda x: x.handle.data.item()) if name == "__index__" else value)

    interpreter._LangPatchScope.set_attr = set_and_mend  # type: ignore[method-assign]


def interpret(file: str, *options: str) -> None:
    """Run the tests of a file once more, interpreted."""
    pytest.importorskip("triton")
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *plugins, *options, file],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
