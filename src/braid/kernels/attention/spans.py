"""Who may see whom in a micro-batch, computed once on the host and used by every attention layer.

A document is a run of equal ids within one row. A token sees the tokens before it in its own document, and
itself; with a window, only the last `window` of these.

Shapes: B rows, T tokens, L tokens of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.kernels.host import to_device

SHORT = 128
"""Neighbouring documents are gathered into pieces of at most this many tokens: below it, the cost of one more
call exceeds that of the masked pairs (measured on a CPU)."""


@dataclass(frozen=True, kw_only=True)
class SpanPiece:
    """Consecutive tokens, over the flattened rows, that see nothing outside themselves."""

    length: int
    mask_LL: Tensor | None
    """Who sees whom, True where a query (first dim) sees a key; None where that is simply causal."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The documents of a micro-batch, as attention needs them."""

    runs_BT: Tensor
    """The number of each token's document, from 0 over all rows; on the host."""
    window: int | None
    rows: SpanPiece | None
    """What every row is, where each holds a single document; else None."""
    pieces: tuple[SpanPiece, ...]
    """The flattened rows cut at document boundaries. Their lengths sum to B * T."""


def spans_of(documents_BT: Tensor, window: int | None, device: torch.device) -> Spans:
    """Cut a micro-batch at its document boundaries; masks are placed on `device`."""
    documents_BT = documents_BT.cpu()
    rows, tokens = documents_BT.shape
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    runs_N = starts_BT.flatten().cumsum(0) - 1
    lengths = torch.bincount(runs_N).tolist()
    whole = len(lengths) == rows
    groups = [[length] for length in lengths] if whole else _gather(lengths)
    pieces = [_piece(group, window, device) for group in groups[: 1 if whole else None]]
    return Spans(
        runs_BT=runs_N.view(rows, tokens),
        window=window,
        rows=pieces[0] if whole else None,
        pieces=tuple(pieces * rows if whole else pieces),
    )


def visible(runs_T: Tensor, window: int | None) -> Tensor:
    """Who sees whom, by the rule: same document, not later, within the window. Leading dims are kept."""
    tokens = runs_T.shape[-1]
    near_TT = reachable(tokens, tokens, window, runs_T.device)
    return near_TT & (runs_T[..., :, None] == runs_T[..., None, :])


def reachable(queries: int, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom within one document of so many tokens, for the last `queries` of them."""
    places_T = torch.arange(tokens, device=device)
    distance_QT = places_T[tokens - queries :, None] - places_T
    return (distance_QT >= 0) if window is None else (distance_QT >= 0) & (distance_QT < window)


def pairs_seen(tokens: int, window: int | None) -> int:
    """About how many pairs of query and key there are in one document of so many tokens."""
    window = min(window or tokens, tokens)
    return tokens * window - window * window // 2


def _gather(lengths: list[int]) -> list[list[int]]:
    """Neighbouring documents together, as long as they stay short."""
    groups: list[list[int]] = []
    total = 0
    for length in lengths:
        if groups and total + length <= SHORT:
            groups[-1].append(length)
            total += length
        else:
            groups.append([length])
            total = length
    return groups


def _piece(lengths: list[int], window: int | None, device: torch.device) -> SpanPiece:
    total = sum(lengths)
    if len(lengths) == 1 and (window is None or total <= window):
        return SpanPiece(length=total, mask_LL=None)
    runs_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return SpanPiece(length=total, mask_LL=to_device(visible(runs_L, window), device))
