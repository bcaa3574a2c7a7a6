"""The Newton-Schulz iteration of Muon, which brings all singular values of a matrix close to 1.

    X = M / |M|        A = X Xᵀ        X ← a X + (b A + c A²) X

The quintic is that of Jordan et al. (https://kellerjordan.github.io/posts/muon/), whose slope at 0 is steep:
after five iterations singular values lie between about 0.7 and 1.2, which trains as well as exactly 1.

Shapes: N matrices, R rows, C columns, S the smaller of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic."""

EPS = 1e-7
"""Norms below are not scaled up to 1: a matrix of zeros stays one."""


@torch.no_grad()
def orthogonal(x_NRC: Tensor, iterations: int) -> Tensor:
    """Each matrix with its singular values moved towards 1, in the dtype of the matrices."""
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if tall else x_NRC
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(iterations):
        gram_NSS = x @ x.mT
        polynomial_NSS = torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial_NSS, x, beta=A)
    return x.mT if tall else x


def flops(rows: int, columns: int, iterations: int) -> int:
    """Floating-point operations for one matrix."""
    small, large = sorted((rows, columns))
    return iterations * (4 * small * small * large + 2 * small**3)
