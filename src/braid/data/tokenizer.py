"""Tokenizers: text to token ids and back.

`ByteTokenizer` is built in. `HfTokenizer` runs any `tokenizer.json` file through the package `tokenizers`
(the extra `hf`). Both describe themselves as plain JSON, from which `tokenizer_from` makes them again:
indices and checkpoints carry that description, so that data and weights always know how to speak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from braid.data.files import sha256_of_json
from braid.errors import DataError

Ids = npt.NDArray[np.int64]
Description = Mapping[str, Any]

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names under which tokenizers usually keep their end-of-document token."""


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Every id is below this number."""

    @property
    def end_of_document(self) -> int:
        """The id that closes every document."""

    @property
    def description(self) -> Description:
        """JSON from which `tokenizer_from` makes this tokenizer again."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the description."""

    def encode(self, text: str) -> Ids:
        """Ids of a text, without an end of document."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of ids; an end of document has no text."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 ends a document."""

    @property
    def vocab(self) -> int:
        return 257

    @property
    def end_of_document(self) -> int:
        return 256

    @property
    def description(self) -> Description:
        return {"kind": "byte"}

    @property
    def fingerprint(self) -> str:
        return sha256_of_json(self.description)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Bytes that are not UTF-8 become U+FFFD: a model may stop in the middle of a character."""
        ids = _checked(ids, self.vocab)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")


class HfTokenizer:
    """A tokenizer in the format of Hugging Face's `tokenizer.json`.

    Special tokens that are spelled out in a text are recognised, so that chat templates work.
    """

    def __init__(self, definition: str, end_of_document: str | None = None) -> None:
        """`definition` is the content of a tokenizer.json; without a name the usual ends are tried."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(
                "a tokenizer.json needs the package `tokenizers`, which is missing: "
                "pip install 'braid[hf]', or use the byte tokenizer"
            ) from None
        try:
            self._backend = Backend.from_str(definition)
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"this is not a tokenizer.json that `tokenizers` can read: {error}") from None
        self._backend.no_truncation()  # some files ask for either; a document is what it is
        self._backend.no_padding()
        ids = self._backend.get_vocab(with_added_tokens=True)
        self._definition = definition
        self._end = _end_name(ids, end_of_document)
        self._vocab = max(ids.values()) + 1
        self._end_id: int = ids[self._end]
        self._fingerprint = sha256_of_json(self.description)

    @classmethod
    def from_file(cls, path: Path | str, end_of_document: str | None = None) -> HfTokenizer:
        """Read a `tokenizer.json`, or the one inside a folder."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            definition = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the tokenizer {file}: {error}") from None
        return cls(definition, end_of_document)

    @property
    def vocab(self) -> int:
        return self._vocab

    @property
    def end_of_document(self) -> int:
        return self._end_id

    @property
    def description(self) -> Description:
        return {"kind": "hf", "end_of_document": self._end, "definition": self._definition}

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def encode(self, text: str) -> Ids:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        ids = _checked(ids, self.vocab)
        text: str = self._backend.decode(ids[ids != self._end_id].tolist(), skip_special_tokens=False)
        return text


def tokenizer_from(description: Description) -> Tokenizer:
    """The tokenizer that gave this description."""
    match description:
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "hf", "end_of_document": str(end), "definition": str(definition)}:
            return HfTokenizer(definition, end)
    raise DataError(
        f"unknown tokenizer {description.get('kind')!r}: a description is of the kind 'byte' or 'hf'"
    )


def _end_name(ids: Mapping[str, int], wanted: str | None) -> str:
    if wanted is not None and wanted not in ids:
        raise DataError(f"the tokenizer has no token {wanted!r}: name one of its tokens as end_of_document")
    found = wanted or next((name for name in USUAL_ENDS if name in ids), None)
    if found is None:
        raise DataError(
            f"the tokenizer has none of the usual end-of-document tokens ({', '.join(USUAL_ENDS)}): "
            "say which token ends a document with end_of_document"
        )
    return found


def _checked(ids: Sequence[int] | Ids, vocab: int) -> Ids:
    ids = np.asarray(ids, np.int64).reshape(-1)
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        raise DataError(
            f"token id {ids[outside][0]} cannot be decoded: ids of this tokenizer are 0 to {vocab - 1}"
        )
    return ids
