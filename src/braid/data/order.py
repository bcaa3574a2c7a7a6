"""The order of samples: a pure function of (seed, epoch, index), with no state and no tables.

Each epoch visits every sample once, in an order of its own. The order is a keyed Feistel permutation of
the next power of four, walked until it lands inside the range (cycle walking): a bijection at any size, at any
index, in constant memory. All arithmetic is on 64-bit integers, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

ROUNDS = 6


def ordered(indices: Ints, samples: int, *, seed: int, stream: int = 0) -> Ints:
    """Which sample of `samples` each index visits; index // samples is its epoch.

    Streams of one seed are independent: the sources of a mixture each have their own.
    """
    assert samples > 0
    epochs, positions = np.divmod(indices, samples)
    visited = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        visited[here] = permuted(positions[here], samples, _keys(f"{seed}/{stream}/{epoch}"))
    return visited


def permuted(positions: Ints, count: int, keys: UInts) -> Ints:
    """A permutation of 0 .. count - 1, chosen by the keys, taken at some positions."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def chosen(ordinal: int, share: float, *, seed: int) -> bool:
    """Whether this one belongs to a random share of all, decided by its ordinal alone."""
    return float(_keys(f"{seed}/share/{ordinal}")[0]) < share * 2.0**64


def _feistel(values: UInts, half_bits: int, keys: UInts) -> UInts:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scrambled(right + key) & mask)
    return (left << shift) | right


def _scrambled(values: UInts) -> UInts:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(text: str) -> UInts:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8 * ROUNDS).digest(), "<u8").astype(
        np.uint64
    )
