"""Import: a folder of the Hugging Face hub, or of Megatron, becomes a run with one checkpoint.

The configuration is read first, and refused with every reason; then tensors are converted part by part, so that
memory holds one part per process whatever the size of the model. What the folder has besides weights goes to
`RUN/hub` (interchange/side_files.py), and an export writes it back.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import braid
from braid import checkpoint, recipes
from braid.checkpoint.manifest import MANIFEST_NAME
from braid.choices import BYTE_VOCAB
from braid.config import Data, Mesh, Module, Run, Train, flatten, from_json, to_json
from braid.data import HfTokenizer, Tokenizer, eos_token_of
from braid.errors import CheckpointError, ConfigError, first_of
from braid.interchange import Adapter, Trained, described, has_moments, reader_of, side_files, to_ours
from braid.interchange.composite import MODULE, Composite, is_kept, kept_notes, language_of
from braid.interchange.composite import TYPES as COMPOSITES
from braid.interchange.composite import described as described_parts
from braid.interchange.composite import to_ours as parts_to_ours
from braid.interchange.files import CONFIG, SafetensorsFolder, read_json
from braid.interchange.hub import HubConfig
from braid.interchange.megatron import reader
from braid.interchange.quantized import Dequantized
from braid.interchange.sliced import Renamed
from braid.interchange.trained import UPDATES
from braid.nn.dtypes import DTYPES
from braid.planning.plan import plan
from braid.train.data_pipeline import load_tokenizer
from braid.train.encoder_checkpoint import encoder_extra
from braid.train.state import RNG
from braid.train.stored_run import MOST, NAMES_VERSION, NO_DATA

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MEGATRON = "megatron"
"""The model_type of folders with Megatron's parameter names."""
MOST_ITEMS = 4
"""Images of a sample in an imported run, which may take half of its tokens; options change both."""
PART_BYTES = 512 * 2**20
"""Size of the parts of an imported checkpoint: what a process holds in memory."""

Report = Callable[[int, int], None]
"""Hears bytes done and bytes in all."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What an import may choose; see `braid import --help`."""

    model_type: str | None = None
    mtp_depths: int = 0
    recipe: str | None = None
    interleave: int = 0
    optimizer: bool = True
    updates: int | None = None
    samples: int | None = None
    ignore: tuple[str, ...] = ()


class ImportSource(NamedTuple):
    """A folder that is to be imported, before its tensors are converted."""

    run: Run | None
    """None where the folder holds an encoder alone."""
    model: Adapter | Composite
    """How its tensors are read: the table of a language model, or the parts of a model with an encoder."""
    files: SafetensorsFolder | Dequantized
    weight_map: Mapping[str, str]
    stored: Mapping[str, Tensor]
    """The weights without numbers, by their names."""
    dtype: torch.dtype | None
    """The dtype of the run whose optimizer state is imported; None to import weights alone."""
    notes: tuple[str, ...]

    @property
    def patterns(self) -> dict[str, str]:
        """The pattern of each model, by the prefix of its canonical names."""
        if isinstance(self.model, Composite):
            return {part.prefix: part.shape.pattern for part in self.model.parts}
        assert self.run is not None
        return {"": self.run.model.pattern}

    def settings(self) -> dict[str, Any]:
        """Those of its models, by dotted names."""
        if not isinstance(self.model, Composite):
            assert self.run is not None
            return flatten(self.run.model, "model")
        shapes = {part.prefix + "model": part.shape for part in self.model.parts}
        return {name: value for at, shape in shapes.items() for name, value in flatten(shape, at).items()}

    @property
    def kept(self) -> list[str]:
        """Tensors of the files that braid does not train, and keeps for an export."""
        return [name for name in self.stored if isinstance(self.model, Composite) and is_kept(name)]

    def convert(self) -> Trained:
        return self._converted(self.files, self.files.outlines())

    def outlines(self) -> dict[str, Tensor]:
        """Shapes and dtypes of the converted tensors."""
        seen = {name: tensor for name, tensor in self.files.outlines().items() if name != UPDATES}
        found = self._converted(seen, seen).tensors
        return {name: found[name] for name in found}

    def _converted(self, tensors: Mapping[str, Tensor], outlines: Mapping[str, Tensor]) -> Trained:
        if isinstance(self.model, Composite):
            return Trained(tensors=parts_to_ours(tensors, outlines, self.model), updates=None)
        assert self.run is not None
        return to_ours(tensors, self.model, self.run.model, dtype=self.dtype, outlines=outlines)


class Imported(NamedTuple):
    """What an import has made."""

    run: Run | None
    """None for an encoder alone."""
    patterns: Mapping[str, str]
    """By the prefix of the canonical names: empty for the language model."""
    path: Path
    tensors: int
    bytes: int
    """Of tensors."""
    step: int
    samples: int
    notes: tuple[str, ...]


def import_folder(
    folder: Path, out: Path, settings: ImportSettings, *, world: int = 1, report: Report = lambda *_: None
) -> Imported:
    """Convert a folder into the run directory `out`, with `world` processes."""
    root = out / "checkpoints"
    _check_folders(folder, out, root)
    try:
        return _import_folder(folder, out, root, settings, world, report)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def _check_links(folder: Path) -> None:
    """Refuse files to be read that are links out of the folder: the import would copy what they lead to. Links
    into the hub's own cache, SNAPSHOT/FILE -> ../../blobs/HASH, are how it stores folders."""
    allowed = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    leading_out = [
        f"{file.name} -> {os.readlink(file)}"
        for file in sorted(folder.iterdir())
        if file.is_symlink() and file.suffix in (".json", ".safetensors")
        if not any(file.resolve().is_relative_to(place) for place in allowed)
    ]
    if leading_out:
        rule = "rule  files are in the folder, or in `blobs` of the hub's cache that the folder is in"
        told = [f"{folder} has links that lead out of it", *first_of(leading_out), rule]
        raise CheckpointError("\n  ".join([*told, "set   a folder that holds the files themselves"]))


def _check_folders(folder: Path, out: Path, root: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder\n"
            "  rule  braid downloads nothing: it reads config.json and .safetensors files from a folder\n"
            "  set   a folder on this machine, such as `hf download NAME --local-dir FOLDER` makes"
        )
    _check_links(folder)
    if not (folder / CONFIG).is_file():
        for name, what in (("checkpoints", "run"), (MANIFEST_NAME, "checkpoint")):
            if (folder / name).exists():
                raise ConfigError(
                    f"{folder} is a {what} already: `braid train` and `braid generate` take it as it is"
                )
    if out.resolve() == folder.resolve():
        raise ConfigError(f"--out {out} is the folder to import: choose another --out")
    # What an import that was killed has left is no checkpoint, and goes away.
    if checkpoint.complete_steps(root):
        raise CheckpointError(f"{root} already exists: choose another --out")


def _import_folder(
    folder: Path, out: Path, root: Path, settings: ImportSettings, world: int, report: Report
) -> Imported:
    source = open_source(folder, settings)
    found, outlines = source.convert(), source.outlines()
    if source.dtype is None and (settings.updates is not None or settings.samples is not None):
        raise ConfigError(
            "--updates and --samples are for files with the state of an optimizer, which is not imported here: "
            "leave them out"
        )
    step = _step(found, settings) if source.dtype is not None else 0
    position = _position(folder, settings) if source.dtype is not None else {}
    tokenizer, run = (None, None) if source.run is None else _tokenizer_of(folder, out, source.run)
    total = sum(tensor.nbytes for tensor in outlines.values())
    out.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out).free) < total:
        raise CheckpointError(
            f"{out} needs {total / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB: free some of it, or "
            "choose another --out"
        )
    read_as: dict[str, Any] = {"ignored": settings.ignore, "model_type": settings.model_type}
    carried = side_files.carry(folder, out, source.weight_map, source.stored, **read_as)
    kept = source.kept
    own = Renamed(source.files, dict(zip(kept, kept, strict=True)))
    side_files.keep(out, own, {name: source.stored[name] for name in kept})
    for name in (TOKENIZER, TOKENIZER_CONFIG):  # the second says which token ends a document
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if run is None or tokenizer is None:
        assert isinstance(source.model, Composite)
        extra = encoder_extra({MODULE: source.model.shape})
    else:
        extra = _extra(run, tokenizer, step, position)
    parts = list(_parts(outlines))
    checkpoint.begin(root, step)
    try:
        records = list(_write_parts(folder, settings, root, step, parts, outlines, world, report))
        if source.dtype is not None and run is not None:
            generator = torch.Generator().manual_seed(run.train.seed).get_state()
            records.append(
                checkpoint.write_part(root, step, len(parts), [checkpoint.Piece.whole(RNG, generator)])
            )
        path = checkpoint.commit(root, step, records, extra=extra)
    except BaseException:
        checkpoint.abandon(root, step)
        raise
    notes = (*source.notes, *(f"left out: {name}" for name in carried.left_out))
    notes += () if run is None else tuple(_tokenizer_notes(folder, run))
    samples = 0 if run is None else extra["samples"]
    return Imported(run, source.patterns, path, len(outlines), total, step, samples, notes)


def open_source(folder: Path, settings: ImportSettings) -> ImportSource:
    """Read the configuration of a folder, then open its files. All that does not fit is reported at once."""
    config = (
        read_json(folder / CONFIG, ConfigError) if (folder / CONFIG).is_file() else {"model_type": MEGATRON}
    )
    config |= {} if settings.model_type is None else {"model_type": settings.model_type}
    notes: tuple[str, ...] = ()
    files: SafetensorsFolder | Dequantized
    model: Adapter | Composite
    run: Run | None
    if config.get("model_type") == MEGATRON:
        run, interleave = _megatron_run(folder, config, settings)
        model = reader(interleave=interleave)
        stored = files = SafetensorsFolder(folder)
    else:
        if settings.recipe is not None or settings.interleave:
            raise ConfigError(
                f"{folder / CONFIG} describes the model: --recipe and --interleave are for {MEGATRON} folders, "
                "leave them out"
            )
        chosen: dict[str, Any] = {"model_type": settings.model_type, "mtp_depths": settings.mtp_depths}
        chosen["ignore"] = settings.ignore
        read: HubConfig | Composite
        if config.get("model_type") in COMPOSITES:
            stored = SafetensorsFolder(folder)
            read = model = described_parts(folder, stored.weight_map(), **chosen)
            notes = (*read.notes, *kept_notes(stored.weight_map()))
        else:
            read = described(folder, **chosen)
            model, notes = reader_of(read.family), read.notes
            stored = SafetensorsFolder(folder)
        files = stored if read.quantization is None else Dequantized(stored, read.quantization)
        if read.quantization is not None:
            notes += ("quantised weights are widened to bfloat16",)
        run = _run_of(read, _dtype_of(files.outlines(), folder))
    if run is not None:  # A tokenizer may be missing: whoever needs one is told then.
        plan(replace(run, mesh=Mesh(), data=replace(run.data, tokenizer=TOKENIZER)), world=1)
    with_moments = settings.optimizer and not isinstance(model, Composite) and has_moments(files.outlines())
    dtype = DTYPES[run.train.dtype] if with_moments and run is not None else None
    seen = files.outlines()
    held = {name: seen[name] for name in stored.weight_map() if name in seen}
    return ImportSource(run, model, files, stored.weight_map(), held, dtype, notes)


def _megatron_run(folder: Path, config: Mapping[str, Any], settings: ImportSettings) -> tuple[Run, int]:
    """The run of a Megatron folder, and the interleave of gate and up in its experts."""
    interleave = config.get("interleave", settings.interleave)
    if type(interleave) is not int:
        raise ConfigError(f"interleave = {interleave!r} in the config.json of {folder}: must be an integer")
    if settings.mtp_depths:
        raise ConfigError(
            f"--mtp-depths {settings.mtp_depths}: {MEGATRON} models get depths from the pattern, leave it out"
        )
    if settings.interleave not in (0, interleave):
        raise ConfigError(
            f"--interleave {settings.interleave}: the config.json of {folder} says {interleave}, leave it out"
        )
    if settings.recipe is not None:
        return recipes.load(settings.recipe), interleave
    if "run" not in config:
        held = (folder / CONFIG).is_file()
        raise ConfigError(
            f"{f'{folder / CONFIG} describes no Megatron model' if held else f'{folder} has no {CONFIG}'}\n"
            "  rule  config.json describes the model, or a recipe if files have Megatron's names\n"
            "  set   --recipe NAME, or --recipe path/to/file.py:function, or a folder with a config.json"
        )
    try:
        return from_json(config["run"]), interleave
    except ConfigError as error:
        raise ConfigError(
            f"{folder / CONFIG} holds no run of this version: {error}\n  set   --recipe, to describe the model"
        ) from error


def _run_of(read: HubConfig | Composite, dtype: torch.dtype) -> Run | None:
    """A run with this model and defaults for everything else; None for an encoder alone."""
    named: Mapping[str, Any] = {"dtype": dtype_of_training(dtype)}
    train = Train(steps=1, batch_samples=1, **named)
    if isinstance(read, HubConfig):
        return Run(model=read.shape, data=Data(), train=train)
    if read.language is None:
        return None
    patches = read.shape.group * (Data().sequence_tokens // 2)
    vision = Module(
        model=read.shape, token=read.token, most_items=MOST_ITEMS, most_patches=patches, items="image"
    )
    return Run(model=language_of(read), data=Data(), train=train, modules={MODULE: vision})


def dtype_of_training(dtype: torch.dtype) -> str:
    """The dtype in which a run trains weights of this one: float32 where braid does not train in it."""
    return {value: name for name, value in DTYPES.items()}.get(dtype, "fp32")


def _dtype_of(outlines: Mapping[str, Tensor], folder: Path) -> torch.dtype:
    """The most common dtype of the weights."""
    dtypes = Counter(tensor.dtype for name, tensor in outlines.items() if "optimizer.state." not in name)
    if not dtypes:
        raise CheckpointError(f"the safetensors files of {folder} hold no tensors")
    return dtypes.most_common(1)[0][0]


# --------------------------------------------------------------------------------------------- tokenizer


def _tokenizer_of(folder: Path, out: Path, run: Run) -> tuple[Tokenizer, Run]:
    """The folder's tokenizer, and the run that names the copy of it in `out`; by default the run's own."""
    if not (folder / TOKENIZER).is_file():
        return load_tokenizer(run.data.tokenizer), run
    tokenizer = HfTokenizer.from_file(folder / TOKENIZER, eos_token_of(folder))
    return tokenizer, replace(run, data=replace(run.data, tokenizer=str(out.resolve() / TOKENIZER)))


def _tokenizer_notes(folder: Path, run: Run) -> Iterator[str]:
    if run.data.tokenizer != "bytes":
        return
    yield f"{folder} has no {TOKENIZER}: using the byte tokenizer"
    if run.model.vocab < BYTE_VOCAB:
        yield (
            f"a vocabulary of {run.model.vocab} is smaller than the byte tokenizer's {BYTE_VOCAB}: generating "
            "and training on text need --data.tokenizer with the model's own tokenizer.json"
        )


# ------------------------------------------------------------------------------------- position of a run


def _step(found: Trained, settings: ImportSettings) -> int:
    """The number of updates of the optimizer."""
    if settings.updates is not None and found.updates not in (None, settings.updates):
        raise ConfigError(f"--updates {settings.updates}: the files say {found.updates}, leave it out")
    updates = found.updates if settings.updates is None else settings.updates
    if updates is None:
        raise ConfigError(
            "the files contain the optimizer's moments, but not its number of updates\n"
            "  rule  Adam's bias correction depends on the number of updates\n"
            "  set   --updates N, or --no-optimizer to import only the weights"
        )
    return updates


def _position(folder: Path, settings: ImportSettings) -> dict[str, Any]:
    """How far a run has read its data: as `--samples` says, or as braid's own exports say."""
    if settings.samples is not None:
        return {"samples": settings.samples}
    file = folder / side_files.POSITION
    position = read_json(file, CheckpointError) if file.is_file() else {}
    for name in ("samples", "tokens"):
        count = position.get(name, 0)
        if type(count) is not int or not 0 <= count <= MOST:
            raise CheckpointError(
                f"{file}: {name} = {count!r} must be a whole number from 0 to 2**63 - 1\n"
                "  set   --samples N, to continue there, or remove the file to begin with the first sample"
            )
    return position


def _extra(run: Run, tokenizer: Tokenizer, step: int, position: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of the manifest, as train/state.py writes it."""
    return {
        "braid": braid.__version__,
        "names": NAMES_VERSION,
        "run": to_json(run),
        "tokenizer": dict(tokenizer.description),
        "samples": int(position.get("samples", 0)),
        "tokens": int(position.get("tokens", 0)),
        "updates": step,
        "skipped_in_a_row": 0,
        "data": {"fingerprint": str(position.get("fingerprint", NO_DATA))},
    }


# ------------------------------------------------------------------------------------------------- parts


def _parts(outlines: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of the tensors of each part, of bounded size; a tensor that is larger has a part of its own."""
    names: list[str] = []
    size = 0
    for name, tensor in outlines.items():
        if names and size + tensor.nbytes > PART_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _write_parts(
    folder: Path,
    settings: ImportSettings,
    root: Path,
    step: int,
    parts: Sequence[Sequence[str]],
    outlines: Mapping[str, Tensor],
    world: int,
    report: Report,
) -> Iterator[checkpoint.Record]:
    """Convert and write every part, here or in processes that open the folder themselves."""
    sizes = [sum(outlines[name].nbytes for name in names) for names in parts]
    done, total = 0, sum(sizes)
    report(done, total)
    jobs = [(folder, settings, root, step, number, tuple(names)) for number, names in enumerate(parts)]
    if world == 1:
        for job, size in zip(jobs, sizes, strict=True):
            yield write_one(*job)
            done += size
            report(done, total)
        return
    with processes(world) as pool:
        running = {pool.submit(write_one, *job): size for job, size in zip(jobs, sizes, strict=True)}
        for future in as_completed(running):
            yield future.result()
            done += running[future]
            report(done, total)


@contextmanager
def processes(world: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that convert. If one of them is killed, all end with an error that says so."""
    try:
        with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise CheckpointError(
            f"--world {world}: one of the processes was killed, as happens when memory runs out\n"
            "  set   a smaller --world, or have more memory free, and repeat the command"
        ) from error


@lru_cache(maxsize=1)
def _converted(folder: Path, settings: ImportSettings) -> Mapping[str, Tensor]:
    """The tensors of a folder, converted when they are read. Opening a folder of many tensors takes seconds,
    and a process writes many parts of it."""
    return open_source(folder, settings).convert().tensors


def write_one(
    folder: Path, settings: ImportSettings, root: Path, step: int, number: int, names: Sequence[str]
) -> checkpoint.Record:
    """Convert some tensors and write them as one part."""
    tensors = _converted(folder, settings)
    pieces = (checkpoint.Piece.whole(name, _finite(folder, name, tensors[name])) for name in names)
    return checkpoint.write_part(root, step, number, pieces)


def _finite(folder: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor, unless it holds NaN or infinity: no model computes anything with those."""
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        wrong = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{folder} holds a model that is not finite: {name} has {wrong:,} of {tensor.numel():,} numbers "
            "NaN or infinite\n  set   whole files: copy or download them again, or another checkpoint"
        )
    return tensor
