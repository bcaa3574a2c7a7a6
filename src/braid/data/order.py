"""The shuffle: a pure function of (seed, epoch, index), without state or tables.

Each epoch visits every sample once, in its own order: a keyed Feistel permutation of the next power of four,
with cycle walking to stay within range. That is a bijection at any size, with random access in constant memory.
All arithmetic is on 64-bit integers, so the order is the same on every machine.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

ROUNDS = 6


def shuffled(indices: Ints, samples: int, *, seed: int, stream: int = 0) -> Ints:
    """The sample, out of `samples`, that each index visits; index // samples is its epoch.

    Different streams of one seed are independent: each source of a mixture has its own.
    """
    assert samples > 0
    epochs, positions = np.divmod(indices, samples)
    visited = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        visited[here] = permute(positions[here], samples, _keys(f"{seed}/{stream}/{epoch}"))
    return visited


def permute(positions: Ints, count: int, keys: UInts) -> Ints:
    """The permutation of 0 .. count - 1 selected by the keys, evaluated at the given positions."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= count).any():  # cycle walking: at most three in four are outside
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def in_random_share(ordinal: int, share: float, *, seed: int) -> bool:
    """Whether an item belongs to a random subset of the given fraction, decided by its ordinal alone."""
    return float(_keys(f"{seed}/share/{ordinal}")[0]) < share * 2.0**64


def _feistel(values: UInts, half_bits: int, keys: UInts) -> UInts:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix64(right + key) & mask)
    return (left << shift) | right


def _mix64(values: UInts) -> UInts:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(text: str) -> UInts:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8 * ROUNDS).digest(), "<u8").astype(
        np.uint64
    )
