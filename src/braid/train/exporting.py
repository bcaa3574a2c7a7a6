"""Export: a checkpoint becomes a folder of the Hugging Face hub, or one under Megatron's names.

The language model is exported, and the encoder beside it where the type has one; others stay behind. An encoder
by itself is exported as such (`--module`, exporting_encoder.py). A model that was imported gets back what its
folder held besides weights (`RUN/hub`). Tensors are streamed from the checkpoint to their files one at a time,
by one process or by several that write whole files each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from braid.config import to_json
from braid.data import tokenizer_from
from braid.errors import CheckpointError, ConfigError
from braid.interchange import FAMILIES, hub_folder, plan_trained, side_files
from braid.interchange.composite import OMNI
from braid.interchange.composite import TYPES as COMPOSITES
from braid.interchange.files import FolderPlan, check_inside
from braid.interchange.megatron import adapter
from braid.model.names import language_names
from braid.nn.dtypes import DTYPES
from braid.train.export_settings import ExportSettings, run_of, trains_as_stored
from braid.train.exporting_encoder import (
    encoder_folder,
    of_encoder,
    omni_folder,
    omni_notes,
    write_encoder_files,
)
from braid.train.importing import MEGATRON, TOKENIZER, Report, processes
from braid.train.lora_weights import checkpoint_of
from braid.train.state import weight_names
from braid.train.stored_run import CheckpointInfo, describe
from braid.validators import nearest

HUB_FORMS = MappingProxyType({"usual": None, "each": "hub", "stacked": "memory", "packed": "packed"})
"""What interchange calls each layout of experts that the hub has; None is that of the imported folder."""


class Exported(NamedTuple):
    """What an export has made."""

    model_type: str
    bytes: int
    """Of tensors."""
    restored: tuple[str, ...]
    """Side files that were written back."""
    notes: tuple[str, ...]


def export_checkpoint(
    path: Path, out: Path, settings: ExportSettings, *, world: int = 1, report: Report = lambda *_: None
) -> Exported:
    """Write the checkpoint at `path` to the folder `out`, with `world` processes."""
    try:
        plan = folder_of(path, out, settings)
        plan.begin()
        try:
            _write_files(path, out, settings, plan, world, report)
        except BaseException:
            plan.abandon()
            raise
        plan.finish()
        if of_encoder(path, settings):
            restored, notes = write_encoder_files(path, out, settings)
        else:
            restored, notes = _write_side_files(path, out, describe(path), settings, plan)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    return Exported(str(plan.config["model_type"]), sum(plan.sizes.values()), restored, notes)


def folder_of(path: Path, out: Path, settings: ExportSettings) -> FolderPlan:
    """What goes into the folder: an encoder; or the language model, with the encoder beside it if the type has
    one, else as the run is without its modules."""
    if of_encoder(path, settings):
        return encoder_folder(path, out, settings)
    saved = describe(path)
    source, run = side_files.source_of(run_of(path)), replace(saved.run, modules={})
    model_type = settings.model_type or (source.config.get("model_type") if source else None)
    known = [*(family.model_type for family in FAMILIES), *COMPOSITES, MEGATRON]
    if model_type is None:
        raise ConfigError(
            f"--model-type is missing: {path} was not imported\n  set   one of {', '.join(known)}"
        )
    if settings.model_type is not None and model_type not in [*known, *(each.text_type for each in FAMILIES)]:
        raise ConfigError(
            f"--model-type {model_type}: braid does not write such models{nearest(model_type, known)}\n"
            f"  set   one of {', '.join(known)}"
        )
    if settings.optimizer and run.train.lora.rank:
        raise ConfigError(
            f"--optimizer: {path} is of a LoRA run, whose moments are those of adapters, and these are merged "
            "into the weights\n  set   the weights alone, without --optimizer"
        )
    if settings.optimizer and saved.run.optim.name != "adamw":
        raise ConfigError(
            f"--optimizer: {path} was trained with optim.name {saved.run.optim.name}, but folders hold the "
            "moments of Adam\n  set   the weights alone, without --optimizer"
        )
    if settings.optimizer and (later := language_names(saved.own_updates)):
        raise ConfigError(
            f"--optimizer: {len(later)} tensors of {path} joined later and have counted their own "
            "updates, but a folder holds one number for all\n  set   the weights alone, without --optimizer"
        )
    names = language_names(weight_names(path, moments=settings.optimizer))
    tensors = checkpoint_of(path, names, run.train.lora)
    dtype = DTYPES[run.train.dtype if settings.dtype == "run" else settings.dtype]
    updates = saved.updates if settings.optimizer else None
    given: dict[str, Any] = {"dtype": dtype, "updates": updates, "outlines": tensors.outlines()}
    extra = saved.hub.get("settings") or {
        "max_position_embeddings": run.data.sequence_tokens,
        "eos_token_id": tokenizer_from(saved.tokenizer).end_of_document,
    }
    if model_type == MEGATRON:
        experts: Any = "stacked" if settings.experts == "usual" else settings.experts
        table = adapter(settings.form, experts, interleave=settings.interleave)
        config = {"model_type": MEGATRON, "interleave": settings.interleave, "run": to_json(run), **extra}
        return plan_trained(out, config, tensors, table, run.model, **given)
    hub: dict[str, Any] = {"settings": extra, "source": source}
    hub["as_stored"] = settings.dtype == "run" and source is not None and trains_as_stored(source, run)
    form = _hub_form(model_type, settings)
    if model_type == OMNI and run.train.lora.rank:
        raise ConfigError(f"{path} is of a LoRA run, which cannot be exported as {OMNI}: set --model-type")
    if model_type == OMNI:
        return omni_folder(path, out, saved.run, optimizer=settings.optimizer, form=form, dtype=dtype, **hub)
    return hub_folder(run.model, tensors, out, model_type=model_type, form=form, **hub, **given)


def _hub_form(model_type: str, settings: ExportSettings) -> str | None:
    if settings.experts in HUB_FORMS and not settings.interleave and settings.form == "indexed":
        return HUB_FORMS[settings.experts]
    raise ConfigError(
        f"--experts {settings.experts} --form {settings.form} --interleave {settings.interleave}: "
        f"{model_type} has no such layout\n"
        f"  rule  Hugging Face has --experts {', '.join(HUB_FORMS)}; other layouts, --form and --interleave "
        f"are for {MEGATRON}\n"
        f"  set   --experts each, or --model-type {MEGATRON}"
    )


def _write_files(
    path: Path, out: Path, settings: ExportSettings, plan: FolderPlan, world: int, report: Report
) -> None:
    done, total = 0, sum(plan.sizes.values())

    def advance(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)

    advance(0)
    if world == 1:
        for file in plan.sizes:
            plan.write_file(file, advance)
        return
    with processes(world) as pool:
        running = {pool.submit(write_one, path, out, settings, file): n for file, n in plan.sizes.items()}
        for future in as_completed(running):
            future.result()
            advance(running[future])


_planned: Callable[[Path, Path, ExportSettings], FolderPlan] = lru_cache(maxsize=1)(folder_of)
"""A process writes many files of one folder, and planning one of many tensors takes seconds."""


def write_one(path: Path, out: Path, settings: ExportSettings, file: str) -> None:
    """Write one file of the folder."""
    _planned(path, out, settings).write_file(file)


def _write_side_files(
    path: Path, out: Path, saved: CheckpointInfo, settings: ExportSettings, plan: FolderPlan
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the imported folder held besides weights, the tokenizer, and how far the run has read its data."""
    restored, notes = side_files.restore(run_of(path), out), []
    check_inside(path, saved.hub.get("files", {}))
    for name, text in saved.hub.get("files", {}).items():  # checkpoints of older versions hold their text
        (out / name).write_text(text, encoding="utf-8")
    if saved.tokenizer.get("kind") == "hf":
        definition = str(saved.tokenizer["definition"]).encode()
        if (out / TOKENIZER).is_file() and (out / TOKENIZER).read_bytes() != definition:
            notes.append(f"{TOKENIZER} is the run's; the other tokenizer files are those of the import")
        (out / TOKENIZER).write_bytes(definition)
    if settings.optimizer:
        position = {"samples": saved.samples, "tokens": saved.tokens, "fingerprint": saved.data_fingerprint}
        (out / side_files.POSITION).write_text(json.dumps(position, indent=2) + "\n")
    source = side_files.source_of(run_of(path))
    left_out = () if source is None else source.left_out
    notes += [f"not in the export, because the import left it out: {name}" for name in left_out]
    if plan.config["model_type"] == OMNI:
        return restored, (*notes, *omni_notes(run_of(path)))
    notes += [
        f"not in the export, which has the language model alone: modules.{name}" for name in saved.run.modules
    ]
    return restored, tuple(notes)
