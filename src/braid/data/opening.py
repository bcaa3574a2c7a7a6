"""Opens a data source by path and detects its format. Opening runs cheap checks; `verify` reads everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from braid.data.megatron import open_megatron
from braid.data.shards import INDEX, open_shards
from braid.data.source import Source
from braid.errors import DataError

TRAIN = "train"
VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The training and validation split of a build."""

    train: Source
    validation: Source | None
    """None if no documents were held out."""


def open_source(path: Path | str, *, vocab: int | None = None) -> Source:
    """Open a folder of token shards, or a Megatron dataset by its prefix or either of its files.

    `vocab` is the model's vocabulary size, which all token ids must be below. It is required for Megatron data;
    braid's own index stores the tokenizer's.
    """
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if path.is_dir():
        if not (path / INDEX).exists() and (path / TRAIN / INDEX).exists():
            raise DataError(f"{path} contains two sources: open {path / TRAIN} or {path / VALIDATION}")
        return open_shards(path, vocab)
    if any(prefix.with_name(prefix.name + suffix).exists() for suffix in (".bin", ".idx")):
        return open_megatron(prefix, vocab)
    raise DataError(
        f"{path} does not exist: give a folder built by `braid data build`, "
        "or the prefix of a Megatron .bin and .idx"
    )


def open_splits(path: Path | str, *, vocab: int | None = None) -> Splits:
    """Open the output of `build`, with or without a validation split, or any single source."""
    path = Path(path)
    if (path / TRAIN / INDEX).exists():
        return Splits(
            train=open_source(path / TRAIN, vocab=vocab), validation=open_source(path / VALIDATION, vocab=vocab)
        )
    return Splits(train=open_source(path, vocab=vocab), validation=None)
