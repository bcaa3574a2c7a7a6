"""Documents within rows: what mixers reset at.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def runs_of(documents_BT: Tensor) -> Tensor:
    """Documents numbered from 0 within each row. A run of equal ids is one; an id that returns later begins
    another."""
    begins_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    return begins_BT.cumsum(1)
