"""Tensors that can be read in part: one expert, out of a tensor that stacks all experts of a layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

Index = tuple[slice, ...]
"""A range of each of some leading dims; the others are whole."""


class Sliceable(Protocol):
    """A tensor, or one in a file of which an index reads a part."""

    @property
    def shape(self) -> torch.Size: ...
    def __getitem__(self, index: Index, /) -> Tensor: ...


class SlicedTensors(Mapping[str, Tensor]):
    """Tensors by name, each of them whole or in part."""

    @abstractmethod
    def opened(self, name: str) -> Sliceable:
        """A tensor of which nothing has been read yet."""


def opened(tensors: Mapping[str, Tensor], name: str) -> Sliceable:
    """A tensor to be read in part; one of an ordinary mapping is there as a whole."""
    return tensors.opened(name) if isinstance(tensors, SlicedTensors) else tensors[name]


class Renamed(SlicedTensors):
    """Some tensors under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """`names` has the name of each here, and the one that it has in `tensors`."""
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def opened(self, name: str) -> Sliceable:
        return opened(self._tensors, self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
