"""Interchange: models to and from the names and layouts that others use.

An adapter is a table of names and of how tensors lie in one another; conversion only reads it. Tensors are
made when they are asked for, names that do not fit are listed in one error, and a configuration that braid
cannot express is refused with every reason.

    from_hf(folder) -> (shape, tensors)               a folder of the Hugging Face hub, by canonical names
    to_hf(shape, tensors, folder, model_type=...)     and back
    adapter_for(model_type, form), convert(tensors, adapter, shape, direction)
    to_ours(tensors, adapter, shape, dtype=...)       with the optimizer's state, in any layout of experts
    to_theirs(tensors, adapter, shape, updates=...)   and back
"""

from braid.interchange.convert import Direction, convert
from braid.interchange.export import config_of, hub_folder, plan_trained, to_hf
from braid.interchange.hub import (
    FAMILIES,
    adapter_for,
    described,
    family_of,
    from_hf,
    reader_of,
    shape_of,
)
from braid.interchange.tables import Adapter
from braid.interchange.trained import Trained, has_moments, to_ours, to_theirs

__all__ = [
    "FAMILIES",
    "Adapter",
    "Direction",
    "Trained",
    "adapter_for",
    "config_of",
    "convert",
    "described",
    "family_of",
    "from_hf",
    "has_moments",
    "hub_folder",
    "plan_trained",
    "reader_of",
    "shape_of",
    "to_hf",
    "to_ours",
    "to_theirs",
]
