"""`braid import`, `braid export`: convert checkpoints from and to Hugging Face and Megatron formats.

Weights, and optionally the optimizer state, are read from and written to safetensors files. Megatron itself
writes no config.json that describes the model: `braid export` adds one that contains the run, and for folders
without it `braid import` takes the model from a recipe.
"""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.cli.generate import CHECKPOINT_HELP
from braid.cli.next_steps import program
from braid.cli.plan_tables import size_text
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode

FOLDER_HELP = """\
FOLDER contains .safetensors files, a config.json in Hugging Face format, and optionally a
tokenizer.json. For Megatron parameter names, --recipe describes the model instead.
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Convert a Hugging Face or Megatron model to a braid checkpoint."""

    out: Path
    """Run directory to create; `braid generate` and `braid train` accept it."""
    model_type: Annotated[str | None, optional("TYPE", "that of config.json")] = None
    """Read config.json as this model_type, if it states none or an unknown one; megatron: by --recipe."""
    mtp_depths: int = 0
    """Number of MTP (multi-token prediction) depths to import from the files."""
    recipe: Annotated[str | None, optional("RECIPE", "none")] = None
    """Recipe that describes the model, for Megatron files."""
    interleave: int = 0
    """Block size in rows in which Megatron experts interleave gate and up; 0 if not interleaved."""
    optimizer: bool = True
    """Import the optimizer state if the files contain it."""
    updates: Annotated[int | None, optional("INT", "optimizer.state.step of the files")] = None
    """Number of optimizer updates so far, for Adam's bias correction."""
    samples: Annotated[int | None, optional("INT", "the position in the export, or 0")] = None
    """Samples of the data that the run has read, where training continues."""
    ignore: Annotated[tuple[str, ...], optional("NAME", "none")] = ()
    """Settings of config.json to leave unread, at your own risk; the run records them."""
    world: int = 1
    """Number of processes that convert in parallel."""


Settings = TypeVar("Settings")
Options = TypeVar("Options", "ImportOptions", "ExportOptions")


def import_(args: list[str]) -> int:
    name, opts = _parse(ImportOptions, args, "import", "FOLDER", FOLDER_HELP)
    counts = {"mtp-depths": opts.mtp_depths, "updates": opts.updates, "samples": opts.samples}
    for option, value in counts.items():
        if value is not None and value < 0:
            raise ConfigError(f"--{option} {value}: must be 0 or more")
    from braid.train.importing import ImportSettings, import_folder

    began = time.monotonic()
    with bar("importing") as progress:
        settings = _chosen(ImportSettings, opts)
        made = import_folder(Path(name), opts.out, settings, world=opts.world, report=progress)
    _print_notes(made.notes)
    held = ", ".join(f"{at.removesuffix('.')} {each}".strip() for at, each in made.patterns.items())
    print(f"{made.tensors} tensors of {held}\ncheckpoint  {made.path}")
    print(f"size        {_rate(made.bytes, time.monotonic() - began)}")
    if made.run is not None:
        print(f"tokenizer   {made.run.data.tokenizer}")
    if made.step:
        print(f"position    step {made.step}, sample {made.samples}")
    print(f"try next    {_next_step(made.run is None, opts.out)}")
    return ExitCode.OK


def _next_step(encoder: bool, out: Path) -> str:
    """What an imported model is for."""
    if not encoder:
        return shlex.join([*program(), "generate", str(out), "--prompt", "The "])
    named = shlex.join([*program(), "train", "RECIPE", "--init", "LANGUAGE", "--init-modules", f"vision={out}"])
    return f"{named}  # RECIPE has this encoder as the module vision"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Convert a checkpoint to Hugging Face or Megatron format."""

    out: Path
    """Output folder; must be empty or not exist."""
    model_type: Annotated[str | None, optional("TYPE", "that of the imported folder")] = None
    """A model_type of transformers, such as llama or nemotron_h (see docs/interchange.md), or megatron."""
    module: Annotated[
        str | None, optional("NAME", "the language model, with its encoder if the type has one")
    ] = None
    """Export this encoder by itself, as radio."""
    dtype: Literal["run", "bf16", "fp32", "fp64"] = "run"
    """Dtype of the weights; run: the dtype of training."""
    optimizer: bool = False
    """Also write the optimizer state, to optimizer.safetensors."""
    adapter: bool = False
    """Of a LoRA run: write the adapters alone, in peft's format. Otherwise they are merged into the weights."""
    experts: Literal["usual", "each", "stacked", "packed", "grouped", "indexed", "sequential"] = "usual"
    """Layout of expert weights. Hugging Face: each, stacked, packed. megatron: any. usual: that of the imported
    Hugging Face folder; else each, for megatron stacked."""
    form: Literal["indexed", "hybrid", "stacked"] = "indexed"
    """megatron: layers by index, by index with MTP by symbol, or stacked in the first dimension of tensors."""
    interleave: int = 0
    """megatron: block size in rows in which experts interleave gate and up; 0 to not interleave."""
    world: int = 1
    """Number of processes that write files in parallel."""


def export(args: list[str]) -> int:
    name, opts = _parse(ExportOptions, args, "export", "CHECKPOINT", CHECKPOINT_HELP)
    from braid.train.export_settings import ExportSettings
    from braid.train.exporting import export_checkpoint
    from braid.train.state import resolve_checkpoint

    if opts.adapter:
        from braid.train.exporting_adapter import export_adapter

        count = export_adapter(resolve_checkpoint(Path(name)), opts.out, opts.model_type)
        print(f"peft  {opts.out}\nadapters  {count}")
        return ExitCode.OK
    began = time.monotonic()
    with bar("exporting") as progress:
        path, settings = resolve_checkpoint(Path(name)), _chosen(ExportSettings, opts)
        made = export_checkpoint(path, opts.out, settings, world=opts.world, report=progress)
    _print_notes(made.notes)
    print(f"{made.model_type}  {opts.out}\nsize  {_rate(made.bytes, time.monotonic() - began)}")
    return ExitCode.OK


def _parse(kind: type[Options], args: list[str], command: str, metavar: str, about: str) -> tuple[str, Options]:
    """The positional argument of a conversion, and its options."""
    if wants_help(args):
        print(about)
        args = [metavar, "--help"]
    name, rest = split_positional(args, command, metavar)
    opts = parse_options(kind, rest, f"braid {command} {name}")
    if opts.world < 1:
        raise ConfigError(f"--world {opts.world}: must be 1 or more")
    return name, opts


def _chosen(kind: Callable[..., Settings], opts: ImportOptions | ExportOptions) -> Settings:
    """The options that a conversion takes as its settings: those with the names of its fields."""
    names = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in vars(opts).items() if name in names})


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"braid: {note}", file=sys.stderr)


def _rate(size: int, seconds: float) -> str:
    """Bytes that were converted, and how fast: the bar shows it only on a terminal."""
    return f"{size_text(size)} in {seconds:.1f} s, {size_text(size / max(seconds, 1e-3))}/s"
