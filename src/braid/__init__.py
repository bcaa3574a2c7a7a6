"""braid trains hybrid attention/Mamba-2/gated-delta-net/MoE language models; results do not depend on the
parallel layout."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid import errors, recipes
    from braid.architecture import Model
    from braid.config import Data, Mesh, Module, Optim, Run, Train
    from braid.encoders import Encoder
    from braid.planning.estimate import estimate
    from braid.planning.plan import Plan, plan
    from braid.train.load_model import load_model
    from braid.train.trainer import Trainer

__version__ = "0.1.0"

_MODULE_OF = MappingProxyType(
    {
        "Data": "braid.config",
        "Encoder": "braid.encoders",
        "Mesh": "braid.config",
        "Model": "braid.architecture",
        "Module": "braid.config",
        "Optim": "braid.config",
        "Plan": "braid.planning.plan",
        "Run": "braid.config",
        "Train": "braid.config",
        "Trainer": "braid.train.trainer",
        "estimate": "braid.planning.estimate",
        "load_model": "braid.train.load_model",
        "plan": "braid.planning.plan",
    }
)
"""The module of each public name. Imported on first access, because `import braid` must not import torch."""

__all__ = [
    "Data",
    "Encoder",
    "Mesh",
    "Model",
    "Module",
    "Optim",
    "Plan",
    "Run",
    "Train",
    "Trainer",
    "errors",
    "estimate",
    "load_model",
    "plan",
    "recipes",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "recipes"):
        return import_module(f"braid.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'braid' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
