"""Whether ranks that hold copies of the same weights still agree on them, to the bit.

    sums of bits, one for each tensor ──► all-gather among its holders ──► any difference, in the step's metrics

Copies are updated from the same gradients by the same arithmetic, so they never differ, unless memory or a
device fails, or braid has a bug. The sums and their comparison stay on the device; the host learns of a
difference with the result of the step, and only then looks which rank it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from braid.distributed.collectives import Group, all_gather_no_grad
from braid.kernels.host import AsyncHostCopy
from braid.launch.rendezvous import format_ranks
from braid.train.module_state import ModuleState

INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""By bytes of an element."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor, or a part of one, that the ranks of a group hold alike."""

    name: str
    """As a person reads it, with the moment that it is of."""
    group: Group
    read: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Tensors that the holders of a copy do not agree on."""

    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those in the minority; all holders where there is no majority."""
    holders: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(self.tensors[:3]) + (", ..." if len(self.tensors) > 3 else "")
        if set(self.ranks) == set(self.holders):
            return f"{format_ranks(list(self.holders))} differ, and there is no majority: {names}"
        return f"{format_ranks(list(self.ranks))}, of {format_ranks(list(self.holders))}: {names}"


class CopyCheck:
    """Compares the copies that this rank holds with those of other ranks."""

    def __init__(self, modules: Mapping[str, ModuleState], device: torch.device) -> None:
        self._device = device
        self._by_group: dict[Group, list[Copy]] = {}
        for module in modules.values():
            for copy in _copies(module):
                self._by_group.setdefault(copy.group, []).append(copy)

    def compare(self) -> ComparedCopies:
        """Start a comparison. All holders of a copy must call it at the same point of a step."""
        sums: list[AsyncHostCopy] = []
        differs = torch.zeros((), dtype=torch.float64, device=self._device)
        # In the order of names: ranks that are in several groups must not wait for each other.
        groups = sorted(self._by_group, key=lambda group: (group.name, _ranks(group)))
        for group in groups:
            sums_T = torch.stack([bit_sum(copy.read()) for copy in self._by_group[group]])
            all_RT = all_gather_no_grad(sums_T[None], group)
            differs = differs + (all_RT != all_RT[:1]).any()
            sums.append(AsyncHostCopy(all_RT))
        names = [(_ranks(group), tuple(copy.name for copy in self._by_group[group])) for group in groups]
        return ComparedCopies(differs, names, sums)


class ComparedCopies:
    """A comparison that may still run on the device."""

    def __init__(
        self,
        differs: Tensor,
        names: Sequence[tuple[tuple[int, ...], tuple[str, ...]]],
        sums: Sequence[AsyncHostCopy],
    ) -> None:
        """`names` are the holders and the names of each of `sums`."""
        self.differs = differs
        """More than 0 if some copies differ: 0-D, on the device."""
        self._names, self._sums = names, sums

    def divergences(self) -> list[Divergence]:
        """Who differs in what, as this rank sees it."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for (holders, names), sums in zip(self._names, self._sums, strict=True):
            for name, column in zip(names, sums.wait().T.tolist(), strict=True):
                if ranks := minority(holders, column):
                    found.setdefault((ranks, holders), []).append(name)
        return [
            Divergence(tensors=tuple(names), ranks=ranks, holders=holders)
            for (ranks, holders), names in found.items()
        ]


def minority(holders: Sequence[int], sums: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose sum is not that of more than half of the holders; all of them if no sum is, none if all
    agree."""
    ((common, count), *others) = Counter(sums).most_common()
    if not others:
        return ()
    wrong = [rank for rank, each in zip(holders, sums, strict=True) if each != common]
    return tuple(wrong) if 2 * count > len(holders) else tuple(holders)


def bit_sum(tensor: Tensor) -> Tensor:
    """The bits of a tensor, as integers, summed modulo 2^64: a flipped bit always changes it."""
    dense = tensor.detach().contiguous()
    return dense.view(INTEGERS[dense.dtype.itemsize]).sum(dtype=torch.int64)


def _copies(module: ModuleState) -> Iterator[Copy]:
    """All copies of a module on this rank: of parts that other tensor-parallel ranks or pipeline ends hold, of
    shards that other replicas hold (HSDP), and of buffers."""
    groups, optimizer, held = module.model.groups, module.optimizer, module.weights()

    def tensors(name: str) -> Iterator[tuple[str, Tensor]]:
        label = module.prefix + module.names.get(name, name)
        yield label, held[name]
        moments = optimizer.moments(name) if name in optimizer.main else {}
        for moment, tensor in moments.items():
            yield f"{moment} of {label}", tensor

    for part in module.copies:
        for label, tensor in tensors(part.parameter):
            read = tensor.detach if part.place is None else _reader(part.place.read, tensor)
            yield Copy(name=label, group=part.group, read=read)
    replicas: dict[dist.ProcessGroup, Group] = {}
    for name, parameter in module.model.named_parameters():
        handle = _replicas(parameter)
        if handle is None or not held[name].numel():
            continue
        group = replicas.setdefault(
            handle, Group(name="replicas", size=handle.size(), rank=handle.rank(), handle=handle)
        )
        for label, tensor in tensors(name):
            yield Copy(name=label, group=group, read=tensor.detach)
    for name, _ in module.model.named_buffers() if groups.slab.size > 1 else ():
        for label, tensor in tensors(name) if name in held else ():
            yield Copy(name=label, group=groups.slab, read=tensor.detach)


def _reader(read: Callable[[Tensor], Tensor], tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: read(tensor.detach())


def _replicas(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard of a parameter, if there are several."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None


def _ranks(group: Group) -> tuple[int, ...]:
    assert group.handle is not None
    return tuple(dist.get_process_group_ranks(group.handle))
