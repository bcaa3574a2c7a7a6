"""Builders for hyper-connections: around each layer, and the exit that merges streams before the final norm.

Both return None for a model with a single residual stream.
"""

from __future__ import annotations

from typing import Any

from braid import architecture
from braid.kernels import Kernels
from braid.nn.hyper_connection import HyperConnection, HyperExit, HyperMean

Exit = HyperExit | HyperMean


def build_connection(shape: architecture.Trunk, kernels: Kernels, on: dict[str, Any]) -> HyperConnection | None:
    """The hyper-connection of one layer; `on` has groups, device and dtype."""
    if shape.hyper is None or kernels.hyper_connection is None:
        return None
    function = kernels.hyper_connection.function
    return HyperConnection(shape.hyper, shape.hidden, shape.norm_eps, function, **on)


def build_exit(shape: architecture.Trunk, kernels: Kernels, on: dict[str, Any]) -> Exit | None:
    """The module that merges the streams before a final norm."""
    if shape.hyper is None or kernels.hyper_connection is None:
        return None
    if shape.hyper.exit == "mean":
        return HyperMean(shape.hyper, shape.hidden, groups=on["groups"])
    function = kernels.hyper_connection.function
    return HyperExit(shape.hyper, shape.hidden, shape.norm_eps, function, **on)
