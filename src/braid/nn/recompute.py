"""Recompute (activation checkpointing): what backward needs of a region is not kept, but made once more when
backward comes to it.

    replays = Replays(["norm", "core"])
    hand_replays(model, replays)            # modules run their regions through it from now on
    model.run(...)                          # of each region its inputs are kept, and nothing else

A **region** is a function of tensors. Of what autograd saves while it runs, nothing is kept but the place in
the order of saving. A **replay** runs the function again on the same inputs, and what is saved then, in the
same order, is handed out. An output of a region that something else saves, or that another region is given, is
not kept either: it comes from the replay. The graph stays the one that forward has made, so gradients are the
same to the last bit.

Functions of regions are pure: they write nothing down, draw from no generator that moves on, and repeat the
collectives that they issue. Whatever else they need of the first time they have been handed.

Replays run when backward first asks for something of them. Where a schedule has ops for that (`planned`),
regions belong to the node in which they ran; to ask before the node's replay is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from braid.choices import recomputed

Result = TypeVar("Result")
Hold = Callable[[Tensor], None]
"""Told of every tensor that a replay made and another one uses."""


class ReplayError(RuntimeError):
    """Something of a region is needed that its replay has not made: a mistake in braid."""


class _Slot:
    """A tensor that autograd saved inside of a region. It lives as long as autograd's interest in it."""

    __slots__ = ("__weakref__", "_region", "made")

    def __init__(self, region: _Region) -> None:
        self._region = region
        self.made: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self.made is None:
            self._region.ask()
        assert self.made is not None
        return self.made


class _Output:
    """A tensor that lies in an output of a region, for somebody outside of it."""

    __slots__ = ("__weakref__", "_offset", "_region", "_size", "_stride", "made", "number")

    def __init__(self, region: _Region, number: int, tensor: Tensor) -> None:
        self._region, self.number = region, number
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.made: Tensor | None = None
        """The output that it lies in."""

    @property
    def tensor(self) -> Tensor:
        if self.made is None:
            self._region.ask()
        assert self.made is not None
        return self.made.as_strided(self._size, self._stride, self._offset)


class _Given(NamedTuple):
    """An input of a region: kept, or to come from another region."""

    held: Any
    differentiable: bool


class _Region:
    """One run of a function, until its replay."""

    def __init__(
        self, replays: Replays, name: str, function: Callable[..., Any], given: Sequence[_Given], node: Hashable
    ) -> None:
        self.replays = replays
        self.called = name if node is None else f"{name} of {node}"
        """For people."""
        self.replayed = False
        self._function: Callable[..., Any] | None = function
        self._given = given
        self._slots: list[weakref.ref[_Slot]] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._outputs: list[weakref.ref[_Output]] = []

    def save(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self)
        self._slots.append(weakref.ref(slot))
        self._shapes.append((tensor.shape, tensor.dtype))
        return slot

    def output(self, number: int, tensor: Tensor) -> _Output:
        found = _Output(self, number, tensor)
        self._outputs.append(weakref.ref(found))
        return found

    def ask(self) -> None:
        """Something of it is needed."""
        if self.replays.planned:
            raise ReplayError(f"{self.called} is needed before its replay")
        self.replay()

    def replay(self, hold: Hold | None = None) -> None:
        """Run the function again, and fill what is still of interest."""
        assert not self.replayed, f"{self.called} is replayed twice"
        assert self._function is not None
        given = [_again(each, hold) for each in self._given]
        saved: list[Tensor] = []

        def save(tensor: Tensor) -> None:
            # A function that saves its own output would otherwise hold itself, for its backward never runs.
            saved.append(tensor.detach())

        with self.replays.inside(), torch.enable_grad(), saved_tensors_hooks(save, _nothing):
            outputs = list(_tensors(self._function(*given)))
        if [(tensor.shape, tensor.dtype) for tensor in saved] != self._shapes:
            raise ReplayError(f"the replay of {self.called} saves other tensors than its forward")
        for place, tensor in zip(self._slots, saved, strict=True):
            if (slot := place()) is not None:
                slot.made = tensor
        for known in self._outputs:
            if (output := known()) is not None:
                output.made = outputs[output.number].detach()
        self.replayed, self._function, self._given = True, None, ()
        self.replays.told()


class _Live(NamedTuple):
    """A storage that a region has written."""

    storage: StorageWeakRef
    region: _Region
    number: int
    dtype: torch.dtype


class _Where(threading.local):
    """What a thread is in the middle of: a stream may have one of its own."""

    inside = False
    node: Hashable | None = None


class Replays:
    """The regions of one step."""

    def __init__(self, names: Iterable[str], *, planned: bool = False) -> None:
        """With `planned`, somebody calls `replay` for every node in which regions ran."""
        self.names, self.planned = recomputed(names), planned
        self.count = 0
        """Replays so far."""
        self._where, self._lock = _Where(), threading.Lock()
        self._live: dict[int, _Live] = {}
        self._nodes: dict[Hashable, list[_Region]] = {}

    # ------------------------------------------------------------------------------------- forward

    def run(self, name: str, function: Callable[..., Result], *given: Tensor) -> Result:
        """The function of these tensors, as a region where the name was chosen. A region within another one is
        a part of it."""
        node = self._where.node
        if name not in self.names or self._where.inside or not torch.is_grad_enabled():
            return function(*given)
        assert node is not None or not self.planned, f"{name} runs in no node"
        self._prune()
        held = [_Given(self._pack(tensor), tensor.requires_grad) for tensor in given]
        region = _Region(self, name, function, held, node)
        with self.inside(), saved_tensors_hooks(region.save, _tensor):
            result = function(*given)
        known = {_address(tensor) for tensor in given}
        with self._lock:
            for number, tensor in enumerate(_tensors(result)):
                if (place := _address(tensor)) not in known:
                    known.add(place)
                    storage = StorageWeakRef(tensor.untyped_storage())
                    self._live[place] = _Live(storage, region, number, tensor.dtype)
            if self.planned:
                self._nodes[node].append(region)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, what is saved outside of regions is kept, but for outputs of regions."""
        if not torch.is_grad_enabled():
            yield
            return
        with saved_tensors_hooks(self._pack, _tensor):
            yield
        self._prune()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within it, no region begins."""
        before, self._where.inside = self._where.inside, True
        try:
            yield
        finally:
            self._where.inside = before

    def forget(self, tensor: Tensor) -> None:
        """An output of a region that is kept where it is needed, and not made again: a replay that needs it
        does not begin with another one."""
        with self._lock:
            self._live.pop(_address(tensor), None)

    def keep(self, tensor: Tensor) -> Any:
        """How a tensor is held: as it is, or as something that has it as its `tensor`."""
        return tensor

    def _pack(self, tensor: Tensor) -> Any:
        with self._lock:
            live = self._live.get(_address(tensor))
        if live is None or live.storage.expired() or live.region.replayed or live.dtype != tensor.dtype:
            return self.keep(tensor.detach())
        return live.region.output(live.number, tensor)

    def _prune(self) -> None:
        """Forget storages that are gone, and with them regions of which nothing is needed."""
        with self._lock:
            self._live = {place: live for place, live in self._live.items() if not live.storage.expired()}

    # --------------------------------------------------------------------------------------- nodes

    @contextmanager
    def node(self, key: Hashable) -> Iterator[None]:
        """Regions within it wait for `replay` with this key."""
        assert self._where.node is None, f"{key} runs within {self._where.node}"
        assert key not in self._nodes, f"{key} runs twice"
        self._where.node, self._nodes[key] = key, []
        try:
            yield
        finally:
            self._where.node = None

    def replay(self, key: Hashable, hold: Hold | None = None) -> None:
        """Replay what ran in a node, in the same order."""
        for region in self._nodes.pop(key):
            region.replay(hold)

    def told(self) -> None:
        """A replay has run."""
        with self._lock:
            self.count += 1

    def finish(self) -> None:
        """The end of a step: all that ran in nodes is replayed."""
        left = [str(key) for key, regions in self._nodes.items() if regions]
        assert not left, f"the step ends, but nobody has replayed {', '.join(left)}"
        self._live.clear()


class Recomputing(nn.Module):
    """A module with regions: they run as such where it has been handed replays."""

    replays: Replays | None = None

    def recomputed(self, name: str, function: Callable[..., Result], *given: Tensor) -> Result:
        return function(*given) if self.replays is None else self.replays.run(name, function, *given)

    def kept(self, tensor: Tensor) -> None:
        """An output of a region that is kept."""
        if self.replays is not None:
            self.replays.forget(tensor)

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.replays is None else self.replays.watching()


def hand_replays(module: nn.Module, replays: Replays | None) -> None:
    """All regions of a module run through these from the next forward on; None takes them back."""
    for each in module.modules():
        if isinstance(each, Recomputing):
            each.replays = replays


def _again(given: _Given, hold: Hold | None) -> Tensor:
    """The input of a replay: without a past, but with a gradient where it had one."""
    tensor = _tensor(given.held)
    if hold is not None and isinstance(given.held, _Output):
        hold(tensor)
    return tensor.detach().requires_grad_(given.differentiable)


def _tensor(held: Any) -> Tensor:
    tensor: Tensor = held if isinstance(held, Tensor) else held.tensor
    return tensor


def _nothing(_: Any) -> Tensor:
    raise ReplayError("a replay has no backward of its own")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, which may be tuples of tuples."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for each in result:
            yield from _tensors(each)
