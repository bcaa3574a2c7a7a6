"""Sampling against transformers' logits processors, stop texts and seeds."""

import numpy as np
import pytest
import torch

from braid.data import ByteTokenizer, HfTokenizer
from braid.errors import ConfigError
from braid.model import generate as generation
from braid.model.generate import Sampling, checked_prompt, continuation, filtered, generate_text
from tests.model.test_generate import Letters, build


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (1, None), (7, None), (None, 0.05), (None, 0.9), (20, 0.5)]
)
def test_filters_are_those_of_transformers(temperature, top_k, top_p):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers (extra `hf`)")
    logits = torch.randn(9, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [transformers.TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [transformers.TopPLogitsWarper(top_p)]
    expected = transformers.LogitsProcessorList(warpers)(torch.zeros(9, 1, dtype=torch.long), logits)
    found = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found.softmax(-1), expected.softmax(-1), rtol=1e-12, atol=0)
    if top_k is not None or top_p is not None:
        assert expected.isinf().any()


def test_generation_draws_only_from_what_is_left():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = generation.sample(logits, temperature=1.0, top_p=0.8, generator=generator)
    shares = np.bincount(drawn.numpy(), minlength=4) / 4000
    expected = logits[0, :2].softmax(0).numpy()
    assert shares[2:].tolist() == [0, 0]
    assert np.abs(shares[:2] - expected).max() < 0.03


def test_the_same_seed_writes_the_same_text():
    model = build("*-")
    options = {"tokens": 40, "temperature": 1.5, "top_k": 20, "top_p": 0.95}
    texts = [generate_text(model, Letters(), "abc", seed=seed, **options) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_text_ends_the_generation_and_is_left_out():
    model, tokenizer = build("*-"), Letters()
    sampling = Sampling(tokens=40, temperature=1.0, seed=3)
    ids = checked_prompt(tokenizer, "abc", sampling)
    whole = continuation(model, tokenizer, ids, sampling)
    calls = []

    class Counting(Letters):
        def decode(self, ids):
            calls.append(len(ids))
            return super().decode(ids)

    stop = whole[10:13]
    place = whole.index(stop)
    stopping = Sampling(tokens=40, temperature=1.0, seed=3, stop=("no such text", stop))
    assert continuation(model, Counting(), ids, stopping) == whole[:place]
    assert max(calls) == len(ids) + place + 3 < 40  # no token is generated behind it
    assert (
        generate_text(model, tokenizer, "abc", tokens=40, temperature=1.0, seed=3, stop=(stop,))
        == "abc" + whole[:place]
    )


def test_a_word_behind_the_prompt_keeps_its_space():
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra `hf`)")
    words = ["</s>", "<image>", *(f"\N{LOWER ONE EIGHTH BLOCK}{letter}" for letter in "abcdefghijklmno")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="</s>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer, model = HfTokenizer(backend.to_str()), build("*-")
    ids = tokenizer.encode("b c d e f g h i j k").tolist()
    (row,) = generation.generate(model, torch.tensor([ids]), 9, temperature=0, end=0, vocab=17).tolist()
    sampling = Sampling(tokens=9, temperature=0, seed=0)
    told = continuation(model, tokenizer, ids, sampling)
    assert told.startswith(" ")
    assert "b c d e f g h i j k" + told == backend.decode(row)
    assert generate_text(model, tokenizer, ids, tokens=9, temperature=0, seed=0) == backend.decode(row)


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"top_k": 0}, "top-k = 0"), ({"top_p": 0.0}, "top-p = 0"), ({"top_p": 1.1}, "top-p = 1"),
     ({"stop": ("",)}, "stop =")],
)  # fmt: skip
def test_wrong_options_are_named(changed, named):
    sampling = Sampling(**{"tokens": 4, "temperature": 1.0, "seed": 0, **changed})
    with pytest.raises(ConfigError, match=named):
        checked_prompt(ByteTokenizer(), "x", sampling)
