"""Small sources made from given ids, for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from braid.data.files import sha256_of_json
from braid.data.opening import open_source
from braid.data.shards import ShardWriter
from braid.data.source import Source


@dataclass(frozen=True)
class NumberTokenizer:
    """Text is numbers: "3 5 8" has the ids 3, 5, 8. Nothing stops a text from leaving the vocabulary."""

    vocab: int = 1000
    end_of_document: int = 0

    @property
    def description(self) -> dict[str, object]:
        return {"kind": "number", "vocab": self.vocab}

    @property
    def fingerprint(self) -> str:
        return sha256_of_json(self.description)

    @property
    def special(self) -> dict[int, str]:
        return {}

    def encode(self, text: str) -> np.ndarray:
        return np.asarray([int(word) for word in text.split()], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def write_source(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    masks: Sequence[Sequence[bool] | None] | None = None,
    vocab: int = 1000,
    shard_tokens: int = 1 << 20,
) -> Source:
    """A source with exactly these documents (no end of document is added)."""
    with ShardWriter(folder, NumberTokenizer(vocab), shard_tokens) as writer:
        for ids, mask in zip(documents, masks or [None] * len(documents), strict=True):
            writer.add(np.asarray(ids, np.int64), None if mask is None else np.asarray(mask, np.bool_), "test")
    return open_source(folder)
