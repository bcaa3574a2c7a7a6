"""Files of a hub folder besides its weights: tokenizer, chat template, generation settings, licence.

An import copies these files to `RUN/hub`, and an export writes them back byte for byte. Text and sentencepiece
models travel. Code, pickles, links and whatever is larger than a tokenizer ever is stay behind, and are named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.checkpoint.parts import CODES
from braid.errors import CheckpointError
from braid.interchange.files import (
    CONFIG,
    DTYPES,
    INDEX,
    OPTIMIZER,
    SafetensorsFolder,
    check_inside,
    plan_folder,
    read_json,
    write_folder,
)

FOLDER = "hub"
"""Where a run keeps them."""
KEPT = "kept"
"""In there, the folder of tensors that are no part of a model that braid trains."""
KINDS = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken", ".jsonl")
"""Endings of the files that travel; `.model` is a sentencepiece model."""
PLAIN = ("LICENSE", "NOTICE", "USE_POLICY")
"""Files without an ending that travel."""
LARGEST = 64 * 2**20
POSITION = "braid_position.json"
"""How far a run has read its data, in braid's own exports with an optimizer's state."""
RECORD = "braid_import.json"
"""What an import has left unread and left out, in a run's folder."""
DAMAGED = "  set   a run that is imported again; or remove {folder}, and give --model-type"
WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Endings of files that are imported, not copied."""


class Source(NamedTuple):
    """The folder that a model was imported from."""

    config: Mapping[str, Any]
    """Its config.json, with the `model_type` that the import read it as."""
    shards: Mapping[str, str]
    """The file that held each tensor."""
    ignored: Sequence[str]
    """Settings of its config.json that the import left unread."""
    left_out: Sequence[str]
    """Files that the import left behind, each with the reason."""
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    """The dtype of each tensor; empty in runs that were imported before it was recorded."""
    dims: Mapping[str, int] = MappingProxyType({})
    """The number of dims of each tensor, which tells layouts of experts apart; empty in older runs."""


class SideFiles(NamedTuple):
    """The files of a folder, sorted by what becomes of them."""

    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    """Each with the reason."""


def survey(folder: Path) -> SideFiles:
    """What travels with the weights of a folder, and what does not."""
    kept, left_out = [], []
    for file in sorted(folder.iterdir()):
        if file.name == POSITION or (file.name.endswith(WEIGHTS) and file.name != INDEX):
            continue
        if file.name == CONFIG and file.is_symlink():
            continue
        reason = _reason(file)
        if reason:
            left_out.append(f"{file.name} ({reason})")
        else:
            kept.append(file.name)
    return SideFiles(tuple(kept), tuple(left_out))


def _reason(file: Path) -> str:
    """Why a file stays behind; empty where it travels."""
    if file.is_symlink():
        return "a link"
    if not file.is_file():
        return "a folder" if file.is_dir() else "no regular file"
    if file.suffix not in KINDS and file.name not in PLAIN:
        return "code" if file.suffix == ".py" else "not a kind of file that braid copies"
    if file.stat().st_size > LARGEST:
        return f"larger than {LARGEST // 2**20} MiB"
    return ""


def carry(
    folder: Path,
    run: Path,
    weight_map: Mapping[str, str],
    outlines: Mapping[str, Tensor],
    *,
    ignored: Sequence[str] = (),
    model_type: str | None = None,
) -> SideFiles:
    """Copy what travels from a folder of the hub to a run's folder, and note which file held each tensor, in
    which dtype and with how many dims, what was left unread, and the `model_type` that config.json was read as,
    if not its own."""
    found = survey(folder)
    _copy(folder, run / FOLDER, found.kept)
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG).is_file():  # has been read, and so travels, even where it is a link
        shutil.copyfile(folder / CONFIG, run / FOLDER / CONFIG)
    seen = sorted(outlines.items())
    record: dict[str, Any] = {"ignored": list(ignored), "left_out": list(found.left_out)}
    record["dtypes"] = {name: CODES[tensor.dtype] for name, tensor in seen}
    record["dims"] = {name: tensor.dim() for name, tensor in seen}
    record |= {} if model_type is None else {"model_type": model_type}
    for name, data in ((INDEX, {"weight_map": dict(sorted(weight_map.items()))}), (RECORD, record)):
        (run / FOLDER / name).write_text(json.dumps(data, indent=2) + "\n")
    return found


def keep(run: Path, tensors: Mapping[str, Tensor], outlines: Mapping[str, Tensor]) -> None:
    """Store tensors that braid does not train in a run's folder."""
    folder = run / FOLDER / KEPT
    shutil.rmtree(folder, ignore_errors=True)  # what an import that was killed has left
    if tensors:
        write_folder(plan_folder(folder, {}, tensors, outlines=outlines))


def kept_of(run: Path) -> Mapping[str, Tensor]:
    """The tensors that `keep` has stored, read when asked for."""
    folder = run / FOLDER / KEPT
    return SafetensorsFolder(folder) if folder.is_dir() else {}


def source_of(run: Path) -> Source | None:
    """What the folder said that a run was imported from; None where it was not."""
    if not (run / FOLDER / CONFIG).is_file():
        return None
    try:
        config, index, record = (
            read_json(run / FOLDER / name, CheckpointError) for name in (CONFIG, INDEX, RECORD)
        )
    except CheckpointError as error:
        told = str(error).partition("\n")[0]
        raise CheckpointError(f"{told}\n{DAMAGED.format(folder=run / FOLDER)}") from error
    config |= {name: record[name] for name in ("model_type",) if name in record}
    shards, codes, dims = index.get("weight_map", {}), record.get("dtypes", {}), record.get("dims", {})
    ignored, left_out = record.get("ignored", []), record.get("left_out", [])
    known = all(isinstance(each, dict) for each in (shards, codes, dims))
    known = known and all(isinstance(each, list) for each in (ignored, left_out))
    if not (known and set(codes.values()) <= DTYPES.keys() and {type(n) for n in dims.values()} <= {int}):
        raise CheckpointError(
            f"{run / FOLDER} is damaged: {INDEX} or {RECORD} is not as an import writes it\n"
            f"{DAMAGED.format(folder=run / FOLDER)}"
        )
    check_inside(run / FOLDER / INDEX, shards.values())
    dtypes = {name: DTYPES[code] for name, code in codes.items()}
    return Source(config, shards, ignored, left_out, dtypes, dims)


def hand_on(source: Path, run: Path) -> None:
    """Copy the side files of one run to another that begins from its weights."""
    if (source / FOLDER).is_dir() and not (run / FOLDER).exists():
        _copy(source / FOLDER, run / FOLDER, survey(source / FOLDER).kept)
        if (source / FOLDER / KEPT).is_dir():
            shutil.copytree(source / FOLDER / KEPT, run / FOLDER / KEPT)


def restore(run: Path, folder: Path) -> tuple[str, ...]:
    """Write the side files of a run back; config.json and the index belong to whoever writes the weights."""
    hub = run / FOLDER
    names = tuple(_restored(hub)) if hub.is_dir() else ()
    _copy(hub, folder, names)
    return names


def _restored(hub: Path) -> Iterator[str]:
    for name in survey(hub).kept:
        if name not in (CONFIG, INDEX, RECORD) and not name.startswith(f"{OPTIMIZER}.safetensors"):
            yield name


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    if not names:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(source / name, target / name, follow_symlinks=False)
    except OSError as error:
        raise CheckpointError(f"cannot copy {source} to {target}: {error.strerror}") from error
