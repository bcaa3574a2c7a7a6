"""Autoregressive generation with caches: prefill of the prompt, then one token at a time. The rows of modules,
those of a prompt's images, are merged in the prefill, and in the caches from then on.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
TOKENS_BEFORE = 8
"""Of a prompt, that are decoded together with what follows it."""


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
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    end: int | None = None,
    finished: Callable[[list[int]], bool] | None = None,
    vocab: int | None = None,
    rows: Rows = NO_ROWS,
    modules: Mapping[str, int] = NO_PLACEHOLDERS,
    never: Collection[int] = (),
) -> Tensor:
    """Append up to `count` tokens to each row; stops early once every row has generated `end`, or `finished` is
    true of its new tokens. Returns the rows on the host. Temperature 0 is greedy decoding. Ids from `vocab` on,
    which pad the head, and those of `never`, which are placeholders, are not sampled. `rows` of modules take
    the places of their placeholders, whose ids `modules` has."""
    tokens_BT = tokens_BT.cpu()
    caches = model.new_caches(len(tokens_BT))
    prompt, seen = tokens_BT.shape[1], 0
    done_B = torch.zeros(len(tokens_BT), dtype=torch.bool)
    for _ in range(count):
        unseen = MicroBatch.of_tokens(tokens_BT[:, seen:], start=seen)
        # The prompt has all placeholders: they are not sampled.
        context = model.prepare(unseen, caches, modules=modules if seen == 0 else NO_PLACEHOLDERS)
        hidden_BtC = model.hidden(context, rows if seen == 0 else NO_ROWS)
        seen = tokens_BT.shape[1]
        logits_BV = without(model.head_logits(hidden_BtC[:, -1])[:, :vocab].cpu(), never)
        next_B = sample(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        tokens_BT = torch.cat([tokens_BT, next_B[:, None]], 1)
        if finished is not None:
            done_B |= torch.tensor([finished(row) for row in tokens_BT[:, prompt:].tolist()])
        if end is not None:
            done_B |= next_B == end
        if bool(done_B.all()):
            break
    return tokens_BT


def without(logits_BV: Tensor, never: Collection[int]) -> Tensor:
    """Logits with which these ids are not sampled. A placeholder may be a special token of the tokenizer: then
    its id is among those of text."""
    ids = torch.tensor([each for each in never if each < logits_BV.shape[-1]], dtype=torch.long)
    return logits_BV.index_fill(-1, ids, float("-inf"))


def sample(
    logits_BV: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample one token per row: the temperature first, then the likeliest `top_k`, then of these the likeliest
    whose probabilities add up to `top_p`."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = filtered(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p).softmax(-1)
    return torch.multinomial(probabilities_BV, 1, generator=generator).squeeze(-1)


def filtered(
    logits_BV: Tensor, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Logits at a temperature above 0, minus infinity where a token is not among the likeliest."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    # Subtract the maximum first: dividing by a very low temperature then cannot overflow.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        threshold_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B1, float("-inf"))
    if top_p is not None and top_p < 1:
        sorted_BV, token_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        # A token stays if those before it have less than top_p: the first always does.
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        out_BV = torch.zeros_like(token_BV, dtype=torch.bool).scatter(-1, token_BV, before_BV >= top_p)
        logits_BV = logits_BV.masked_fill(out_BV, float("-inf"))
    return logits_BV


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and when to stop."""

    tokens: int
    """Most new tokens."""
    temperature: float
    """0 is greedy."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; None: from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens with this much probability together; None: from all."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation, and are not part of it."""
    seed: int

    def problems(self) -> Iterator[Problem]:
        yield from validators.at_least("temperature", self.temperature, 0)
        yield from validators.at_least("tokens", self.tokens, 0)
        yield from validators.seed("seed", self.seed)
        if self.top_k is not None:
            yield from validators.at_least("top-k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            rule = "must be a probability above 0 and at most 1"
            yield Problem(field="top-p", value=self.top_p, rule=rule, remedy="0.9, or leave it out")
        if "" in self.stop:
            rule = "an empty text would stop before the first token"
            yield Problem(field="stop", value="", rule=rule, remedy="some text, or leave it out")


def continuation(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    rows: Rows = NO_ROWS,
    modules: Mapping[str, int] = NO_PLACEHOLDERS,
    never: Collection[int] = (),
) -> str:
    """What the model writes behind the ids of a prompt: up to the end of the document, or to the first stop
    text. Deterministic for a given seed."""

    def text(new: Sequence[int]) -> str:
        return text_behind(tokenizer, ids, new, modules)

    (row_T,) = generate(
        model,
        torch.tensor([list(ids)]),
        sampling.tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        generator=torch.Generator().manual_seed(sampling.seed),
        end=tokenizer.end_of_document,
        finished=(lambda new: any(stop in text(new) for stop in sampling.stop)) if sampling.stop else None,
        vocab=tokenizer.vocab,
        rows=rows,
        modules=modules,
        never=never,
    )
    told = text(row_T.tolist()[len(ids) :])
    return told[: min((told.find(stop) for stop in sampling.stop if stop in told), default=len(told))]


def generate_text(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: str | Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[str, ...] = (),
    rows: Rows = NO_ROWS,
    modules: Mapping[str, int] = NO_PLACEHOLDERS,
    never: Collection[int] = (),
) -> str:
    """The prompt and its continuation. A prompt of ids may have the placeholders of `modules`, which the text
    leaves out."""
    sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=seed)
    ids = checked_prompt(tokenizer, prompt, sampling)
    told = continuation(model, tokenizer, ids, sampling, rows=rows, modules=modules, never=never)
    return decode_text(tokenizer, ids, modules) + told


def text_behind(
    tokenizer: TextTokenizer, ids: Sequence[int], new: Sequence[int], modules: Mapping[str, int]
) -> str:
    """What new tokens add to the text of a prompt. Decoded alone they may lose the space before their first
    word, which some tokenizers leave out at the beginning of a text."""
    held = frozenset(modules.values())
    before = [token for token in ids if token not in held][-TOKENS_BEFORE:]
    head, whole = tokenizer.decode(before), decode_text(tokenizer, [*before, *new], modules)
    # A prompt that ends within a character has no text of its own that the whole could begin with.
    return whole[len(head) :] if whole.startswith(head) else decode_text(tokenizer, new, modules)


def decode_text(tokenizer: TextTokenizer, ids: Iterable[int], modules: Mapping[str, int]) -> str:
    """The text of tokens, without placeholders."""
    held = frozenset(modules.values())
    return tokenizer.decode([token for token in ids if token not in held])


def prompt_ids(
    tokenizer: TextTokenizer, prompt: str | Sequence[int], *, tokens: int, temperature: float, seed: int
) -> list[int]:
    """The ids of a prompt. Raises a `ConfigError` with every problem of the prompt and of the options."""
    return checked_prompt(tokenizer, prompt, Sampling(tokens=tokens, temperature=temperature, seed=seed))


def checked_prompt(tokenizer: TextTokenizer, prompt: str | Sequence[int], sampling: Sampling) -> list[int]:
    """The same, with all options."""
    ids = list(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    problems: list[Problem] = []
    if not ids:
        problems.append(
            Problem(field="prompt", value="", rule="must have at least one token", remedy="some text")
        )
    if len(ids) + sampling.tokens > MOST_TOKENS:
        problems.append(
            Problem(
                field="prompt",
                value=f"{len(ids):,} tokens, and {sampling.tokens:,} to generate",
                rule=f"must be at most {MOST_TOKENS:,} together, all of which the caches hold",
                remedy="a shorter prompt, or fewer tokens",
            )
        )
    problems += sampling.problems()
    if problems:
        raise ConfigError(problems)
    return ids
