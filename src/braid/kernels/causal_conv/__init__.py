"""Depthwise causal conv1d within documents, without an activation: y_t = Σ_k w_k · x_{t-K+1+k} + b.

One implementation for every device and dtype. On a CPU, `F.conv1d` is no faster than one product per tap
(measured, forward and backward), and it does not support document boundaries.
"""

from __future__ import annotations

from braid.kernels.causal_conv.reference import causal_conv

__all__ = ["causal_conv"]
