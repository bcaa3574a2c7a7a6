"""Several residual streams in a model: what connects each layer with them, and what makes one of them again.

A model without hyper-connections has one stream, and none of this.
"""

from __future__ import annotations

from typing import Any

from braid import architecture
from braid.kernels import Kernels
from braid.nn.hyper_connection import HyperConnection, HyperExit, HyperMean

Exit = HyperExit | HyperMean


def connection_of(shape: architecture.Model, kernels: Kernels, on: dict[str, Any]) -> HyperConnection | None:
    """The ways into and out of one layer. `on` says for which groups, where, and in which dtype."""
    if shape.hyper is None or kernels.hyper_connection is None:
        return None
    function = kernels.hyper_connection.function
    return HyperConnection(shape.hyper, shape.hidden, shape.norm_eps, function, **on)


def leaving(shape: architecture.Model, kernels: Kernels, on: dict[str, Any]) -> Exit | None:
    """What stands before a final norm."""
    if shape.hyper is None or kernels.hyper_connection is None:
        return None
    if shape.hyper.exit == "mean":
        return HyperMean(shape.hyper, shape.hidden, groups=on["groups"])
    function = kernels.hyper_connection.function
    return HyperExit(shape.hyper, shape.hidden, shape.norm_eps, function, **on)
