"""Activation memory: bytes that ops save for backward, in closed form, for the memory estimate.

`narrow` is the item size of activations, `wide` that of tensors in float32 or wider. Every row is assumed to be
a single document.

Shapes: B rows, T tokens, H heads, G groups (key heads), D head channels, N state channels, K key and V value
channels, Q tokens of a chunk.
"""

from __future__ import annotations

from braid.architecture import Activation, Glu
from braid.kernels.delta_rule import reference as delta_rule
from braid.kernels.ssd import reference as ssd

CHUNK = ssd.CHUNK
"""Chunk length of both recurrent ops."""
assert CHUNK == delta_rule.CHUNK


def reference_attention_bytes(
    rows: int, tokens: int, heads: int, *, inputs: int, narrow: int, wide: int
) -> int:
    """What reference attention saves that fused kernels do not: probabilities, once more in the order of the
    product with v, the mask, and upcast copies of its `inputs`, the numbers in q, k and v."""
    pairs = rows * tokens**2
    return 2 * pairs * heads * wide + pairs + (inputs * wide if wide != narrow else 0)


def saved_ffn_tensors(activation: Activation, glu: Glu, *, joined: bool) -> int:
    """Number of tensors with ffn channels saved by an activation, including its inputs and output. `joined`:
    gate and up are slices of one tensor."""
    if activation != "swiglu":
        return 2
    limit, offset = glu.limit is not None, bool(glu.offset)
    gate = 1 + limit + (glu.alpha != 1) + 1  # the gate, clamped, its sigmoid, their product
    up = (joined or limit or not offset) + (limit or offset)
    return gate + up + 1


def padded_to_chunks(tokens: int) -> int:
    """Sequence length padded to a multiple of the chunk length of the recurrent ops."""
    chunk = min(CHUNK, tokens)
    return -(-tokens // chunk) * chunk


def ssd_bytes(
    rows: int, tokens: int, heads: int, head_dim: int, groups: int, state: int, *, narrow: int, wide: int
) -> int:
    """`ssd.reference` with its inputs x, B and C, which are slices of one tensor. They are copied if there are
    several groups, or if the last chunk is padded."""
    chunk = min(CHUNK, tokens)
    chunks = -(-tokens // chunk)
    padded = rows * chunks * chunk
    x, b = padded * heads * head_dim * narrow, padded * groups * state * narrow
    inputs = x + (4 if groups > 1 else 2) * b
    pairs = chunk * padded * (heads * (wide + narrow) + groups * narrow) + chunk * chunk
    decays = (4 * padded + 2) * heads * wide
    states = rows * chunks * heads * head_dim * state * narrow
    scan = _state_scan_bytes(rows, chunks, heads, head_dim * state, wide)
    return inputs + 3 * x + pairs + decays + states + scan


def fused_ssd_bytes(
    rows: int,
    tokens: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    *,
    contiguous: bool,
    narrow: int,
    wide: int,
) -> int:
    """`ssd.fused` with its inputs: x, B and C, dt, and two scalars per head. Unless they are `contiguous`, x, B
    and C are slices of one tensor, and x is copied if there are several groups."""
    x, b = heads * head_dim, groups * state
    copies = 1 if contiguous or groups == 1 else 2
    per_token = (copies * x + 2 * b) * narrow + heads * wide
    return rows * tokens * per_token + 2 * heads * wide


def _state_scan_bytes(rows: int, chunks: int, heads: int, entries: int, wide: int) -> int:
    """The scan over chunk states, which combines `ssd.SCAN_CHUNKS` of them per product."""
    total = 0
    for first in range(0, chunks, ssd.SCAN_CHUNKS):
        boundaries = min(ssd.SCAN_CHUNKS, chunks - first) + 1
        # With several rows, the batched product reads a copy of the decays between chunk boundaries.
        decays = boundaries * (1 if rows == 1 else 2)
        total += rows * heads * boundaries * (entries + decays) * wide + boundaries * boundaries
    return total


def delta_rule_bytes(
    rows: int, tokens: int, heads: int, groups: int, key_dim: int, value_dim: int, *, narrow: int, wide: int
) -> int:
    """`delta_rule.reference` with its inputs q, k and v, which are slices of one tensor and are copied if they
    are cast to a wider dtype."""
    chunk = min(CHUNK, tokens)
    chunks = -(-tokens // chunk)
    padded = rows * chunks * chunk
    keys, values, scalars = padded * heads * key_dim, padded * heads * value_dim, padded * heads
    inputs = 2 * groups * key_dim + (0 if narrow != wide else heads * value_dim)
    normalized = rows * tokens * (2 * groups + inputs)
    pairs = chunk * padded * (5 * heads + 2 * groups)
    key_heads = 2 * padded * groups * key_dim
    # The first state is zero and the final state is unused: neither step saves its factors.
    steps = chunks * key_dim if chunks > 2 else 0
    states = rows * heads * key_dim * (steps + (2 * chunks - 1) * value_dim)
    entries = 4 * keys + 4 * values + 4 * scalars + pairs + key_heads + states + normalized + key_dim * key_dim
    return entries * wide + chunk * chunk


def fused_delta_rule_bytes(
    rows: int, tokens: int, heads: int, groups: int, key_dim: int, value_dim: int, *, narrow: int, wide: int
) -> int:
    """`delta_rule.fused`: the tensor that q, k and v are slices of, a copy of v if there are several groups,
    log decays, and the inverse of each chunk. β is counted by its sigmoid."""
    values = heads * value_dim * (2 if groups > 1 else 1)
    inverses = rows * fused_chunks(tokens) * CHUNK * CHUNK * heads * narrow
    return rows * tokens * ((2 * groups * key_dim + values) * narrow + heads * wide) + inverses


def fused_delta_rule_workspace(
    rows: int, tokens: int, heads: int, groups: int, key_dim: int, value_dim: int, *, narrow: int
) -> int:
    """Bytes that the backward of `delta_rule.fused` allocates: states and their gradients, deltas and theirs,
    three matrices of token pairs, and the gradients of q, k and v."""
    chunks = rows * heads * fused_chunks(tokens)
    entries = chunks * (2 * key_dim * value_dim + 2 * CHUNK * value_dim + 3 * CHUNK * CHUNK)
    return narrow * (entries + rows * tokens * (2 * groups * key_dim + heads * value_dim))


def fused_chunks(tokens: int) -> int:
    """Chunks of a row; fused kernels do not shorten them for short rows."""
    return -(-tokens // CHUNK)
