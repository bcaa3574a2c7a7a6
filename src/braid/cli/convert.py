"""`braid import`, `braid export`: models from and to folders of the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from braid.cli.words import options, subject, wants_help
from braid.errors import CheckpointError, ExitCode

if TYPE_CHECKING:
    import torch

    from braid.architecture import Model
    from braid.config import Run
    from braid.data import Tokenizer

TOKENIZER = "tokenizer.json"
CARRIED = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files of a folder that travel with its model as they are."""
SETTINGS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of a config.json that say nothing about the shape."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Make a checkpoint of a model from the Hugging Face hub."""

    out: Path
    """Folder of the run that is made; `braid generate` takes it."""
    mtp_depths: int = 0
    """Depths of multi-token prediction that the files hold and the model should have."""


def import_(words: list[str]) -> int:
    if wants_help(words):
        print("HF_FOLDER holds config.json and .safetensors files, and may hold tokenizer.json.\n")
        words = ["HF_FOLDER", "--help"]
    name, rest = subject(words, "import", "HF_FOLDER")
    chosen = options(ImportOptions, rest, f"braid import {name}")
    from braid.interchange import from_hf
    from braid.plan import plan
    from braid.train.state import save_weights

    folder, root = Path(name), chosen.out / "checkpoints"
    if root.exists():
        raise CheckpointError(f"{root} is there already: choose another --out")
    shape, tensors = from_hf(folder, mtp_depths=chosen.mtp_depths)
    tokenizer, tokenizer_file = _tokenizer_of(folder, chosen.out)
    run = _run_of(shape, tokenizer_file, tensors["embedding.weight"].dtype)
    plan(run, world=1)
    path = save_weights(root, tensors, run, tokenizer, _hub(folder))
    if tokenizer_file == "bytes":
        print(f"braid: {folder} has no {TOKENIZER}: text goes in and out as bytes", file=sys.stderr)
    print(f"{len(tensors)} tensors of {shape.pattern}\ncheckpoint  {path}\ntokenizer   {tokenizer_file}")
    print(f'try next    braid generate {chosen.out} --prompt "The "')
    return ExitCode.OK


def _hub(folder: Path) -> dict[str, Any]:
    """What a folder says that no shape holds, to be written again on export."""
    from braid.interchange.files import read_json

    config = read_json(folder / "config.json", CheckpointError)
    files = {name: (folder / name).read_text(encoding="utf-8") for name in CARRIED if (folder / name).is_file()}
    return {"settings": {name: config[name] for name in SETTINGS if name in config}, "files": files}


def _tokenizer_of(folder: Path, out: Path) -> tuple[Tokenizer, str]:
    """The folder's tokenizer, and a copy of its file beside the checkpoints; bytes where there is none."""
    from braid.data import ByteTokenizer, HfTokenizer

    if not (folder / TOKENIZER).is_file():
        return ByteTokenizer(), "bytes"
    tokenizer = HfTokenizer.from_file(folder / TOKENIZER, _end_of_document(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / TOKENIZER).write_bytes((folder / TOKENIZER).read_bytes())
    return tokenizer, str(out / TOKENIZER)


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
    from braid.train.device import DTYPES

    names = {value: name for name, value in DTYPES.items()}
    train: Mapping[str, Any] = {"dtype": names.get(dtype, "fp32")}
    return Run(model=shape, data=Data(tokenizer=tokenizer), train=Train(steps=1, batch_samples=1, **train))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained model as a folder of the Hugging Face hub."""

    out: Path
    """Folder to write; must be empty or not there."""
    model_type: str
    """llama, qwen3, qwen3_moe, mixtral, mamba2, nemotron_h, qwen3_next or deepseek_v3."""
    dtype: Literal["run", "bf16", "fp32", "fp64"] = "run"
    """Dtype of the files; run takes the one that the model was trained in."""


def export(words: list[str]) -> int:
    if wants_help(words):
        print("CHECKPOINT is a folder like runs/tiny/checkpoints/step-00000400, or a run's: its newest.\n")
        words = ["CHECKPOINT", "--help"]
    name, rest = subject(words, "export", "CHECKPOINT")
    chosen = options(ExportOptions, rest, f"braid export {name}")
    from braid.data import tokenizer_from
    from braid.interchange import to_hf
    from braid.train.device import DTYPES
    from braid.train.state import describe, newest_in, read_weights

    path = newest_in(Path(name))
    saved = describe(path)
    dtype = DTYPES[saved.run.train.dtype if chosen.dtype == "run" else chosen.dtype]
    settings = saved.hub.get("settings") or {
        "max_position_embeddings": saved.run.data.sequence_tokens,
        "eos_token_id": tokenizer_from(saved.tokenizer).end_of_document,
    }
    files = dict(saved.hub.get("files", {}))
    if saved.tokenizer.get("kind") == "hf":
        files[TOKENIZER] = str(saved.tokenizer["definition"])
    weights = read_weights(path)
    try:
        to_hf(
            saved.run.model,
            weights,
            chosen.out,
            model_type=chosen.model_type,
            dtype=dtype,
            settings=settings,
        )
        for file, text in files.items():
            (chosen.out / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {chosen.out}: {error.strerror}; choose another --out") from error
    print(f"{chosen.model_type}  {chosen.out}")
    return ExitCode.OK
