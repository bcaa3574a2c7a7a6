"""`braid generate`: autoregressive sampling from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.errors import ConfigError, ExitCode

CHECKPOINT_HELP = (
    "CHECKPOINT is a checkpoint such as runs/tiny/checkpoints/step-00000400, or a run directory such as\n"
    "runs/tiny, whose latest checkpoint is used.\n"
)
PROMPT = "def "


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text from a checkpoint."""

    prompt: Annotated[str | None, optional("TEXT", "'def ', or none behind images")] = None
    """Text to continue."""
    image: Annotated[
        tuple[tuple[Path, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE [FILE ...]")
    ] = ()
    """Images before the prompt: PNG or JPEG files, in order."""
    prompt_parts: Annotated[Path | None, optional("FILE", "none")] = None
    """In place of both: a JSON file with a list of {"text": ...}, {"image": ...} and {"video": [...]}."""
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
    if opts.prompt_parts is not None and (opts.prompt is not None or opts.image):
        raise ConfigError("--prompt-parts has the whole prompt: leave --prompt and --image out")
    if () in opts.image:
        raise ConfigError("--image has no file: give one or several, or leave it out")
    images = tuple(file for files in opts.image for file in files)
    # Imports torch, which takes seconds: only after the arguments are validated.
    from braid.data.prompts import encode_prompt, parts_with_images, read_parts
    from braid.train.device import choose_device
    from braid.train.load_model import image_limits, load_models

    device = choose_device(opts.device)
    if opts.prompt_parts is not None:
        parts = read_parts(opts.prompt_parts)
    else:
        default = "" if images else PROMPT
        parts = parts_with_images(images, default if opts.prompt is None else opts.prompt)
    loaded = load_models(Path(checkpoint), device)
    prompt = encode_prompt(parts, loaded.tokenizer, image_limits(loaded.run), str(loaded.path))
    text = loaded.generate(prompt, tokens=opts.tokens, temperature=opts.temperature, seed=opts.seed)
    print(text)
    return ExitCode.OK
