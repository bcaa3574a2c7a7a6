"""Tokenisation: builds token shards from text files and JSONL (`braid data build`).

The build is atomic: everything is written to a temporary folder next to the output, which is renamed at the
end.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from braid.data.files import Progress, sync_folder
from braid.data.opening import TRAIN, VALIDATION
from braid.data.order import in_random_share
from braid.data.rows import NotText, Row, input_files, rows_of
from braid.data.shards import ShardWriter
from braid.data.tokenizer import Ids, Tokenizer
from braid.errors import DataError


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The output of a build and its statistics."""

    output: Path
    """The folder; `open_splits` opens it."""
    documents: int
    """All documents, including validation."""
    tokens: int
    """All tokens, including validation and end-of-document tokens."""
    bytes: int
    """Bytes of text read."""
    skipped: int
    """Files skipped because they are not UTF-8 text."""
    validation_documents: int
    validation_tokens: int


def build(
    input: Path | str | Sequence[Path],
    output: Path | str,
    tokenizer: Tokenizer,
    *,
    glob: str = "*",
    validation: float = 0.0,
    seed: int = 0,
    shard_tokens: int = 1 << 28,
    progress: Progress | None = None,
) -> BuildResult:
    """Tokenise text into a new folder.

    `input` is a folder (each row of a .jsonl file is a document, any other text file is one document), one such
    file, or a list of files. With `validation`, that fraction of documents, chosen by `seed`, is held out, and
    the output contains the two sources `train` and `validation`; otherwise the output is itself a source.
    """
    output = Path(output)
    if not 0 <= validation < 1:
        raise DataError(f"validation = {validation}: set a fraction of the documents, at least 0 and below 1")
    if output.exists():
        raise DataError(f"{output} exists already: remove it or set another output")
    files = input_files(input, glob)
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    folders = (partial / TRAIN, partial / VALIDATION) if validation else (partial,)

    def held_out(ordinal: int) -> bool:
        return in_random_share(ordinal, validation, seed=seed)

    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(ShardWriter(folder, tokenizer, shard_tokens)) for folder in folders]
            size, skipped = _write(files, writers, tokenizer, held_out, progress)
            _check_filled(writers, files, skipped, validation)
        sync_folder(partial)
        partial.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise DataError(f"building {output} failed and left nothing behind: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return BuildResult(
        output=output,
        documents=sum(writer.documents for writer in writers),
        tokens=sum(writer.tokens for writer in writers),
        bytes=size,
        skipped=skipped,
        validation_documents=sum(writer.documents for writer in writers[1:]),
        validation_tokens=sum(writer.tokens for writer in writers[1:]),
    )


def _write(
    files: Sequence[Path],
    writers: Sequence[ShardWriter],
    tokenizer: Tokenizer,
    held_out: Callable[[int], bool],
    progress: Progress | None,
) -> tuple[int, int]:
    """Write every document to its split. Returns the bytes read and the number of files skipped."""
    total = sum(file.stat().st_size for file in files)
    done = skipped = documents = 0
    for row in (row for file in files for row in rows_of(file)):
        done += row.bytes
        if isinstance(row, NotText):
            skipped += 1
        else:
            writers[held_out(documents)].add(*_tokenise(row, tokenizer), row.origin)
            documents += 1
        if progress is not None:
            progress(done, total)
    return done, skipped


def _tokenise(row: Row, tokenizer: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_] | None]:
    """Token ids of a document with its end-of-document token, and the loss mask; None if all tokens count."""
    text_ids = tokenizer.encode(row.text)
    end = np.asarray([tokenizer.end_of_document], np.int64)
    if not row.prompt:
        return np.concatenate([text_ids, end]), None
    prompt_ids = tokenizer.encode(row.prompt)
    ids = np.concatenate([prompt_ids, text_ids, end])
    return ids, np.arange(len(ids)) >= len(prompt_ids)


def _check_filled(
    writers: Sequence[ShardWriter], files: Sequence[Path], skipped: int, validation: float
) -> None:
    documents = sum(writer.documents for writer in writers)
    if documents == 0:
        raise DataError(
            f"no document in {len(files)} files, of which {skipped} are not UTF-8 text: "
            "give text or .jsonl files"
        )
    if not all(writer.documents for writer in writers):
        raise DataError(
            f"validation = {validation} of {documents} documents leaves one split empty: "
            "give more documents, or set another fraction or seed"
        )
