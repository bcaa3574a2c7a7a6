"""Where and from what a figure comes: written beside every result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def describe() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def needs_gpu() -> None:
    """Leave, before anything is written, where there is no GPU to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures kernels on a GPU, and torch sees none here")


def write(name: str, figures: dict[str, Any], origin: dict[str, Any]) -> Path:
    """Write figures as results/<name>.json. `origin` is what `describe` said before anything was written."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": origin, **figures}, indent=2) + "\n")
    return path


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
