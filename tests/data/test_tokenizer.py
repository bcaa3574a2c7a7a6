"""Tokenizers give text back, and describe themselves well enough to be made again."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.data import ByteTokenizer, HfTokenizer, tokenizer_from
from braid.errors import DataError


@pytest.fixture
def words_json() -> str:
    """A tokenizer.json with words, special tokens, and a hole in its ids."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4, "<|endoftext|>": 5, "<|user|>": 9}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>"])
    return tokenizer.to_str()


@given(st.text())
def test_bytes_of_any_text_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


@given(st.lists(st.integers(0, 256)))
def test_any_bytes_decode_to_some_text(ids: list[int]) -> None:
    expected = bytes(i for i in ids if i < 256).decode(errors="replace")
    assert ByteTokenizer().decode(ids) == expected


def test_ids_outside_the_vocabulary_do_not_decode() -> None:
    with pytest.raises(DataError, match="token id 257"):
        ByteTokenizer().decode([65, 257])


def test_hugging_face_file(words_json: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(words_json)
    tokenizer = HfTokenizer.from_file(tmp_path)
    assert tokenizer.vocab == 10
    assert tokenizer.end_of_document == 5
    assert tokenizer.encode("<|user|> to be").tolist() == [9, 1, 2]
    assert tokenizer.decode([1, 2, 5]) == "to be"


def test_the_end_of_a_document_is_a_common_token_or_that_of_the_folder(words_json: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(words_json)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "not"}')
    assert HfTokenizer.from_file(tmp_path).end_of_document == 5
    (tmp_path / "tokenizer.json").write_text(words_json.replace("<|endoftext|>", "<|something|>"))
    for end in ('"not"', '{"content": "not"}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {end}}}')
        assert HfTokenizer.from_file(tmp_path / "tokenizer.json").end_of_document == 4
    for unknown in ('{"eos_token": "stop"}', "{}", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(unknown)
        with pytest.raises(DataError, match=r"in a tokenizer_config\.json beside"):
            HfTokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*tokenizer_config\.json"):
        HfTokenizer.from_file(tmp_path)


def test_descriptions_survive_json(words_json: str) -> None:
    for tokenizer in (ByteTokenizer(), HfTokenizer(words_json)):
        again = tokenizer_from(json.loads(json.dumps(tokenizer.description)))
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode("to be").tolist() == tokenizer.encode("to be").tolist()


def test_another_end_is_another_tokenizer(words_json: str) -> None:
    tokenizer = HfTokenizer(words_json, end_of_document="not")
    assert tokenizer.end_of_document == 4
    assert tokenizer.fingerprint != HfTokenizer(words_json).fingerprint


def test_what_cannot_be_a_tokenizer_is_refused(words_json: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token 'stop'"):
        HfTokenizer(words_json, end_of_document="stop")
    with pytest.raises(DataError, match="common end-of-document"):
        HfTokenizer(words_json.replace("<|endoftext|>", "<|something|>"))
    with pytest.raises(DataError, match="this is not a tokenizer"):
        HfTokenizer("{}")
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*absent"):
        HfTokenizer.from_file(tmp_path / "absent.json")
    with pytest.raises(DataError, match="unknown tokenizer 'word'"):
        tokenizer_from({"kind": "word"})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "tokenizers":
            raise ImportError(name)
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="make venv"):
        HfTokenizer("{}")


def test_a_text_is_neither_cut_padded_nor_framed(words_json: str) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(words_json)
    plain = HfTokenizer(words_json)
    some = sorted(backend.get_vocab().items())[0]
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.post_processor = TemplateProcessing(single=f"{some[0]} $A", special_tokens=[some])
    text = " ".join(sorted(backend.get_vocab())[:4])
    assert HfTokenizer(backend.to_str()).encode(text).tolist() == plain.encode(text).tolist()
    assert len(plain.encode(text)) == 4
