"""Kinds of parameters, by canonical name: what Muon takes, and which learning rates there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from braid.choices import ParameterKind
from braid.nn.canonical import Canonical

_STATE_SPACE = frozenset({"conv", "A_log", "D", "dt_bias"})
_CONNECTIONS = frozenset({"connection", "exit"})
_ROUTERS = frozenset({"router", "shared_gate"})


def kind_of(name: str, tensor: Canonical) -> ParameterKind:
    """The kind of a tensor, by its canonical name within its module."""
    words = name.split(".")
    if not _STATE_SPACE.isdisjoint(words):
        return "state_space"
    if not _CONNECTIONS.isdisjoint(words):
        return "hyper_connection"
    if words[0] in ("embedding", "patches"):
        return "embedding"
    if words[0] == "head":
        return "head"
    if len(tensor.shape) != 2:
        return "vector"
    if not _ROUTERS.isdisjoint(words):
        return "router"
    return "expert" if "experts" in words else "matrix"


def kinds_of(tensors: Mapping[str, Canonical]) -> dict[str, ParameterKind]:
    """The kind of each parameter that holds some of these tensors: all tensors of one are of one kind."""
    found: dict[str, ParameterKind] = {}
    for name, tensor in tensors.items():
        kind = kind_of(name, tensor)
        assert found.setdefault(tensor.parameter, kind) == kind, f"{tensor.parameter} has several kinds"
    return found


def matrices_of(tensors: Mapping[str, Canonical], kinds: Iterable[ParameterKind]) -> frozenset[str]:
    """The parameters of some kinds that hold matrices."""
    wanted, flat = frozenset(kinds), {t.parameter for t in tensors.values() if len(t.shape) != 2}
    return frozenset(name for name, kind in kinds_of(tensors).items() if kind in wanted and name not in flat)
