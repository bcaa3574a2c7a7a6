"""Opening data by its path, whatever the format. Cheap checks happen here; `verify` reads everything."""

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
    """What to train on, and what to hold out."""

    train: Source
    """Documents to learn from."""
    validation: Source | None
    """Documents the model never learns from; None where none were held out."""


def open_source(path: Path | str, *, vocab: int | None = None) -> Source:
    """Open a folder of token shards, or a Megatron dataset by its prefix or either of its files.

    `vocab` is the vocabulary of the model: no id may reach it. Megatron data needs it; braid's own index knows
    the tokenizer's.
    """
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if path.is_dir():
        if not (path / INDEX).exists() and (path / TRAIN / INDEX).exists():
            raise DataError(f"{path} holds two sources: open {path / TRAIN} or {path / VALIDATION}")
        return open_shards(path, vocab)
    if any(prefix.with_name(prefix.name + suffix).exists() for suffix in (".bin", ".idx")):
        return open_megatron(prefix, vocab)
    raise DataError(
        f"{path} does not exist: give a folder made by `braid data build`, "
        "or the prefix of a Megatron .bin and .idx"
    )


def open_splits(path: Path | str, *, vocab: int | None = None) -> Splits:
    """Open what `build` wrote, with or without a held-out part, or any single source."""
    path = Path(path)
    if (path / TRAIN / INDEX).exists():
        return Splits(
            train=open_source(path / TRAIN, vocab=vocab), validation=open_source(path / VALIDATION, vocab=vocab)
        )
    return Splits(train=open_source(path, vocab=vocab), validation=None)
