"""torch dtypes by the names of the config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
)
"""By the values of `train.dtype`."""
