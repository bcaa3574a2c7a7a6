"""Activation bytes: what each op keeps for its backward, in bytes: closed forms, beside the implementations
that they describe.

`narrow` and `wide` are bytes of an activation and of what is float32 or better. Rows are single
documents.

Shapes: B rows, T tokens, H heads, G groups (key heads), D head channels, N state channels, K key and V value
channels, Q tokens of a chunk.
"""

from __future__ import annotations

from braid.architecture import Activation, Glu
from braid.kernels.delta_rule import reference as delta_rule
from braid.kernels.ssd import reference as ssd

CHUNK = ssd.CHUNK
"""Tokens of a chunk of both recurrent ops."""
assert CHUNK == delta_rule.CHUNK


def activated(activation: Activation, glu: Glu, *, joined: bool) -> int:
    """How many tensors of ffn channels are kept from the projections to the result, both included. `joined`
    says whether gate and up are slices of one tensor."""
    if activation != "swiglu":
        return 2
    limit, offset = glu.limit is not None, bool(glu.offset)
    gate = 1 + limit + (glu.alpha != 1) + 1  # itself, cut off, its sigmoid, opened
    up = (joined or limit or not offset) + (limit or offset)
    return gate + up + 1


def in_chunks(tokens: int) -> int:
    """Tokens with those that fill up the last chunk of the recurrent ops."""
    chunk = min(CHUNK, tokens)
    return -(-tokens // chunk) * chunk


def scanned(
    rows: int, tokens: int, heads: int, head_dim: int, groups: int, state: int, *, narrow: int, wide: int
) -> int:
    """`ssd.reference`, and what it is given: x, B and C, which are slices of one tensor. Of several groups they
    are copied before use, and where the last chunk is filled up."""
    chunk = min(CHUNK, tokens)
    chunks = -(-tokens // chunk)
    padded = rows * chunks * chunk
    x, b = padded * heads * head_dim * narrow, padded * groups * state * narrow
    given = x + (4 if groups > 1 else 2) * b
    pairs = chunk * padded * (heads * (wide + narrow) + groups * narrow) + chunk * chunk
    decays = (4 * padded + 2) * heads * wide
    states = rows * chunks * heads * head_dim * state * narrow
    passed_on = _passed_on(rows, chunks, heads, head_dim * state, wide)
    return given + 3 * x + pairs + decays + states + passed_on


def _passed_on(rows: int, chunks: int, heads: int, entries: int, wide: int) -> int:
    """States on their way from chunk to chunk, so many of them at a time."""
    total = 0
    for first in range(0, chunks, ssd.TOGETHER):
        moments = min(ssd.TOGETHER, chunks - first) + 1
        # The product of several rows reads a copy of the decays between moments.
        decays = moments * (1 if rows == 1 else 2)
        total += rows * heads * moments * (entries + decays) * wide + moments * moments
    return total


def remembered(
    rows: int, tokens: int, heads: int, groups: int, key_dim: int, value_dim: int, *, narrow: int, wide: int
) -> int:
    """`delta_rule.reference`, and what it is given: q, k and v, which are slices of one tensor. They are copied
    where they have to be widened."""
    chunk = min(CHUNK, tokens)
    chunks = -(-tokens // chunk)
    padded = rows * chunks * chunk
    keys, values, numbers = padded * heads * key_dim, padded * heads * value_dim, padded * heads
    given = 2 * groups * key_dim + (0 if narrow != wide else heads * value_dim)
    units = rows * tokens * (2 * groups + given)
    pairs = chunk * padded * (5 * heads + 2 * groups)
    of_groups = 2 * padded * groups * key_dim
    # The first step starts from zero and nobody asks for the last: neither keeps what it multiplies with.
    steps = chunks * key_dim if chunks > 2 else 0
    memories = rows * heads * key_dim * (steps + (2 * chunks - 1) * value_dim)
    entries = 4 * keys + 4 * values + 4 * numbers + pairs + of_groups + memories + units + key_dim * key_dim
    return entries * wide + chunk * chunk
