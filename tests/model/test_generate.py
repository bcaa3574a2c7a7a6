"""Generation: what it samples from, and that a seed decides it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from braid.errors import ConfigError
from braid.model.context import MicroBatch
from braid.model.generate import generate, generate_text, sample
from tests.model.cases import build


class Letters:
    """Seventeen letters, and an end that is none of them unless a test says so."""

    def __init__(self, end: int = -1) -> None:
        self.end_of_document = end
        self.vocab = 17

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_without_chance_every_token_is_the_likeliest() -> None:
    model = build("[*-][*E]")
    start = torch.tensor([[1, 2, 3], [4, 5, 6]])
    rows = generate(model, start, 6, temperature=0.0)
    assert rows.shape == (2, 9)
    logits = model.logits(model.prepare(MicroBatch.of_tokens(rows)))
    assert torch.equal(rows[:, 3:], logits.argmax(-1)[:, 2:-1])
    assert torch.equal(generate(model, start, 0), start)


def test_what_only_pads_the_vocabulary_is_never_generated() -> None:
    model, start = build("[*-][*E]"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert int(generate(model, start, 6, temperature=0.0)[:, 3:].max()) >= 5
    rows = generate(model, start, 6, temperature=0.0, vocab=5)
    logits = model.logits(model.prepare(MicroBatch.of_tokens(rows)))
    assert torch.equal(rows[:, 3:], logits[..., :5].argmax(-1)[:, 2:-1])


def test_a_seed_decides_the_text() -> None:
    model = build("*-")
    texts = [generate_text(model, Letters(), "abc", tokens=30, temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("abc")
    assert len(texts[0]) == 33


def test_the_end_of_the_document_ends_the_text() -> None:
    model = build("*-")
    whole = generate_text(model, Letters(), "abc", tokens=30, temperature=1.0, seed=1)
    end = Letters().encode(whole[10])[0]
    cut = generate_text(model, Letters(end), "abc", tokens=30, temperature=1.0, seed=1)
    assert cut == whole[: whole.index(whole[10], 3) + 1]


def test_an_end_inside_the_prompt_ends_nothing() -> None:
    rows = generate(build("*-"), torch.tensor([[3, 16, 5]]), 6, temperature=0.0, end=16)
    new = rows[0, 3:].tolist()
    assert len(new) == 6 or new[-1] == 16


def test_samples_follow_the_temperature_and_stay_within_top_k() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits, temperature=0.5, top_k=None, generator=generator)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(0), rtol=0.0, atol=0.02)
    best = sample(logits, temperature=5.0, top_k=2, generator=generator)
    assert set(best.tolist()) == {1, 2}


def test_an_empty_prompt_and_a_negative_temperature_are_both_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)prompt.*temperature"):
        generate_text(build("*-"), Letters(), "", tokens=1, temperature=-1.0, seed=0)


def test_rows_go_on_until_the_last_one_has_ended() -> None:
    model, start = build("*-"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    rows = generate(model, start, 12, temperature=0.0)
    first, other = (set(row[3:].tolist()) for row in rows)
    end = min((first - other) or (other - first))
    assert generate(model, start, 12, temperature=0.0, end=end).shape == rows.shape
