"""`braid generate`: autoregressive sampling from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from braid.cli.args import parse_options, split_positional, wants_help
from braid.errors import ExitCode

CHECKPOINT_HELP = (
    "CHECKPOINT is a checkpoint such as runs/tiny/checkpoints/step-00000400, or a run directory such as\n"
    "runs/tiny, whose latest checkpoint is used.\n"
)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text from a checkpoint."""

    prompt: str = "def "
    """Text to continue."""
    tokens: int = 200
    """Maximum number of new tokens; generation stops earlier at an end-of-document token."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Sampling seed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if one is available."""


def generate(args: list[str]) -> int:
    if wants_help(args):
        print(CHECKPOINT_HELP)
        args = ["CHECKPOINT", "--help"]
    checkpoint, rest = split_positional(args, "generate", "CHECKPOINT")
    opts = parse_options(GenerateOptions, rest, f"braid generate {checkpoint}")
    from braid.model.generate import generate_text
    from braid.train.device import choose_device
    from braid.train.state import load_model

    model, tokenizer = load_model(Path(checkpoint), choose_device(opts.device))
    text = generate_text(
        model,
        tokenizer,
        opts.prompt,
        tokens=opts.tokens,
        temperature=opts.temperature,
        seed=opts.seed,
    )
    print(text)
    return ExitCode.OK
