"""Samples of generated text along the way: what a run writes to samples.jsonl, one line per prompt.

    {"step": 200, "prompt": "def ", "text": "def __init__(self):", "seed": 0, "temperature": 0.8}

A sample depends on the weights and the seed of the run: every topology writes the same text, as far as rounding
leaves the same token the likeliest. A run that resumes from an earlier step first moves later lines to
samples-cut.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from braid.console import say, warn
from braid.data.prompts import Prompt
from braid.errors import ConfigError, DataError
from braid.train.json_lines import append, cut_lines_after

TEMPERATURE = 0.8

Generate = Callable[[str | Prompt], str]


class TextSamples:
    """Generates on all ranks, collectively; rank 0 writes."""

    def __init__(self, file: Path, *, after_step: int, seed: int, writes: bool, quiet: bool) -> None:
        """The lines beyond `after_step` are moved away."""
        self._file, self._seed, self._writes, self._quiet = file, seed, writes, quiet
        self._failed = False
        if writes:
            try:
                if file.exists():
                    cut_lines_after(file, after_step)
                    file.open("ab").close()
            except OSError as error:
                raise ConfigError(
                    f"{file} cannot be written: {error.strerror or error}\n"
                    "  set   another --out, or move away what is in the way; a full disk needs space"
                ) from error

    def write(self, step: int, prompts: Sequence[str | Prompt], generate: Generate) -> None:
        """Continue every prompt. One that the model cannot read is an error of all ranks, and ends samples."""
        for prompt in [] if self._failed else prompts:
            try:
                text = generate(prompt)
            except (ConfigError, DataError) as error:
                self._give_up(error)
                return
            shown = prompt if isinstance(prompt, str) else ""
            line = {"step": step, "prompt": shown, "text": text, "seed": self._seed, "temperature": TEMPERATURE}
            if self._writes:
                self._append(line)
                if not self._quiet:
                    say(f"step {step}  sample {_one_line(text)}")

    def _append(self, line: dict[str, object]) -> None:
        try:
            append(self._file, json.dumps(line))
        except OSError as error:
            warn(f"cannot write {self._file}: {error.strerror}; training continues without it")

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        if self._writes:
            warn(f"no samples of text from here on: {error}")


def _one_line(text: str, most: int = 100) -> str:
    """A text for a progress line: control characters as escapes, the end cut."""
    shown = json.dumps(text, ensure_ascii=False)
    printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return printable if len(printable) <= most else printable[: most - 1] + "…"
