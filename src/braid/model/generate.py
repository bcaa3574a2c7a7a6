"""Generation: one token after the other, each from a forward pass over all that stands before it.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from braid.errors import ConfigError, Problem
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> Iterable[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens_BT: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    end: int | None = None,
) -> Tensor:
    """The rows with `count` more tokens each, on the host; fewer where every row has come to `end`. Temperature
    0 takes the likeliest token."""
    tokens_BT = tokens_BT.cpu()
    for _ in range(count):
        logits_BV = model.logits(model.prepare(MicroBatch.of_tokens(tokens_BT)))[:, -1]
        next_B = sample(logits_BV.cpu(), temperature=temperature, top_k=top_k, generator=generator)
        tokens_BT = torch.cat([tokens_BT, next_B[:, None]], 1)
        if end is not None and bool((tokens_BT == end).any(1).all()):
            break
    return tokens_BT


def sample(
    logits_BV: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token per row."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(-1)


def generate_text(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and what the model makes of it, up to the end of the document. The same seed gives the same
    text."""
    ids = list(tokenizer.encode(prompt))
    problems = []
    if not ids:
        problems.append(
            Problem(field="prompt", value=prompt, rule="has at least one token", remedy="some text")
        )
    if temperature < 0:
        rule = "a temperature is 0 or more"
        problems.append(Problem(field="temperature", value=temperature, rule=rule, remedy="0 for no chance"))
    if problems:
        raise ConfigError(problems)
    generator = torch.Generator().manual_seed(seed)
    end = tokenizer.end_of_document
    rows = generate(model, torch.tensor([ids]), tokens, temperature=temperature, generator=generator, end=end)
    return tokenizer.decode(rows[0].tolist())
