"""`braid import`, `braid export`: convert checkpoints from and to Hugging Face and Megatron formats.

Weights, and optionally the optimizer state, are read from and written to safetensors files. Megatron itself
writes no config.json that describes the model: `braid export` adds one that contains the run, and for folders
without it `braid import` takes the model from a recipe.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.cli.generate import CHECKPOINT_HELP
from braid.cli.next_steps import program
from braid.errors import CheckpointError, ConfigError, ExitCode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from braid.architecture import Model
    from braid.config import Run
    from braid.data import Tokenizer
    from braid.interchange import Adapter, Trained
    from braid.train.state import CheckpointInfo

TOKENIZER = "tokenizer.json"
VERBATIM_FILES = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files that an import keeps and an export writes back unchanged."""
SETTINGS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of a config.json that do not describe the architecture; an export writes them back."""
MEGATRON = "megatron"
"""The model_type of folders with Megatron's parameter names."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Convert a Hugging Face or Megatron model to a braid checkpoint."""

    out: Path
    """Run directory to create; `braid generate` and `braid train --init` accept it."""
    mtp_depths: int = 0
    """Number of MTP (multi-token prediction) depths to import from the files."""
    recipe: Annotated[str | None, optional("RECIPE", "none")] = None
    """Recipe that describes the model, for Megatron files without a config.json."""
    interleave: int = 0
    """Block size in rows in which Megatron experts interleave gate and up; 0 if not interleaved."""
    optimizer: bool = True
    """Import the optimizer state if the files contain it."""
    updates: Annotated[int | None, optional("INT", "optimizer.state.step of the files")] = None
    """Number of optimizer updates so far, for Adam's bias correction."""


class ConvertSource(NamedTuple):
    """Contents of a source folder other than its tensors."""

    run: Run
    adapter: Adapter
    tokenizer: Tokenizer
    hub: Mapping[str, Any]


def import_(args: list[str]) -> int:
    if wants_help(args):
        print("FOLDER contains .safetensors files, a config.json in Hugging Face format, and optionally a")
        print("tokenizer.json. For Megatron parameter names, --recipe describes the model instead.\n")
        args = ["FOLDER", "--help"]
    name, rest = split_positional(args, "import", "FOLDER")
    opts = parse_options(ImportOptions, rest, f"braid import {name}")
    from braid.interchange import has_moments, to_ours
    from braid.interchange.files import SafetensorsFolder
    from braid.nn.dtypes import DTYPES
    from braid.train.state import save_weights

    folder, root = Path(name), opts.out / "checkpoints"
    if root.exists():
        raise CheckpointError(f"{root} already exists: choose another --out")
    files = SafetensorsFolder(folder)
    outlines = files.outlines()
    source = _source(folder, opts, outlines)
    shape = source.run.model
    dtype = DTYPES[source.run.train.dtype] if opts.optimizer and has_moments(outlines) else None
    found = to_ours(files, source.adapter, shape, dtype=dtype, outlines=outlines)
    if dtype is None:
        path = save_weights(root, found.tensors, source.run, source.tokenizer, source.hub)
    else:
        path = _save_trained(root, found, source, opts.updates)
    if source.run.data.tokenizer == "bytes":
        print(f"braid: {folder} has no {TOKENIZER}: using the byte tokenizer", file=sys.stderr)
    print(f"{len(found.tensors)} tensors of {shape.pattern}\ncheckpoint  {path}")
    print(f"tokenizer   {source.run.data.tokenizer}")
    print(f"try next    {shlex.join([*program(), 'generate', str(opts.out), '--prompt', 'The '])}")
    return ExitCode.OK


def _source(folder: Path, opts: ImportOptions, outlines: Mapping[str, Tensor]) -> ConvertSource:
    from braid.config import Mesh
    from braid.interchange import described, reader_of
    from braid.interchange.files import CONFIG, read_json
    from braid.interchange.megatron import reader
    from braid.planning.plan import plan

    config = (
        read_json(folder / CONFIG, ConfigError) if (folder / CONFIG).is_file() else {"model_type": MEGATRON}
    )
    if config.get("model_type") == MEGATRON:
        run, interleave = _megatron_run(folder, config, opts)
        adapter = reader(interleave=interleave)
        tokenizer, tokenizer_file = _tokenizer_of(folder, opts.out, run.data.tokenizer)
        run = replace(run, data=replace(run.data, tokenizer=tokenizer_file))
    else:
        if opts.recipe is not None or opts.interleave:
            raise ConfigError(
                f"{folder / CONFIG} describes the model: --recipe and --interleave are for {MEGATRON} folders"
            )
        family, shape, *_ = described(folder, mtp_depths=opts.mtp_depths)
        adapter = reader_of(family)
        tokenizer, tokenizer_file = _tokenizer_of(folder, opts.out, "bytes")
        run = _run_of(shape, tokenizer_file, _dtype_of(outlines))
    plan(replace(run, mesh=Mesh()), world=1)
    return ConvertSource(run, adapter, tokenizer, _hub(folder))


def _megatron_run(folder: Path, config: Mapping[str, Any], opts: ImportOptions) -> tuple[Run, int]:
    """The run of a Megatron folder, and the interleave of gate and up in its experts."""
    from braid import recipes
    from braid.config import from_json

    interleave = config.get("interleave", opts.interleave)
    if type(interleave) is not int:
        raise ConfigError(f"interleave = {interleave!r} in the config.json of {folder}: must be an integer")
    if opts.mtp_depths:
        raise ConfigError(
            f"--mtp-depths {opts.mtp_depths}: {MEGATRON} models get MTP depths from the pattern, leave it out"
        )
    if opts.interleave not in (0, interleave):
        raise ConfigError(
            f"--interleave {opts.interleave}: the config.json of {folder} says {interleave}, leave it out"
        )
    if opts.recipe is not None:
        return recipes.load(opts.recipe), interleave
    if "run" not in config:
        raise ConfigError(
            f"{folder} does not describe its model\n"
            "  rule  either its config.json or a recipe must\n"
            "  set   --recipe NAME, or --recipe path/to/file.py:function"
        )
    return from_json(config["run"]), interleave


def _save_trained(root: Path, found: Trained, source: ConvertSource, given: int | None) -> Path:
    """Save weights and optimizer state as a training checkpoint, at the step of the last update."""
    import torch

    import braid
    from braid import checkpoint
    from braid.config import to_json
    from braid.train.state import NAMES_VERSION, NO_DATA, RNG

    if given is not None and found.updates not in (None, given):
        raise ConfigError(f"--updates {given}: the files say {found.updates}, leave it out")
    updates = found.updates if given is None else given
    if updates is None:
        raise ConfigError(
            "the files contain the optimizer's moments, but not its number of updates\n"
            "  rule  Adam's bias correction depends on the number of updates\n"
            "  set   --updates N, or --no-optimizer to import only the weights"
        )
    extra = {
        "braid": braid.__version__,
        "names": NAMES_VERSION,
        "run": to_json(source.run),
        "tokenizer": dict(source.tokenizer.description),
        "samples": 0,
        "tokens": 0,
        "updates": updates,
        "skipped_in_a_row": 0,
        "data": {"fingerprint": NO_DATA},
        "hub": dict(source.hub),
    }
    pieces = (checkpoint.Piece.whole(name, found.tensors[name]) for name in found.tensors)
    generator = checkpoint.Piece.whole(RNG, torch.Generator().manual_seed(source.run.train.seed).get_state())
    return checkpoint.save(root, updates, chain(pieces, [generator]), extra=extra)


def _hub(folder: Path) -> dict[str, Any]:
    """Settings and files that `braid export` writes back unchanged."""
    from braid.interchange.files import CONFIG, read_json

    config = read_json(folder / CONFIG, CheckpointError) if (folder / CONFIG).is_file() else {}
    files = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in VERBATIM_FILES
        if (folder / name).is_file()
    }
    return {"settings": {name: config[name] for name in SETTINGS if name in config}, "files": files}


def _tokenizer_of(folder: Path, out: Path, default: str) -> tuple[Tokenizer, str]:
    """The folder's tokenizer, whose file is copied to `out`; or `default` if the folder has none."""
    from braid.data import HfTokenizer
    from braid.train.data_pipeline import load_tokenizer

    if not (folder / TOKENIZER).is_file():
        return load_tokenizer(default), default
    tokenizer = HfTokenizer.from_file(folder / TOKENIZER, _end_of_document(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / TOKENIZER).write_bytes((folder / TOKENIZER).read_bytes())
    return tokenizer, str(out / TOKENIZER)


def _dtype_of(outlines: Mapping[str, Tensor]) -> torch.dtype:
    """The most common dtype of the weights."""
    dtypes = Counter(tensor.dtype for name, tensor in outlines.items() if "optimizer.state." not in name)
    return dtypes.most_common(1)[0][0]


def _end_of_document(folder: Path) -> str | None:
    """The `eos_token` of tokenizer_config.json, which is a string or a dict with `content`."""
    from braid.interchange.files import read_json

    file = folder / "tokenizer_config.json"
    end = read_json(file, CheckpointError).get("eos_token") if file.is_file() else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _run_of(shape: Model, tokenizer: str, dtype: torch.dtype) -> Run:
    """A run with this model and defaults for everything else."""
    from braid.config import Data, Run, Train
    from braid.nn.dtypes import DTYPES

    names = {value: name for name, value in DTYPES.items()}
    train: Mapping[str, Any] = {"dtype": names.get(dtype, "fp32")}
    return Run(model=shape, data=Data(tokenizer=tokenizer), train=Train(steps=1, batch_samples=1, **train))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Convert a checkpoint to Hugging Face or Megatron format."""

    out: Path
    """Output folder; must be empty or not exist."""
    model_type: str
    """llama, qwen3, qwen3_moe, mixtral, mamba2, nemotron_h, qwen3_next, deepseek_v3, deepseek_v4, megatron."""
    dtype: Literal["run", "bf16", "fp32", "fp64"] = "run"
    """Dtype of the weights; run: the dtype of training."""
    optimizer: bool = False
    """Also write the optimizer state, to optimizer.safetensors."""
    experts: Literal["usual", "each", "stacked", "packed", "grouped", "indexed", "sequential"] = "usual"
    """Layout of expert weights. Hugging Face: each (usual), stacked, packed. megatron: any (usual: stacked)."""
    form: Literal["indexed", "hybrid", "stacked"] = "indexed"
    """megatron: layers by index, by index with MTP by symbol, or stacked in the first dimension of tensors."""
    interleave: int = 0
    """megatron: block size in rows in which experts interleave gate and up; 0 to not interleave."""


def export(args: list[str]) -> int:
    if wants_help(args):
        print(CHECKPOINT_HELP)
        args = ["CHECKPOINT", "--help"]
    name, rest = split_positional(args, "export", "CHECKPOINT")
    opts = parse_options(ExportOptions, rest, f"braid export {name}")
    from braid.train.state import describe, read_weights, resolve_checkpoint

    path = resolve_checkpoint(Path(name))
    saved = describe(path)
    tensors = _read_all(path) if opts.optimizer else read_weights(path)
    files = dict(saved.hub.get("files", {}))
    if saved.tokenizer.get("kind") == "hf":
        files[TOKENIZER] = str(saved.tokenizer["definition"])
    try:
        _write(opts, saved, tensors)
        for file, text in files.items():
            (opts.out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {opts.out}: {error.strerror}; choose another --out") from error
    print(f"{opts.model_type}  {opts.out}")
    return ExitCode.OK


def _write(opts: ExportOptions, saved: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
    from braid.config import to_json
    from braid.data import tokenizer_from
    from braid.interchange import to_hf, write_trained
    from braid.interchange.megatron import adapter
    from braid.nn.dtypes import DTYPES

    run, updates = saved.run, saved.updates if opts.optimizer else None
    dtype = DTYPES[run.train.dtype if opts.dtype == "run" else opts.dtype]
    settings = saved.hub.get("settings") or {
        "max_position_embeddings": run.data.sequence_tokens,
        "eos_token_id": tokenizer_from(saved.tokenizer).end_of_document,
    }
    if opts.model_type != MEGATRON:
        form = _form(opts)
        to_hf(
            run.model,
            tensors,
            opts.out,
            model_type=opts.model_type,
            form=form,
            dtype=dtype,
            settings=settings,
            updates=updates,
        )
        return
    table = adapter(
        opts.form, "stacked" if opts.experts == "usual" else opts.experts, interleave=opts.interleave
    )
    config = {"model_type": MEGATRON, "interleave": opts.interleave, "run": to_json(run), **settings}
    write_trained(opts.out, config, tensors, table, run.model, dtype=dtype, updates=updates)


def _form(opts: ExportOptions) -> str:
    """The interchange form of the `--experts` option, for Hugging Face families."""
    forms = {"usual": "hub", "each": "hub", "stacked": "memory", "packed": "packed"}
    if opts.experts not in forms or opts.interleave or opts.form != "indexed":
        raise ConfigError(
            f"--experts {opts.experts} --form {opts.form} --interleave {opts.interleave}: "
            f"{opts.model_type} has no such layout\n"
            f"  rule  Hugging Face has --experts {', '.join(forms)}; other layouts, --form and --interleave "
            f"are for {MEGATRON}\n"
            f"  set   --experts each, or --model-type {MEGATRON}"
        )
    return forms[opts.experts]


def _read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint except the RNG state."""
    import torch

    from braid import checkpoint
    from braid.train.state import RNG

    stored = checkpoint.read_manifest(path).tensors
    wanted: dict[str, checkpoint.ReadRequest | Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
        if name != RNG
    }
    return checkpoint.read(path, wanted, unread={RNG})
