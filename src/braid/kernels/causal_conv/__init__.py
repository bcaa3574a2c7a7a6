"""Depthwise causal convolution that never crosses a document boundary, without an activation.

One implementation, for every device and dtype: on a CPU `F.conv1d` is no faster than a product per tap
(measured, forward and backward), and it knows nothing of documents.
"""

from __future__ import annotations

from braid.kernels.causal_conv.reference import causal_conv

__all__ = ["causal_conv"]
