"""Recompute (activation checkpointing) of selected regions, bit-exact and schedulable.

    replays = Replays(["norm", "core"])
    set_replays(model, replays)             # modules run their regions through it from now on
    model.run(...)                          # each region saves its inputs and nothing else

A **region** is a function of tensors. What autograd saves while it runs is dropped; only the order of the saves
is recorded. A **replay** runs the function again on the same inputs and fills those slots in the same order.
Outputs of a region that something else saves, or that another region takes as input, also come from the replay.
The graph is still the one that forward built, so gradients are bit-identical to those without recompute.

`torch.utils.checkpoint` saves the outputs of a region if a later op needs them, and replays from within
backward. Here outputs are dropped as well, and a schedule may place replays as ops of their own.

Functions of regions must be pure: no side effects, no stateful RNG. They repeat the collectives they issue.
Anything else that depends on the first run is passed in.

By default a region is replayed when backward first unpacks one of its tensors. With `planned`, the schedule has
an op for it: regions belong to the node in which they ran, and unpacking before the node's replay is an error.
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
from braid.nn.offload import Offloads

Result = TypeVar("Result")
Hold = Callable[[Tensor], None]
"""Called with every tensor that one replay produces and another one consumes."""


class ReplayError(RuntimeError):
    """A region's tensor is needed, but its replay has not produced it: a bug in braid."""


class _Slot:
    """A tensor that autograd saved inside a region. Autograd holds the only strong reference."""

    __slots__ = ("__weakref__", "_region", "value")

    def __init__(self, region: _Region) -> None:
        self._region = region
        self.value: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self.value is None:
            self._region.replay_on_demand()
        assert self.value is not None
        return self.value


class _Output:
    """A view of a region's output that is needed outside the region."""

    __slots__ = ("__weakref__", "_offset", "_region", "_size", "_stride", "number", "value")

    def __init__(self, region: _Region, number: int, tensor: Tensor) -> None:
        self._region, self.number = region, number
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.value: Tensor | None = None
        """The whole output; the view is a part of it."""

    @property
    def tensor(self) -> Tensor:
        if self.value is None:
            self._region.replay_on_demand()
        assert self.value is not None
        return self.value.as_strided(self._size, self._stride, self._offset)


class _Input(NamedTuple):
    """An input of a region: a saved tensor, or the output of another region."""

    packed: Any
    requires_grad: bool


class _Region:
    """One run of a function, until its replay."""

    def __init__(
        self,
        replays: Replays,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[_Input],
        node: Hashable,
    ) -> None:
        self.replays = replays
        self.label = name if node is None else f"{name} of {node}"
        self.replayed = False
        self._function: Callable[..., Any] | None = function
        self._inputs = inputs
        # Weak references: what autograd no longer needs is not kept after the replay.
        self._slots: list[weakref.ref[_Slot]] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._outputs: list[weakref.ref[_Output]] = []

    def pack(self, tensor: Tensor) -> _Slot:
        """The pack hook of autograd while the region runs."""
        slot = _Slot(self)
        self._slots.append(weakref.ref(slot))
        self._shapes.append((tensor.shape, tensor.dtype))
        return slot

    def output(self, number: int, tensor: Tensor) -> _Output:
        output = _Output(self, number, tensor)
        self._outputs.append(weakref.ref(output))
        return output

    def replay_on_demand(self) -> None:
        if self.replays.planned:
            raise ReplayError(f"{self.label} is needed before its replay")
        self.replay()

    def replay(self, hold: Hold | None = None) -> None:
        """Run the function again and fill every slot and output that is still referenced."""
        assert not self.replayed, f"{self.label} is replayed twice"
        assert self._function is not None
        inputs = [_replay_input(each, hold) for each in self._inputs]
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            # Without detach, a function that saves its own output would form a reference cycle, which nothing
            # breaks: the backward of a replay never runs.
            saved.append(tensor.detach())

        with self.replays.no_regions(), torch.enable_grad(), saved_tensors_hooks(pack, _no_backward):
            outputs = list(_tensors(self._function(*inputs)))
        if [(tensor.shape, tensor.dtype) for tensor in saved] != self._shapes:
            raise ReplayError(f"the replay of {self.label} saves other tensors than its forward")
        for slot_ref, tensor in zip(self._slots, saved, strict=True):
            if (slot := slot_ref()) is not None:
                slot.value = tensor
        for output_ref in self._outputs:
            if (output := output_ref()) is not None:
                output.value = outputs[output.number].detach()
        self.replayed, self._function, self._inputs = True, None, ()
        self.replays.count_replay()


class _LiveOutput(NamedTuple):
    """A storage that a region has written and that still exists."""

    storage: StorageWeakRef
    region: _Region
    number: int
    dtype: torch.dtype


class _ThreadState(threading.local):
    """Per thread, because each CUDA stream may be driven by a thread of its own."""

    inside = False
    node: Hashable | None = None


class Replays:
    """The recomputed regions of one step."""

    def __init__(
        self, names: Iterable[str], *, planned: bool = False, offloads: Offloads | None = None
    ) -> None:
        """With `planned`, the caller replays every node in which regions ran. `offloads` take what is saved."""
        self.names, self.planned, self.offloads = recomputed(names), planned, offloads
        self.count = 0
        """Replays so far."""
        self._thread, self._lock = _ThreadState(), threading.Lock()
        self._live: dict[int, _LiveOutput] = {}
        self._nodes: dict[Hashable, list[_Region]] = {}

    # ------------------------------------------------------------------------------------- forward

    def run(self, name: str, function: Callable[..., Result], *inputs: Tensor) -> Result:
        """Apply the function, as a region if `name` is recomputed. A region inside another one is part of the
        outer one."""
        node = self._thread.node
        if self._thread.inside or not torch.is_grad_enabled():
            return function(*inputs)
        if name not in self.names:
            return self._run_offloaded(name, function, *inputs)
        assert node is not None or not self.planned, f"{name} runs outside of a node"
        self._prune()
        packed = [_Input(self._pack(tensor), tensor.requires_grad) for tensor in inputs]
        region = _Region(self, name, function, packed, node)
        with self.no_regions(), saved_tensors_hooks(region.pack, _unpack):
            result = function(*inputs)
        # An output that shares storage with an input (a view, an in-place op) is not the region's own.
        known = {_address(tensor) for tensor in inputs}
        with self._lock:
            for number, tensor in enumerate(_tensors(result)):
                if (address := _address(tensor)) not in known:
                    known.add(address)
                    storage = StorageWeakRef(tensor.untyped_storage())
                    self._live[address] = _LiveOutput(storage, region, number, tensor.dtype)
            if self.planned:
                self._nodes[node].append(region)
        return result

    def _run_offloaded(self, name: str, function: Callable[..., Result], *inputs: Tensor) -> Result:
        """Apply a function that is not recomputed. If its region is offloaded, all that it makes may leave."""
        if self.offloads is None or name not in self.offloads.regions:
            return function(*inputs)
        offloads, given = self.offloads, {_address(tensor) for tensor in inputs}

        def pack(tensor: Tensor) -> Any:
            if _address(tensor) not in given:
                offloads.leaves(tensor)
            return self._pack(tensor)

        with saved_tensors_hooks(pack, _unpack):
            result = function(*inputs)
        offloads.leaves(*(tensor for tensor in _tensors(result) if _address(tensor) not in given))
        return result

    @contextmanager
    def save_hooks(self) -> Iterator[None]:
        """Hooks for ops between regions: they save outputs of regions by reference, all else as usual."""
        if not torch.is_grad_enabled():
            yield
            return
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._prune()

    @contextmanager
    def no_regions(self) -> Iterator[None]:
        """Functions run as they are, without regions of their own."""
        before, self._thread.inside = self._thread.inside, True
        try:
            yield
        finally:
            self._thread.inside = before

    def save_output(self, tensor: Tensor) -> None:
        """Save a region's output instead of recomputing it. A replay that needs it then does not depend on
        another replay."""
        with self._lock:
            self._live.pop(_address(tensor), None)

    def keep(self, tensor: Tensor) -> Any:
        """How a saved tensor is stored: as it is, or as an object with the attribute `tensor`."""
        return tensor if self.offloads is None else self.offloads.keep(tensor)

    def _pack(self, tensor: Tensor) -> Any:
        with self._lock:
            live = self._live.get(_address(tensor))
        if live is None or live.storage.expired() or live.region.replayed or live.dtype != tensor.dtype:
            return self.keep(tensor.detach())
        return live.region.output(live.number, tensor)

    def _prune(self) -> None:
        """Drop outputs whose storage was freed, and with them the regions that nothing needs any more."""
        with self._lock:
            self._live = {address: live for address, live in self._live.items() if not live.storage.expired()}

    # --------------------------------------------------------------------------------------- nodes

    @contextmanager
    def node(self, key: Hashable) -> Iterator[None]:
        """Regions that run inside wait for `replay(key)`."""
        assert self._thread.node is None, f"{key} runs within {self._thread.node}"
        assert key not in self._nodes, f"{key} runs twice"
        self._thread.node, self._nodes[key] = key, []
        try:
            yield
        finally:
            self._thread.node = None

    def replay(self, key: Hashable, hold: Hold | None = None) -> None:
        """Replay the regions of a node in the order in which they ran."""
        for region in self._nodes.pop(key):
            region.replay(hold)

    def count_replay(self) -> None:
        with self._lock:
            self.count += 1

    def finish(self) -> None:
        """End the step; every node must have been replayed."""
        pending = [str(key) for key, regions in self._nodes.items() if regions]
        assert not pending, f"the step ends, but {', '.join(pending)} has not been replayed"
        self._live.clear()


class Recomputing(nn.Module):
    """A module with regions. They run as plain functions until `set_replays`."""

    replays: Replays | None = None

    def recomputed(self, name: str, function: Callable[..., Result], *inputs: Tensor) -> Result:
        return function(*inputs) if self.replays is None else self.replays.run(name, function, *inputs)

    def save_output(self, tensor: Tensor) -> None:
        if self.replays is not None:
            self.replays.save_output(tensor)

    def holds(self, name: str, *results: Any) -> None:
        """What the regions of a name hold for their replay beside their inputs: offload leaves it where it
        is."""
        replays = self.replays
        if replays is not None and replays.offloads is not None and name in replays.names:
            replays.offloads.stays(*_tensors(results))

    def save_hooks(self) -> AbstractContextManager[None]:
        return nullcontext() if self.replays is None else self.replays.save_hooks()


def set_replays(module: nn.Module, replays: Replays | None) -> None:
    """Run all regions of a module through `replays` from the next forward on; None turns recompute off."""
    for each in module.modules():
        if isinstance(each, Recomputing):
            each.replays = replays


def _replay_input(given: _Input, hold: Hold | None) -> Tensor:
    """The input of a replay: detached, but requiring grad if it did in forward, so that the same ops save."""
    tensor = _unpack(given.packed)
    if hold is not None and isinstance(given.packed, _Output):
        hold(tensor)
    return tensor.detach().requires_grad_(given.requires_grad)


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed if isinstance(packed, Tensor) else packed.tensor
    return tensor


def _no_backward(_: Any) -> Tensor:
    raise ReplayError("a replay has no backward of its own")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, which may be a tensor or nested tuples of them."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for each in result:
            yield from _tensors(each)
