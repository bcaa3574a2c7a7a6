"""`generate --chat`: where the template comes from, answers to a prompt, a file and typed turns."""

import json
import re
from dataclasses import replace

import pytest

from braid.cli import main
from braid.cli.chat import answer, chat, conversation_from, template_of
from braid.config import Data, to_json
from braid.data.chat import Conversation
from braid.errors import ConfigError, DataError, ExitCode
from braid.model.generate import Sampling
from braid.train.load_model import load_models
from tests.runs import small_run

SAMPLING = Sampling(tokens=12, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on conversations, by the commands of docs/conversations.md. It has learnt to say `kkkk`."""
    folder = tmp_path_factory.mktemp("chat")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "kkkk"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    words = ["--format", "chat", "--chat-template", "chatml"]
    assert (
        main(["data", "build", "--input", f"{folder}/chats.jsonl", "--output", f"{folder}/data", *words]) == 0
    )
    run = small_run()
    run = replace(run, model=replace(run.model, pattern="[*-]*", moe=None))
    data = Data(sources=(f"{folder}/data",), packing="documents", sequence_tokens=80)
    run = replace(run, data=data, train=replace(run.train, steps=40), optim=replace(run.optim, lr=3e-2))
    (folder / "small.json").write_text(json.dumps(to_json(run)))
    assert main(["train", f"{folder}/small.json", "--out", f"{folder}/run", "--device", "cpu"]) == 0
    return folder


def test_a_prompt_is_answered_up_to_the_end_of_the_turn(trained, capsys):
    capsys.readouterr()
    words = ["--chat", "--device", "cpu", "--temperature", "0", "--tokens", "30"]
    command = ["generate", f"{trained}/run", *words]
    assert main([*command, "--prompt", "hi"]) == 0
    assert re.fullmatch("k+", capsys.readouterr().out.strip())
    messages = [{"role": "user", "content": "hi"}]
    for content in (messages, {"messages": messages}):
        (trained / "asked.json").write_text(json.dumps(content))
        assert main([*command, "--messages", f"{trained}/asked.json"]) == 0
        assert re.fullmatch("k+", capsys.readouterr().out.strip())
    assert main([*command, "--prompt", "hi", "--stop", "kk"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_typed_turns_have_all_turns_before_them(trained, capsys, monkeypatch):
    loaded = load_models(trained / "run", "cpu")
    template = template_of(loaded, None)
    asked = []
    told = iter(["one", "two"])
    monkeypatch.setattr("braid.cli.chat.answer", lambda *each: asked.append(each[2:]) or next(told))
    typed = iter(["hi", "  ", "more"])

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    chat(loaded, template, conversation_from(None, None, "be brief"), SAMPLING, ask)
    (first, seed), (second, next_seed) = asked
    assert [message["content"] for message in first.messages] == ["be brief", "hi"]
    assert [message["content"] for message in second.messages] == ["be brief", "hi", "one", "more"]
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert (seed.seed, next_seed.seed) == (5, 6)
    assert "model> one\nmodel> two\n" in capsys.readouterr().out


def test_answers_are_decided_by_the_seed(trained):
    loaded = load_models(trained / "run", "cpu")
    begun = conversation_from("hello", None, None)
    hot = replace(SAMPLING, temperature=3.0)
    texts = [
        answer(loaded, template_of(loaded, "chatml"), begun, replace(hot, seed=seed)) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_templates_are_looked_for_beside_the_run(trained, tmp_path):
    loaded = load_models(trained / "run", "cpu")
    asked = Conversation(messages=({"role": "user", "content": "x"},))
    assert template_of(loaded, None).render(asked) == "<|im_start|>user\nx<|im_end|>\n"
    (trained / "run" / "hub").mkdir()
    try:
        (trained / "run" / "hub" / "chat_template.jinja").write_text("of the hub")
        assert template_of(loaded, None).render(asked) == "of the hub"
    finally:
        (trained / "run" / "hub" / "chat_template.jinja").unlink()
    elsewhere = replace(loaded, run=replace(loaded.run, data=Data(sources=(str(tmp_path),))))
    with pytest.raises(DataError, match=r"has no chat template: looked in .*hub"):
        template_of(elsewhere, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--system", "x"], "set --chat as well"),
        (["--chat", "--image", "a.png"], "leave --image and --prompt-parts out"),
        (["--chat", "--top-p", "0"], "top-p = 0.0"),
        (["--chat", "--prompt", "x", "--messages", "m.json"], "leave --prompt and --system out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, why, trained, capsys):
    assert main(["generate", f"{trained}/run", *words, "--device", "cpu"]) == ExitCode.CONFIG
    assert why in capsys.readouterr().err


def test_a_file_without_messages_is_named(tmp_path):
    (tmp_path / "m.json").write_text('{"text": "x"}')
    with pytest.raises(DataError, match=r"m\.json: has the fields 'text'"):
        conversation_from(None, tmp_path / "m.json", None)
    with pytest.raises(DataError, match="is no JSON file"):
        conversation_from(None, tmp_path / "none.json", None)
    with pytest.raises(ConfigError, match="has the whole conversation"):
        conversation_from(None, tmp_path / "m.json", "x")
