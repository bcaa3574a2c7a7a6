"""Tokenisation: builds token shards from text files, JSONL and Parquet, with the images and videos that rows
name (`braid data build`).

The build is atomic: everything is written to a temporary folder next to the output, which is renamed at the
end.
"""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from braid.data.chat import ChatTemplate, files_of
from braid.data.documents import Encoder, documents
from braid.data.files import HashedFile, Progress, sync_folder
from braid.data.opening import TRAIN, VALIDATION
from braid.data.order import in_random_share
from braid.data.records import ROWS, kind_of, records_of
from braid.data.rows import Skipped, input_files
from braid.data.shards import ShardWriter
from braid.data.tokenizer import Tokenizer
from braid.errors import DataError, first_of

MOST_WORKERS = 256
"""Each is a process with the tokenizer: thousands would take the memory of the machine."""
SHARD_TOKENS = 1 << 28
"""Most tokens of a shard, unless told otherwise."""
NO_FILES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The output of a build and its statistics."""

    output: Path
    """The folder; `open_splits` opens it."""
    documents: int
    """All documents, including validation."""
    tokens: int
    """All tokens, including validation and end-of-document tokens; one for each image and each video."""
    bytes: int
    """Bytes of text read, as they were before compression."""
    skipped: int
    """Files skipped because they are not UTF-8 text, or have zero bytes."""
    refused: tuple[str, ...] = ()
    """Conversations that are skipped: file and line, and what is wrong with each."""
    validation_documents: int
    validation_tokens: int
    images: int = 0
    """All images, including validation."""
    videos: int = 0
    """All videos, including validation."""


@dataclass(kw_only=True)
class _Written:
    """What has been read and written so far."""

    documents: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def build(
    input: Path | str | Sequence[Path],
    output: Path | str,
    tokenizer: Tokenizer,
    *,
    glob: str = "*",
    validation: float = 0.0,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    reserved: Sequence[str] = (),
    field: str | None = None,
    chat: ChatTemplate | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> BuildResult:
    """Tokenise text into a new folder; images and videos are stored beside it, as they came.

    `input` is a folder (each row of a .jsonl or .parquet file is a document, any other text file is one
    document), one such file, or a list of files; they may be compressed (.gz, .bz2, .xz, .zst). With
    `validation`, that fraction of documents, chosen by `seed`, is held out, and the output contains the two
    sources `train` and `validation`; otherwise the output is itself a source.
    `reserved` are special tokens of the tokenizer that no text may spell, such as the `<image>` of a model.
    `field` is the field of rows that has their text. With `chat`, rows are conversations, of which only what
    the assistant says counts in the loss. `workers` processes tokenise; the result does not depend on them.
    """
    output = Path(output)
    if not 0 <= validation < 1:
        raise DataError(f"validation = {validation}: set a fraction of the documents, at least 0 and below 1")
    if not 1 <= workers <= MOST_WORKERS:
        raise DataError(
            f"workers = {workers}: set 1 to {MOST_WORKERS} processes, at most one for each processor"
        )
    if output.exists():
        raise DataError(f"{output} exists already: remove it or set another output")
    inside = next(folder for folder in output.absolute().parents if folder.exists())
    if not inside.is_dir():
        raise DataError(f"{output} cannot be made, {inside} is a file: set another output")
    encoder = Encoder(tokenizer=tokenizer, reserved=_reserved_ids(tokenizer, reserved), field=field, chat=chat)
    files = input_files(input, glob)
    splits = (TRAIN, VALIDATION) if validation else ("",)

    def held_out(ordinal: int) -> bool:
        return in_random_share(ordinal, validation, seed=seed)

    if chat is not None:
        chat.check()  # or every row would be refused for it
    if field is not None and not any(kind_of(file) in ROWS for file in files):
        raise DataError(f"field = {field!r}: none of the {len(files)} files has rows: leave it out")
    files_beside = {} if chat is None else files_of(chat)
    with new_splits(output, splits, tokenizer, shard_tokens, files_beside) as writers:
        done = _write(files, writers, encoder, held_out, workers, progress)
        _check_filled(writers, files, done.skipped, validation)
    return BuildResult(
        output=output,
        documents=sum(writer.documents for writer in writers),
        tokens=sum(writer.tokens for writer in writers),
        bytes=done.bytes,
        skipped=sum(not each.why for each in done.skipped),
        refused=tuple(each.why for each in done.skipped if each.why),
        validation_documents=sum(writer.documents for writer in writers[1:]),
        validation_tokens=sum(writer.tokens for writer in writers[1:]),
        images=done.kinds["image"],
        videos=done.kinds["video"],
    )


@contextmanager
def new_splits(
    output: Path,
    splits: Sequence[str],
    tokenizer: Tokenizer,
    shard_tokens: int = SHARD_TOKENS,
    files: Mapping[str, str] = NO_FILES,
) -> Iterator[list[ShardWriter]]:
    """Writers of the splits of a new source, by the names of their folders in `output`, which has some other
    `files` too. All of it is written next to that, and renamed at the end."""
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(ShardWriter(partial / name, tokenizer, shard_tokens)) for name in splits]
        for name, content in files.items():
            file = HashedFile(partial / name)
            file.write(content.encode())
            file.finish()
        sync_folder(partial)
        partial.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise DataError(f"building {output} failed and left nothing behind: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    files: Sequence[Path],
    writers: Sequence[ShardWriter],
    encoder: Encoder,
    held_out: Callable[[int], bool],
    workers: int,
    progress: Progress | None,
) -> _Written:
    """Write every document to its split."""
    sizes = [file.stat().st_size for file in files]
    before = dict(zip(files, np.cumsum([0, *sizes]).tolist(), strict=False))
    done = _Written()
    records = (record for file in files for record in records_of(file, encoder.columns))
    for record, outcome in documents(records, encoder, workers):
        done.bytes += outcome.bytes
        if isinstance(outcome, Skipped):
            done.skipped.append(outcome)
        else:
            writer = writers[held_out(done.documents)]
            writer.add(outcome.ids, outcome.loss_mask, outcome.origin, outcome.media)
            done.kinds.update(medium.kind for medium in outcome.media)
            done.documents += 1
        if progress is not None:
            progress(before[record.file] + record.read, sum(sizes))
    return done


def _reserved_ids(tokenizer: Tokenizer, reserved: Sequence[str]) -> dict[int, str]:
    ids = {text: number for number, text in tokenizer.special.items()}
    if unknown := [text for text in reserved if text not in ids]:
        held = ", ".join(ids) or "none"
        raise DataError(
            f"reserved {', '.join(unknown)}: no special token of the tokenizer; its special tokens are: {held}"
        )
    return {ids[text]: text for text in reserved}


def _check_filled(
    writers: Sequence[ShardWriter], files: Sequence[Path], skipped: Sequence[Skipped], validation: float
) -> None:
    documents = sum(writer.documents for writer in writers)
    if documents == 0 and (refused := [each.why for each in skipped if each.why]):
        listed = "\n  ".join(first_of(refused))
        in_files = str(files[0]) if len(files) == 1 else f"{len(files)} files"
        raise DataError(f"no conversation in {in_files} can be used\n  {listed}")
    if documents == 0:
        given = f"{files[0]} has" if len(files) == 1 else f"{len(files)} files have"
        why = f": {len(skipped)} not text in UTF-8, or with zero bytes" if skipped else ": nothing to read"
        raise DataError(f"{given} no document{why}. Give text, .jsonl or .parquet files")
    if not all(writer.documents for writer in writers):
        count = "1 document" if documents == 1 else f"{documents} documents"
        raise DataError(
            f"validation = {validation} of {count} leaves one split empty, since each is drawn at random: give "
            "more documents, another fraction (0 holds out none) or another seed"
        )
