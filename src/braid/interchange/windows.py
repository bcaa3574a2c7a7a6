"""Sliding-window and full attention layers in turn: `layer_types` of a config.json, and `window_pattern`."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from braid.architecture import Attention
from braid.interchange.settings import Settings

LAYER_TYPES = MappingProxyType({"sliding_attention": "S", "full_attention": "L"})


def read_windows(settings: Settings, kinds: Sequence[str], window: int | None, layers: int) -> dict[str, Any]:
    """The fields `window` and `window_pattern` of an attention shape, from the kind of every layer."""
    if len(kinds) != layers:
        settings.refuse("layer_types", kinds, f"has {len(kinds)} entries, num_hidden_layers is {layers}")
    unknown = sorted(set(kinds) - LAYER_TYPES.keys())
    if unknown:
        settings.refuse(
            "layer_types", kinds, f"braid has {' and '.join(LAYER_TYPES)}, not {', '.join(unknown)}"
        )
    letters = "".join(LAYER_TYPES.get(kind, "L") for kind in kinds)
    if window is None or "S" not in letters:
        return {"window": None}
    return {"window": window, "window_pattern": _shortest_tile(letters)}


def write_layer_types(attention: Attention, layers: int) -> list[str]:
    """The kind of every layer."""
    windows = [attention.of_layer(nth).window for nth in range(layers)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _shortest_tile(letters: str) -> str:
    """The shortest text that gives `letters` when repeated, the last time perhaps in part."""
    lengths = range(1, len(letters) + 1)
    length = next(n for n in lengths if all(a == letters[i % n] for i, a in enumerate(letters)))
    return letters[:length]
