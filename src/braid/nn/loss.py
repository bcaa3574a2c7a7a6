"""Head loss: vocab-parallel cross-entropy, returned as (sum, token count); the step knows the denominator.

    loss = Σ_tokens logsumexp(logits / scale) - logits[label] / scale

With tensor parallelism each rank has the logits of its part of the vocabulary for the same tokens; all ranks
get the same sum. `kernels.linear_cross_entropy` computes it from hidden states and the head's weight.

Shapes: N tokens, C hidden channels, V ids of this rank, R >= V rows with padding.
"""

from __future__ import annotations

from torch import Tensor

from braid.kernels.linear_cross_entropy import (
    ChunkedLinearCrossEntropy,
    LinearCrossEntropy,
    VocabShard,
    reference,
)
from braid.kernels.linear_cross_entropy.chunked import PlainPasses, gradients_in_forward
from braid.nn.cost import INDEX_BYTES, Call, Cost, Workload, in_phase, no_grad_call
from braid.nn.delayed_wgrad import DelayedWgrad
from braid.nn.vocabulary import Vocabulary
from braid.nn.work import Moved, Piece, Product, Work, moved


def linear_cross_entropy(
    implementation: LinearCrossEntropy,
    weight_RC: Tensor,
    x_NC: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocabulary: Vocabulary,
    scale: float = 1.0,
    wgrad_store: DelayedWgrad | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the tokens where the mask is True, and their number. `scale` divides the logits.

    Computed in at least float32. Masked tokens contribute exactly zero to sum and gradient, whatever their
    logits and labels are, inf and nan included.
    """
    row_N, shard = vocabulary.local(labels_N.where(mask_N, 0)), VocabShard(vocabulary.held, vocabulary.group)
    given = (x_NC, weight_RC, row_N, mask_N, shard)
    return implementation(*given, scale=scale, wgrad_store=wgrad_store), mask_N.sum()


def cross_entropy(
    logits_NR: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocabulary: Vocabulary | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The same, from logits."""
    vocabulary = Vocabulary(logits_NR.shape[1]) if vocabulary is None else vocabulary
    row_N, shard = vocabulary.local(labels_N.where(mask_N, 0)), VocabShard(vocabulary.held, vocabulary.group)
    return reference.cross_entropy(logits_NR, row_N, mask_N, shard, scale), mask_N.sum()


def linear_cross_entropy_cost(
    implementation: LinearCrossEntropy,
    workload: Workload,
    tokens: int,
    channels: int,
    vocabulary: Vocabulary,
    scale: float = 1.0,
) -> Cost:
    """The cost of head and loss for `tokens` hidden states, without what the hidden states themselves take if
    they are saved (`saves_hidden`)."""
    if isinstance(implementation, ChunkedLinearCrossEntropy):
        return _chunked_cost(implementation, workload, tokens, channels, vocabulary)
    return _reference_cost(workload, tokens, vocabulary, scale)


def saves_hidden(implementation: LinearCrossEntropy, tokens: int, channels: int) -> bool:
    """Whether the hidden states are saved for backward; else, their gradient is."""
    chunked = isinstance(implementation, ChunkedLinearCrossEntropy)
    return not chunked or not gradients_in_forward(tokens, channels)


def _chunked_cost(
    implementation: ChunkedLinearCrossEntropy,
    workload: Workload,
    tokens: int,
    channels: int,
    vocabulary: Vocabulary,
) -> Cost:
    """Saves the gradients of hidden states and weight; or label, mask and logsumexp of each token. The logits
    of one chunk are transient: also in forward, where as much is saved as at the beginning of backward."""
    rows, hidden = vocabulary.rows, tokens * channels * workload.narrow
    size = implementation.chunk_tokens(tokens, rows, workload.narrow)
    chunk = size * rows * workload.narrow
    calls = _sum_calls(workload, tokens, size, vocabulary)
    if saves_hidden(implementation, tokens, channels):
        kept = tokens * (INDEX_BYTES + 1 + workload.wide)
        return Cost(kept=kept, passing=chunk + hidden, calls=calls)
    kept = hidden + rows * channels * workload.wide
    return Cost(kept=kept, passing=max(chunk, hidden), calls=calls)


def _reference_cost(workload: Workload, tokens: int, vocabulary: Vocabulary, scale: float) -> Cost:
    """Saves the logits, and label, mask and logsumexp of each token; the gradient of the logits is
    transient."""
    logits, chunk = (
        n * vocabulary.rows for n in (tokens * workload.narrow, min(reference.CHUNK, tokens) * workload.wide)
    )
    kept = logits + tokens * (INDEX_BYTES + 1 + workload.wide)
    upcast = chunk if workload.mixed else 0
    # Forward scales a copy of a chunk, which is the upcast one if there is one; backward scales in place.
    summing = chunk * (2 if vocabulary.group.size > 1 else 1) + (chunk - upcast if scale != 1 else 0)
    passing = upcast + max(logits, summing)
    return Cost(kept=kept, passing=passing, calls=_sum_calls(workload, tokens, reference.CHUNK, vocabulary))


def linear_cross_entropy_work(
    implementation: LinearCrossEntropy, workload: Workload, tokens: int, channels: int, vocabulary: Vocabulary
) -> Work:
    """The work of head and loss in chunks of tokens. With at least as many tokens as channels, forward computes
    all gradients, and backward scales them; else backward computes the logits again."""
    chunked = implementation if isinstance(implementation, ChunkedLinearCrossEntropy) else None
    config = chunked or ChunkedLinearCrossEntropy(PlainPasses())
    size = config.chunk_tokens(tokens, vocabulary.rows, workload.narrow)
    now, work = gradients_in_forward(tokens, channels), Work()
    for chunk, times in ((size, tokens // size), (tokens % size, int(tokens % size > 0))):
        work += _chunk_work(workload, chunk, channels, vocabulary, now=now).times(times)
    weight = vocabulary.rows * channels * workload.wide
    if not now:
        return work
    return work + moved(backward=2 * tokens * channels * workload.narrow) + moved(backward=3 * weight)


def _chunk_work(workload: Workload, tokens: int, channels: int, vocabulary: Vocabulary, *, now: bool) -> Work:
    """One chunk: logits, a pass over them that overwrites them with their gradient (two passes if ranks share
    the vocabulary, or if backward writes it), and the products with that gradient. Padding does not count."""
    rows, counted = vocabulary.rows, 2 * tokens * vocabulary.held * channels
    logits = Piece(Product(tokens, rows, channels, counted=counted))
    dx, dweight = (
        Product(tokens, channels, rows, counted=counted),
        Product(rows, channels, tokens, counted=counted),
    )
    size, shared = tokens * rows * workload.narrow, vocabulary.group.size > 1
    reads, writes = Piece(Moved(size), launches=8 if shared else 1), Piece(Moved(2 * size))
    if now:
        passes = (reads, writes) if shared else (writes,)
        gradients = (Piece(dx, counts_as="backward"), Piece(dweight, counts_as="wgrad"))
        return Work((logits, *passes, *gradients))
    again = Piece(Product(tokens, rows, channels, counted=0))
    return Work((logits, reads), (again, writes, Piece(dx), Piece(dweight, counts_as="wgrad")))


def _sum_calls(workload: Workload, tokens: int, chunk: int, vocabulary: Vocabulary) -> tuple[Call, ...]:
    """Collectives of the sums over a vocabulary, for chunks of tokens."""
    calls = tuple[Call, ...]()
    for size, times in ((chunk, tokens // chunk), (tokens % chunk, int(tokens % chunk > 0))):
        calls += no_grad_call("all_reduce", vocabulary.group, size * workload.wide, "maxima of logits", times)
        calls += no_grad_call("all_reduce", vocabulary.group, 2 * size * workload.wide, "sums of logits", times)
    return in_phase(calls, "head")
