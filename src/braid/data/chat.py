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

from braid.data.rows import has_instead, kind_of_json
from braid.data.tokenizer import CONFIG, Ids, Tokenizer
from braid.errors import DataError, how_to_install, reason

ASSISTANT = "assistant"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of templates other than the default one."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: that of conversations, and that of those with tools."""
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
    tool_use: str | None = None
    """The template of conversations with tools, if it is another."""
    tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Such as `eos_token`."""
    origin: str
    """Where it comes from, for error messages."""

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        """The compiled templates, by their source."""
        sources = (self.source, self.tool_use)
        return {source: _compile(source, self.origin) for source in sources if source is not None}

    def __getstate__(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "tool_use": self.tool_use,
            "tokens": dict(self.tokens),
            "origin": self.origin,
        }

    def check(self) -> None:
        """Raise unless the template is valid."""
        _ = self._compiled

    def _source(self, conversation: Conversation) -> str:
        return self.source if self.tool_use is None or conversation.tools is None else self.tool_use

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
            return str(self._compiled[self._source(conversation)].render(values))
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # templates compute with what rows have: a missing field, None + text ...
            told = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template of {self.origin} fails on it: {told}") from None

    def rendered(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, with the spans that the assistant says."""
        text = self.render(conversation)
        if "endgeneration" not in self._source(conversation):
            return Rendered(text=text, spans=tuple(self._differences(conversation)))
        marks = _unused_marks(conversation)
        found = _unmarked(self.render(conversation, marks=marks), marks)
        if found.text != text:
            raise DataError(
                f"the template of {self.origin} changes what stands between {{% generation %}} and "
                "{% endgeneration %} after these tags, as a filter of a macro or of a `set` block does: put "
                "the filter between the tags"
            )
        return found

    def _differences(self, conversation: Conversation) -> Iterator[tuple[int, int]]:
        """What each of the assistant's messages adds to the text."""
        whole, messages = self.render(conversation), conversation.messages
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = Conversation(messages=messages[:place], tools=conversation.tools)
            upto = Conversation(messages=messages[: place + 1], tools=conversation.tools)
            stop = self.render(upto)
            start = self.render(before, prompt=True) if place else self._opening(stop, conversation.tools)
            if not whole.startswith(stop):
                what = "writes a message otherwise when others follow"
            elif start is None or not stop.startswith(start):
                what = "begins a message of the assistant otherwise than it prompts for one"
            else:
                yield len(start), len(stop)
                continue
            raise DataError(
                f"messages[{place}]: the template of {self.origin} {what}, so that what the message adds is "
                "not clear: put {% generation %} and {% endgeneration %} around the assistant's part of the "
                "template"
            )

    def _opening(self, text: str, tools: tuple[Any, ...] | None) -> str | None:
        """The text up to the first message, if the assistant begins, or None if that is not clear: few
        templates can render no messages."""
        asked = Conversation(messages=({"role": "user", "content": "a question"},), tools=tools)
        prompt = self.render(asked, prompt=True).removeprefix(self.render(asked))
        if prompt:
            before, found, _ = text.partition(prompt)
            return before + found if found else None
        try:
            return self.render(Conversation(messages=(), tools=tools))
        except DataError:
            return None

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


def conversation_of(given: Any, name: str = "messages", *, sparse: bool = False) -> Conversation:
    """The conversation of a row. What is wrong with it is a `DataError` that does not say where it is. Rows of
    Parquet are `sparse`: every object has the fields of all others, as None where it had none."""
    if not isinstance(given, Mapping) or not isinstance(given.get(name), list):
        raise DataError(
            f'{has_instead(given, name)}; a conversation is {{"{name}": [{{"role": "user", "content": …}}, …]}}'
        )
    messages = given[name]
    if not messages:
        raise DataError(f"has no {name}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{name}[{place}]: is {json.dumps(message, default=str)[:100]}; a message has a "role"'
            )
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(f"{name}[{place}]: its content is {kind_of_json(message['content'])}, not text")
    tools = given.get("tools")
    if not isinstance(tools, list | None):
        raise DataError(f"its tools are {kind_of_json(tools)}, not a list")
    messages = [_clean(message) for message in messages]
    if sparse:
        messages = [{key: _held(each) for key, each in message.items()} for message in messages]
        tools = _held(tools)
    return Conversation(messages=tuple(messages), tools=tuple(tools) if tools else None)


def _clean(message: Message) -> Message:
    """A message without the fields that are null: templates ask whether a field is defined."""
    return {key: value for key, value in message.items() if key == "content" or value is not None}


def _held(value: Any) -> Any:
    """A value of a sparse row without the fields that its objects do not have, at any depth."""
    if isinstance(value, Mapping):
        return {key: _held(each) for key, each in value.items() if each is not None}
    return [_held(each) for each in value] if isinstance(value, list) else value


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
        more = folder / MORE_TEMPLATES / f"{TOOL_USE}.jinja"
        tool_use = _read(more) if more.is_file() else None
        return ChatTemplate(source=_read(file), tool_use=tool_use, tokens=tokens, origin=str(file))
    source, tool_use = _config(folder).get("chat_template"), None
    if isinstance(source, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source, tool_use = named.get(DEFAULT), named.get(TOOL_USE)
    if not isinstance(source, str):
        return None
    return ChatTemplate(
        source=source,
        tool_use=tool_use if isinstance(tool_use, str) else None,
        tokens=tokens,
        origin=str(folder / CONFIG),
    )


def files_of(template: ChatTemplate) -> dict[str, str]:
    """The files from which `stored_template` makes the same template."""
    tokens = dict(template.tokens)
    if template.tool_use is None:
        return {TEMPLATE: template.source, CONFIG: json.dumps(tokens, indent=1)}
    named = {DEFAULT: template.source, TOOL_USE: template.tool_use}
    templates = [{"name": name, "template": source} for name, source in named.items()]
    return {CONFIG: json.dumps({**tokens, "chat_template": templates}, indent=1)}


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
        raise DataError(f"cannot read the chat template {file}: {reason(error)}") from None
