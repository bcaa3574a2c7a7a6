"""Where canonical tensors lie in parameters: reading undoes writing, shards leave out and repeat nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.distributed.collectives import ALONE, Group
from braid.nn.canonical import Canonical, RowSpan, Shard, under
from braid.nn.linear import Linear, RowLinear

sizes = st.integers(1, 4)


@dataclass(frozen=True)
class Place:
    """A canonical tensor, the shape of the parameter that holds some of it, and the dim that shards cut."""

    tensor: Canonical
    parameter: tuple[int, ...]
    dim: int

    def numbered(self) -> Tensor:
        """A parameter whose entries are all different, none of them zero."""
        return torch.arange(1, 1 + prod(self.parameter)).view(self.parameter)

    def expected(self) -> Tensor:
        """What is held of the tensor, found by plain indexing."""
        rows, rest = (self.tensor.view or self.parameter[:1]), self.parameter[1:]
        return self.numbered().reshape(*rows, *rest)[self.tensor.index].reshape(self.tensor.held.shape)


def pieces(size: int) -> st.SearchStrategy[slice]:
    """Some neighbouring entries of a dim, all of them, or none."""
    some = [slice(start, stop) for start in range(size) for stop in range(start + 1, size + 1)]
    return st.sampled_from([slice(None), slice(0, 0), *some])


@st.composite
def parts(draw: st.DrawFn, place: Place) -> Place:
    """The same where the tensor is larger than what is held of it."""
    held = place.tensor.held.shape
    before = tuple(draw(st.integers(0, 3)) for _ in held)
    after = tuple(draw(st.integers(0, 3)) for _ in held)
    whole = tuple(map(sum, zip(before, held, after, strict=True)))
    return replace(place, tensor=replace(place.tensor, shape=whole, part=held, offset=before))


@st.composite
def dense(draw: st.DrawFn) -> Place:
    """Some rows of a matrix, or of a vector, whose rows may unfold to several dims; dim 0 is cut."""
    rows = draw(st.sampled_from([(5,), (1, 6), (2, 3), (4, 2), (3, 3, 2), (2, 4, 1), (2, 3, 4)]))
    rest = tuple(draw(st.lists(sizes, max_size=2)))
    unfolds = len(rows) > 1 or draw(st.booleans())
    chosen = rows[: draw(st.sampled_from(range(len(rows) + 1)))]
    index: tuple[int | slice, ...] = tuple(draw(pieces(size)) for size in chosen)
    if unfolds and index and draw(st.booleans()):
        index = (*index[:-1], draw(st.sampled_from(range(chosen[-1]))))
    held = torch.empty(rows, device="meta")[index].numel()
    shape = (held, *rest)
    tensor = Canonical(
        parameter="weight", shape=shape, fill="normal", view=rows if unfolds else (), index=index
    )
    return draw(parts(Place(tensor, (prod(rows), *rest), 0)))


@st.composite
def stacked(draw: st.DrawFn) -> Place:
    """One expert of many, in a parameter that may hold its gate and up together; the ffn dim is cut."""
    before = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))
    index = tuple(draw(st.integers(0, size - 1)) for size in before)
    tensor = Canonical(parameter="weight", shape=shape, fill="normal", index=index)
    dim = len(before) + draw(st.integers(0, len(shape) - 1))
    return draw(parts(Place(tensor, (*before, *shape), dim)))


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    """Ends of shards that together are a dim; some may be empty."""
    return st.lists(st.integers(0, size), max_size=4).map(lambda inner: [0, *sorted(inner), size])


places = dense() | stacked()


@settings(deadline=None)
@given(place=places)
def test_reading_finds_what_is_held_and_writing_puts_it_back(place: Place) -> None:
    tensor, parameter = place.tensor, place.numbered()
    assert torch.equal(tensor.read(parameter), place.expected())
    tensor.write(parameter, -place.expected())
    assert torch.equal(tensor.read(parameter), -place.expected())
    untouched = parameter > 0
    assert untouched.sum() == parameter.numel() - place.expected().numel()
    assert torch.equal(parameter[untouched], place.numbered()[untouched])


@settings(deadline=None)
@given(place=places)
def test_a_box_is_cut_out_of_the_whole_tensor(place: Place) -> None:
    held, whole = place.tensor.held, torch.arange(prod(place.tensor.shape)).view(place.tensor.shape)
    box = tuple(slice(start, start + size) for start, size in zip(held.offset, held.shape, strict=True))
    assert torch.equal(held.of(whole), whole[box])
    assert held.empty == (held.of(whole).numel() == 0)


@settings(max_examples=300, deadline=None)
@given(place=places, data=st.data())
def test_shards_hold_every_entry_once(place: Place, data: st.DataObject) -> None:
    tensor, dim = place.tensor, place.dim
    found, times = torch.zeros(tensor.shape, dtype=torch.int64), torch.zeros(tensor.shape, dtype=torch.int64)
    rebuilt = torch.zeros(place.parameter, dtype=torch.int64)
    for start, stop in pairwise(data.draw(cuts(place.parameter[dim]))):
        held = tensor.within(Shard(dim, start, stop))
        kept = place.numbered().narrow(dim, start, stop - start)
        held.of(found).copy_(held.read(kept))
        held.of(times).add_(1)
        held.write(rebuilt.narrow(dim, start, stop - start), held.of(found))
    assert torch.equal(tensor.held.of(found), place.expected())
    assert torch.equal(tensor.read(rebuilt), place.expected())
    assert torch.equal(times, (found > 0).long())
    assert times.sum() == place.expected().numel()
    assert (rebuilt > 0).sum() == place.expected().numel()


@settings(deadline=None)
@given(place=places)
def test_without_a_shard_it_is_the_whole_parameter(place: Place) -> None:
    assert place.tensor.within(None) == place.tensor.held


def test_a_tensor_by_default_is_whole_and_first() -> None:
    held = Canonical(parameter="weight", shape=(3, 2), fill="normal").held
    assert (held.offset, held.shape) == ((0, 0), (3, 2))


def test_writing_casts_to_the_parameter() -> None:
    tensor = Canonical(parameter="weight", shape=(2,), fill="normal", index=(slice(1, 3),))
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    tensor.write(parameter, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert parameter.tolist() == [0, 1, 2, 0]
    assert parameter.requires_grad


def test_neighbouring_rows_of_a_shard_are_read_without_a_copy() -> None:
    tensor = Canonical(parameter="weight", shape=(6, 2), fill="normal", view=(2, 3, 2), index=(1,))
    shard = torch.zeros(8, 2)
    tensor.within(Shard(0, 4, 12)).read(shard).fill_(1.0)
    assert shard.sum() == 12


def test_linear_parts_say_where_they_lie_and_who_has_them() -> None:
    pair = Group(name="tp", size=2, rank=1, handle=None)
    linear = Linear(3, (2, 4, 5), bias=True)
    part = linear.canonical_part((slice(None), slice(1, 3)), RowSpan(20, 80), pair)
    assert {name: tensor.shape for name, tensor in part.items()} == {"weight": (80, 3), "bias": (80,)}
    assert part["weight"].held.offset == (20, 0)
    assert part["weight"].held.shape == (20, 3)
    assert part["bias"].held.offset == (20,)
    assert all(tensor.copies is pair for tensor in part.values())
    assert Linear(3, 2, copies=pair).canonical()["weight"].copies is pair
    assert linear.canonical()["weight"].copies is ALONE


def test_row_linear_holds_columns_and_a_copy_of_the_bias() -> None:
    pair = Group(name="tp", size=2, rank=1, handle=None)
    tensors = RowLinear(3, 4, pair, bias=True).canonical()
    assert tensors["weight"].shape == (4, 6)
    assert (tensors["weight"].held.offset, tensors["weight"].held.shape) == ((0, 3), (4, 3))
    assert tensors["weight"].copies is ALONE
    assert tensors["bias"].copies is pair


def test_a_parent_tells_its_submodules_tensors_under_its_own_names() -> None:
    inner = {"weight": Canonical(parameter="weight", shape=(2,), fill="ones")}
    assert {name: tensor.parameter for name, tensor in under("a", "b", inner).items()} == {
        "a.weight": "b.weight"
    }
    assert list(under("", "b", inner)) == ["weight"]


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix = Canonical(parameter="weight", shape=(2, 2), fill="normal")
    assert matrix.decays
    assert not replace(matrix, shape=(4,)).decays
