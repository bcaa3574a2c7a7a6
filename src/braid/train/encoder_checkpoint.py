"""Checkpoints of encoders without a language model: what an import of a vision encoder makes.

Tensors are named as in a run with the module, `modules.<name>.<tensor>`; the manifest has the settings of the
encoder in place of a run. `--init-modules` starts a module of a run from one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import braid
from braid import checkpoint
from braid.config import encoder_from_json
from braid.encoders import Encoder
from braid.errors import CheckpointError, ConfigError
from braid.train.stored_run import NAMES_VERSION, saved_models

ENCODERS = "encoders"
"""The entry of a manifest that has their settings."""


def encoder_extra(encoders: Mapping[str, Encoder]) -> dict[str, Any]:
    """The `extra` of a manifest."""
    settings = {name: dataclasses.asdict(each) for name, each in encoders.items()}
    return {"braid": braid.__version__, "names": NAMES_VERSION, ENCODERS: settings}


def is_encoder(path: Path) -> bool:
    """Whether a checkpoint holds encoders and no language model."""
    return ENCODERS in checkpoint.read_manifest(path).extra


def saved_encoders(path: Path) -> dict[str, Encoder]:
    """The settings of the encoders of a checkpoint, with a language model or without."""
    extra = checkpoint.read_manifest(path).extra
    if ENCODERS not in extra:
        return {name: each for name, each in saved_models(path).items() if isinstance(each, Encoder)}
    try:
        return {name: encoder_from_json(each, name) for name, each in extra[ENCODERS].items()}
    except (AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{path} has settings of encoders that this braid cannot read: {error}; use the braid that wrote it"
        ) from error
