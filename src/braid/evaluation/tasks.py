"""Evaluations of files: perplexity and bits per byte of texts, accuracy on multiple choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from braid.data import Tokenizer
from braid.data.records import ROWS, Record, kind_of, records_of
from braid.data.rows import TEXT, Skipped, row_of, values_of
from braid.errors import DataError
from braid.evaluation.scoring import Request, Score, encode_pair, score, windows
from braid.model.language import LanguageModel

TOGETHER = 256
"""Documents that are read before they are scored: long ones and short ones share batches."""
WINDOWS = 4096
"""Windows of texts that exist at a time."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts become rows of the model."""

    length: int
    """Most input tokens of a row."""
    overlap: int = 1
    """Tokens that a window of a longer document reads again."""
    batch_tokens: int = 8192
    """Tokens of a batch, padding included."""
    field: str | None = None
    """The field of rows with their text."""
    separator: str = " "
    """Between a query and each of its choices."""


@dataclass(kw_only=True)
class TextResult:
    """Sums over documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    """Negative log-likelihood."""

    @property
    def scored(self) -> int:
        """Of how many things there are scores."""
        return self.tokens

    def add(self, other: TextResult) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.nats += other.nats

    def as_json(self) -> dict[str, Any]:
        """The counts and their quotients; None where there is nothing to divide by."""
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats_per_token": loss,
            "perplexity": None if loss is None else math.exp(min(loss, 700.0)),
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else None,
        }


@dataclass(kw_only=True)
class ChoiceResult:
    """Right and wrong answers."""

    right: list[bool] = field(default_factory=list)
    """Whether the likeliest choice is the right one."""
    right_by_length: list[bool] = field(default_factory=list)
    """The same, with each log-likelihood divided by the characters of its choice."""

    @property
    def scored(self) -> int:
        """Of how many things there are scores."""
        return len(self.right)

    def add(self, other: ChoiceResult) -> None:
        self.right += other.right
        self.right_by_length += other.right_by_length

    def as_json(self) -> dict[str, Any]:
        return {
            "questions": len(self.right),
            **_share("acc", self.right),
            **_share("acc_norm", self.right_by_length),
        }


Result = TextResult | ChoiceResult
Progress = Callable[[int, int], None]
"""Called with bytes done and all bytes."""


def _share(name: str, right: Sequence[bool]) -> dict[str, float | None]:
    """The mean, and its standard error, from the variance of a sample."""
    count = len(right)
    mean = sum(right) / count if count else None
    error = None if mean is None or count < 2 else math.sqrt(mean * (1 - mean) / (count - 1))
    return {name: mean, f"{name}_stderr": error}


def evaluate_files(
    model: LanguageModel,
    tokenizer: Tokenizer,
    files: Sequence[Path],
    settings: Settings,
    progress: Progress = lambda done, total: None,
) -> dict[Path, Result]:
    """The result of each file."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"{', '.join(missing)}: is no file; give text files, .jsonl or .parquet")
    total, before = sum(file.stat().st_size for file in files), 0
    results: dict[Path, Result] = {}
    for file in files:
        columns = (settings.field or TEXT, "query", "choices", "gold")
        records = records_of(file, columns)
        first = next(records, None)
        chosen = first is not None and _is_question(first, settings)
        result: Result = ChoiceResult() if chosen else TextResult()
        for group in _groups(first, records):
            if isinstance(result, ChoiceResult):
                result.add(_answered(model, tokenizer, group, settings))
            else:
                result.add(_read(model, tokenizer, group, settings))
            progress(before + group[-1].read, total)
        before += file.stat().st_size
        results[file] = result
    if not any(result.scored for result in results.values()):
        raise DataError(f"{', '.join(map(str, files))}: nothing to evaluate, there is no text")
    return results


def _groups(first: Record | None, rest: Iterator[Record]) -> Iterator[list[Record]]:
    if first is not None:
        yield [first, *islice(rest, TOGETHER - 1)]
        while group := list(islice(rest, TOGETHER)):
            yield group


# ------------------------------------------------------------------------------------------------- texts


def _read(
    model: LanguageModel, tokenizer: Tokenizer, records: Sequence[Record], settings: Settings
) -> TextResult:
    told = TextResult()

    def every() -> Iterator[Request]:
        for record in records:
            text = _text_of(record, settings)
            ids = tokenizer.encode(text).tolist()
            told.add(TextResult(documents=1, tokens=len(ids), bytes=len(text.encode(errors="surrogateescape"))))
            yield from windows(ids, tokenizer.end_of_document, settings.length, settings.overlap)

    requests = every()
    while some := list(islice(requests, WINDOWS)):
        told.nats -= math.fsum(each.logprob for each in _scores(model, some, settings))
    return told


def _text_of(record: Record, settings: Settings) -> str:
    row = row_of(record, settings.field)
    if isinstance(row, Skipped):
        raise DataError(f"{record.origin}: is not UTF-8 text")
    parts = [*row.prompt, *row.content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise DataError(f"{record.origin}: has images, and `braid eval` reads text alone")
    return "".join(texts)


def _scores(model: LanguageModel, requests: Sequence[Request], settings: Settings) -> list[Score]:
    return score(model, requests, length=settings.length, batch_tokens=settings.batch_tokens)


# ------------------------------------------------------------------------------------------ multiple choice


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query with several answers, one of which is right."""

    query: str
    choices: tuple[str, ...]
    gold: int


def _is_question(record: Record, settings: Settings) -> bool:
    if kind_of(record.file) not in ROWS or settings.field is not None:
        return False
    given = values_of(record)
    return isinstance(given, Mapping) and "choices" in given


def question_of(record: Record) -> Question:
    """`{"query": ..., "choices": [...], "gold": ...}`, with the number of the right choice from 0, or its
    text."""
    given = values_of(record)
    match given:
        case {"query": str(query), "choices": [_, _, *_] as choices, "gold": int() | str() as gold} if all(
            isinstance(choice, str) and choice for choice in choices
        ):
            try:
                "".join((query, *choices)).encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{record.origin}: is not valid text: {error}") from None
            place = choices.index(gold) if gold in choices else gold
            if type(place) is int and 0 <= place < len(choices):
                return Question(query=query, choices=tuple(choices), gold=place)
    raise DataError(
        f'{record.origin}: is {str(given)[:100]}; a question is {{"query": text, "choices": [two or more '
        'texts], "gold": number of the right one from 0, or its text}'
    )


def _answered(
    model: LanguageModel, tokenizer: Tokenizer, records: Sequence[Record], settings: Settings
) -> ChoiceResult:
    questions = [question_of(record) for record in records]
    pairs = [(each.query, settings.separator + choice) for each in questions for choice in each.choices]
    requests = [encode_pair(tokenizer, *pair) for pair in pairs]
    for (query, choice), request in zip(pairs, requests, strict=True):
        if not request.continuation:  # its score would be that of certainty
            raise DataError(
                f"the choice {choice!r} adds no token to {query!r}, with which the tokenizer joins it, so that "
                "it has no likelihood of its own: set another --separator"
            )
    scores = iter(_scores(model, requests, settings))
    result = ChoiceResult()
    for each in questions:
        logprob = np.asarray([next(scores).logprob for _ in each.choices])
        characters = np.asarray([len(choice) for choice in each.choices])
        result.right.append(int(logprob.argmax()) == each.gold)
        result.right_by_length.append(int((logprob / characters).argmax()) == each.gold)
    return result
