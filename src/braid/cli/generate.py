"""`braid generate`: autoregressive sampling from a checkpoint, and conversations with one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from braid.cli.args import optional, parse_options, split_positional, wants_help
from braid.errors import ConfigError, ExitCode
from braid.train.stored_run import refuse_at_once

if TYPE_CHECKING:
    from braid.model.generate import Sampling
    from braid.train.device import Device

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
    top_k: Annotated[int | None, optional("INT", "all tokens")] = None
    """Draw from this many of the likeliest tokens."""
    top_p: Annotated[float | None, optional("FLOAT", "all tokens")] = None
    """Draw from the likeliest tokens with this much probability together."""
    stop: Annotated[tuple[str, ...], optional("TEXT [TEXT ...]", "none")] = ()
    """Texts that end the generation; they are not printed."""
    chat: bool = False
    """A conversation: --prompt is a message of the user, and the answer is printed. Without --prompt and
    --messages, type turns."""
    system: Annotated[str | None, optional("TEXT", "none")] = None
    """With --chat: the system message."""
    messages: Annotated[Path | None, optional("FILE", "none")] = None
    """With --chat: a JSON file with a list of messages, {"role": ..., "content": ...}, to answer."""
    chat_template: Annotated[str | None, optional("FILE", "that of the model or its data")] = None
    """With --chat: a Jinja chat template, or `chatml`."""
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
    if not opts.chat and (
        opts.system is not None or opts.messages is not None or opts.chat_template is not None
    ):
        raise ConfigError("--system, --messages and --chat-template are of conversations: set --chat as well")
    if opts.chat and (opts.image or opts.prompt_parts is not None):
        raise ConfigError("--chat is text alone: leave --image and --prompt-parts out")
    images = tuple(file for files in opts.image for file in files)
    refuse_at_once(Path(checkpoint))
    # Imports torch, which takes seconds: only after the arguments are validated.
    from braid.model.generate import Sampling
    from braid.train.device import choose_device

    device = choose_device(opts.device)
    sampling = Sampling(
        tokens=opts.tokens,
        temperature=opts.temperature,
        top_k=opts.top_k,
        top_p=opts.top_p,
        stop=opts.stop,
        seed=opts.seed,
    )
    if problems := list(sampling.problems()):
        raise ConfigError(problems)
    if opts.chat:
        _chat(checkpoint, device, sampling, opts)
    else:
        _continue(checkpoint, device, sampling, images, opts)
    return ExitCode.OK


def _continue(
    checkpoint: str, device: Device, sampling: Sampling, images: tuple[Path, ...], opts: GenerateOptions
) -> None:
    from braid.data.prompts import encode_prompt, parts_with_images, read_parts
    from braid.train.load_model import image_limits, load_models

    if opts.prompt_parts is not None:
        parts = read_parts(opts.prompt_parts)
    else:
        default = "" if images else PROMPT
        parts = parts_with_images(images, default if opts.prompt is None else opts.prompt)
    loaded = load_models(Path(checkpoint), device)
    prompt = encode_prompt(parts, loaded.tokenizer, image_limits(loaded.run), str(loaded.path))
    print(loaded.text(prompt, sampling))


def _chat(checkpoint: str, device: Device, sampling: Sampling, opts: GenerateOptions) -> None:
    from braid.cli.chat import answer, chat, conversation_from, template_of
    from braid.train.load_model import load_models

    begun = conversation_from(opts.prompt, opts.messages, opts.system)
    loaded = load_models(Path(checkpoint), device)
    template = template_of(loaded, opts.chat_template)
    if opts.prompt is None and opts.messages is None:
        chat(loaded, template, begun, sampling)
    else:
        print(answer(loaded, template, begun, sampling))
