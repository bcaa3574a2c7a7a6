"""What an export may choose, and what it knows of the folder that a model was imported from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from braid.config import Run
from braid.interchange.megatron import Form
from braid.interchange.side_files import Source
from braid.train.importing import dtype_of_training


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What an export may choose; see `braid export --help`."""

    model_type: str | None = None
    module: str | None = None
    dtype: str = "run"
    optimizer: bool = False
    experts: str = "usual"
    form: Form = "indexed"
    interleave: int = 0


def run_of(path: Path) -> Path:
    """The run directory of a checkpoint."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def trains_as_stored(source: Source, run: Run) -> bool:
    """Whether a run has the dtype that the import chose for it."""
    common = Counter(source.dtypes.values()).most_common(1)
    return bool(common) and dtype_of_training(common[0][0]) == run.train.dtype
