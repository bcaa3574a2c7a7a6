"""What really happens: storages that autograd holds, and calls that reach the communicators."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from braid.distributed import collectives


class _Saved:
    """A tensor that autograd saved; it dies with the graph's last interest in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept(forward: Callable[[], Any], weights: Iterable[Tensor], shared: Iterable[Tensor] = ()) -> int:
    """Bytes of all storages that the graph of what `forward` returns keeps, but for weights and what is shared
    with others."""
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        result = forward()
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*weights, *shared)}
    storages = {}
    for reference in saved:
        held = reference()
        if held is not None:
            storage = held.tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    assert result is not None
    return sum(size for place, size in storages.items() if place and place not in left_out)


Calls = Counter[tuple[str, int, int]]
"""How often each of (op, ranks, bytes that the rank hands in) was called."""


@contextmanager
def recorded() -> Iterator[Calls]:
    """Every collective that braid's own functions call meanwhile."""
    calls: Calls = Counter()

    def record(name: str, function: Callable[..., Any], given: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor, ranks = arguments[given], dist.get_world_size(options.get("group"))
            calls[name, ranks, tensor.numel() * tensor.element_size()] += 1
            return function(*arguments, **options)

        return call

    with (
        mock.patch.object(collectives, "_all_gather", record("all_gather", collectives._all_gather, 1)),
        mock.patch.object(
            collectives, "_reduce_scatter", record("reduce_scatter", collectives._reduce_scatter, 1)
        ),
        mock.patch.object(dist, "all_reduce", record("all_reduce", dist.all_reduce, 0)),
        mock.patch.object(dist, "all_to_all_single", record("all_to_all", dist.all_to_all_single, 1)),
    ):
        yield calls


OPS = {"all_to_all_v": "all_to_all"}
"""torch has one op for both."""


class Allocations(TorchDispatchMode):
    """Bytes of all storages that ops make and that somebody still holds, and the most of them at a time. FSDP2
    keeps its gathered storages and resizes them, without an op that could be seen: sizes are read anew at every
    op."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """`known` are there already and do not count."""
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, op: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        result = op(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        storages = (reference() for reference in list(self._storages.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _see(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self._storages and place not in self._known:
            self._storages[place] = weakref.ref(storage, lambda _: self._storages.pop(place))
