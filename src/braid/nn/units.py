"""The parameters of FSDP units: which ones a unit has, and along which dim they are sharded.

The engine shards by them, the memory estimate counts by them. Nothing here loads torch.distributed's FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from braid.nn.moe.experts import SHARD_DIMS, Experts


def parameters_of_units(root: nn.Module, units: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The parameter names of each unit, without those of nested units. Nested units must come first."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    by_unit = {}
    for unit in units:
        parameters = root.get_submodule(unit).parameters()
        by_unit[unit] = tuple(names.pop(parameter) for parameter in parameters if parameter in names)
    return by_unit


def shard_dims(module: nn.Module) -> Mapping[str, int]:
    """The sharded dim of each parameter of a unit, by name; dim 0 for parameters that are not listed."""
    if not isinstance(module, Experts):
        return {}
    return {name: SHARD_DIMS[name.rpartition(".")[2]] for name, _ in module.named_parameters()}
