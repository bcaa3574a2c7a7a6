"""Routing decisions of one run, for another to repeat.

Where two runs differ by rounding alone, a token whose scores are nearly equal may visit another expert, and
from there on the runs have little in common. A run that repeats the decisions of another can be compared to
it. Decisions are kept by layer and sample, so any batch and any rank finds its own.

Shapes: B rows, T tokens of a row, N = B · T, S slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.errors import DataError
from braid.nn.moe.routing import ExpertChoice
from braid.nn.moe.token_ids import Tokens


class Recording:
    """What routers decided, on the host."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], ExpertChoice] = {}
        """By layer and sample; each holds one row, [T, S]."""

    def write(self, tokens: Tokens, choice: ExpertChoice) -> None:
        """Keep the decisions about these tokens, which may be parts of rows: others may fill in the rest."""
        place_T = tokens.place_T.cpu()
        parts = [None if part is None else part.unflatten(0, (tokens.rows, -1)).cpu() for part in choice]
        for row, sample in enumerate(tokens.sample_B.tolist()):
            experts_TS, favourites_TS, kept_TS = (None if part is None else part[row] for part in parts)
            assert experts_TS is not None
            assert favourites_TS is not None
            before = self._choices.get((tokens.layer, sample))
            part = ExpertChoice(experts_TS, favourites_TS, kept_TS)
            self._choices[tokens.layer, sample] = _joined(before, part, place_T)

    def read(self, tokens: Tokens) -> ExpertChoice:
        """The decisions about these tokens, which may be parts of rows."""
        device, place_T = tokens.place_T.device, tokens.place_T.cpu()
        rows = [self._row(tokens.layer, sample, place_T) for sample in tokens.sample_B.tolist()]
        kept = None
        if any(row.kept_NS is not None for row in rows):
            kept = torch.cat([_kept(row)[place_T] for row in rows]).to(device)
        return ExpertChoice(
            torch.cat([row.experts_NS[place_T] for row in rows]).to(device),
            torch.cat([row.favourites_NS[place_T] for row in rows]).to(device),
            kept,
        )

    def _row(self, layer: int, sample: int, place_T: Tensor) -> ExpertChoice:
        row = self._choices.get((layer, sample))
        if row is None or int(place_T.max()) >= len(row.experts_NS) or (row.experts_NS[place_T] < 0).any():
            raise DataError(
                f"the recording has no routing of sample {sample} in layer {layer}"
                f"{'' if row is None else ' for all of its tokens'}: "
                "record the same samples with the same model first"
            )
        return row


def _joined(before: ExpertChoice | None, part: ExpertChoice, place_T: Tensor) -> ExpertChoice:
    """A row with one more part of it. Places that nobody has written yet hold the expert -1."""
    if before is None and torch.equal(place_T, torch.arange(len(place_T))):
        return part
    if before is None:
        before = ExpertChoice(part.experts_NS[:0], part.favourites_NS[:0], None)
    length = max(len(before.experts_NS), int(place_T.max()) + 1)

    def joined(old_TS: Tensor, new_TS: Tensor, unwritten: int | bool) -> Tensor:
        whole_TS = new_TS.new_full((length, new_TS.shape[1]), unwritten)
        whole_TS[: len(old_TS)] = old_TS
        whole_TS[place_T] = new_TS
        return whole_TS

    kept_TS = None
    if before.kept_NS is not None or part.kept_NS is not None:
        kept_TS = joined(_kept(before), _kept(part), True)
    return ExpertChoice(
        joined(before.experts_NS, part.experts_NS, -1),
        joined(before.favourites_NS, part.favourites_NS, -1),
        kept_TS,
    )


def _kept(row: ExpertChoice) -> Tensor:
    return torch.ones_like(row.experts_NS, dtype=torch.bool) if row.kept_NS is None else row.kept_NS
