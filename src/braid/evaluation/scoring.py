"""Log-likelihoods of tokens behind a context, in batches of padded rows.

Tokens are cut from text as lm-evaluation-harness does it, so that its figures can be compared: a text begins
behind an end-of-document token, and every token of it is predicted once.

Shapes: B rows, T tokens, N tokens that are scored, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from braid.data import Tokenizer
from braid.data.batch import collate
from braid.data.packing import padded
from braid.data.source import DocumentSpan
from braid.errors import DataError
from braid.model.language import LanguageModel

HEAD_TOKENS = 1024
"""Tokens whose logits exist at a time."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens to be scored, and those before them."""

    context: Sequence[int]
    """At least one."""
    continuation: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely a continuation is."""

    logprob: float
    """Natural logarithm of its probability behind the context."""
    greedy: bool
    """Whether each of its tokens is the likeliest."""


def windows(ids: Sequence[int], prefix: int, length: int, overlap: int) -> Iterator[Request]:
    """A document behind a prefix, in windows of at most `length` input tokens. Each token is scored once; from
    the second window on, `overlap` tokens are read again for context, and more in the last one, which is
    full."""
    assert 1 <= overlap <= length
    tokens, done = [prefix, *ids], 1
    while done < len(tokens):
        stop = min(len(tokens), done + (length if done == 1 else length - overlap + 1))
        # A token is predicted from the one before it: inputs are all but the last one.
        yield Request(context=tokens[max(0, stop - 1 - length) : done], continuation=tokens[done:stop])
        done = stop


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Tokens of a continuation behind a text. White space at the end of the context goes to the continuation,
    where the tokens of words have it."""
    end = tokenizer.end_of_document
    if not context:
        ids = tokenizer.encode(continuation).tolist()
        return Request(context=[end], continuation=ids[1:] if ids[:1] == [end] else ids)
    spaces = len(context) - len(context.rstrip())
    context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
    before = tokenizer.encode(context).tolist()
    whole = tokenizer.encode(context + continuation).tolist()
    return Request(context=before or [end], continuation=whole[len(before) :])


@torch.no_grad()
def score(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    length: int,
    batch_tokens: int,
    done: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """The scores of all requests, in their order. Contexts are cut at their beginning where a row has more than
    `length` input tokens. `done` is called with the number of scored requests."""
    scores: list[Score] = [Score(logprob=0.0, greedy=True)] * len(requests)
    rows = [_row(request, length) for request in requests]
    # Long rows first: rows of a batch are about as long, and what does not fit fails at once.
    order = sorted((i for i in range(len(rows)) if requests[i].continuation), key=lambda i: -len(rows[i].ids_S))
    counted = len(rows) - len(order)
    while order:
        width = len(rows[order[0]].ids_S) - 1
        count = max(1, batch_tokens // width)
        chosen, order = order[:count], order[count:]
        for place, each in zip(chosen, _scored(model, [rows[i] for i in chosen], width), strict=True):
            scores[place] = each
        counted += len(chosen)
        done(counted)
    return scores


def _row(request: Request, length: int) -> DocumentSpan:
    if len(request.continuation) > length:
        raise DataError(
            f"a text of {len(request.continuation)} tokens is to be scored at once, and a row has {length}: "
            "set a larger --length"
        )
    ids = np.asarray([*request.context, *request.continuation], np.int64)[-(length + 1) :]
    places = np.arange(len(ids))
    return DocumentSpan(
        ids_S=ids, loss_mask_S=places >= len(ids) - len(request.continuation), starts_S=places == 0
    )


def _scored(model: LanguageModel, rows: Sequence[DocumentSpan], width: int) -> Iterator[Score]:
    batch = replace(
        collate([padded([row], width + 1) for row in rows], range(len(rows)), width), training=False
    )
    hidden_BTC = model.hidden(model.prepare(batch))
    mask_BT = batch.loss_mask_BT.to(hidden_BTC.device)
    labels_N, hidden_NC = batch.labels_BT.to(hidden_BTC.device)[mask_BT], hidden_BTC[mask_BT]
    parts = [
        _of_labels(model.head_logits(some_NC[None])[0, :, : model.shape.vocab], labels)
        for some_NC, labels in zip(hidden_NC.split(HEAD_TOKENS), labels_N.split(HEAD_TOKENS), strict=True)
    ]
    logprob_N, hit_N = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    counts = batch.loss_mask_BT.sum(1).tolist()
    for logprob, hit in zip(logprob_N.double().split(counts), hit_N.split(counts), strict=True):
        yield Score(logprob=float(logprob.sum()), greedy=bool(hit.all()))


def _of_labels(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels, and whether each is the likeliest token."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprob_N = wide_NV.gather(1, labels_N[:, None])[:, 0] - wide_NV.logsumexp(1)
    return logprob_N, wide_NV.argmax(1) == labels_N
