"""Canonical names and layers: which layer of the pattern a checkpoint tensor belongs to.

Canonical names count blocks: the MLP of `*-*E` has `blocks.1.mlp.up.weight`, that of `[*-][*E]` has
`blocks.0.mlp.up.weight`. The functions here translate through the layer, which brackets do not change: for
initial weights, which are drawn by the name in the pattern without brackets, and for checkpoints of a pattern
with other brackets. MTP depths have no brackets, so their names depend on their symbols alone. Nothing in this
module needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from braid.model.declaration import LAYER_NAMES
from braid.pattern import Layer, Layout

MODULES = "modules."
"""What the names of tensors of modules begin with; those of the language model do not."""

_OF_MODULE = re.compile(rf"(?:optimizer\.[a-z_]+\.)?{re.escape(MODULES)}")
_LAYER_TENSOR = re.compile(r"((?:mtp\.\d+\.)?blocks\.\d+\.[a-z0-9_]+)\.(.+)")


def split_module(name: str) -> tuple[str, str]:
    """A tensor's name in a checkpoint as the prefix of its module and the name within: `modules.vision.` and
    `patches.weight`. The first is empty for the language model."""
    if not name.startswith(MODULES):
        return "", name
    module, _, rest = name.removeprefix(MODULES).partition(".")
    return f"{MODULES}{module}.", rest


def language_names(names: Iterable[str]) -> frozenset[str]:
    """Of the names of a checkpoint, those of tensors of the language model and of their moments."""
    return frozenset(name for name in names if not _OF_MODULE.match(name))


def split_layer(name: str) -> tuple[str, str]:
    """A canonical name as the name of its layer and the rest: `blocks.3.mlp` and `up.weight`. The first is
    empty for a tensor outside the layers, such as `embedding.weight` or `mtp.0.final_norm.weight`."""
    found = _LAYER_TENSOR.fullmatch(name)
    return ("", name) if found is None else (found[1], found[2])


def layer_name(layer: Layer) -> str:
    """The prefix of a layer's canonical names: `blocks.3.mlp`, `mtp.0.blocks.0.attention`."""
    depth = "" if layer.depth is None else f"mtp.{layer.depth}."
    return f"{depth}blocks.{layer.block}.{LAYER_NAMES[layer.kind]}"


def layers_by_name(layout: Layout) -> dict[str, Layer]:
    """Every layer by the prefix of its canonical names, MTP depths included."""
    depths = (layer for depth in layout.mtp for layer in depth.layers)
    return {layer_name(layer): layer for layer in (*layout.layers, *depths)}


def ungrouped_names(layout: Layout) -> dict[str, str]:
    """For every layer of the main stack, its name in the pattern without brackets, where each layer is a block
    of its own."""
    return {
        layer_name(layer): f"blocks.{layer.number - 1}.{LAYER_NAMES[layer.kind]}" for layer in layout.layers
    }


def regrouped_names(layout: Layout, other: Layout) -> dict[str, str] | None:
    """For every layer of `layout`, its name in a layout with other brackets. None if the two have other layers
    or MTP depths."""
    if symbols(layout) != symbols(other):
        return None
    return dict(zip(layers_by_name(layout), layers_by_name(other), strict=True))


def symbols(layout: Layout) -> tuple[str, ...]:
    """The symbols of the main stack and of each MTP depth, without brackets and segments."""
    stacks = (layout.layers, *(depth.layers for depth in layout.mtp))
    return tuple("".join(layer.kind.value for layer in layers) for layers in stacks)


def renamed(name: str, layers: Mapping[str, str]) -> str:
    """A canonical name with its layer's name replaced, if `layers` has another for it."""
    layer, rest = split_layer(name)
    return f"{layers[layer]}.{rest}" if layer in layers else name
