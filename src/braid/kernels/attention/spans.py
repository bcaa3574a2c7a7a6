"""Document spans of packed rows: the attention mask of a micro-batch, computed once on the host.

A document is a run of equal ids within a row. A token attends to itself and the tokens before it in its
document; with a window, only to the last `window` of these. Without a causal mask it attends to all tokens of
its document, as encoders do.

Shapes: B rows, T tokens, L tokens of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from braid.kernels.attention.tiles import AttentionTiles, tiles_of
from braid.kernels.host import to_device

SHORT = 128
"""Adjacent documents are merged into masked pieces of at most this many tokens: below it, an additional call
costs more than the masked pairs (measured on a CPU)."""


@dataclass(frozen=True, kw_only=True)
class SpanPiece:
    """Consecutive tokens of the flattened rows that attend only to each other."""

    length: int
    mask_LL: Tensor | None
    """Attention mask, True where a query (first dim) attends to a key; None for one document and no window."""
    causal: bool = True
    """Whether a query attends to no key after it; a mask has this already."""
    documents: int = 1
    window: int | None = None
    """The window, where it is shorter than the piece; a mask has it already."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The documents of a micro-batch, as attention needs them: tables for `fused`, pieces for `sdpa`. Each is
    computed when it is first needed, and placed on `device`."""

    runs_BT: Tensor
    """Document index of each token, from 0 over all rows; on the host."""
    window: int | None
    device: torch.device
    causal: bool = True
    """Whether a token attends to no token after it; else there is no window."""

    @cached_property
    def tiles(self) -> AttentionTiles:
        """The tables of packed attention."""
        return tiles_of(self.runs_BT.flatten(), self.window, self.device, causal=self.causal)

    @cached_property
    def rows(self) -> SpanPiece | None:
        """The piece of every row if each row is a single document, otherwise None."""
        rows, tokens = self.runs_BT.shape
        unpacked = not tokens or bool((self.runs_BT[:, 0] == self.runs_BT[:, -1]).all())
        return self._piece([tokens]) if rows and unpacked else None

    @cached_property
    def pieces(self) -> tuple[SpanPiece, ...]:
        """The flattened rows, split at document boundaries. Their lengths sum to B * T."""
        if self.rows is not None:
            return (self.rows,) * len(self.runs_BT)
        lengths = torch.bincount(self.runs_BT.flatten()).tolist()
        return tuple(self._piece(group) for group in _merge_short(lengths))

    def with_tiles(self, tiles: AttentionTiles) -> Spans:
        """The same documents with tables that someone else keeps up to date."""
        made = replace(self)
        vars(made)["tiles"] = tiles
        return made

    def tensors(self) -> Iterator[Tensor]:
        """The tables and masks that have been computed so far."""
        if "tiles" in vars(self):
            yield from (each for each in vars(self.tiles).values() if isinstance(each, Tensor))
        for piece in ((self.rows,) if "rows" in vars(self) else ()) + vars(self).get("pieces", ()):
            if piece is not None and piece.mask_LL is not None:
                yield piece.mask_LL

    def _piece(self, lengths: list[int]) -> SpanPiece:
        """The piece of adjacent documents of these lengths."""
        total, window, causal = sum(lengths), self.window, self.causal
        if len(lengths) == 1 and (window is None or total <= window):
            return SpanPiece(length=total, mask_LL=None, causal=causal)
        runs_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask_LL = to_device(visible(runs_L, window, causal=causal), self.device)
        return SpanPiece(length=total, mask_LL=mask_LL, causal=causal, documents=len(lengths), window=window)


def spans_of(documents_BT: Tensor, window: int | None, device: torch.device, *, causal: bool = True) -> Spans:
    """The documents of a micro-batch; a document is a run of equal ids within a row."""
    if window is not None and not causal:
        raise ValueError(
            f"a window of {window} tokens: a window ends at the query, so attention must be causal; "
            "set the window to None"
        )
    runs_BT = document_runs(documents_BT.cpu())
    return Spans(runs_BT=runs_BT, window=window, device=device, causal=causal)


def document_runs(documents_BT: Tensor) -> Tensor:
    """Document index of each token, from 0 over all rows."""
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return (starts_BT.flatten().cumsum(0) - 1).view(documents_BT.shape)


def visible(runs_T: Tensor, window: int | None, *, causal: bool = True) -> Tensor:
    """Attention mask: same document and, if causal, not after the query and within the window. Leading dims are
    kept."""
    same_TT = runs_T[..., :, None] == runs_T[..., None, :]
    tokens = runs_T.shape[-1]
    return reachable(tokens, tokens, window, runs_T.device) & same_TT if causal else same_TT


def reachable(queries: int, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask with a window for the last `queries` of the `tokens` of one document."""
    positions_T = torch.arange(tokens, device=device)
    distance_QT = positions_T[tokens - queries :, None] - positions_T
    return (distance_QT >= 0) if window is None else (distance_QT >= 0) & (distance_QT < window)


def pairs_seen(tokens: int, window: int | None, *, causal: bool = True) -> int:
    """Approximate number of unmasked query-key pairs in one document, for FLOP counts."""
    if not causal:
        return tokens * tokens
    window = min(window or tokens, tokens)
    return tokens * window - window * window // 2


def _merge_short(lengths: list[int]) -> list[list[int]]:
    """Group adjacent documents, up to `SHORT` tokens per group."""
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
