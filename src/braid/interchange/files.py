"""Folders as the Hugging Face hub has them: config.json, safetensors files, and their index.

The state of an optimizer, which the hub does not know, may lie beside them in files of its own, so that nobody
takes it for weights. Tensors are read when they are asked for. Nothing that a folder holds is ever executed,
and names in its index may not lead out of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.checkpoint.parts import CODES, lay_out, raw_bytes
from braid.errors import CheckpointError, ConfigError, first_of
from braid.interchange.sliced import Index, SlicedTensors

CONFIG = "config.json"
MODEL, OPTIMIZER = "model", "optimizer"
"""How the names of files begin."""
INDEX = f"{MODEL}.safetensors.index.json"
SINGLE = f"{MODEL}.safetensors"
DTYPES = MappingProxyType({code: dtype for dtype, code in CODES.items()})
LFS_POINTER = b"version https://git-lfs"
"""How the files begin that Git puts in the place of large ones."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD_BYTES = 5 * 10**9
"""Bytes of one file at most, unless one tensor alone is larger."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file, of which an index reads a part."""

    file: Path
    name: str

    @property
    def shape(self) -> torch.Size:
        with self._stored() as stored:
            return torch.Size(stored.get_shape())

    def __getitem__(self, index: Index) -> Tensor:
        with self._stored() as stored:
            part: Tensor = stored[index]
            return part

    @contextmanager
    def _stored(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as handle:
                yield handle.get_slice(self.name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.file, error, f"{self.file}: {self.name}") from error


class SafetensorsFolder(SlicedTensors):
    """The tensors of a folder, by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files_of(folder, MODEL)
        if any((folder / name).is_file() for name in _names_of(OPTIMIZER)):
            state = _files_of(folder, OPTIMIZER)
            twice = sorted(self._files.keys() & state.keys())
            if twice:
                told = [f"twice    {name}: in {self._files[name]} and in {state[name]}" for name in twice]
                raise CheckpointError("\n  ".join([f"{folder} holds tensors twice", *told]))
            self._files |= state

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error, f"{file}: {name}") from error

    def opened(self, name: str) -> FileTensor:
        return FileTensor(self._files[name], name)

    def outlines(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor, as a tensor without memory: reads headers alone. Dtypes that braid
        does not have stand as one that is narrow."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as handle:
                for name in list(handle.keys()):
                    stored = handle.get_slice(name)
                    dtype = DTYPES.get(stored.get_dtype(), torch.int8)
                    found[name] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
        return found

    def weight_map(self) -> dict[str, str]:
        """The name of the file that holds each tensor, the optimizer's apart."""
        return {name: file.name for name, file in self._files.items() if not file.name.startswith(OPTIMIZER)}

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _names_of(stem: str) -> tuple[str, str]:
    """A single file, and the index of several."""
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json"


def _files_of(folder: Path, stem: str) -> dict[str, Path]:
    """The file of every tensor. An index must name exactly what its files hold."""
    single, index = (folder / name for name in _names_of(stem))
    if index.is_file() and single.is_file():
        raise CheckpointError(
            f"{folder} holds both {single.name} and {index.name}, which is ambiguous: remove one of them"
        )
    if not index.is_file():
        if not single.is_file():
            raise _no_weights(folder, stem)
        return dict.fromkeys(_names_in(single), single)
    indexed = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(indexed, dict) or not all(isinstance(file, str) for file in indexed.values()):
        raise CheckpointError(
            f"{index} has no weight_map\n"
            "  rule  an index holds the file of each tensor: "
            '{"weight_map": {"TENSOR": "FILE.safetensors"}}\n'
            "  set   the index that came with these files"
        )
    check_inside(index, indexed.values())
    absent = sorted({file for file in indexed.values() if not (folder / file).is_file()})
    if absent:
        told = [f"{index} names files that are not there", *first_of(absent, lambda file: f"missing  {file}")]
        raise CheckpointError("\n  ".join([*told, "set   all files: copy or download them again"]))
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
        raise CheckpointError("\n  ".join([f"{index} does not fit its files", *wrong]))
    return {name: folder / file for name, file in indexed.items()}


def check_inside(index: Path, files: Iterable[str]) -> None:
    """Refuse an index that names files outside of its folder, by accident or to have them overwritten."""
    outside = sorted({file for file in files if Path(file).name != file or file in ("", "..")})
    if outside:
        raise CheckpointError(f"{index} names files outside of its folder: {', '.join(map(repr, outside))}")


def _names_in(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error, str(file)) from error


def _unreadable(file: Path, error: Exception, what: str) -> CheckpointError:
    """The error for a file that safetensors does not read, or a tensor of it."""
    with suppress(OSError), open(file, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            return CheckpointError(
                f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in {file.parent}"
            )
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return CheckpointError(f"{what} cannot be read: {why}\n  set   a whole file: copy or download it again")


def _no_weights(folder: Path, stem: str) -> CheckpointError:
    """The error for a folder without files that braid would read."""
    single, index = _names_of(stem)
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    remedy = "the folder that has them"
    if others:
        remedy = f"{single} as the name of a single file, or add {index}, which says what is in {others[0]}"
    elif pickled:
        remedy = f"the folder of safetensors files that {pickled[0]} is converted to: braid unpickles nothing"
    return CheckpointError(
        f"{folder} holds neither {single} nor {index}\n"
        f"  rule  weights are in {single}, or in the files that {index} names\n  set   {remedy}"
    )


def read_json(file: Path, kind: type[CheckpointError] | type[ConfigError]) -> dict[str, Any]:
    """The object in a JSON file, or an error of this kind."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise kind(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise kind(
            f"{file} cannot be read as JSON: {error}\n  set   a whole file: copy or download it again"
        ) from error
    if not isinstance(data, dict):
        raise kind(f"{file} must hold a JSON object, {{...}}, not a {type(data).__name__}")
    return data


@dataclass(frozen=True, kw_only=True)
class FolderPlan:
    """A folder before it is written: what goes into which file. Files are written one by one, by one process or
    by several, and streamed: headers follow from outlines alone, and one tensor at a time is in memory."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By stem: those of the model, those of the optimizer."""
    outlines: Mapping[str, Mapping[str, Tensor]]
    """The same without numbers."""
    files: Mapping[str, Mapping[str, Sequence[str]]]
    """By stem, then by file: names of tensors."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the tensors of every file."""
        return {
            file: sum(self.outlines[stem][name].nbytes for name in names)
            for stem, files in self.files.items()
            for file, names in files.items()
        }

    def begin(self) -> None:
        """Make the folder, which must be empty, on a disk that has room for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = sorted(file.name for file in self.folder.iterdir())
        if held:
            raise CheckpointError(
                f"{self.folder} is not empty: it holds {', '.join(held[:5])}; choose another --out"
            )
        needed, free = sum(self.sizes.values()), shutil.disk_usage(self.folder).free
        if needed > free:
            sizes = f"needs {needed / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB"
            raise CheckpointError(f"{self.folder} {sizes}: free some of it, or choose another --out")

    def write_file(self, file: str, report: Callable[[int], None] = lambda _: None) -> None:
        """Write one of `sizes`. `report` hears the bytes of every tensor that is written."""
        stem = next(stem for stem, files in self.files.items() if file in files)
        tensors, outlines = self.tensors[stem], self.outlines[stem]
        layout = lay_out({name: outlines[name] for name in self.files[stem][file]}, metadata={"format": "pt"})
        with open(self.folder / file, "xb") as stream:
            stream.write(layout.header)
            for name in layout.tensors:
                tensor = tensors[name]
                if (tensor.shape, tensor.dtype) != (outlines[name].shape, outlines[name].dtype):
                    raise CheckpointError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not as announced")
                stream.write(raw_bytes(tensor))
                report(tensor.nbytes)
                del tensor  # before the next one is read

    def abandon(self) -> None:
        """Delete the files of an export that failed, so that it can be repeated."""
        for file in self.sizes:
            (self.folder / file).unlink(missing_ok=True)

    def finish(self) -> None:
        """Write the indexes, where there are several files, and the config."""
        for stem, files in self.files.items():
            single, index = _names_of(stem)
            if list(files) == [single]:
                continue
            places = {name: file for file, names in files.items() for name in names}
            size = sum(tensor.nbytes for tensor in self.outlines[stem].values())
            data = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
            (self.folder / index).write_text(json.dumps(data, indent=2) + "\n")
        (self.folder / CONFIG).write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")


def plan_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    outlines: Mapping[str, Tensor] | None = None,
    optimizer: Mapping[str, Tensor] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
    shards: Mapping[str, str] = MappingProxyType({}),
) -> FolderPlan:
    """Files of bounded size, and the optimizer's state in files of its own. `outlines` are the tensors without
    numbers; without them tensors are read twice. `shards` names the file of each tensor, if files are to be
    divided as they were."""
    seen = {MODEL: outlined(tensors) if outlines is None else outlines}
    files = {MODEL: _files(MODEL, seen[MODEL], shard_bytes, shards)}
    if optimizer:
        seen[OPTIMIZER] = outlined(optimizer)
        files[OPTIMIZER] = _files(OPTIMIZER, seen[OPTIMIZER], shard_bytes, {})
    stems = {MODEL: tensors, OPTIMIZER: optimizer}
    return FolderPlan(folder=folder, config=config, tensors=stems, outlines=seen, files=files)


def write_folder(plan: FolderPlan) -> None:
    """Write a folder from one process."""
    plan.begin()
    for file in plan.sizes:
        plan.write_file(file)
    plan.finish()


def outlined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shapes and dtypes, as tensors without memory."""
    return {name: tensors[name].to("meta") for name in tensors}


def _files(
    stem: str, outlines: Mapping[str, Tensor], shard_bytes: int, shards: Mapping[str, str]
) -> dict[str, list[str]]:
    """File names, and the tensors that go into each: as they were divided before, if all were there. Then they
    have the order in which safetensors writes them, so that the whole file is the one that it was."""
    if outlines.keys() <= shards.keys():
        held: dict[str, list[str]] = {}
        for name in sorted(outlines):
            held.setdefault(shards[name], []).append(name)
        return dict(sorted(held.items()))
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in outlines.items():
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {_names_of(stem)[0]: groups[0]}
    count = len(groups)
    return {f"{stem}-{n:05d}-of-{count:05d}.safetensors": names for n, names in enumerate(groups, start=1)}
