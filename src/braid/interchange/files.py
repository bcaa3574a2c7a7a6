"""Folders as the Hugging Face hub has them: config.json, safetensors files, and their index.

Tensors are read when they are asked for. Nothing that a folder holds is ever executed, and names in its index
may not lead out of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braid.errors import CheckpointError, ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Bytes of one file at most, unless one tensor alone is larger."""


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder, by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files_of(folder)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}") from error

    def outlines(self) -> dict[str, Tensor]:
        """The shape of every tensor, as a tensor without memory: reads headers alone."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as handle:
                shapes = {name: handle.get_slice(name).get_shape() for name in list(handle.keys())}
            found |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of every tensor. An index must name exactly what its files hold."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(_names_in(folder / SINGLE), folder / SINGLE)
    indexed = read_json(folder / INDEX, CheckpointError).get("weight_map")
    if not isinstance(indexed, dict) or not all(isinstance(file, str) for file in indexed.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of names to files")
    outside = sorted({file for file in indexed.values() if Path(file).name != file})
    if outside:
        raise CheckpointError(f"{folder / INDEX} names files outside of its folder: {', '.join(outside)}")
    held = {name: file for file in sorted(set(indexed.values())) for name in _names_in(folder / file)}
    wrong = [f"missing  {name}: not in {indexed[name]}" for name in sorted(indexed.keys() - held.keys())]
    wrong += [
        f"extra    {name}: in {held[name]}, not in the index" for name in sorted(held.keys() - indexed.keys())
    ]
    wrong += [
        f"moved    {name}: in {held[name]}, the index says {indexed[name]}"
        for name in sorted(indexed.keys() & held.keys())
        if held[name] != indexed[name]
    ]
    if wrong:
        raise CheckpointError("\n  ".join([f"{folder / INDEX} does not fit its files", *wrong]))
    return {name: folder / file for name, file in indexed.items()}


def _names_in(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_json(file: Path, kind: type[CheckpointError] | type[ConfigError]) -> dict[str, Any]:
    """The object in a JSON file, or an error of this kind."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise kind(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise kind(f"{file} must hold a JSON object")
    return data


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors in files of bounded size, with an index where there are several, and the config."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    left = [file.name for file in folder.iterdir()]
    if left:
        raise CheckpointError(f"{folder} is not empty: it holds {', '.join(sorted(left)[:5])}; choose another")
    shards = _shards(tensors, shard_bytes)
    files = {name: file for file, names in shards.items() for name in names}
    total = 0
    for file, names in shards.items():
        shard = {name: tensors[name].detach().cpu().contiguous().clone() for name in names}
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> dict[str, list[str]]:
    """File names, and the tensors that go into each."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        bytes_here = tensors[name].nbytes
        if groups[-1] and size + bytes_here > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_here
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": names for n, names in enumerate(groups, start=1)}
