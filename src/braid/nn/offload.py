"""Activation offload: what blocks save for backward waits in host memory, as ops of the schedule say.

    offloads = Offloads(pool, streams)
    with offloads.saving(key):              # the forward of each phase of a block
        ...                                 # autograd saves `offloads.keep(tensor)`
    offloads.offload(key, slot)             # starts the copy to the host
    offloads.free(key)                      # waits for it, and frees the device memory
    offloads.reload(key, slot)              # allocates it again, and starts the copy back
    offloads.wait(key)                      # backward may read what was saved

With `regions`, only what is made in regions of these names moves, inside or behind them: their inputs stay.

What moves are whole storages, each once, however many views of it are saved by however many phases. Weights
stay, as does what lives as long anyway. What has no room in its slot stays on the device too: experts may
receive more rows than planned.

No memory is handed from stream to stream behind the allocator's back: what `free` releases and `reload`
allocates belongs to the compute stream, and the copy streams have waited for it or are waited for. Copies to
the host and back have a stream each: a link moves both ways at once. A slot is written when it has been read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from braid.schedule import Stream

Way = Literal["to_host", "to_device"]
Key = tuple[int, int, str]
"""(micro-batch, segment, block)."""


class OffloadError(RuntimeError):
    """A tensor is needed while it is on the host, or a slot is taken: a bug in braid."""


class SlotKey(NamedTuple):
    segment: int
    block: str
    number: int


class HostPool:
    """Host memory of a fixed size, cut into slots; page-locked if it is for a GPU, so that copies run beside
    computation."""

    def __init__(self, sizes: Mapping[SlotKey, int], device: torch.device) -> None:
        self.device = device
        """Whose tensors wait here."""
        self.memory = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        if device.type == "cuda" and self.memory.numel():
            # `pin_memory` would round the size up to a power of two.
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0))
            weakref.finalize(self, runtime.cudaHostUnregister, self.memory.data_ptr())
        parts = self.memory.split(list(sizes.values())) if sizes else ()
        self.slots = dict(zip(sizes, parts, strict=True))


class CopyStreams(Protocol):
    """What offload needs of the streams of a rank."""

    def copy(self, job: Callable[[], None], way: Way, after: Any = None) -> Any:
        """Run copies on a stream of their own for each way, after everything issued to the streams of phases
        before and after an event of the other way's copies; return the event behind them."""
        ...

    def hold(self, event: Any) -> None:
        """Make everything issued to the other streams from now on wait for copies."""
        ...

    def record_stream(self, tensor: Tensor, stream: Stream) -> None: ...


class _Storage:
    """A storage that a block has saved."""

    __slots__ = ("__weakref__", "communicates", "device", "host", "size", "weak", "where")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device: torch.UntypedStorage | None = storage
        self.host: Tensor | None = None
        """A part of a slot, from its copy to the host until its copy back."""
        self.weak, self.size, self.where = StorageWeakRef(storage), storage.nbytes(), storage.device
        self.communicates = False
        """Whether a phase on the communication stream has saved it."""


class Saved:
    """A tensor that a block has saved: a view of a storage."""

    __slots__ = ("_dtype", "_offset", "_size", "_storage", "_stride")

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self._storage, self._dtype = storage, tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    @property
    def tensor(self) -> Tensor:
        device = self._storage.device
        if device is None:
            raise OffloadError(f"a tensor of {tuple(self._size)} is needed before it is reloaded")
        empty = torch.empty(0, dtype=self._dtype, device=self._storage.where)
        return empty.set_(device, self._offset, self._size, self._stride)


@dataclass(kw_only=True)
class _Block:
    """What a block has saved in a micro-batch."""

    storages: dict[weakref.ref[_Storage], None] = field(default_factory=dict)
    """In the order of saving. Weak references: what autograd gives up is not kept."""
    staying: set[int] = field(default_factory=set)
    """Addresses of storages that live on the device anyway."""
    leaving: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages that regions have made, by their addresses. One that is gone may have left its to another."""
    slot: SlotKey | None = None
    event: Any = None
    """Behind its last copy."""

    def alive(self) -> list[_Storage]:
        return [storage for each in self.storages if (storage := each()) is not None]


class _ThreadState(threading.local):
    """Per thread, because each CUDA stream may be driven by a thread of its own."""

    block: _Block | None = None
    communicates = False


class Offloads:
    """The offloaded blocks of one step."""

    def __init__(self, pool: HostPool, streams: CopyStreams, regions: Collection[str] = ()) -> None:
        """`regions`: names of those whose tensors alone move; all tensors, if there are none."""
        self.pool, self.streams, self.regions = pool, streams, frozenset(regions)
        self.moved: dict[Key, int] = {}
        """Bytes that each block has copied to the host."""
        self.without_room = 0
        """Bytes that stayed on the device because their slot was full."""
        self._thread, self._lock = _ThreadState(), threading.Lock()
        self._blocks: dict[Key, _Block] = {}
        self._known: dict[int, weakref.ref[_Storage]] = {}
        self._taken: dict[SlotKey, Key] = {}
        self._emptied: dict[SlotKey, Any] = {}
        """Behind the copy from each slot: the next copy to it waits for that."""

    # ------------------------------------------------------------------------------------- forward

    @contextmanager
    def saving(self, key: Key, weights: Collection[Tensor], stream: Stream) -> Iterator[None]:
        """What is saved inside belongs to a block, other than weights."""
        block = self._blocks.setdefault(key, _Block())
        block.staying |= {_address(each) for each in weights}
        self._thread.block, self._thread.communicates = block, stream is Stream.COMMUNICATION
        try:
            yield
        finally:
            self._thread.block = None

    def stays(self, *tensors: Tensor) -> None:
        """Tensors that live on the device until the backward of the current block, whether saved or not."""
        if self._thread.block is not None:
            self._thread.block.staying |= {_address(each) for each in tensors}

    def leaves(self, *tensors: Tensor) -> None:
        """Tensors that a region has made."""
        if self._thread.block is not None:
            storages = [tensor.untyped_storage() for tensor in tensors]
            self._thread.block.leaving |= {_id(each): StorageWeakRef(each) for each in storages}

    def keep(self, tensor: Tensor) -> Tensor | Saved:
        """What autograd holds for a saved tensor."""
        block, address = self._thread.block, _address(tensor)
        elsewhere = tensor.device.type != self.pool.device.type or not tensor.untyped_storage().nbytes()
        if block is None or elsewhere or address in block.staying:
            return tensor.detach()
        if self.regions and ((made := block.leaving.get(address)) is None or made.expired()):
            return tensor.detach()
        with self._lock:
            reference = self._known.get(address)
            storage = None if reference is None else reference()
            if storage is None or storage.weak.expired():
                storage = _Storage(tensor.untyped_storage())
                self._known[address] = weakref.ref(storage)
        storage.communicates |= self._thread.communicates
        block.storages[weakref.ref(storage)] = None
        return Saved(storage, tensor)

    # ---------------------------------------------------------------------------------------- copies

    def offload(self, key: Key, slot: int, staying: Collection[Tensor] = ()) -> None:
        """Start to copy what a block has saved to its slot, the largest storages first; `staying` live on the
        device anyway."""
        block = self._blocks[key]
        block.staying |= {_address(each) for each in staying}
        block.slot = self._take(SlotKey(*key[1:], slot), key)
        room = self.pool.slots[block.slot]

        def job() -> None:
            end = 0
            leaving = [each for each in block.alive() if _leaves(each, block)]
            for storage in sorted(leaving, key=lambda each: -each.size):
                if end + storage.size > room.numel():
                    self.without_room += storage.size
                    continue
                storage.host = room[end : end + storage.size]
                storage.host.copy_(_bytes(storage), non_blocking=True)
                end += storage.size
            self.moved[key] = end

        block.event = self.streams.copy(job, "to_host", after=self._emptied.pop(block.slot, None))

    def free(self, key: Key) -> None:
        """Free device memory when the copy is done."""
        block = self._blocks[key]
        self.streams.hold(block.event)
        for storage in block.alive():
            if storage.host is not None:
                storage.device = None

    def reload(self, key: Key, slot: int) -> None:
        """Allocate what a block has saved, and start to copy it back."""
        block = self._blocks[key]
        if block.slot is None or block.slot.number != slot:
            raise OffloadError(f"{key} is in {block.slot}, not in slot {slot}")
        coming = [each for each in block.alive() if each.device is None]
        for storage in coming:
            memory = torch.empty(storage.size, dtype=torch.uint8, device=storage.where)
            if storage.communicates:
                self.streams.record_stream(memory, Stream.COMMUNICATION)
            storage.device = memory.untyped_storage()

        def job() -> None:
            for storage in coming:
                assert storage.host is not None
                _bytes(storage).copy_(storage.host, non_blocking=True)
                storage.host = None

        block.event = self._emptied[block.slot] = self.streams.copy(job, "to_device")
        del self._taken[block.slot]

    def wait(self, key: Key) -> None:
        """Hold the backward of a block until it is back. Without effect the second time."""
        if key in self._blocks:
            self.streams.hold(self._blocks.pop(key).event)

    def finish(self) -> None:
        """End the step; every block must be back."""
        assert not self._blocks, f"the step ends, but {', '.join(map(str, self._blocks))} is on the host"

    def _take(self, slot: SlotKey, key: Key) -> SlotKey:
        if slot in self._taken:
            raise OffloadError(f"{key} goes to {slot}, which holds {self._taken[slot]}")
        self._taken[slot] = key
        return slot


def _leaves(storage: _Storage, block: _Block) -> bool:
    """Whether a storage is to be copied: unless it stays, or another block has copied it."""
    return storage.host is None and storage.device is not None and _id(storage.device) not in block.staying


def _bytes(storage: _Storage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.where)
    assert storage.device is not None
    return empty.set_(storage.device, 0, (storage.size,), (1,))


def _address(tensor: Tensor) -> int:
    return _id(tensor.untyped_storage())


def _id(storage: torch.UntypedStorage) -> int:
    address: int = storage._cdata
    return address
