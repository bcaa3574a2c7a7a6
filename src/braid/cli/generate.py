"""`braid generate`: text from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from braid.cli.args import options, subject, wants_help
from braid.errors import ExitCode


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a prompt with a trained model."""

    prompt: str = "def "
    """What to continue."""
    tokens: int = 200
    """How many tokens to add, at most: the end of a document ends it."""
    temperature: float = 0.8
    """0 always takes the likeliest token; higher is bolder."""
    seed: int = 0
    """The same seed gives the same text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""


def generate(words: list[str]) -> int:
    if wants_help(words):
        print("CHECKPOINT is a folder like runs/tiny/checkpoints/step-00000400, or a run's: its newest.\n")
        words = ["CHECKPOINT", "--help"]
    name, rest = subject(words, "generate", "CHECKPOINT")
    chosen = options(GenerateOptions, rest, f"braid generate {name}")
    from braid.model.generate import generate_text
    from braid.train.device import choose_device
    from braid.train.state import load_model

    model, tokenizer = load_model(Path(name), choose_device(chosen.device))
    text = generate_text(
        model,
        tokenizer,
        chosen.prompt,
        tokens=chosen.tokens,
        temperature=chosen.temperature,
        seed=chosen.seed,
    )
    print(text)
    return ExitCode.OK
