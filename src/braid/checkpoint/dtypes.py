"""The dtypes of a checkpoint's tensors, by their names in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from braid.checkpoint.manifest import ITEM_BYTES

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in ITEM_BYTES})
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
