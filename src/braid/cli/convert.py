"""`braid import`, `braid export`: convert checkpoints from and to Hugging Face and Megatron formats.

Weights, and optionally the optimizer state, are read from and written to safetensors files. Megatron itself
writes no config.json that describes the model: `braid export` adds one that contains the run, and for folders
without it `braid import` takes the model from a recipe.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.cli.generate import CHECKPOINT_HELP
from braid.cli.next_steps import program
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Convert a Hugging Face or Megatron model to a braid checkpoint."""

    out: Path
    """Run directory to create; `braid generate` and `braid train` accept it."""
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
    samples: Annotated[int | None, optional("INT", "the position in the export, or 0")] = None
    """Samples of the data that the run has read, where training continues."""
    ignore: tuple[str, ...] = ()
    """Settings of config.json to leave unread; recorded in the checkpoint."""
    world: int = 1
    """Number of processes that convert in parallel."""


def import_(args: list[str]) -> int:
    if wants_help(args):
        print("FOLDER contains .safetensors files, a config.json in Hugging Face format, and optionally a")
        print("tokenizer.json. For Megatron parameter names, --recipe describes the model instead.\n")
        args = ["FOLDER", "--help"]
    name, rest = split_positional(args, "import", "FOLDER")
    opts = parse_options(ImportOptions, rest, f"braid import {name}")
    _check_world(opts.world)
    from braid.train.importing import ImportSettings, import_folder

    settings = ImportSettings(
        mtp_depths=opts.mtp_depths,
        recipe=opts.recipe,
        interleave=opts.interleave,
        optimizer=opts.optimizer,
        updates=opts.updates,
        samples=opts.samples,
        ignore=opts.ignore,
    )
    with bar("importing") as progress:
        made = import_folder(Path(name), opts.out, settings, world=opts.world, report=progress)
    for note in made.notes:
        print(f"braid: {note}", file=sys.stderr)
    print(f"{made.tensors} tensors of {made.run.model.pattern}\ncheckpoint  {made.path}")
    print(f"tokenizer   {made.run.data.tokenizer}")
    if made.step:
        print(f"position    step {made.step}, sample {made.samples}")
    print(f"try next    {shlex.join([*program(), 'generate', str(opts.out), '--prompt', 'The '])}")
    return ExitCode.OK


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Convert a checkpoint to Hugging Face or Megatron format."""

    out: Path
    """Output folder; must be empty or not exist."""
    model_type: Annotated[str | None, optional("TYPE", "that of the imported folder")] = None
    """A model_type of transformers, such as llama or nemotron_h (see docs/interchange.md), or megatron."""
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
    world: int = 1
    """Number of processes that write files in parallel."""


def export(args: list[str]) -> int:
    if wants_help(args):
        print(CHECKPOINT_HELP)
        args = ["CHECKPOINT", "--help"]
    name, rest = split_positional(args, "export", "CHECKPOINT")
    opts = parse_options(ExportOptions, rest, f"braid export {name}")
    _check_world(opts.world)
    from braid.train.exporting import ExportSettings, export_checkpoint
    from braid.train.state import resolve_checkpoint

    settings = ExportSettings(
        model_type=opts.model_type,
        dtype=opts.dtype,
        optimizer=opts.optimizer,
        experts=opts.experts,
        form=opts.form,
        interleave=opts.interleave,
    )
    with bar("exporting") as progress:
        path = resolve_checkpoint(Path(name))
        made = export_checkpoint(path, opts.out, settings, world=opts.world, report=progress)
    for note in made.notes:
        print(f"braid: {note}", file=sys.stderr)
    print(f"{made.model_type}  {opts.out}")
    return ExitCode.OK


def _check_world(world: int) -> None:
    if world < 1:
        raise ConfigError(f"--world {world}: must be 1 or more")
