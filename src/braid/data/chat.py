"""Chat templates: conversations as text, and which part of it the assistant says.

A template is Jinja, as Hugging Face tokenizers have it (`chat_template.jinja`, or `chat_template` in
tokenizer_config.json), rendered in a sandbox. What the assistant says is what stands between its tags
`{% generation %}` and `{% endgeneration %}`. In a template without them, it is what each of the assistant's
messages adds: the difference between the conversation up to the message, with the prompt of a generation, and
the conversation with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from braid.data.tokenizer import CONFIG, Ids, Tokenizer
from braid.errors import DataError, how_to_install

ASSISTANT = "assistant"
TEMPLATE = "chat_template.jinja"
CHATML = "chatml"
"""The name of the template below."""
CHATML_SOURCE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- (message.content or '') + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- (message.content or '') + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""For tokenizers without a template, such as that of bytes."""
TOKENS_OF_TEMPLATES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, as a row has them."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    """What the assistant may call."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """The characters that the assistant says: first, and behind the last."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template with the special tokens that it may name."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Such as `eos_token`."""
    origin: str
    """Where it comes from, for error messages."""

    @cached_property
    def _compiled(self) -> Any:
        return _compile(self.source, self.origin)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "tokens": dict(self.tokens), "origin": self.origin}

    def check(self) -> None:
        """Raise unless the template is valid."""
        _ = self._compiled

    def render(
        self, conversation: Conversation, *, prompt: bool = False, marks: tuple[str, str] = ("", "")
    ) -> str:
        """The text of a conversation. With `prompt`, it ends with what the assistant's next message begins
        with. `marks` stand around what the template says is generated."""
        import jinja2

        values = {
            **self.tokens,
            "messages": list(conversation.messages),
            "tools": None if conversation.tools is None else list(conversation.tools),
            "documents": None,
            "add_generation_prompt": prompt,
            OPEN: marks[0],
            CLOSE: marks[1],
        }
        try:
            return str(self._compiled.render(values))
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # templates compute with what rows have: a missing field, None + text ...
            told = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template of {self.origin} fails on it: {told}") from None

    def rendered(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, with the spans that the assistant says."""
        if "endgeneration" in self.source:
            marks = _unused_marks(conversation)
            return _unmarked(self.render(conversation, marks=marks), marks)
        return Rendered(text=self.render(conversation), spans=tuple(self._differences(conversation)))

    def _differences(self, conversation: Conversation) -> Iterator[tuple[int, int]]:
        """What each of the assistant's messages adds to the text."""
        whole, messages = self.render(conversation), conversation.messages
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = Conversation(messages=messages[:place], tools=conversation.tools)
            upto = Conversation(messages=messages[: place + 1], tools=conversation.tools)
            stop = self.render(upto)
            start = self.render(before, prompt=True) if place else self._opening(stop)
            if not (stop.startswith(start) and whole.startswith(stop)):
                raise DataError(
                    f"messages[{place}]: the template of {self.origin} changes what stands before a message, "
                    "so that what the message adds is not clear: put {% generation %} and {% endgeneration %} "
                    "around the assistant's part of the template"
                )
            yield len(start), len(stop)

    def _opening(self, text: str) -> str:
        """The text up to the first message, if the assistant begins: few templates can render no messages."""
        asked = Conversation(messages=({"role": "user", "content": "a question"},))
        prompt = self.render(asked, prompt=True).removeprefix(self.render(asked))
        before, found, _ = text.partition(prompt)
        return before + found

    def stop_text(self) -> str:
        """What the template writes behind an answer, without white space at its ends; may be empty."""
        answer = "an answer"
        asked: tuple[Message, ...] = ({"role": "user", "content": "a question"},)
        try:
            prompt = self.render(Conversation(messages=asked), prompt=True)
            whole = self.render(Conversation(messages=(*asked, {"role": ASSISTANT, "content": answer})))
        except DataError:
            return ""
        return whole[len(prompt) :].partition(answer)[2].strip() if whole.startswith(prompt) else ""


# ---------------------------------------------------------------------------------------------- rendering

OPEN, CLOSE = "braid_generation_opens", "braid_generation_closes"
"""Variables of a template that stand for marks around generated text."""


def _compile(source: str, origin: str) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Name, Output
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError(
            f"chat templates need the package jinja2, which is missing: run `{how_to_install('jinja2')}`"
        ) from None

    class Generation(Extension):
        """`{% generation %}`: marks around its body."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's way of declaring tags)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            marks = [Output([Name(name, "load", lineno=line)], lineno=line) for name in (OPEN, CLOSE)]
            return [marks[0], *body, marks[1]]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of {origin} is not valid: {error}") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """JSON as templates expect it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _unused_marks(conversation: Conversation) -> tuple[str, str]:
    """Two texts that the conversation does not have."""
    held = json.dumps([*conversation.messages, conversation.tools], ensure_ascii=False, default=str)
    number = 0
    while f"\x02{number}" in held or f"\\u0002{number}" in held:
        number += 1
    return f"\x02{number}[\x03", f"\x02{number}]\x03"


def _unmarked(text: str, marks: tuple[str, str]) -> Rendered:
    plain, spans = "", []
    for part in text.split(marks[0]):
        said, closed, rest = part.partition(marks[1])
        if closed:
            spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return Rendered(text=plain, spans=tuple(spans))


# ------------------------------------------------------------------------------------------------- tokens


def tokens_of(rendered: Rendered, tokenizer: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Token ids of a conversation, and which of them the assistant says: those that have a character of its
    spans."""
    ids, offsets_S2 = tokenizer.encode_with_offsets(rendered.text)
    start_S, stop_S = offsets_S2[:, 0].copy(), offsets_S2[:, 1]
    # Tokenizers may leave white space out of offsets. A token of nothing else begins where the one before ends.
    empty_S = np.flatnonzero(start_S == stop_S)
    start_S[empty_S] = np.where(empty_S > 0, stop_S[empty_S - 1], 0)
    said_S = np.zeros(len(ids), np.bool_)
    for start, stop in rendered.spans:
        said_S |= (start_S < stop) & (stop_S > start)
    return ids, said_S


# ------------------------------------------------------------------------------------------- reading rows


def conversation_of(given: Any, name: str = "messages") -> Conversation:
    """The conversation of a row. What is wrong with it is a `DataError` that does not say where it is."""
    if not isinstance(given, Mapping) or not isinstance(given.get(name), list):
        held = (
            f"the fields {', '.join(map(repr, given))}" if isinstance(given, Mapping) else type(given).__name__
        )
        raise DataError(f'has {held}; a conversation is {{"{name}": [{{"role": "user", "content": …}}, …]}}')
    messages = given[name]
    if not messages:
        raise DataError(f"has no {name}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{name}[{place}]: is {json.dumps(message, default=str)[:100]}; a message has a "role"'
            )
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(f"{name}[{place}]: its content is {type(message['content']).__name__}, not text")
    tools = given.get("tools")
    if not isinstance(tools, list | None):
        raise DataError(f"its tools are {type(tools).__name__}, not a list")
    return Conversation(
        messages=tuple(_clean(message) for message in messages), tools=tuple(tools) if tools else None
    )


def _clean(message: Message) -> Message:
    """A message without the fields that it does not have: rows of Parquet have those of all others, as None."""
    return {key: value for key, value in message.items() if key == "content" or value is not None}


# --------------------------------------------------------------------------------------------------- files


def chat_template(name: str | None, folder: Path | None) -> ChatTemplate:
    """The template of a file, or `chatml`; by default that of the tokenizer in a folder."""
    tokens = {} if folder is None else _special_tokens(folder)
    if name == CHATML:
        return ChatTemplate(source=CHATML_SOURCE, tokens=tokens, origin=CHATML)
    if name is not None:
        file = Path(name) / TEMPLATE if Path(name).is_dir() else Path(name)
        return ChatTemplate(source=_read(file), tokens=tokens, origin=str(file))
    found = None if folder is None else stored_template(folder)
    if found is None:
        where = "the tokenizer of bytes" if folder is None else f"the tokenizer in {folder}"
        raise DataError(
            f"{where} has no chat template, neither {TEMPLATE} nor chat_template in {CONFIG}: give one with "
            f"--chat-template FILE, or {CHATML}"
        )
    return found


def stored_template(folder: Path) -> ChatTemplate | None:
    """The template of a folder: chat_template.jinja, or `chat_template` of tokenizer_config.json; None if there
    is none."""
    file, tokens = folder / TEMPLATE, _special_tokens(folder)
    if file.is_file():
        return ChatTemplate(source=_read(file), tokens=tokens, origin=str(file))
    source = _config(folder).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return (
        ChatTemplate(source=source, tokens=tokens, origin=str(folder / CONFIG))
        if isinstance(source, str)
        else None
    )


def files_of(template: ChatTemplate) -> dict[str, str]:
    """The files from which `stored_template` makes the same template."""
    return {TEMPLATE: template.source, CONFIG: json.dumps(dict(template.tokens), indent=1)}


def _special_tokens(folder: Path) -> dict[str, str]:
    config = _config(folder)
    given = {name: config.get(name) for name in TOKENS_OF_TEMPLATES}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {file}: {error}") from None
    return config if isinstance(config, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template {file}: {error}") from None
