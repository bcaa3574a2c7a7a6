"""`braid import`, `braid export`: models from and to the files of others, with the state of their optimizer."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from braid.cli.args import options, subject, wants_help
from braid.cli.next_steps import program
from braid.errors import CheckpointError, ConfigError, ExitCode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from braid.architecture import Model
    from braid.config import Run
    from braid.data import Tokenizer
    from braid.interchange import Adapter, Trained
    from braid.train.state import Saved

TOKENIZER = "tokenizer.json"
CARRIED = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files of a folder that travel with its model as they are."""
SETTINGS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of a config.json that say nothing about the shape."""
MEGATRON = "megatron"
"""The model_type of files under Megatron's names. They tell no shape: braid adds the run that it exports."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Make a checkpoint of a model that others have trained."""

    out: Path
    """Folder of the run that is made; `braid generate` takes it."""
    mtp_depths: int = 0
    """Depths of multi-token prediction that the files hold and the model should have."""
    recipe: str | None = None
    """Recipe that has the shape of a model under Megatron's names, which its files do not tell."""
    interleave: int = 0
    """Rows in which gate and up alternate in the experts of a Megatron model; 0 where one follows the other."""
    optimizer: bool = True
    """Whether the optimizer's state is read too, where the files hold it."""
    updates: int | None = None
    """Updates that the optimizer has made, where no optimizer.state.step in the files tells."""


class ConvertSource(NamedTuple):
    """What a folder says before its tensors are read."""

    run: Run
    adapter: Adapter
    tokenizer: Tokenizer
    hub: Mapping[str, Any]


def import_(words: list[str]) -> int:
    if wants_help(words):
        print("FOLDER holds .safetensors files, config.json as the Hugging Face hub has it, and may hold")
        print("tokenizer.json. Where the files have Megatron's names, --recipe has the shape.\n")
        words = ["FOLDER", "--help"]
    name, rest = subject(words, "import", "FOLDER")
    chosen = options(ImportOptions, rest, f"braid import {name}")
    from braid.interchange import has_moments, to_ours
    from braid.interchange.files import SafetensorsFolder
    from braid.nn.dtypes import DTYPES
    from braid.train.state import save_weights

    folder, root = Path(name), chosen.out / "checkpoints"
    if root.exists():
        raise CheckpointError(f"{root} is there already: choose another --out")
    files = SafetensorsFolder(folder)
    outlines = files.outlines()
    source = _source(folder, chosen, outlines)
    shape = source.run.model
    dtype = DTYPES[source.run.train.dtype] if chosen.optimizer and has_moments(outlines) else None
    found = to_ours(files, source.adapter, shape, dtype=dtype, outlines=outlines)
    if dtype is None:
        path = save_weights(root, found.tensors, source.run, source.tokenizer, source.hub)
    else:
        path = _save_trained(root, found, source, chosen.updates)
    if source.run.data.tokenizer == "bytes":
        print(f"braid: {folder} has no {TOKENIZER}: text goes in and out as bytes", file=sys.stderr)
    print(f"{len(found.tensors)} tensors of {shape.pattern}\ncheckpoint  {path}")
    print(f"tokenizer   {source.run.data.tokenizer}")
    print(f"try next    {shlex.join([*program(), 'generate', str(chosen.out), '--prompt', 'The '])}")
    return ExitCode.OK


def _source(folder: Path, chosen: ImportOptions, outlines: Mapping[str, Tensor]) -> ConvertSource:
    from braid.config import Mesh
    from braid.interchange import described, reader_of
    from braid.interchange.files import CONFIG, read_json
    from braid.interchange.megatron import reader
    from braid.planning.plan import plan

    config = (
        read_json(folder / CONFIG, ConfigError) if (folder / CONFIG).is_file() else {"model_type": MEGATRON}
    )
    if config.get("model_type") == MEGATRON:
        run, interleave = _described(folder, config, chosen)
        adapter = reader(interleave=interleave)
        tokenizer, tokenizer_file = _tokenizer_of(folder, chosen.out, run.data.tokenizer)
        run = replace(run, data=replace(run.data, tokenizer=tokenizer_file))
    else:
        if chosen.recipe is not None or chosen.interleave:
            raise ConfigError(f"{folder / CONFIG} has the shape: --recipe and --interleave are for {MEGATRON}")
        family, shape, *_ = described(folder, mtp_depths=chosen.mtp_depths)
        adapter = reader_of(family)
        tokenizer, tokenizer_file = _tokenizer_of(folder, chosen.out, "bytes")
        run = _run_of(shape, tokenizer_file, _dtype_of(outlines))
    plan(replace(run, mesh=Mesh()), world=1)
    return ConvertSource(run, adapter, tokenizer, _hub(folder))


def _described(folder: Path, config: Mapping[str, Any], chosen: ImportOptions) -> tuple[Run, int]:
    """The run of a model under Megatron's names, and how gate and up lie in its experts."""
    from braid import recipes
    from braid.config import from_json

    told = config.get("interleave", chosen.interleave)
    if type(told) is not int:
        raise ConfigError(f"interleave = {told!r} in the config.json of {folder}: must be a whole number")
    if chosen.mtp_depths:
        raise ConfigError(f"--mtp-depths {chosen.mtp_depths}: the pattern of a {MEGATRON} model has its depths")
    if chosen.interleave not in (0, told):
        raise ConfigError(f"--interleave {chosen.interleave}: {folder} says {told}, leave it out")
    if chosen.recipe is not None:
        return recipes.load(chosen.recipe), told
    if "run" not in config:
        raise ConfigError(
            f"{folder} does not tell the shape of its model\n"
            "  rule  a config.json has it, or a recipe\n"
            "  set   --recipe NAME, or --recipe path/to/file.py:function"
        )
    return from_json(config["run"]), told


def _save_trained(root: Path, found: Trained, source: ConvertSource, given: int | None) -> Path:
    """Write weights and moments as a run saves them, at the step of the last update."""
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
            "the files hold the optimizer's moments, and nothing says how many updates it has made\n"
            "  rule  bias correction counts them\n"
            "  set   --updates N, or --no-optimizer to leave the moments out"
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
    """What a folder says that no shape holds, to be written again on export."""
    from braid.interchange.files import CONFIG, read_json

    config = read_json(folder / CONFIG, CheckpointError) if (folder / CONFIG).is_file() else {}
    files = {name: (folder / name).read_text(encoding="utf-8") for name in CARRIED if (folder / name).is_file()}
    return {"settings": {name: config[name] for name in SETTINGS if name in config}, "files": files}


def _tokenizer_of(folder: Path, out: Path, otherwise: str) -> tuple[Tokenizer, str]:
    """The folder's tokenizer, and a copy of its file beside the checkpoints; or else the one that is named."""
    from braid.data import HfTokenizer
    from braid.train.data_pipeline import tokenizer_of

    if not (folder / TOKENIZER).is_file():
        return tokenizer_of(otherwise), otherwise
    tokenizer = HfTokenizer.from_file(folder / TOKENIZER, _end_of_document(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / TOKENIZER).write_bytes((folder / TOKENIZER).read_bytes())
    return tokenizer, str(out / TOKENIZER)


def _dtype_of(outlines: Mapping[str, Tensor]) -> torch.dtype:
    """What most of the weights have."""
    dtypes = Counter(tensor.dtype for name, tensor in outlines.items() if "optimizer.state." not in name)
    return dtypes.most_common(1)[0][0]


def _end_of_document(folder: Path) -> str | None:
    """The token that tokenizer_config.json names as the end, in either of its spellings."""
    from braid.interchange.files import read_json

    file = folder / "tokenizer_config.json"
    end = read_json(file, CheckpointError).get("eos_token") if file.is_file() else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _run_of(shape: Model, tokenizer: str, dtype: torch.dtype) -> Run:
    """A run around a model that somebody else trained: its shape matters, the rest are defaults."""
    from braid.config import Data, Run, Train
    from braid.nn.dtypes import DTYPES

    names = {value: name for name, value in DTYPES.items()}
    train: Mapping[str, Any] = {"dtype": names.get(dtype, "fp32")}
    return Run(model=shape, data=Data(tokenizer=tokenizer), train=Train(steps=1, batch_samples=1, **train))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained model for others."""

    out: Path
    """Folder to write; must be empty or not there."""
    model_type: str
    """llama, qwen3, qwen3_moe, mixtral, mamba2, nemotron_h, qwen3_next, deepseek_v3, deepseek_v4, megatron."""
    dtype: Literal["run", "bf16", "fp32", "fp64"] = "run"
    """Dtype of the files; run takes the one that the model was trained in."""
    optimizer: bool = False
    """Whether the optimizer's state is written too, into optimizer.safetensors."""
    experts: Literal["usual", "each", "stacked", "packed", "grouped", "indexed", "sequential"] = "usual"
    """Layout of experts. The hub has each (usual), stacked and packed; megatron has all (usual: stacked)."""
    form: Literal["indexed", "hybrid", "stacked"] = "indexed"
    """How megatron tells layers: by index, the same with MTP by symbols, or as the first dim of tensors."""
    interleave: int = 0
    """Rows in which gate and up alternate in the experts of megatron; 0 where one follows the other."""


def export(words: list[str]) -> int:
    if wants_help(words):
        print("CHECKPOINT is a folder like runs/tiny/checkpoints/step-00000400, or a run's: its newest.\n")
        words = ["CHECKPOINT", "--help"]
    name, rest = subject(words, "export", "CHECKPOINT")
    chosen = options(ExportOptions, rest, f"braid export {name}")
    from braid.train.state import describe, newest_in, read_weights

    path = newest_in(Path(name))
    saved = describe(path)
    tensors = _read_all(path) if chosen.optimizer else read_weights(path)
    files = dict(saved.hub.get("files", {}))
    if saved.tokenizer.get("kind") == "hf":
        files[TOKENIZER] = str(saved.tokenizer["definition"])
    try:
        _write(chosen, saved, tensors)
        for file, text in files.items():
            (chosen.out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {chosen.out}: {error.strerror}; choose another --out") from error
    print(f"{chosen.model_type}  {chosen.out}")
    return ExitCode.OK


def _write(chosen: ExportOptions, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    from braid.config import to_json
    from braid.data import tokenizer_from
    from braid.interchange import to_hf, write_trained
    from braid.interchange.megatron import adapter
    from braid.nn.dtypes import DTYPES

    run, updates = saved.run, saved.updates if chosen.optimizer else None
    dtype = DTYPES[run.train.dtype if chosen.dtype == "run" else chosen.dtype]
    settings = saved.hub.get("settings") or {
        "max_position_embeddings": run.data.sequence_tokens,
        "eos_token_id": tokenizer_from(saved.tokenizer).end_of_document,
    }
    if chosen.model_type != MEGATRON:
        form = _form(chosen)
        to_hf(
            run.model,
            tensors,
            chosen.out,
            model_type=chosen.model_type,
            form=form,
            dtype=dtype,
            settings=settings,
            updates=updates,
        )
        return
    table = adapter(
        chosen.form, "stacked" if chosen.experts == "usual" else chosen.experts, interleave=chosen.interleave
    )
    config = {"model_type": MEGATRON, "interleave": chosen.interleave, "run": to_json(run), **settings}
    write_trained(chosen.out, config, tensors, table, run.model, dtype=dtype, updates=updates)


def _form(chosen: ExportOptions) -> str:
    """What a table of the hub calls the layout that is chosen."""
    forms = {"usual": "hub", "each": "hub", "stacked": "memory", "packed": "packed"}
    if chosen.experts not in forms or chosen.interleave or chosen.form != "indexed":
        raise ConfigError(
            f"--experts {chosen.experts} --form {chosen.form} --interleave {chosen.interleave}: "
            f"{chosen.model_type} has no such layout\n"
            f"  rule  the hub has {', '.join(forms)}; the others, --form and --interleave are {MEGATRON}'s\n"
            f"  set   --experts each, or --model-type {MEGATRON}"
        )
    return forms[chosen.experts]


def _read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint but the state of generators."""
    import torch

    from braid import checkpoint
    from braid.train.state import RNG

    stored = checkpoint.read_manifest(path).tensors
    wanted: dict[str, checkpoint.Wanted | Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
        if name != RNG
    }
    return checkpoint.read(path, wanted, unread={RNG})
