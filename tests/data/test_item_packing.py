"""Packing with images: every document once, no image cut, and no sample with more than its module takes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.data import ItemLimits, Loader, Mixture, Packing, Source
from braid.data.images import image_grid
from braid.data.item_stream import ItemStream, patches_of_each
from braid.data.packing import ConcatenatedItems, Packed, first_fit, first_fit_within
from braid.errors import DataError
from tests.data.helpers import write_source
from tests.data.pictures import TOKEN, Shown, limits, png, write_documents
from tests.data.test_items import FIELDS
from tests.data.test_items import limits as synthetic_limits

shown = st.builds(Shown, st.integers(1, 40), st.integers(1, 40)) | st.builds(
    Shown, st.integers(1, 20), st.integers(1, 20), st.integers(1, 7), st.just("video")
)
parts = st.lists(st.integers(1, 999) | shown, max_size=10).map(lambda found: [*found, 0])
document_lists = st.lists(parts, min_size=1, max_size=8).filter(
    lambda found: any(isinstance(part, Shown) for document in found for part in document)
)
module_limits = st.builds(
    limits,
    items=st.integers(1, 4),
    patches=st.integers(1, 8).map(lambda rows: 4 * rows),
    frames=st.integers(1, 3),
)


def expanded(documents: list[list[int | Shown]], allowed: ItemLimits) -> list[list[list[int]]]:
    """Brute force: each document as units, a token of text each, or all placeholders of an item."""
    frames = allowed.encoder.pixels.frames
    units = []
    for document in documents:
        counts = [-(-part.frames // frames) for part in document if isinstance(part, Shown)]
        most = patches_of_each(sum(counts), allowed)
        found: list[list[int]] = []
        for part in document:
            if isinstance(part, Shown):
                rows, columns = image_grid(part.height, part.width, allowed.encoder, most)
                found += [[TOKEN] * (rows * columns // 4)] * -(-part.frames // frames)
            else:
                found.append([part])
        units.append(found)
    return units


def stream_of(units: list[list[list[int]]]) -> list[int]:
    return [token for document in units for unit in document for token in unit]


def opened(
    folder: Path, documents: list[list[int | Shown]], allowed: ItemLimits, length: int, packing: Packing
) -> Loader:
    source = write_documents(folder / "s", documents, shard_tokens=9)
    return Loader(source, length, 0, packing, images={"vision": allowed})


def check_limits(loader: Loader, allowed: ItemLimits) -> None:
    """Rows and placeholders agree in every sample, and limits are kept."""
    samples = range(loader.samples_per_epoch)
    tokens_BT = loader.batch(samples).tokens_BT
    for tokens_T, sizes in zip(tokens_BT, loader.items["vision"].sizes(samples), strict=True):
        assert len(sizes) <= allowed.most_items
        assert sum(sizes) <= allowed.most_patches
        assert all(size > 0 and size % 4 == 0 for size in sizes)
        assert int((tokens_T == TOKEN).sum()) == sum(sizes) // 4


@settings(deadline=None, max_examples=80)
@given(documents=document_lists, allowed=module_limits, more=st.integers(0, 12))
def test_concatenated_samples_are_the_stream_cut_between_items(
    tmp_path_factory: pytest.TempPathFactory, documents: list, allowed: ItemLimits, more: int
) -> None:
    length = allowed.most_patches // 4 + more
    loader = opened(tmp_path_factory.mktemp("s"), documents, allowed, length, "concatenate")
    (samples,) = loader.samples
    assert isinstance(samples, ConcatenatedItems)
    units = expanded(documents, allowed)
    stream = stream_of(units)
    assert samples.source.tokens == len(stream)
    check_limits(loader, allowed)
    # In the order of the stream: inputs are the stream, but for the very last token, which is only a label.
    inputs, labels = [], []
    for sample in range(samples.count):
        span = samples.read(sample)
        assert len(span.ids_S) == length + 1
        ((start, stop),) = samples.ranges(sample)
        held = length + 1 - span.padding
        assert held - (stop - start) in (0, 1)
        assert span.ids_S[:held].tolist() == stream[start : start + held]
        assert not span.loss_mask_S[span.ids_S == TOKEN].any()
        assert not span.loss_mask_S[held:].any()
        inputs += span.ids_S[: min(stop - start, length)].tolist()
        labels += range(start + 1, start + held)
        assert span.padding == 0 or stop == len(stream) or stream[stop] == TOKEN, (
            "only items end a sample early"
        )
    assert inputs in (stream, stream[:-1])
    counts = Counter(labels)
    assert set(counts.values()) <= {1}
    assert all(place in counts for place in range(1, len(stream)) if stream[place] != TOKEN), (
        "text is a label once"
    )


@settings(deadline=None, max_examples=80)
@given(documents=document_lists, allowed=module_limits, more=st.integers(0, 30))
def test_packed_samples_hold_every_document_once_and_whole(
    tmp_path_factory: pytest.TempPathFactory, documents: list, allowed: ItemLimits, more: int
) -> None:
    length = allowed.most_patches // 4 + more
    units = expanded(documents, allowed)
    kept, cut_tokens, cut_items = [], 0, 0
    for document in units:
        fitting = fits(document, allowed, length + 1)
        kept.append([token for unit in document[:fitting] for token in unit])
        cut_tokens += sum(map(len, document[fitting:]))
        cut_items += sum(unit[0] == TOKEN for unit in document[fitting:])
    folder = tmp_path_factory.mktemp("s")
    if not any(kept):
        with pytest.raises(DataError, match=r"no document of .* fits into a sample"):
            opened(folder, documents, allowed, length, "documents")
        return
    loader = opened(folder, documents, allowed, length, "documents")
    (samples,) = loader.samples
    assert isinstance(samples, Packed)
    check_limits(loader, allowed)
    assert (samples.cut_tokens, samples.cut_items) == (cut_tokens, cut_items)
    found = []
    for sample in range(samples.count):
        span = samples.read(sample)
        held = length + 1 - span.padding
        starts = [*np.flatnonzero(span.starts_S[:held]).tolist(), held]
        found += [span.ids_S[a:b].tolist() for a, b in pairwise(starts)]
        assert not span.loss_mask_S[held:].any()
    assert sorted(found) == sorted(each for each in kept if each)


def fits(document: list[list[int]], allowed: ItemLimits, width: int) -> int:
    """How many units of a document fit into a sample; none at the end of which an item is, if it is cut."""
    tokens = items = patches = count = 0
    for unit in document:
        is_item = unit[0] == TOKEN
        tokens, items, patches = tokens + len(unit), items + is_item, patches + is_item * 4 * len(unit)
        if tokens > width or items > allowed.most_items or patches > allowed.most_patches:
            while count and document[count - 1][0] == TOKEN:
                count -= 1
            return count
        count += 1
    return count


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 5)), max_size=30),
)
def test_first_fit_of_several_kinds_is_that_of_brute_force(sizes: list[tuple[int, int, int]]) -> None:
    capacity, rooms, expected = (9, 3, 5), [], []
    for size in sizes:
        place = next(
            (n for n, room in enumerate(rooms) if all(r >= s for r, s in zip(room, size, strict=True))), None
        )
        if place is None:
            place = len(rooms)
            rooms.append(capacity)
        rooms[place] = tuple(r - s for r, s in zip(rooms[place], size, strict=True))
        expected.append(place)
    sizes_ND = np.asarray(sizes, np.int64).reshape(-1, 3)
    assert first_fit_within(sizes_ND, capacity).tolist() == expected
    assert first_fit_within(sizes_ND[:, :1], (9,)).tolist() == first_fit(sizes_ND[:, 0], 9).tolist()


def test_items_of_a_document_share_the_patches_of_a_sample(tmp_path: Path) -> None:
    """A large image alone takes all; two take half each, and fit together. No more than `most_items` share."""
    large = Shown(400, 800)
    documents = [[large, 1, 0], [large, 1, large, 2, 0], [large, 3] * 9 + [0]]
    allowed, expected = limits(items=4, patches=64), {"concatenate": 9, "documents": 4}
    for packing in ("concatenate", "documents"):
        loader = opened(tmp_path / packing, documents, allowed, 40, packing)
        sizes = loader.items["vision"].sizes(range(loader.samples_per_epoch))
        # 16 blocks of 2 x 2 patches are 2 x 5 at an aspect ratio of 1 : 2, 8 are 2 x 4, and 4 are 1 x 2.
        assert Counter(size for each in sizes for size in each) == {40: 1, 32: 2, 8: expected[packing]}


def test_an_image_that_no_sample_could_hold_is_refused(tmp_path: Path) -> None:
    allowed = limits(patches=64)
    message = r"most_patches is 64, so an image may have 16 rows, and a sample has 15 tokens: .* to 60 or less"
    with pytest.raises(DataError, match=message):
        opened(tmp_path, [[Shown(9, 9), 0]], allowed, 15, "documents")
    opened(tmp_path / "fits", [[Shown(9, 9), 0]], allowed, 16, "documents")


# --------------------------------------------------------------------------------------------- mixtures, ranks


def texts(folder: Path, documents: int = 12) -> Source:
    return write_source(folder, [[1 + (7 * d + t) % 900 for t in range(9 + d)] for d in range(documents)])


def mixed(folder: Path, packing: Packing) -> Loader:
    """Images of two sources, and text alone."""
    some = [[Shown(4 + d, 9), *range(1, 6 + d), Shown(8, 3 + d), 5, 0] for d in range(6)]
    others = [[*range(1, 9), Shown(5, 5, 3, "video"), 5, 0] for _ in range(5)]
    data = png(4, 4)
    sources = [write_documents(folder / "a", some, data=data), write_documents(folder / "b", others, data=data)]
    mixture = Mixture(sources=(sources[0], texts(folder / "t"), sources[1]), weights=(2.0, 1.0, 1.0))
    return Loader(mixture, 24, 3, packing, images={"vision": limits(items=3, patches=48, frames=2)})


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_the_order_is_the_same_on_any_number_of_ranks(tmp_path: Path, packing: Packing) -> None:
    loader, samples = mixed(tmp_path / "whole", packing), range(40)
    whole, vision = loader.batch(samples), loader.items["vision"]
    sizes = vision.sizes(samples)
    assert {len(each) for each in sizes} >= {0, 2}
    wanted = [(sample, n) for sample, each in zip(samples, sizes, strict=True) for n in range(len(each))]
    patches_NI = vision.read(wanted).patches_NI
    for ranks in (2, 3):
        for rank in range(ranks):
            part = mixed(tmp_path / f"{ranks}-{rank}", packing)
            batch = part.batch(samples[rank::ranks])
            for name in FIELDS:
                assert torch.equal(getattr(batch, name), getattr(whole, name)[rank::ranks])
            assert part.items["vision"].sizes(samples[rank::ranks]) == sizes[rank::ranks]
            assert part.fingerprint == loader.fingerprint
        lanes = [wanted[len(wanted) * n // ranks : len(wanted) * (n + 1) // ranks] for n in range(ranks)]
        assert torch.equal(torch.cat([vision.read(lane).patches_NI for lane in lanes]), patches_NI)


def test_sources_of_text_are_cut_as_without_images(tmp_path: Path) -> None:
    source = texts(tmp_path / "t")
    plain = Loader(source, 16, 0)
    beside = Loader(source, 16, 0, images={"vision": limits()})
    assert beside.samples_per_epoch == plain.samples_per_epoch
    for name in FIELDS:
        assert torch.equal(getattr(beside.batch(range(9)), name), getattr(plain.batch(range(9)), name))
    assert beside.items["vision"].sizes(range(3)) == [(), (), ()]


def test_the_fingerprint_covers_everything_that_makes_items(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "s", [[Shown(9, 9), *range(1, 30), 0]])
    other = write_documents(tmp_path / "o", [[Shown(9, 10), *range(1, 30), 0]])
    different = [
        limits(),
        limits(items=3),
        limits(patches=20),
        limits(group=1),
        limits(patch=3),
        limits(frames=2),
        limits(channels=1, mean=(0.5,), std=(0.5,)),
        limits(mean=(0.5, 0.5, 0.5)),
        limits(std=(0.5, 0.5, 0.5)),
    ]
    loaders = [Loader(source, 20, 0, images={"vision": each}) for each in different]
    loaders += [
        Loader(source, 20, 0, images={"sight": limits()}),
        Loader(other, 20, 0, images={"vision": limits()}),
    ]
    assert len({loader.fingerprint for loader in loaders}) == len(loaders)
    again = Loader(source, 20, 0, images={"vision": limits()})
    assert again.fingerprint == loaders[0].fingerprint


def test_images_need_a_module_that_reads_them(tmp_path: Path) -> None:
    documents = [[Shown(9, 9), Shown(5, 5, 2, "video"), Shown(5, 5, 2, "video"), 0]]
    source = write_documents(tmp_path / "s", documents)
    with pytest.raises(DataError, match=r"/s has 1 image and 2 videos, and no module reads them"):
        Loader(source, 1, 0)


def test_text_with_the_placeholder_is_refused(tmp_path: Path) -> None:
    """In a source of text too, whose format may not know the tokenizer."""
    with_images = write_documents(tmp_path / "i", [[5, 0], [Shown(2, 2), 3, 77, 4, 0]])
    text = write_source(tmp_path / "t", [[1, 2, 77, 3]])
    allowed = ItemLimits(encoder=limits().encoder, token=77, most_items=1, most_patches=4)
    for source, place in ((with_images, "i: document 1, offset 2"), (text, "t: document 0, offset 2")):
        loader = Loader(source, 3, 0, "documents", images={"vision": allowed})
        message = rf"sample \d: .*/{place}: its text has token 77, the placeholder of modules\.vision"
        with pytest.raises(DataError, match=message):
            loader.batch(range(loader.samples_per_epoch))


def test_a_placeholder_may_be_the_marker(tmp_path: Path) -> None:
    """The marker is the first id that no text has, and so is a good placeholder."""
    source = write_documents(tmp_path / "s", [[1, Shown(4, 4), 2, 0]])
    assert source.read(0, source.tokens).ids_S.tolist() == [1, 1000, 2, 0]
    loader = Loader(source, 6, 0, "documents", images={"vision": limits(patch=1)})
    assert loader.batch([0]).tokens_BT[0].tolist() == [1, 1000, 1000, 1000, 1000, 2]


def test_made_up_items_keep_away_from_images(tmp_path: Path) -> None:
    documents = [[*range(1, 12), Shown(8, 8), *range(20, 32), 0] for _ in range(20)]
    source = write_documents(tmp_path / "s", documents)
    made_up = synthetic_limits("audio")
    with_both = Loader(source, 40, 0, synthetic={"audio": made_up}, images={"vision": limits()})
    images_only = Loader(source, 40, 0, images={"vision": limits()})
    samples = range(12)
    both_BT, images_BT = with_both.batch(samples).tokens_BT, images_only.batch(samples).tokens_BT
    assert torch.equal(both_BT == TOKEN, images_BT == TOKEN)
    assert (both_BT == made_up.token).any()
    assert with_both.items["vision"].sizes(samples) == images_only.items["vision"].sizes(samples)


def test_reading_any_part_of_a_stream(tmp_path: Path) -> None:
    """Between any two positions: what a read of all has there, whatever is cut."""
    documents = [[1, Shown(6, 6), 2, 0], [Shown(4, 8, 3, "video"), Shown(2, 2), 5, 0], [7, 0]]
    source = write_documents(tmp_path / "s", documents, shard_tokens=5)
    stream = ItemStream(source=source, module="vision", limits=limits(patches=32, items=4))
    whole = stream.read(0, stream.tokens)
    assert whole.ids_S.tolist() == stream_of(expanded(documents, stream.limits))
    assert np.flatnonzero(whole.starts_S).tolist() == stream.document_offsets()[:-1].tolist()
    for start in range(stream.tokens + 1):
        for stop in range(start, stream.tokens + 1):
            part = stream.read(start, stop)
            for name in ("ids_S", "loss_mask_S", "starts_S"):
                assert np.array_equal(getattr(part, name), getattr(whole, name)[start:stop])
