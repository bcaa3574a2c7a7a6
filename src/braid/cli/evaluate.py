"""`braid eval`: perplexity of texts and accuracy on multiple choice, by file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.console

from braid import validators
from braid.cli.args import optional, parse_options, print_table, split_positional, wants_help
from braid.cli.generate import CHECKPOINT_HELP
from braid.cli.progress import bar
from braid.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from braid.evaluation.tasks import Result

WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluate a checkpoint on files, on one process: perplexity and bits per byte of texts, accuracy on
    multiple choice (docs/evaluation.md)."""

    data: tuple[Path, ...]
    """Text files, JSONL or Parquet with texts as for `braid data build`, or JSONL with questions:
    {"query": ..., "choices": [...], "gold": 0}."""
    length: Annotated[int | None, optional("INT", "data.sequence_tokens of the run")] = None
    """Most tokens that the model reads at once; longer documents are cut into windows."""
    overlap: int = 1
    """Tokens of the window before that each window reads again, as context for those that it predicts."""
    field: Annotated[str | None, optional("NAME", "text")] = None
    """Field of JSONL rows, or column of Parquet files, with the text."""
    separator: str = " "
    """Between a query and each of its choices."""
    batch_tokens: int = 8192
    """Tokens of a batch, padding included. Fewer take less memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if one is available."""
    json: bool = False
    """Print JSON."""


def evaluate(args: list[str]) -> int:
    if wants_help(args):
        print(CHECKPOINT_HELP)
        args = ["CHECKPOINT", "--help"]
    checkpoint, rest = split_positional(args, "eval", "CHECKPOINT")
    opts = parse_options(EvalOptions, rest, f"braid eval {checkpoint}")
    if not opts.data:
        raise ConfigError("--data has no file: give one or several")
    problems = [
        *validators.at_least("overlap", opts.overlap, 1),
        *validators.at_least("batch-tokens", opts.batch_tokens, 1),
        *([] if opts.length is None else validators.at_least("length", opts.length, opts.overlap)),
    ]
    if problems:
        raise ConfigError(problems)
    # Imports torch, which takes seconds: only after the arguments are validated.
    from braid.evaluation.tasks import Settings, evaluate_files
    from braid.train.device import choose_device
    from braid.train.load_model import load_models

    loaded = load_models(Path(checkpoint), choose_device(opts.device))
    length = loaded.run.data.sequence_tokens if opts.length is None else opts.length
    if opts.overlap > length:
        raise ConfigError(
            f"--overlap {opts.overlap} is more than the {length} tokens of a window: set it lower"
        )
    settings = Settings(
        length=length,
        overlap=opts.overlap,
        batch_tokens=opts.batch_tokens,
        field=opts.field,
        separator=opts.separator,
    )
    with bar("evaluating") as progress:
        results = evaluate_files(loaded.language, loaded.tokenizer, opts.data, settings, progress)
    told = _told(results) | {"checkpoint": str(loaded.path), "length": length, "overlap": opts.overlap}
    if opts.json:
        print(json.dumps(told, indent=2))
    else:
        print(f"{loaded.path}: windows of {length} tokens, {opts.overlap} of them read again")
        _print(told)
    return ExitCode.OK


def _told(results: dict[Path, Result]) -> dict[str, Any]:
    """Texts and questions by file, and all together."""
    from braid.evaluation.tasks import ChoiceResult, TextResult

    texts, questions = TextResult(), ChoiceResult()
    told: dict[str, Any] = {"texts": {}, "questions": {}}
    for file, result in results.items():
        if isinstance(result, TextResult):
            texts.add(result)
            told["texts"][str(file)] = result.as_json()
        else:
            questions.add(result)
            told["questions"][str(file)] = result.as_json()
    return {**told, "all_texts": texts.as_json(), "all_questions": questions.as_json()}


def _print(told: dict[str, Any]) -> None:
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=WIDTH)
    for kind in ("texts", "questions"):
        rows = [(name, *map(_short, figures.values())) for name, figures in told[kind].items()]
        if rows:
            total = told[f"all_{kind}"]
            rows += [("all", *map(_short, total.values()))] if len(rows) > 1 else []
            print()
            print_table(["file", *(name.replace("_", " ") for name in total)], rows, console)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
