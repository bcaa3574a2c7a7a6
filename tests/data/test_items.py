"""Made-up items: placeholders that agree with sizes, items that show the text behind them, for every reader
alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.data import ItemLimits, Loader, Packing
from braid.data.items import NOISE
from braid.encoders import Encoder, Projector
from braid.errors import DataError
from braid.model.multimodal import mask_placeholders
from tests.data.helpers import write_source

IDS = {"vision": 1000, "audio": 1001}
"""Placeholders; ids of text are below 1000, and have 10 bits."""
BITS = 10
FIELDS = ("tokens_BT", "labels_BT", "loss_mask_BT", "positions_BT", "documents_BT", "sample_B")


def limits(
    name: str = "vision", *, items: int = 2, patches: int = 8, group: int = 2, input: int = 12
) -> ItemLimits:
    encoder = Encoder(pattern="-", hidden=4, input=input, group=group, projector=Projector(width=4))
    return ItemLimits(encoder=encoder, token=IDS[name], most_items=items, most_patches=patches)


def plain(loader: Loader) -> Loader:
    return replace(loader, synthetic={})


def one_document(folder: Path, tokens: int, length: int, **settings: Any) -> Loader:
    source = write_source(folder / "one", [[place * 7 % 1000 for place in range(tokens)]])
    return Loader(source, length=length, **{"seed": 0, "synthetic": {"vision": limits()}} | settings)


@dataclass(frozen=True)
class Row:
    """A sample: all its tokens, the last of which is only a label, and the document of each."""

    tokens: list[int]
    documents: list[int]


def rows_of(loader: Loader, samples: range) -> list[Row]:
    batch = loader.batch(samples)
    last = [span.starts_S[-1] for span in loader.read_text(samples)]
    return [
        Row(tokens=[*tokens, labels[-1]], documents=[*documents, documents[-1] + int(starts)])
        for tokens, labels, documents, starts in zip(
            batch.tokens_BT.tolist(), batch.labels_BT.tolist(), batch.documents_BT.tolist(), last, strict=True
        )
    ]


def runs(tokens: list[int], token: int) -> list[range]:
    """The places of all placeholders of a module that stand side by side."""
    places = [place for place, each in enumerate(tokens) if each == token]
    grouped = groupby(enumerate(places), lambda pair: pair[1] - pair[0])
    members = [[place for _, place in group] for _, group in grouped]
    return [range(group[0], group[-1] + 1) for group in members]


def shown(patches_NI: Tensor) -> list[int]:
    """The ids whose bits the patches show, for patches of at least `BITS` numbers."""
    bits_NB = (patches_NI[:, :BITS] > 0).long()
    return (bits_NB << torch.arange(BITS)).sum(1).tolist()  # type: ignore[no-any-return]


def check_sample(loader: Loader, sample: int, row: Row) -> None:
    """Item by item: its size is allowed, its placeholders lie inside a document, it shows what follows."""
    for name, source in loader.items.items():
        allowed, (sizes,) = loader.synthetic[name], source.sizes([sample])
        assert len(sizes) <= allowed.most_items
        assert sum(sizes) <= allowed.most_patches
        assert all(size > 0 and size % allowed.encoder.group == 0 for size in sizes)
        found = runs(row.tokens, allowed.token)
        assert [len(run) for run in found] == [allowed.encoder.rows(size) for size in sizes]
        for number, (size, run) in enumerate(zip(sizes, found, strict=True)):
            patches_NI, grids = source.read([(sample, number)])
            assert list(grids) == [(1, size)]
            assert patches_NI.shape == (size, source.input)
            assert patches_NI.dtype == torch.float32
            assert shown(patches_NI.flip(0)) == row.tokens[run.stop : run.stop + size]
            assert ((patches_NI.abs() - 1).abs() <= NOISE + 1e-6).all()
            assert run.start > 0
            assert len(set(row.documents[run.start - 1 : run.stop + size])) == 1
            assert row.documents[run.start] >= 0


module_limits = st.builds(
    dict,
    items=st.integers(1, 4),
    group=st.integers(1, 3),
    patches=st.integers(0, 14),
    input=st.integers(BITS, 25),
)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1),
    length=st.integers(1, 40),
    packing=st.sampled_from(["concatenate", "documents"]),
    chosen=st.dictionaries(st.sampled_from(list(IDS)), module_limits),
    seed=st.integers(0, 2**63 - 1),
    first=st.integers(0, 2**40),
)
def test_text_with_items_is_text_whose_items_show_what_follows(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    length: int,
    packing: Packing,
    chosen: Mapping[str, dict[str, int]],
    seed: int,
    first: int,
) -> None:
    documents = [[(31 * d + place) % 1000 for place in range(size)] for d, size in enumerate(sizes)]
    masks = [[place % 5 != 1 for place in range(size)] for size in sizes]
    source = write_source(tmp_path_factory.mktemp("s") / "s", documents, masks=masks)
    synthetic = {name: limits(name, **given_limits) for name, given_limits in chosen.items()}
    length = min(length, sum(sizes) - 1) if packing == "concatenate" else length
    loader = Loader(source, length, seed, packing, synthetic)
    samples = range(first, first + 6)
    batch, text, ids = loader.batch(samples), plain(loader).batch(samples), torch.tensor(list(IDS.values()))
    for sample, row in zip(samples, rows_of(loader, samples), strict=True):
        check_sample(loader, sample, row)
    for found_BT, expected_BT in ((batch.tokens_BT, text.tokens_BT), (batch.labels_BT, text.labels_BT)):
        assert torch.equal(found_BT.where(~torch.isin(found_BT, ids), expected_BT), expected_BT)
    assert torch.equal(batch.labels_BT[:, :-1], batch.tokens_BT[:, 1:])
    assert torch.equal(batch.labels_BT[:, -1], text.labels_BT[:, -1])
    masked = mask_placeholders(replace(text, labels_BT=batch.labels_BT), IDS)
    assert torch.equal(batch.loss_mask_BT, masked.loss_mask_BT)
    for name in ("positions_BT", "documents_BT", "sample_B"):
        assert torch.equal(getattr(batch, name), getattr(text, name))


def test_samples_have_none_to_most_items_and_use_all_patches(tmp_path: Path) -> None:
    loader = one_document(tmp_path, 4001, 40, synthetic={"vision": limits(items=3, patches=8)})
    sizes = loader.items["vision"].sizes(range(300))
    assert {len(each) for each in sizes} == {0, 1, 2, 3}
    assert max(map(sum, sizes)) == 8
    assert {size for each in sizes for size in each} == {2, 4, 6, 8}


def test_a_sample_without_room_has_fewer_items(tmp_path: Path) -> None:
    """An item of one group needs a token before it, its row, and two tokens to show: four of T + 1."""
    counts = {}
    for length in (2, 3, 6, 40):
        loader = one_document(tmp_path / str(length), 400, length)
        counts[length] = sum(map(len, loader.items["vision"].sizes(range(50))))
        assert not loader.batch([]).tokens_BT.numel()
    assert counts[2] == 0
    assert 0 < counts[3] < counts[6] < counts[40]


def two_modules(folder: Path) -> Loader:
    both = {"vision": limits(patches=12), "audio": limits("audio", group=1, input=5, items=3)}
    return one_document(folder, 3000, 48, synthetic=both)


def wanted_of(loader: Loader, name: str, samples: range) -> list[tuple[int, int]]:
    sizes = loader.items[name].sizes(samples)
    return [
        (sample, number) for sample, each in zip(samples, sizes, strict=True) for number in range(len(each))
    ]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_whoever_asks_gets_the_same(tmp_path: Path, ranks: int) -> None:
    """Tokens by lanes of the text, items by runs that lanes of an encoder hold, cut anywhere in a sample."""
    loader, samples = two_modules(tmp_path), range(30, 60)
    whole = loader.batch(samples)
    for rank in range(ranks):
        part = two_modules(tmp_path / str(rank)).batch(samples[rank::ranks])
        for name in FIELDS:
            assert torch.equal(getattr(part, name), getattr(whole, name)[rank::ranks])
    for name, source in loader.items.items():
        sizes, wanted = source.sizes(samples), wanted_of(loader, name, samples)
        assert [source.sizes([sample])[0] for sample in samples] == sizes
        lanes = [
            wanted[len(wanted) * lane // ranks : len(wanted) * (lane + 1) // ranks] for lane in range(ranks)
        ]
        patches_NI = source.read(wanted).patches_NI
        assert patches_NI.shape == (sum(map(sum, sizes)), source.input)
        assert torch.equal(torch.cat([source.read(lane).patches_NI for lane in lanes]), patches_NI)
        lengths = [sizes[sample - samples.start][number] for sample, number in wanted]
        backwards = torch.cat(list(reversed(patches_NI.split(lengths))))
        assert torch.equal(source.read(list(reversed(wanted))).patches_NI, backwards)


def test_a_lane_without_items(tmp_path: Path) -> None:
    source = one_document(tmp_path, 400, 40).items["vision"]
    assert source.read([]).patches_NI.shape == (0, 12)
    assert source.read([]).patches_NI.dtype == torch.float32
    assert source.sizes([]) == []


def test_few_numbers_in_a_patch_are_the_lowest_bits(tmp_path: Path) -> None:
    """Also if an id has more bits; and more numbers are the same bits again."""
    few, many = (
        one_document(tmp_path / str(input), 3000, 48, synthetic={"vision": limits(input=input)})
        for input in (5, 25)
    )
    wanted = wanted_of(few, "vision", range(9))
    assert wanted == wanted_of(many, "vision", range(9))
    few_NI, many_NI = (each.items["vision"].read(wanted).patches_NI for each in (few, many))
    for start, stop in ((0, 5), (10, 15), (20, 25)):
        assert torch.equal(many_NI[:, start:stop] > 0, few_NI > 0)


def test_seed_module_and_sample_have_items_of_their_own(tmp_path: Path) -> None:
    same = {"vision": limits(), "audio": limits("audio")}
    loader, other = (one_document(tmp_path / str(s), 9000, 80, synthetic=same, seed=s) for s in (0, 1))
    sizes = [each.items[name].sizes(range(200)) for each in (loader, other) for name in same]
    sizes.append(loader.items["vision"].sizes(range(200, 400)))
    assert len({tuple(each) for each in sizes}) == len(sizes)
    # The second epoch visits the same texts, with other items in them.
    assert loader.samples_per_epoch == 112
    texts = [{tuple(span.ids_S) for span in loader.read_text(range(e * 112, e * 112 + 112))} for e in (0, 1)]
    assert texts[0] == texts[1]


def test_the_order_of_modules_does_not_matter(tmp_path: Path) -> None:
    loader = two_modules(tmp_path)
    turned = replace(loader, synthetic=dict(reversed(loader.synthetic.items())))
    assert list(turned.items) != list(loader.items)
    assert turned.fingerprint == loader.fingerprint
    assert torch.equal(turned.batch(range(40)).tokens_BT, loader.batch(range(40)).tokens_BT)


def test_resuming_on_other_ranks_sees_the_same_items(tmp_path: Path) -> None:
    """12 samples by 2 ranks, then 12 by 3: together those that one rank reads."""
    loader = two_modules(tmp_path)
    read, consumed = [], 0
    for ranks, steps in ((2, 6), (3, 4)):
        for _ in range(steps):
            for rank in range(ranks):
                own = range(consumed + rank, consumed + rank + 1)
                read.append(loader.items["vision"].read(wanted_of(loader, "vision", own)).patches_NI)
            consumed += ranks
    expected = loader.items["vision"].read(wanted_of(loader, "vision", range(24)))
    assert torch.equal(torch.cat(read), expected.patches_NI)


def test_the_fingerprint_covers_items_and_is_as_before_without_them(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [[1, 2, 3, 4, 5, 0]])
    loader = Loader(source, length=3, seed=0)
    assert loader.fingerprint == "6239a27e0caa572099b88ac68ae0ef30bc82fea43b1587ad789c2b158331bf4a"
    different = [
        {"vision": limits()},
        {"vision": limits(items=3)},
        {"vision": limits(patches=10)},
        {"vision": limits(group=1)},
        {"vision": limits(input=13)},
        {"vision": limits("audio")},
        {"audio": limits()},
        {"vision": limits(), "audio": limits("audio")},
    ]
    loaders = [loader, *(replace(loader, synthetic=synthetic) for synthetic in different)]
    assert len({each.fingerprint for each in loaders}) == len(loaders)


def test_text_with_a_placeholder_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [[*range(1, 13), 77, *range(14, 18)]])
    loader = Loader(source, 8, 0, synthetic={"vision": replace(limits(), token=77)})
    with_it, without = sorted(range(2), key=lambda sample: 77 not in loader.read_text([sample])[0].ids_S)
    remedy = r"set modules\.vision\.token to an id that no text has"
    message = rf"sample {with_it}: token 4 of its text is 77, the placeholder of modules\.vision: {remedy}"
    for read in (loader.batch, loader.items["vision"].sizes):
        read([without])
        with pytest.raises(DataError, match=message):
            read([with_it])
