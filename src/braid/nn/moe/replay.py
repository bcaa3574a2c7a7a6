"""Routing decisions of one run, for another to repeat.

Where two runs differ by rounding alone, a token whose scores are nearly equal may visit another expert, and
from there on the runs have little in common. A run that repeats the decisions of another can be compared to
it. Decisions are kept by layer and sample, so any batch and any rank finds its own.

Shapes: B rows, T tokens of a row, N = B · T, S slots of a token.
"""

from __future__ import annotations

import torch

from braid.errors import DataError
from braid.nn.moe.routing import Choice
from braid.nn.moe.tokens import Tokens


class Recording:
    """What routers decided, on the host."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], Choice] = {}
        """By layer and sample; each holds one row, [T, S]."""

    def write(self, tokens: Tokens, choice: Choice) -> None:
        """Keep the decisions about whole rows."""
        whole = [None if part is None else part.unflatten(0, (tokens.rows, -1)).cpu() for part in choice]
        for row, sample in enumerate(tokens.sample_B.tolist()):
            experts_TS, favourites_TS, kept_TS = (None if part is None else part[row] for part in whole)
            assert experts_TS is not None
            assert favourites_TS is not None
            self._choices[tokens.layer, sample] = Choice(experts_TS, favourites_TS, kept_TS)

    def read(self, tokens: Tokens) -> Choice:
        """The decisions about these tokens, which may be parts of rows."""
        device, place_T = tokens.place_T.device, tokens.place_T.cpu()
        rows = [self._row(tokens.layer, sample) for sample in tokens.sample_B.tolist()]
        kept = None
        if any(row.kept_NS is not None for row in rows):
            kept = torch.cat([_kept(row)[place_T] for row in rows]).to(device)
        return Choice(
            torch.cat([row.experts_NS[place_T] for row in rows]).to(device),
            torch.cat([row.favourites_NS[place_T] for row in rows]).to(device),
            kept,
        )

    def _row(self, layer: int, sample: int) -> Choice:
        if (layer, sample) not in self._choices:
            raise DataError(
                f"the recording has no routing of sample {sample} in layer {layer}: "
                "record the same samples with the same model first"
            )
        return self._choices[layer, sample]


def _kept(row: Choice) -> torch.Tensor:
    return torch.ones_like(row.experts_NS, dtype=torch.bool) if row.kept_NS is None else row.kept_NS
