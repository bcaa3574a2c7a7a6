"""Tokenisation: builds token shards from text files and JSONL, with the images and videos that rows name
(`braid data build`).

The build is atomic: everything is written to a temporary folder next to the output, which is renamed at the
end.
"""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from braid.data.files import Progress, sync_folder
from braid.data.images import checked_size
from braid.data.media import Medium, Picture
from braid.data.opening import TRAIN, VALIDATION
from braid.data.order import in_random_share
from braid.data.rows import MediaFiles, NotText, Row, input_files, rows_of
from braid.data.shards import ShardWriter, marker_of
from braid.data.tokenizer import Ids, Tokenizer
from braid.errors import DataError

SHARD_TOKENS = 1 << 28
"""Most tokens of a shard, unless told otherwise."""


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
    """Bytes of text read."""
    skipped: int
    """Files skipped because they are not UTF-8 text."""
    validation_documents: int
    validation_tokens: int
    images: int = 0
    """All images, including validation."""
    videos: int = 0
    """All videos, including validation."""


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
    progress: Progress | None = None,
) -> BuildResult:
    """Tokenise text into a new folder; images and videos are stored beside it, as they came.

    `input` is a folder (each row of a .jsonl file is a document, any other text file is one document), one such
    file, or a list of files. With `validation`, that fraction of documents, chosen by `seed`, is held out, and
    the output contains the two sources `train` and `validation`; otherwise the output is itself a source.
    `reserved` are special tokens of the tokenizer that no text may spell, such as the `<image>` of a model.
    """
    output = Path(output)
    if not 0 <= validation < 1:
        raise DataError(f"validation = {validation}: set a fraction of the documents, at least 0 and below 1")
    if output.exists():
        raise DataError(f"{output} exists already: remove it or set another output")
    refused = _reserved_ids(tokenizer, reserved)
    files = input_files(input, glob)
    splits = (TRAIN, VALIDATION) if validation else ("",)

    def held_out(ordinal: int) -> bool:
        return in_random_share(ordinal, validation, seed=seed)

    with new_splits(output, splits, tokenizer, shard_tokens) as writers:
        size, skipped, kinds = _write(files, writers, tokenizer, held_out, refused, progress)
        _check_filled(writers, files, skipped, validation)
    return BuildResult(
        output=output,
        documents=sum(writer.documents for writer in writers),
        tokens=sum(writer.tokens for writer in writers),
        bytes=size,
        skipped=skipped,
        validation_documents=sum(writer.documents for writer in writers[1:]),
        validation_tokens=sum(writer.tokens for writer in writers[1:]),
        images=kinds["image"],
        videos=kinds["video"],
    )


@contextmanager
def new_splits(
    output: Path, splits: Sequence[str], tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
) -> Iterator[list[ShardWriter]]:
    """Writers of the splits of a new source, by the names of their folders in `output`. All of it is written
    next to that, and renamed at the end."""
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(ShardWriter(partial / name, tokenizer, shard_tokens)) for name in splits]
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
    tokenizer: Tokenizer,
    held_out: Callable[[int], bool],
    reserved: Mapping[int, str],
    progress: Progress | None,
) -> tuple[int, int, Counter[str]]:
    """Write every document to its split. Returns the bytes read, the number of files skipped, and how many
    images and videos there are."""
    total = sum(file.stat().st_size for file in files)
    done = skipped = documents = 0
    kinds: Counter[str] = Counter()
    for row in (row for file in files for row in rows_of(file)):
        done += row.bytes
        if isinstance(row, NotText):
            skipped += 1
        else:
            ids, loss_mask, media = _tokenise(row, tokenizer, reserved)
            writers[held_out(documents)].add(ids, loss_mask, row.origin, media)
            kinds.update(medium.kind for medium in media)
            documents += 1
        if progress is not None:
            progress(done, total)
    return done, skipped, kinds


def _reserved_ids(tokenizer: Tokenizer, reserved: Sequence[str]) -> dict[int, str]:
    ids = {text: number for number, text in tokenizer.special.items()}
    if unknown := [text for text in reserved if text not in ids]:
        held = ", ".join(ids) or "none"
        raise DataError(
            f"reserved {', '.join(unknown)}: no special token of the tokenizer; its special tokens are: {held}"
        )
    return {ids[text]: text for text in reserved}


def _tokenise(
    row: Row, tokenizer: Tokenizer, reserved: Mapping[int, str]
) -> tuple[Ids, npt.NDArray[np.bool_] | None, list[Medium]]:
    """Token ids of a document with its end-of-document token, the loss mask (None if all tokens count), and its
    images and videos, each with a marker among the ids."""
    pieces: list[Ids] = []
    media: list[Medium] = []
    for part in (*row.prompt, *row.content):
        if isinstance(part, MediaFiles):
            media.append(_medium(part, position=sum(map(len, pieces))))
            pieces.append(np.asarray([marker_of(tokenizer.vocab)], np.int64))
        else:
            pieces.append(tokenizer.encode(part))
            if found := [text for number, text in reserved.items() if number in pieces[-1]]:
                raise DataError(
                    f"{row.origin}: its text spells {found[0]}, which is reserved for images: these are parts "
                    'of a row, {"image": "file.png"}'
                )
    ids = np.concatenate([*pieces, np.asarray([tokenizer.end_of_document], np.int64)])
    prompt = sum(map(len, pieces[: len(row.prompt)]))
    return ids, np.arange(len(ids)) >= prompt if prompt else None, media


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
