"""`braid data build`, `braid data verify`: make token shards, and check them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from braid.cli.args import options
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode
from braid.validators import nearest


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Tokenise text into token shards that `--data.sources` takes."""

    input: Path
    """Text files in a folder, one file, or JSONL rows with `text`, or `prompt` (not learnt) and `response`."""
    output: Path
    """Folder to make. It must not exist yet."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json (extra `hf`)."""
    validation: float = 0.05
    """Share of documents held out for evaluation; 0 holds none out."""
    glob: str = "*"
    """Which files of a folder to take."""
    seed: int = 0
    """Chooses the documents that are held out."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every token and every checksum of a source."""

    source: Path
    """A folder made by `braid data build`."""


def data(words: list[str]) -> int:
    actions = {"build": _build, "verify": _verify}
    if words and words[0] in ("-h", "--help"):
        print("usage: braid data build --input DIR_OR_FILE --output DIR [options]")
        print("       braid data verify --source DIR")
        return ExitCode.OK
    if not words:
        raise ConfigError("`braid data` needs build or verify: braid data build --input DIR --output DIR")
    if words[0] not in actions:
        raise ConfigError(f"`braid data` has no {words[0]!r}{nearest(words[0], actions)}")
    return actions[words[0]](words[1:])


def _build(words: list[str]) -> int:
    chosen = options(BuildOptions, words, "braid data build")
    from braid.data import build, open_splits
    from braid.train.data_pipeline import tokenizer_of

    tokenizer = tokenizer_of(chosen.tokenizer)
    with bar("tokenising") as progress:
        built = build(
            chosen.input,
            chosen.output,
            tokenizer,
            glob=chosen.glob,
            validation=chosen.validation,
            seed=chosen.seed,
            progress=progress,
        )
    held_out = f"; held out: {built.validation_documents:,}" if chosen.validation else ""
    print(f"documents: {built.documents:,}{held_out}; tokens: {built.tokens:,} from {built.bytes:,} bytes")
    if built.skipped:
        print(f"files left out because they are not UTF-8 text: {built.skipped:,}")
    fields = ["--data.sources", str(built.output)]
    if chosen.tokenizer != "bytes":
        fields += ["--data.tokenizer", chosen.tokenizer, "--model.vocab", str(tokenizer.vocab)]
    if any(shard.loss_mask is not None for shard in open_splits(built.output).train.shards):
        fields += ["--data.packing", "documents"]
    print(f"train on it: braid train RECIPE {shlex.join(fields)}")
    return ExitCode.OK


def _verify(words: list[str]) -> int:
    chosen = options(VerifyOptions, words, "braid data verify")
    from braid.data import open_splits, verify

    splits = open_splits(chosen.source)
    for part in (splits.train, splits.validation):
        if part is not None:
            with bar("verifying") as progress:
                verify(part, progress)
            print(f"{part.path}: {part.documents:,} documents, {part.tokens:,} tokens, all as the index says")
    return ExitCode.OK
