"""`braid generate --chat`: a conversation with a model, from a prompt, from a file, or typed turn by turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braid.errors import ConfigError, DataError, reason

if TYPE_CHECKING:
    from braid.data.chat import ChatTemplate, Conversation
    from braid.model.generate import Sampling
    from braid.train.load_model import LoadedModel

YOU, MODEL = "you> ", "model> "


def template_of(loaded: LoadedModel, given: str | None) -> ChatTemplate:
    """The template that is given; else that of the run's folder, which an import or its data brought; else that
    beside its tokenizer."""
    from braid.data.chat import chat_template, stored_template
    from braid.interchange.side_files import FOLDER
    from braid.train.data_pipeline import tokenizer_folder
    from braid.train.export_settings import run_of

    data = loaded.run.data
    beside = tokenizer_folder(data.tokenizer)
    if given is not None:
        return chat_template(given, beside)
    folders = [run_of(loaded.path) / FOLDER, *map(Path, data.sources), *([] if beside is None else [beside])]
    for folder in folders:
        if folder.is_dir() and (found := stored_template(folder)) is not None:
            return found
    looked = ", ".join(map(str, folders))
    raise DataError(
        f"{loaded.path} has no chat template: looked in {looked}\n"
        "  set   --chat-template to a Jinja file, or to chatml if the model was trained with that"
    )


def read_messages(file: Path) -> Conversation:
    """A conversation from a JSON file: a list of messages, or an object with `messages` and maybe `tools`."""
    from braid.data.chat import conversation_of

    try:
        given = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON file that can be read: {reason(error)}") from None
    try:
        return conversation_of({"messages": given} if isinstance(given, list) else given)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def answer(loaded: LoadedModel, template: ChatTemplate, conversation: Conversation, sampling: Sampling) -> str:
    """What the model says next."""
    from dataclasses import replace

    from braid.data.prompts import text_prompt

    end = template.stop_text()
    stopping = replace(sampling, stop=(*sampling.stop, *([end] if end else [])))
    prompt = text_prompt(template.render(conversation, prompt=True), loaded.tokenizer)
    return loaded.continuation(prompt, stopping).strip()


def chat(
    loaded: LoadedModel,
    template: ChatTemplate,
    begun: Conversation,
    sampling: Sampling,
    ask: Callable[[str], str] = input,
) -> None:
    """Take turns until the input ends. Each answer has a seed of its own."""
    from dataclasses import replace

    messages: list[Any] = [*begun.messages]
    print("Type a message; Ctrl-D ends the conversation.")
    while True:
        try:
            asked = ask(YOU)
        except EOFError:
            print()
            return
        if not asked.strip():
            continue
        messages.append({"role": "user", "content": asked})
        told = answer(loaded, template, replace(begun, messages=tuple(messages)), sampling)
        print(f"{MODEL}{told}", flush=True)
        messages.append({"role": "assistant", "content": told})
        sampling = replace(sampling, seed=sampling.seed + 1)


def conversation_from(prompt: str | None, messages: Path | None, system: str | None) -> Conversation:
    """How the conversation begins."""
    from braid.data.chat import Conversation

    if messages is not None:
        if prompt is not None or system is not None:
            raise ConfigError("--messages has the whole conversation: leave --prompt and --system out")
        return read_messages(messages)
    first = [] if system is None else [{"role": "system", "content": system}]
    asked = [] if prompt is None else [{"role": "user", "content": prompt}]
    return Conversation(messages=(*first, *asked))
