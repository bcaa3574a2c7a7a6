"""Storages that wait on the host: the same bits, each storage once, memory that is freed, errors when late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from braid.engine.streams import HostStreams
from braid.nn.offload import HostPool, Key, OffloadError, Offloads, SlotKey, Way
from braid.nn.recompute import Replays
from braid.schedule import Stream

CPU = torch.device("cpu")
KEY, SLOT = (0, 0, "0.block"), SlotKey(0, "0.block", 0)


def offloads_of(*sizes: int) -> Offloads:
    """One slot of block 0 for each size."""
    pool = HostPool({SLOT._replace(number=number): size for number, size in enumerate(sizes)}, CPU)
    return Offloads(pool, HostStreams())


def forward(offloads: Offloads | None, x: Tensor, weight: Tensor) -> Tensor:
    """Saves views of a storage, a storage twice, a weight, and an empty tensor."""
    hooks = Replays((), offloads=offloads).save_hooks()
    with nullcontext() if offloads is None else offloads.saving(KEY, [weight], Stream.COMPUTE), hooks:
        y = (x @ weight).sin()
        halves = y[:, ::2] * y[:, 1::2].t().reshape(len(y), -1)
        return (halves.exp() * halves).sum() + (y * y.square()).sum() + x[:0].exp().sum()


def gradients(offloads: Offloads | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(6, 6, generator=generator, requires_grad=True) for _ in range(2))
    loss = forward(offloads, x, weight)
    if offloads is not None:
        offloads.offload(KEY, 0)
        offloads.free(KEY)
        offloads.reload(KEY, 0)
        offloads.wait(KEY)
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    if offloads is not None:
        offloads.finish()
    return [x.grad, weight.grad]


@pytest.mark.parametrize("room", [4096, 200, 0])
def test_backward_has_the_same_bits_however_much_has_room(room: int) -> None:
    offloads = offloads_of(room)
    for wanted, found in zip(gradients(None), gradients(offloads), strict=True):
        assert torch.equal(wanted, found)
    moved = offloads.moved[KEY]
    assert moved <= room
    assert (offloads.without_room == 0) == (room == 4096)
    everything = moved + offloads.without_room
    assert everything == offloads_all(), "each storage is copied once, weights and empty tensors are not"


def offloads_all() -> int:
    """Bytes of x, x @ weight, its sine and square; of half of the sine, the halves, their exponential."""
    whole, half = 6 * 6 * 4, 6 * 3 * 4
    return 4 * whole + 3 * half


def saved(offloads: Offloads, tensors: Sequence[Tensor], key: Key = KEY) -> list[Tensor]:
    with offloads.saving(key, [], Stream.COMPUTE):
        return [offloads.keep(tensor) for tensor in tensors]  # type: ignore[misc]


def test_memory_is_freed_after_the_copy_and_views_come_back_as_they_were() -> None:
    offloads, base = offloads_of(4096), torch.arange(24.0).view(4, 6)
    views = [base[1:, ::2], base.t(), base.view(torch.int32)]
    wanted, kept = [view.clone() for view in views], saved(offloads, views)
    storage = weakref.ref(base.untyped_storage())
    places = [(view.stride(), view.storage_offset()) for view in views]
    views.clear()
    del base
    offloads.offload(KEY, 0)
    gc.collect()
    offloads.free(KEY)
    assert storage() is None
    with pytest.raises(OffloadError, match=r"\(3, 3\) is needed before it is reloaded"):
        _ = kept[0].tensor  # type: ignore[attr-defined]
    offloads.reload(KEY, 0)
    found = [each.tensor for each in kept]  # type: ignore[attr-defined]
    assert offloads.moved[KEY] == 96
    assert all(map(torch.equal, wanted, found))
    assert [(view.stride(), view.storage_offset()) for view in found] == places
    assert len({view.untyped_storage().data_ptr() for view in found}) == 1


def test_what_lives_anyway_stays() -> None:
    offloads, table, own = offloads_of(4096), torch.ones(8), torch.ones(4)
    kept = saved(offloads, [table, own])
    offloads.offload(KEY, 0, [table])
    offloads.free(KEY)
    assert offloads.moved[KEY] == own.nbytes
    assert kept[0].tensor.data_ptr() == table.data_ptr()  # type: ignore[attr-defined]


def test_what_autograd_gives_up_is_not_copied() -> None:
    offloads = offloads_of(4096)
    kept = saved(offloads, [torch.ones(8), torch.ones(4)])
    del kept[0]
    offloads.offload(KEY, 0)
    assert offloads.moved[KEY] == 16


def test_a_storage_that_two_blocks_save_is_copied_once_and_comes_back_with_the_later_one() -> None:
    later = (0, 0, "1.block")
    pool = HostPool({SLOT: 512, SlotKey(0, "1.block", 0): 512}, CPU)
    offloads, shared = Offloads(pool, HostStreams()), torch.arange(8.0)
    kept = saved(offloads, [shared])
    with offloads.saving(later, [], Stream.COMPUTE):
        kept.append(offloads.keep(shared))  # type: ignore[arg-type]
    for key in (KEY, later):
        offloads.offload(key, 0)
        offloads.free(key)
    assert offloads.moved == {KEY: 32, later: 0}
    offloads.reload(later, 0)
    assert torch.equal(kept[1].tensor, shared)  # type: ignore[attr-defined]
    assert torch.equal(kept[0].tensor, shared)  # type: ignore[attr-defined]
    offloads.reload(KEY, 0)


class _Ordered(HostStreams):
    """Notes which event each copy waits for; events are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, object]] = []

    def copy(self, job: Callable[[], None], way: Way, after: object = None) -> int:  # type: ignore[override]
        self.copies.append((way, after))
        job()
        return len(self.copies) - 1


def test_a_slot_is_written_again_behind_the_copy_that_reads_it() -> None:
    """Ways have streams of their own, so nothing else orders the two copies."""
    other, streams = (1, 0, "0.block"), _Ordered()
    offloads = Offloads(HostPool({SLOT: 512}, CPU), streams)
    kept = [saved(offloads, [torch.ones(2)], key) for key in (KEY, other)]
    for key in (KEY, other):
        offloads.offload(key, 0)
        offloads.free(key)
        offloads.reload(key, 0)
    assert streams.copies == [("to_host", None), ("to_device", None), ("to_host", 1), ("to_device", None)]
    assert all(torch.equal(each.tensor, torch.ones(2)) for (each,) in kept)  # type: ignore[attr-defined]


def test_a_slot_that_is_taken_and_a_stale_one_are_errors() -> None:
    offloads, other = offloads_of(512, 512), (1, 0, "0.block")
    for key in (KEY, other):
        with offloads.saving(key, [], Stream.COMPUTE):
            offloads.keep(torch.ones(2))
    offloads.offload(KEY, 0)
    with pytest.raises(OffloadError, match="which holds"):
        offloads.offload(other, 0)
    with pytest.raises(OffloadError, match="not in slot 1"):
        offloads.reload(KEY, 1)
    with pytest.raises(AssertionError, match="is on the host"):
        offloads.finish()
