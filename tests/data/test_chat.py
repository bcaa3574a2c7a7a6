"""Conversations: masks against transformers' templates, rows that cannot be used, and generation prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.cli import main
from braid.data import ByteTokenizer, HfTokenizer, build, open_source
from braid.data.chat import (
    ChatTemplate,
    Conversation,
    chat_template,
    conversation_of,
    stored_template,
    tokens_of,
)
from braid.errors import DataError, ExitCode
from tests.data.test_build import write_jsonl

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra `hf`)")

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a città <&> 天気",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]

HEAD = """
{%- if tools %}
    {{- bos_token + '<|turn|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- bos_token + '<|turn|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
"""
CALLS = """
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '<call>' }}{{ call.function | tojson }}{{ '</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end|>' }}
"""
TAGGED = (
    HEAD
    + """
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content or '' }}"""
    + CALLS
    + """
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.content }}{{ '<|end|>' }}
    {%- else %}
        {{- raise_exception('content of ' + message.role) }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}
"""
)
PLAIN = TAGGED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
TEMPLATES = {"generation tags": TAGGED, "prefix differences": PLAIN}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def conversations() -> list[dict[str, Any]]:
    """Twenty, with tools, system turns and empty turns."""
    simple = [turn("user", "What is 2 + 2?"), turn("assistant", "It is 4.")]
    called = [
        turn("user", "Weather?"),
        turn("assistant", None, tool_calls=CALL),
        turn("tool", "rain"),
        turn("assistant", "Rain."),
    ]
    two = [
        turn("assistant", "", tool_calls=CALL * 2),
        turn("tool", "{}"),
        turn("tool", "[]"),
        turn("assistant", "  two  "),
    ]
    bodies = [
        simple,
        [turn("user", ""), turn("assistant", "You said nothing.")],
        [turn("user", "Say nothing."), turn("assistant", "")],
        [turn("user", "x"), turn("assistant", ""), turn("user", ""), turn("assistant", "y")],
        [*simple, turn("user", "Grüße, 世界 🙂"), turn("assistant", "Gruß 🙂🙂 zurück\n\nund mehr\n")],
        [turn("assistant", "I begin."), *simple],
        [*simple, turn("assistant", "And another."), turn("assistant", "And one more.")],
        called,
        [turn("user", "both"), *two],
        [*called, *simple, turn("user", "<|turn|> and <call> in a text")],
    ]  # fmt: skip
    system = turn("system", "Answer briefly. Ünïcode.")
    rows: list[dict[str, Any]] = []
    for number, body in enumerate(bodies):
        rows += [{"messages": body}, {"messages": [system, *body]}]
        if number >= 5:
            rows[-1]["tools"] = [TOOL]
        if number >= 7:
            rows[-2]["tools"] = [TOOL, TOOL]
    assert len(rows) == 20
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of byte-level pairs, as chat models have them, that merges over spaces and line breaks."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "<|turn|>", "<|end|>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator([json.dumps(row) for row in conversations()] + ["a\n\nb \n c"] * 50, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    words.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TAGGED}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def transformers_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers (extra `hf`)")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def masks_of(theirs: Any, template: str, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and assistant mask, as transformers has them: of the tags, or of prefixes."""
    options = {"chat_template": template, "tools": row.get("tools"), "tokenize": True, "return_dict": True}
    messages = row["messages"]
    if template == TAGGED:
        whole = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        return whole["input_ids"], whole["assistant_masks"]

    def ids(upto: int, prompt: bool) -> list[int]:
        if upto == 0:  # transformers has no template of nothing
            text = theirs.apply_chat_template(messages[:1], **options | {"tokenize": False})
            return theirs.encode(text[: text.index("<|turn|>assistant\n")] + "<|turn|>assistant\n")
        return theirs.apply_chat_template(messages[:upto], add_generation_prompt=prompt, **options)["input_ids"]

    mask = [0] * len(ids(len(messages), False))
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = len(ids(place, True)), len(ids(place + 1, False))
            # The line break behind a turn belongs to what the message adds, but may be one token with more.
            mask[start:stop] = [1] * (stop - start)
    return ids(len(messages), False), mask


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    theirs = transformers_tokenizer(folder)
    (tmp_path / "t.jinja").write_text(TEMPLATES[name])
    template, tokenizer = chat_template(str(tmp_path / "t.jinja"), folder), HfTokenizer.from_file(folder)
    rows = [
        row for row in conversations() if name == "generation tags" or row["messages"][0]["role"] != "assistant"
    ]
    counted = 0
    for row in rows:
        rendered = template.rendered(conversation_of(row))
        ids, said = tokens_of(rendered, tokenizer)
        expected, mask = masks_of(theirs, TEMPLATES[name], row)
        assert ids.tolist() == expected, row
        assert said.astype(int).tolist() == mask, row
        counted += int(said.sum())
    assert counted > 200
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    built = build(file, tmp_path / "out", tokenizer, chat=template)
    assert (built.documents, built.refused) == (len(rows), ())
    source = open_source(tmp_path / "out")
    span = source.read(0, source.tokens)
    assert int(span.loss_mask_S.sum()) == counted
    ends = source.document_offsets()[1:] - 1
    assert (span.ids_S[ends] == tokenizer.end_of_document).all()
    assert not span.loss_mask_S[ends].any()


def test_a_template_comes_back_from_what_was_built(folder: Path, tmp_path: Path) -> None:
    template = chat_template(None, folder)
    file = write_jsonl(tmp_path / "rows.jsonl", conversations())
    build(file, tmp_path / "out", HfTokenizer.from_file(folder), chat=template, validation=0.3)
    found = stored_template(tmp_path / "out")
    assert found is not None
    asked = conversation_of(conversations()[-1])
    assert found.render(asked, prompt=True) == template.render(asked, prompt=True)
    assert found.render(asked).startswith("<s><|turn|>system\nAnswer briefly.")
    assert found.stop_text() == "<|end|>"
    assert chat_template("chatml", None).stop_text() == "<|im_end|>"


def test_a_template_that_ends_with_the_end_of_a_document_has_one(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>"])
    tokenizer = HfTokenizer(words.to_str())
    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %} {% endfor %}"
    template = ChatTemplate(source=source, origin="a test")
    rows = [{"messages": [turn("user", "a"), turn("assistant", "b a")]}]
    build(write_jsonl(tmp_path / "r.jsonl", rows), tmp_path / "out", tokenizer, chat=template)
    span = open_source(tmp_path / "out").read(0, 4)
    assert span.ids_S.tolist() == [1, 2, 1, 3]
    assert span.loss_mask_S.tolist() == [False, True, True, True]


BAD = [
    ("{'messages': []}", "not a JSON object"),
    ('{"text": "x"}', "has the fields 'text'; a conversation is"),
    ('{"messages": []}', "has no messages"),
    ('{"messages": "x"}', "has 'messages' as text; a conversation is"),
    ('{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}', "has the field 'role' twice"),
    ('{"messages": [{"from": "human", "value": "x"}]}', 'messages[0]: is {"from": "human"'),
    ('{"messages": [{"role": "assistant", "content": 3}]}', "messages[0]: its content is a number"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "has nothing that the assistant says"),
    ('{"messages": [{"role": "tool", "content": null}]}', "the chat template refuses it: content of tool"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": "y"}', "its tools are text"),
    ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "has an unpaired surrogate"),
    ('{"messages": [{"role": "assistant", "tool_calls": [3], "content": ""}]}', "fails on it: TypeError"),
]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_cannot_be_used_is_named_and_counted(workers: str, folder: Path, tmp_path: Path, capsys) -> None:
    good = json.dumps(conversations()[0])
    lines = [good, *(line for line, _ in BAD), "", good]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    out = ["--output", str(tmp_path / "out"), "--validation", "0", "--workers", workers]
    words = ["data", "build", "--format", "chat", "--tokenizer", str(folder / "tokenizer.json"), *out]
    assert main([*words, "--input", str(file)]) == 0
    told = capsys.readouterr()
    assert "documents: 2; tokens:" in told.out
    assert f"skipped conversations: {len(BAD)}\n" in told.out
    assert "--data.packing documents" in told.out
    named = [line for line in told.err.splitlines() if not line.startswith("tokenizing")]  # of a slow machine
    assert len(named) == len(BAD)
    for place, (line, (_, why)) in enumerate(zip(named, BAD, strict=True), start=2):
        assert line.startswith(f"braid: skipped {file}, line {place}: "), line
        assert why in line
    (tmp_path / "all.jsonl").write_text("\n".join(line for line, _ in BAD))
    words[words.index(str(tmp_path / "out"))] = str(tmp_path / "none")
    assert main([*words, "--input", str(tmp_path / "all.jsonl")]) == ExitCode.DATA
    told = capsys.readouterr()
    assert f"no conversation in {tmp_path / 'all.jsonl'} can be used" in told.err
    assert f"{tmp_path / 'all.jsonl'}, line 2: has the fields" in told.err
    assert not (tmp_path / "none").exists()


def test_a_template_that_rewrites_what_was_said_needs_tags(folder: Path) -> None:
    """As those that drop the reasoning of earlier turns."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content if loop.last else '-' }};{% endfor %}"
    template = ChatTemplate(source=source, origin="a test")
    one, two = ([*turns] for turns in (conversations()[0]["messages"], conversations()[8]["messages"]))
    with pytest.raises(DataError, match=r"messages\[1\]: the template of a test writes a message"):
        template.rendered(Conversation(messages=(*one, *two)))


def said_by(source: str, *messages: dict[str, Any]) -> list[str]:
    """What the assistant says of a conversation, by a template."""
    rendered = ChatTemplate(source=source, origin="a test").rendered(Conversation(messages=messages))
    return [rendered.text[start:stop] for start, stop in rendered.spans]


def test_a_template_without_a_prompt_for_a_generation() -> None:
    """As that of Llama 2: an answer follows the question, with no header."""
    source = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
        "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
    )
    asked, told = turn("user", "q"), turn("assistant", "  a  ")
    assert said_by(source, asked, told, asked, told) == [" a </s>"] * 2
    assert said_by(source, told, asked, told) == [" a </s>"] * 2


def test_a_prompt_that_a_message_does_not_begin_with_needs_tags() -> None:
    """As of templates that prompt with an empty reasoning, which messages do not have."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think></think>{% endif %}"
    )
    asked, told = turn("user", "q"), turn("assistant", "a")
    for messages in ((asked, told), (told, asked)):
        with pytest.raises(DataError, match="begins a message of the assistant otherwise than it prompts"):
            said_by(source, *messages)


def test_tags_within_a_filter_are_refused() -> None:
    """A mark beside white space would keep it from being trimmed: neither text nor mask would be right."""
    macro = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    told = turn("assistant", "  a  ")
    assert said_by(macro + "{% for m in messages %}{{ say(m) }}{% endfor %}", told) == ["  a  "]
    with pytest.raises(DataError, match="changes what stands between"):
        said_by(macro + "{% for m in messages %}{{ say(m) | trim }}{% endfor %}", told)


def test_conversations_with_tools_have_the_template_of_that_name(folder: Path, tmp_path: Path) -> None:
    templates = {"default": TAGGED, "tool_use": TAGGED.replace("# Tools", "# You may call")}
    theirs = transformers_tokenizer(folder)
    theirs.chat_template = templates
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [{"name": name, "template": source} for name, source in templates.items()]
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    kept = tmp_path / "kept"  # as transformers saves several templates
    theirs.save_pretrained(kept)
    rows = [conversations()[0], conversations()[-1]]
    build(
        write_jsonl(tmp_path / "r.jsonl", rows),
        tmp_path / "out",
        ByteTokenizer(),
        chat=stored_template(tmp_path),
    )
    for place in (tmp_path, kept, tmp_path / "out"):
        found = stored_template(place)
        assert found is not None
        for row in rows:
            expected = theirs.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
            assert found.rendered(conversation_of(row)).text == expected
    assert "# You may call" in expected


def test_objects_of_parquet_have_no_fields_of_other_rows() -> None:
    """Columns hold structures, in which a row has the fields of all others, as None."""
    row = conversations()[-1]
    wider = json.loads(json.dumps(row))
    for message in wider["messages"]:
        message["name"] = None
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"]["other"] = None
    wider["tools"][0]["function"]["parameters"]["properties"]["other"] = None
    assert conversation_of(wider, sparse=True) == conversation_of(row)
    assert conversation_of(wider) != conversation_of(row)  # a null of JSON is the row's own


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages.__class__.__mro__ }}", "refuses it"),
        ("{{ messages.append(1) }}", "refuses it"),
        ("{% for m in messages %}", "is not valid"),
        ("{{ 1 / 0 }}", "fails on it: ZeroDivisionError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "refuses it"),
    ],
)
def test_templates_run_in_a_sandbox(source: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        ChatTemplate(source=source, origin="a test").render(Conversation(messages=(turn("user", "x"),)))


def test_a_template_that_is_not_valid_ends_the_build_at_once(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "r.jsonl", [{"messages": [turn("assistant", "x")]}])
    chat = ChatTemplate(source="{% for m in messages %}", origin="a test")
    with pytest.raises(DataError, match=r"^the chat template of a test is not valid"):
        build(file, tmp_path / "out", ByteTokenizer(), chat=chat)


def test_templates_that_are_missing_are_asked_for(tmp_path: Path, capsys) -> None:
    with pytest.raises(DataError, match=r"of bytes has no chat template.*--chat-template FILE, or chatml"):
        chat_template(None, None)
    with pytest.raises(DataError, match="cannot read the chat template"):
        chat_template(str(tmp_path / "none.jinja"), None)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(None, tmp_path).source == "d"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert chat_template(None, tmp_path).source == "of the file"
    file = write_jsonl(tmp_path / "r.jsonl", [{"text": "x"}])
    words = [
        "data",
        "build",
        "--input",
        str(file),
        "--output",
        str(tmp_path / "o"),
        "--chat-template",
        "chatml",
    ]
    assert main(words) == ExitCode.CONFIG
    assert "set --format chat" in capsys.readouterr().err


def test_texts_of_bytes_have_the_mask_of_their_letters() -> None:
    row = {"messages": [turn("user", "ü"), turn("assistant", "天 ü"), turn("user", "x")]}
    ids, said = tokens_of(chat_template("chatml", None).rendered(conversation_of(row)), ByteTokenizer())
    assert bytes(ids[said].tolist()).decode() == "天 ü<|im_end|>"
    assert bytes(ids[np.logical_not(said)].tolist()).decode().startswith("<|im_start|>user\nü<|im_end|>\n")
