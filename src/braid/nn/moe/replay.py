"""Routing replay: record the expert choices of one run and repeat them in another.

If two runs differ by rounding only, near-ties in the scores send tokens to different experts, and the runs
diverge. A run that replays the choices of another can be compared to it numerically. Choices are keyed by layer
and sample, independently of batches and ranks.

Shapes: B rows, T tokens of a row, N = B · T, S slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.errors import DataError
from braid.nn.moe.routing import ExpertChoice
from braid.nn.moe.token_ids import Tokens, by_row


class Recording:
    """Recorded expert choices, on the host."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], ExpertChoice] = {}
        """By (layer, sample); each is one row, [T, S]."""

    def write(self, tokens: Tokens, choice: ExpertChoice) -> None:
        """Record the choices of these tokens. They may be parts of rows; other ranks record the rest."""
        position_T = tokens.position_T.cpu()
        parts = [None if part is None else by_row(part, tokens.rows).cpu() for part in choice]
        for row, sample in enumerate(tokens.sample_B.tolist()):
            experts_TS, raw_top_k_TS, kept_TS = (None if part is None else part[row] for part in parts)
            assert experts_TS is not None
            assert raw_top_k_TS is not None
            before = self._choices.get((tokens.layer, sample))
            part = ExpertChoice(experts_TS, raw_top_k_TS, kept_TS)
            self._choices[tokens.layer, sample] = _merge(before, part, position_T)

    def read(self, tokens: Tokens) -> ExpertChoice:
        """The recorded choices of these tokens, which may be parts of rows."""
        device, position_T = tokens.position_T.device, tokens.position_T.cpu()
        rows = [self._row(tokens.layer, sample, position_T) for sample in tokens.sample_B.tolist()]
        kept = None
        if any(row.kept_NS is not None for row in rows):
            kept = torch.cat([_kept(row)[position_T] for row in rows]).to(device)
        return ExpertChoice(
            torch.cat([row.experts_NS[position_T] for row in rows]).to(device),
            torch.cat([row.raw_top_k_NS[position_T] for row in rows]).to(device),
            kept,
        )

    def _row(self, layer: int, sample: int, position_T: Tensor) -> ExpertChoice:
        row = self._choices.get((layer, sample))
        if (
            row is None
            or int(position_T.max()) >= len(row.experts_NS)
            or (row.experts_NS[position_T] < 0).any()
        ):
            raise DataError(
                f"the recording has no routing for sample {sample} in layer {layer}"
                f"{'' if row is None else ' that covers all its tokens'}: "
                "record the same samples with the same model first"
            )
        return row


def _merge(before: ExpertChoice | None, part: ExpertChoice, position_T: Tensor) -> ExpertChoice:
    """Merge a part into a row. Positions not recorded yet have expert -1."""
    if before is None and torch.equal(position_T, torch.arange(len(position_T))):
        return part
    if before is None:
        before = ExpertChoice(part.experts_NS[:0], part.raw_top_k_NS[:0], None)
    length = max(len(before.experts_NS), int(position_T.max()) + 1)

    def merge(old_TS: Tensor, new_TS: Tensor, missing: int | bool) -> Tensor:
        row_TS = new_TS.new_full((length, new_TS.shape[1]), missing)
        row_TS[: len(old_TS)] = old_TS
        row_TS[position_T] = new_TS
        return row_TS

    kept_TS = None
    if before.kept_NS is not None or part.kept_NS is not None:
        kept_TS = merge(_kept(before), _kept(part), True)
    return ExpertChoice(
        merge(before.experts_NS, part.experts_NS, -1),
        merge(before.raw_top_k_NS, part.raw_top_k_NS, -1),
        kept_TS,
    )


def _kept(row: ExpertChoice) -> Tensor:
    return torch.ones_like(row.experts_NS, dtype=torch.bool) if row.kept_NS is None else row.kept_NS
