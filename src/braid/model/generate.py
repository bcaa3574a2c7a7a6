"""Autoregressive generation with caches: prefill of the prompt, then one token at a time. The rows of modules,
those of a prompt's images, are merged in the prefill, and in the caches from then on.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from braid import validators
from braid.errors import ConfigError, Problem
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel
from braid.model.multimodal import NO_ROWS, Rows

NO_PLACEHOLDERS: Mapping[str, int] = MappingProxyType({})
MOST_TOKENS = 131_072
"""Of a prompt and its continuation."""


class TextTokenizer(Protocol):
    """The part of a tokenizer that generation uses."""

    @property
    def vocab(self) -> int: ...

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
    vocab: int | None = None,
    rows: Rows = NO_ROWS,
    modules: Mapping[str, int] = NO_PLACEHOLDERS,
    never: Collection[int] = (),
) -> Tensor:
    """Append up to `count` tokens to each row; stops early once every row has generated `end`. Returns the rows
    on the host. Temperature 0 is greedy decoding. Ids from `vocab` on, which pad the head, and those of
    `never`, which are placeholders, are not sampled. `rows` of modules take the places of their placeholders,
    whose ids `modules` has."""
    tokens_BT = tokens_BT.cpu()
    caches = model.new_caches(len(tokens_BT))
    prompt, seen = tokens_BT.shape[1], 0
    for _ in range(count):
        unseen = MicroBatch.of_tokens(tokens_BT[:, seen:], start=seen)
        # The prompt has all placeholders: they are not sampled.
        context = model.prepare(unseen, caches, modules=modules if seen == 0 else NO_PLACEHOLDERS)
        hidden_BtC = model.hidden(context, rows if seen == 0 else NO_ROWS)
        seen = tokens_BT.shape[1]
        logits_BV = without(model.head_logits(hidden_BtC[:, -1])[:, :vocab].cpu(), never)
        next_B = sample(logits_BV, temperature=temperature, top_k=top_k, generator=generator)
        tokens_BT = torch.cat([tokens_BT, next_B[:, None]], 1)
        if end is not None and bool((tokens_BT[:, prompt:] == end).any(1).all()):
            break
    return tokens_BT


def without(logits_BV: Tensor, never: Collection[int]) -> Tensor:
    """Logits with which these ids are not sampled. A placeholder may be a special token of the tokenizer: then
    its id is among those of text."""
    ids = torch.tensor([each for each in never if each < logits_BV.shape[-1]], dtype=torch.long)
    return logits_BV.index_fill(-1, ids, float("-inf"))


def sample(
    logits_BV: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token per row."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    # Subtract the maximum first: dividing by a very low temperature then cannot overflow.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        threshold_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, float("-inf"))
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(-1)


def generate_text(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: str | Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
    rows: Rows = NO_ROWS,
    modules: Mapping[str, int] = NO_PLACEHOLDERS,
    never: Collection[int] = (),
) -> str:
    """The prompt and its continuation, up to the end of the document; deterministic for a given seed. A prompt
    of ids may have the placeholders of `modules`, which the text leaves out."""
    ids = prompt_ids(tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    (row_T,) = generate(
        model,
        torch.tensor([ids]),
        tokens,
        temperature=temperature,
        generator=generator,
        end=tokenizer.end_of_document,
        vocab=tokenizer.vocab,
        rows=rows,
        modules=modules,
        never=never,
    )
    return decode_text(tokenizer, row_T.tolist(), modules)


def decode_text(tokenizer: TextTokenizer, ids: Iterable[int], modules: Mapping[str, int]) -> str:
    """The text of tokens, without placeholders."""
    held = frozenset(modules.values())
    return tokenizer.decode([token for token in ids if token not in held])


def prompt_ids(
    tokenizer: TextTokenizer, prompt: str | Sequence[int], *, tokens: int, temperature: float, seed: int
) -> list[int]:
    """The ids of a prompt. Raises a `ConfigError` with every problem of the prompt and of the options."""
    ids = list(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    problems: list[Problem] = []
    if not ids:
        problems.append(
            Problem(field="prompt", value="", rule="must have at least one token", remedy="some text")
        )
    if len(ids) + tokens > MOST_TOKENS:
        problems.append(
            Problem(
                field="prompt",
                value=f"{len(ids):,} tokens, and {tokens:,} to generate",
                rule=f"must be at most {MOST_TOKENS:,} together, all of which the caches hold",
                remedy="a shorter prompt, or fewer tokens",
            )
        )
    problems += validators.at_least("temperature", temperature, 0)
    problems += validators.at_least("tokens", tokens, 0)
    problems += validators.seed("seed", seed)
    if problems:
        raise ConfigError(problems)
    return ids
