"""Tokenizers: text to token ids and back.

`ByteTokenizer` is built in. `HfTokenizer` runs any `tokenizer.json` file with the package `tokenizers`.
Both have a description in plain JSON from which `tokenizer_from` recreates them. Data indices and
checkpoints store it, so data and weights always come with their tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from braid.data.files import sha256_of_json
from braid.errors import DataError, how_to_install, reason

Ids = npt.NDArray[np.int64]
Description = Mapping[str, Any]

CONFIG = "tokenizer_config.json"

COMMON_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Common names of the end-of-document token."""


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Vocabulary size: all ids are below this number."""

    @property
    def end_of_document(self) -> int:
        """The token id that ends every document."""

    @property
    def description(self) -> Description:
        """JSON from which `tokenizer_from` recreates this tokenizer."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the description."""

    @property
    def special(self) -> Mapping[int, str]:
        """Tokens that only their own spelling makes, such as `<image>`: id and spelling."""

    def encode(self, text: str) -> Ids:
        """Token ids of a text, without end-of-document token."""

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        """The same, and for each token its first character and the one behind its last."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of token ids; end-of-document tokens are dropped."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are UTF-8 bytes; 256 is the end-of-document token."""

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

    @property
    def special(self) -> Mapping[int, str]:
        return {}

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int64)

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        """Every byte of a character has the offsets of the character."""
        sizes = [len(letter.encode(errors="surrogateescape")) for letter in text]
        first = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return self.encode(text), np.column_stack([first, first + 1])

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Invalid UTF-8 becomes U+FFFD: a model may stop in the middle of a character."""
        ids = _check_ids(ids, self.vocab)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")


class HfTokenizer:
    """A tokenizer in the format of Hugging Face's `tokenizer.json`.

    Special tokens spelled out in a text are recognised, so that chat templates work.
    """

    def __init__(
        self, definition: str, end_of_document: str | None = None, eos_token: str | None = None
    ) -> None:
        """`definition` is the content of a tokenizer.json. By default the end-of-document token is the first of
        COMMON_EOD_TOKENS that it has, else `eos_token`."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(
                "a tokenizer.json needs the package tokenizers, which is missing: "
                f"run `{how_to_install('tokenizers')}`, or use the byte tokenizer"
            ) from None
        try:
            self._backend = Backend.from_str(definition)
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"this is not a tokenizer.json that `tokenizers` can read: {error}") from None
        # Some tokenizer.json files enable truncation or padding, which would corrupt documents.
        self._backend.no_truncation()
        self._backend.no_padding()
        ids = self._backend.get_vocab(with_added_tokens=True)
        self._definition = definition
        self._end = _eod_token(ids, end_of_document, eos_token)
        self._vocab = max(ids.values()) + 1
        self._end_id: int = ids[self._end]
        added = self._backend.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._fingerprint = sha256_of_json(self.description)

    @classmethod
    def from_file(cls, path: Path | str, end_of_document: str | None = None) -> HfTokenizer:
        """Load a `tokenizer.json`, or the one in a folder, with the `eos_token` of the tokenizer_config.json
        beside it."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            definition = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the tokenizer {file}: {reason(error)}") from None
        try:
            return cls(definition, end_of_document, eos_token_of(file.parent))
        except DataError as error:
            raise DataError(f"{file}: {error}") from None

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

    @property
    def special(self) -> Mapping[int, str]:
        return self._special

    def encode(self, text: str) -> Ids:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        found = self._backend.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, np.int64), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTokenizer, (self._definition, self._end)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        ids = _check_ids(ids, self.vocab)
        text: str = self._backend.decode(ids[ids != self._end_id].tolist(), skip_special_tokens=False)
        return text


def tokenizer_from(description: Description) -> Tokenizer:
    """Recreate a tokenizer from its description."""
    match description:
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "hf", "end_of_document": str(end), "definition": str(definition)}:
            return HfTokenizer(definition, end)
    raise DataError(
        f"unknown tokenizer {description.get('kind')!r}: the kind of a description is 'byte' or 'hf'"
    )


def eos_token_of(folder: Path) -> str | None:
    """The `eos_token` of a folder's tokenizer_config.json, which is a string or a dict with `content`."""
    file = folder / CONFIG
    if not file.is_file():
        return None
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from None
    end = given.get("eos_token") if isinstance(given, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _eod_token(ids: Mapping[str, int], name: str | None, eos_token: str | None) -> str:
    if name is not None and name not in ids:
        raise DataError(
            f"the tokenizer has no token {name!r} to end documents with: set eos_token in {CONFIG}, or "
            "end_of_document from Python, to one of its tokens"
        )
    token = name or next((each for each in (*COMMON_EOD_TOKENS, eos_token) if each in ids), None)
    if token is None:
        raise DataError(
            f"the tokenizer has none of the common end-of-document tokens ({', '.join(COMMON_EOD_TOKENS)}): "
            f'give the token that ends a document as {{"eos_token": "..."}} in a {CONFIG} beside tokenizer.json'
        )
    return token


def _check_ids(ids: Sequence[int] | Ids, vocab: int) -> Ids:
    ids = np.asarray(ids, np.int64).reshape(-1)
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        raise DataError(
            f"token id {ids[outside][0]} cannot be decoded: ids of this tokenizer are 0 to {vocab - 1}"
        )
    return ids
