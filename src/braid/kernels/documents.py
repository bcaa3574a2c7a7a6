"""Document boundaries in packed rows, where recurrent mixers and convolutions reset.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def runs_of(documents_BT: Tensor) -> Tensor:
    """Document index of each token, from 0 within each row. A document is a run of equal ids; the same id later
    in the row is another document."""
    starts_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    return starts_BT.cumsum(1)
