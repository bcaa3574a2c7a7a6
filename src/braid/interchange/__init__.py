"""Interchange: models to and from the names and layouts that others use.

An adapter is a table of names and of how tensors lie in one another; conversion only reads it. Tensors are
made when they are asked for, names that do not fit are listed in one error, and a configuration that braid
cannot express is refused with every reason.

    from_hf(folder) -> (shape, tensors)               a folder of the Hugging Face hub, by canonical names
    to_hf(shape, tensors, folder, model_type=...)     and back
    adapter_for(model_type, form), convert(tensors, adapter, shape, direction)
"""

from braid.interchange.convert import Direction, convert
from braid.interchange.hub import FAMILIES, adapter_for, config_of, family_of, from_hf, shape_of, to_hf
from braid.interchange.tables import Adapter

__all__ = [
    "FAMILIES",
    "Adapter",
    "Direction",
    "adapter_for",
    "config_of",
    "convert",
    "family_of",
    "from_hf",
    "shape_of",
    "to_hf",
]
