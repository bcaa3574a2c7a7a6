"""Export of encoders: beside their language model (`nemotron_h_omni`), or by themselves (`radio`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid.checkpoint import LazyCheckpoint
from braid.config import Run
from braid.encoders import Encoder
from braid.errors import ConfigError
from braid.interchange import side_files
from braid.interchange.composite import OMNI, kept_notes, processor_of
from braid.interchange.composite_export import CompositeModel, Origin, composite_folder
from braid.interchange.files import FolderPlan
from braid.interchange.radio import MODEL_TYPE as RADIO
from braid.nn.dtypes import DTYPES
from braid.train.encoder_checkpoint import is_encoder, saved_encoders
from braid.train.export_settings import ExportSettings, run_of, trains_as_stored
from braid.train.state import weight_names
from braid.train.stored_run import describe

NO_VIDEO = (
    "config.json has a video path, as every model of this type, and the files have no weights of it: whoever "
    "loads them draws these at random. Images do not pass through it"
)


def of_encoder(path: Path, settings: ExportSettings) -> bool:
    """Whether an export is that of an encoder by itself."""
    return settings.module is not None or settings.model_type == RADIO or is_encoder(path)


# --------------------------------------------------------------------------------------- an encoder alone


def encoder_folder(path: Path, out: Path, settings: ExportSettings) -> FolderPlan:
    """The folder of a module by itself."""
    if settings.model_type not in (None, RADIO):
        raise ConfigError(f"--model-type {settings.model_type}: an encoder by itself is written as {RADIO}")
    _check_weights_alone(RADIO, settings.optimizer)
    for name, value, usual in (
        ("experts", settings.experts, "usual"),
        ("form", settings.form, "indexed"),
        ("interleave", settings.interleave, 0),
    ):
        if value != usual:
            raise ConfigError(f"--{name} {value}: an encoder of type {RADIO} has one layout, leave it out")
    encoders = saved_encoders(path)
    name = _chosen(path, settings.module, encoders)
    prefix = f"modules.{name}."
    tensors = LazyCheckpoint(path, frozenset(each for each in weight_names(path) if each.startswith(prefix)))
    outlines = tensors.outlines()
    origin = _encoder_origin(run_of(path))
    return composite_folder(
        CompositeModel(language=None, encoder=encoders[name], module=name),
        tensors,
        out,
        dtype=_dtype(path, settings, outlines),
        origin=origin,
        outlines=outlines,
        as_stored=origin is not None and bool(origin.source.dtypes) and _as_stored(path, settings, origin),
    )


def _chosen(path: Path, module: str | None, encoders: dict[str, Encoder]) -> str:
    if module is None and len(encoders) == 1:
        return next(iter(encoders))
    if module not in encoders:
        held = ", ".join(encoders) or "none"
        given = "--module is missing" if module is None else f"--module {module}: there is no such module"
        raise ConfigError(
            f"{given}\n  rule  the modules of {path} are: {held}\n  set   --module to one of them"
        )
    return module


def _encoder_origin(run: Path) -> Origin | None:
    """What is known of the folder that an encoder came from. In one with a language model it has settings and
    no files of its own."""
    source = side_files.source_of(run)
    if source is None:
        return None
    if source.config.get("model_type") == RADIO:
        return Origin(source=source, kept=side_files.kept_of(run), processor={})
    config = source.config.get("vision_config")
    if source.config.get("model_type") != OMNI or not isinstance(config, dict):
        return None
    images = {"model_type": RADIO, "video_temporal_patch_size": None, "video_patch_dim": None}
    ignored = [
        name.removeprefix("vision_config.") for name in source.ignored if name.startswith("vision_config.")
    ]
    own = side_files.Source({**config, **images}, {}, ignored, ())
    return Origin(source=own, kept={}, processor={})


def _dtype(path: Path, settings: ExportSettings, outlines: dict[str, Tensor]) -> torch.dtype:
    if settings.dtype != "run":
        return DTYPES[settings.dtype]
    if not is_encoder(path):
        return DTYPES[describe(path).run.train.dtype]
    return Counter(tensor.dtype for tensor in outlines.values()).most_common(1)[0][0]


def _as_stored(path: Path, settings: ExportSettings, origin: Origin) -> bool:
    whole = is_encoder(path) or trains_as_stored(origin.source, describe(path).run)
    return settings.dtype == "run" and whole


def write_encoder_files(
    path: Path, out: Path, settings: ExportSettings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the imported folder of an encoder held besides weights; and what has no place in the new one."""
    name = _chosen(path, settings.module, saved_encoders(path))
    notes = [f"left out: modules.{name}.projector, which an encoder of type {RADIO} does not have"]
    run = run_of(path)
    if not is_encoder(path):
        return (), tuple(notes)
    source = side_files.source_of(run)
    left_out = () if source is None else source.left_out
    told = [f"not in the export, because the import left it out: {each}" for each in left_out]
    return side_files.restore(run, out), tuple(told)


# ------------------------------------------------------------------------------- beside a language model


def omni_folder(
    path: Path,
    out: Path,
    run: Run,
    *,
    optimizer: bool,
    form: str | None,
    dtype: torch.dtype,
    settings: dict[str, Any],
    source: side_files.Source | None,
    as_stored: bool,
) -> FolderPlan:
    """The folder of a run with one encoder of images."""
    _check_weights_alone(OMNI, optimizer)
    if len(run.modules) != 1:
        held = ", ".join(run.modules) or "none"
        raise ConfigError(
            f"--model-type {OMNI}: the modules of {path} are: {held}\n"
            "  rule  a model of this type has one encoder, of images\n"
            "  set   --model-type nemotron_h for the language model alone, --module NAME for an encoder"
        )
    ((name, module),) = run.modules.items()
    folder = run_of(path)
    origin = None
    if source is not None and source.config.get("model_type") == OMNI:
        hub = folder / side_files.FOLDER
        origin = Origin(source=source, kept=side_files.kept_of(folder), processor=processor_of(hub))
    tensors = LazyCheckpoint(path, weight_names(path))
    model = CompositeModel(language=run.model, encoder=module.model, module=name, token=module.token)
    return composite_folder(
        model,
        tensors,
        out,
        form=form,
        dtype=dtype,
        settings=settings,
        origin=origin,
        outlines=tensors.outlines(),
        as_stored=as_stored and origin is not None,
    )


def omni_notes(run: Path) -> list[str]:
    """What a user should know of the parts of the folder that are no part of the run."""
    kept = list(side_files.kept_of(run))
    return [f"{note}; written as it was imported" for note in kept_notes(kept)] if kept else [NO_VIDEO]


def _check_weights_alone(model_type: str, optimizer: bool) -> None:
    if optimizer:
        raise ConfigError(f"--optimizer: folders of {model_type} hold weights alone, leave it out")
