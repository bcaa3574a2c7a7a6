"""Documents: records of files as token ids, with the loss mask, images and videos; in this process, or in
several.

Workers take chunks of records in turn, and answers are taken in the same turn, so that the documents and their
order do not depend on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt

from braid.data.chat import ChatTemplate, conversation_of, tokens_of
from braid.data.images import checked_size
from braid.data.media import Medium, Picture
from braid.data.records import Record
from braid.data.rows import TEXT, MediaFiles, Row, Skipped, row_of, size_of, valid_text, values_of
from braid.data.shards import marker_of
from braid.data.tokenizer import Ids, Tokenizer
from braid.distributed.main_file import without_main
from braid.errors import BraidError, DataError

CHUNK_BYTES = 1 << 18
CHUNK_RECORDS = 256
MESSAGES = "messages"
"""The field of a row that has a conversation."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document as it is stored."""

    ids: Ids
    loss_mask: npt.NDArray[np.bool_] | None
    """None if all tokens count."""
    media: list[Medium] = field(default_factory=list)
    origin: str
    """File and line, for error messages."""
    bytes: int
    """Size of its text in the file, as it was before compression."""


Outcome = Document | Skipped


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How records become documents."""

    tokenizer: Tokenizer
    reserved: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that no text may spell."""
    field: str | None = None
    """The field of a row with its text or its messages; None for the usual ones."""
    chat: ChatTemplate | None = None
    """Rows are conversations, rendered by this template."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What to read of a Parquet file."""
        if self.chat is None:
            return (self.field or TEXT,)
        return (self.field or MESSAGES, "tools")

    def document(self, record: Record) -> Outcome:
        """The document of a record. A conversation that cannot be used is skipped; any other bad row is an
        error."""
        if self.chat is not None:
            return self._conversation(record, self.chat)
        row = row_of(record, self.field)
        return row if isinstance(row, Skipped) else self._document(row)

    def _conversation(self, record: Record, chat: ChatTemplate) -> Outcome:
        try:
            if record.line is None:
                raise DataError("is no file of rows: conversations are lines of .jsonl or rows of .parquet")
            sparse = not isinstance(record.content, bytes)
            given = conversation_of(values_of(record), self.field or MESSAGES, sparse=sparse)
            rendered = chat.rendered(given)
            valid_text(rendered.text)
            ids, said = tokens_of(rendered, self.tokenizer)
            self._check_reserved(ids, record.origin)
        except DataError as error:
            why = str(error).removeprefix(f"{record.origin}: ")
            return Skipped(bytes=size_of(record), why=f"{record.origin}: {why}")
        if not said.any():
            return Skipped(bytes=size_of(record), why=f"{record.origin}: has nothing that the assistant says")
        if ids[-1] != self.tokenizer.end_of_document:  # some templates end with it
            ids, said = np.append(ids, self.tokenizer.end_of_document), np.append(said, False)
        return Document(ids=ids, loss_mask=said, origin=record.origin, bytes=size_of(record))

    def _document(self, row: Row) -> Document:
        pieces: list[Ids] = []
        media: list[Medium] = []
        for part in (*row.prompt, *row.content):
            if isinstance(part, MediaFiles):
                media.append(_medium(part, position=sum(map(len, pieces))))
                pieces.append(np.asarray([marker_of(self.tokenizer.vocab)], np.int64))
            else:
                pieces.append(self.tokenizer.encode(part))
                self._check_reserved(pieces[-1], row.origin)
        ids = np.concatenate([*pieces, np.asarray([self.tokenizer.end_of_document], np.int64)])
        prompt = sum(map(len, pieces[: len(row.prompt)]))
        mask = np.arange(len(ids)) >= prompt if prompt else None
        return Document(ids=ids, loss_mask=mask, media=media, origin=row.origin, bytes=row.bytes)

    def _check_reserved(self, ids: Ids, origin: str) -> None:
        if found := [text for number, text in self.reserved.items() if number in ids]:
            raise DataError(
                f"{origin}: its text spells {found[0]}, which is reserved for images: these are parts "
                'of a row, {"image": "file.png"}'
            )


def _medium(files: MediaFiles, position: int) -> Medium:
    """An image or a video, every file of which decodes."""
    pictures: list[Picture] = []
    for origin, data in files.read():
        try:
            height, width = checked_size(data)
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None
        pictures.append(Picture(data=data, height=height, width=width))
        first = pictures[0]
        if (height, width) != (first.height, first.width):
            raise DataError(
                f"{origin}: is {height} x {width} pixels, and the first frame {first.height} x {first.width}: "
                "frames of a video have one size"
            )
    return Medium(kind=files.kind, position=position, pictures=tuple(pictures))


# ------------------------------------------------------------------------------------------------ workers


def documents(records: Iterable[Record], encoder: Encoder, workers: int) -> Iterator[tuple[Record, Outcome]]:
    """The documents of records, in order."""
    if workers == 1:
        for record in records:
            yield record, encoder.document(record)
        return
    with ExitStack() as stack:
        crew = [_Worker(encoder, stack) for _ in range(workers)]
        busy: deque[tuple[_Worker, list[Record]]] = deque()
        for number, chunk in enumerate(_chunks(records)):
            worker = crew[number % workers]
            if len(busy) == workers:  # the first of them is this worker
                yield from _finished(*busy.popleft())
            worker.send(chunk)
            busy.append((worker, chunk))
        while busy:
            yield from _finished(*busy.popleft())


def _finished(worker: _Worker, chunk: list[Record]) -> Iterator[tuple[Record, Outcome]]:
    yield from zip(chunk, worker.receive(), strict=True)


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += size_of(record)
        if size >= CHUNK_BYTES or len(chunk) == CHUNK_RECORDS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Worker:
    """A process that makes documents. It has at most one chunk: it answers before it is sent another, so that
    neither side waits for the other to read."""

    def __init__(self, encoder: Encoder, stack: ExitStack) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, encoder), daemon=True)
        with without_main():
            self._process.start()
        theirs.close()
        stack.callback(self._end)

    def send(self, chunk: list[Record]) -> None:
        try:
            self._pipe.send(chunk)
        except OSError:
            raise self._died() from None

    def receive(self) -> list[Outcome]:
        """The documents of the chunk. Raises what a record raised."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, list)
        return answer

    def _died(self) -> DataError:
        self._process.join()
        return DataError(
            f"a worker of the build has ended with {self._process.exitcode}, as one that is killed for memory "
            "does: give fewer --workers, or smaller documents"
        )

    def _end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _work(pipe: Connection, encoder: Encoder) -> None:
    # Ctrl-C goes to every process of a terminal; the one that builds ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            chunk = pipe.recv()
        except EOFError:
            return
        try:
            answer: object = [encoder.document(record) for record in chunk]
        except BraidError as error:
            answer = error
        pipe.send(answer)
