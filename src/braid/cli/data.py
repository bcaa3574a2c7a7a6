"""`braid data build`, `braid data verify`: tokenize text into token shards, with its images, and check them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from braid.cli.args import optional, parse_options, wants_help
from braid.cli.next_steps import program
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode
from braid.validators import nearest

MOST_NAMED = 1000
"""Skipped conversations that are named."""
HELP = """usage: braid data build --input DIR_OR_FILE --output DIR [OPTIONS]
       braid data verify --source DIR

  build   tokenize text, JSONL or Parquet into token shards, for --data.sources of `braid train`
  verify  check the checksums, every token id and the images of a folder of token shards

Run `braid data build --help` or `braid data verify --help` for the options."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Tokenize text into token shards, for `--data.sources` of `braid train`."""

    input: Path
    """Folder of text files, a text file, Parquet, or JSONL: `text`, `content` (images), `prompt` and
    `response`, or `messages` with --format chat. Compressed files end with .gz, .bz2, .xz or .zst."""
    output: Path
    """Output folder; must not exist."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json (needs the package tokenizers)."""
    validation: float = 0.05
    """Fraction of documents held out for validation; 0 for none."""
    glob: str = "*"
    """Which files of the input folder to read."""
    seed: int = 0
    """Seed of the train/validation split."""
    reserved: Annotated[tuple[str, ...], optional("TOKEN [TOKEN ...]", "none")] = ()
    """Special tokens that no text may spell, such as the placeholder of a model with images: '<image>'."""
    field: Annotated[str | None, optional("NAME", "text, or messages with --format chat")] = None
    """Field of JSONL rows, or column of Parquet files, that is read."""
    format: Literal["text", "chat"] = "text"
    """chat: rows are conversations, {"messages": [{"role": ..., "content": ...}]}; only what the assistant says
    counts in the loss (docs/conversations.md)."""
    chat_template: Annotated[str | None, optional("FILE", "that of the tokenizer's folder")] = None
    """With --format chat: a Jinja chat template, or `chatml`."""
    workers: int = 1
    """Processes that tokenize. The shards do not depend on their number."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check the checksums, every token id and the images of a folder of token shards."""

    source: Path
    """Folder written by `braid data build`."""


def data(args: list[str]) -> int:
    if wants_help(args):
        print(HELP)
        return ExitCode.OK
    actions = {"build": _build, "verify": _verify}
    if not args:
        raise ConfigError("`braid data` needs build or verify: braid data build --input DIR --output DIR")
    if args[0] not in actions:
        raise ConfigError(f"`braid data` takes build or verify, got {args[0]!r}{nearest(args[0], actions)}")
    return actions[args[0]](args[1:])


def _build(args: list[str]) -> int:
    opts = parse_options(BuildOptions, args, "braid data build")
    from braid.data import build, open_splits
    from braid.data.chat import chat_template
    from braid.data.media import in_words
    from braid.train.data_pipeline import load_tokenizer, tokenizer_folder

    tokenizer = load_tokenizer(opts.tokenizer)
    if opts.chat_template is not None and opts.format != "chat":
        raise ConfigError("--chat-template is for conversations: set --format chat as well")
    chat = (
        chat_template(opts.chat_template, tokenizer_folder(opts.tokenizer)) if opts.format == "chat" else None
    )
    with bar("tokenizing") as progress:
        built = build(
            opts.input,
            opts.output,
            tokenizer,
            glob=opts.glob,
            validation=opts.validation,
            seed=opts.seed,
            reserved=opts.reserved,
            field=opts.field,
            chat=chat,
            workers=opts.workers,
            progress=progress,
        )
    held_out = f"; held out: {built.validation_documents:,}" if opts.validation else ""
    print(f"documents: {built.documents:,}{held_out}; tokens: {built.tokens:,} from {built.bytes:,} bytes")
    if held := in_words({"image": built.images, "video": built.videos}):
        print(f"with {held}")
    if built.skipped:
        print(f"skipped files that are not text (not UTF-8, or with zero bytes): {built.skipped:,}")
    if built.refused:
        print(f"skipped conversations: {len(built.refused):,}")
        for text in built.refused[:MOST_NAMED]:
            print(f"braid: skipped {text}", file=sys.stderr)
        if len(built.refused) > MOST_NAMED:
            print(f"braid: ... and {len(built.refused) - MOST_NAMED:,} more of these", file=sys.stderr)
    flags = ["--data.sources", str(built.output)]
    if opts.tokenizer != "bytes":
        flags += ["--data.tokenizer", opts.tokenizer, "--model.vocab", str(tokenizer.vocab)]
    if any(shard.loss_mask is not None for shard in open_splits(built.output).train.shards):
        flags += ["--data.packing", "documents"]
    if built.images or built.videos:
        flags += ["--modules.NAME.items", "image"]
    print(f"train on it: {shlex.join([*program(), 'train', 'RECIPE', *flags])}")
    return ExitCode.OK


def _verify(args: list[str]) -> int:
    opts = parse_options(VerifyOptions, args, "braid data verify")
    from braid.data import open_splits, verify
    from braid.data.media import in_words

    splits = open_splits(opts.source)
    for split in (splits.train, splits.validation):
        if split is not None:
            with bar("verifying") as progress:
                verify(split, progress)
            held = in_words(split.media)
            counts = f"{split.documents:,} documents, {split.tokens:,} tokens{held and f', {held}'}"
            print(f"{split.path}: {counts}, all valid")
    return ExitCode.OK
