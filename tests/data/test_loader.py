"""The loader: what a batch holds, and that samples are neither lost nor repeated."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.data import Loader, Mixture
from braid.data.packing import Packed, first_fit
from braid.errors import DataError
from braid.model.context import MicroBatch
from tests.data.helpers import write_source

FIELDS = ("tokens_BT", "labels_BT", "loss_mask_BT", "positions_BT", "documents_BT")


def pairs(batch: MicroBatch) -> Counter[tuple[int, int]]:
    """Every (token, next token) that counts in the loss."""
    mask = batch.loss_mask_BT
    return Counter(zip(batch.tokens_BT[mask].tolist(), batch.labels_BT[mask].tolist(), strict=True))


def document_pairs(documents: list[list[int]]) -> Counter[tuple[int, int]]:
    return Counter(pair for document in documents for pair in pairwise(document))


def distinct_documents(sizes: list[int]) -> list[list[int]]:
    """Documents in which every id is another one, so that a pair of ids says where it came from."""
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def check_layout(batch: MicroBatch, length: int) -> None:
    """Rules that hold for every batch, looked at token by token."""
    for name in FIELDS:
        tensor = getattr(batch, name)
        assert tensor.shape[1] == length
        assert tensor.dtype == (torch.bool if name == "loss_mask_BT" else torch.int64)
    for documents, positions in zip(batch.documents_BT.tolist(), batch.positions_BT.tolist(), strict=True):
        assert documents[0] == positions[0] == 0
        for t in range(1, length):
            new = documents[t] != documents[t - 1]
            assert documents[t] in (documents[t - 1] + new, -1)
            assert documents[t - 1] != -1 or documents[t] == -1
            assert positions[t] == (0 if new else positions[t - 1] + 1)


def test_a_batch_in_full(tmp_path: Path) -> None:
    masks = [None, [False, False, True, True], None]
    source = write_source(tmp_path / "s", [[1, 2, 0], [3, 4, 5, 0], [6, 0]], masks=masks)
    batch = Loader(source, length=8, seed=0).batch([0])
    assert batch.tokens_BT.tolist() == [[1, 2, 0, 3, 4, 5, 0, 6]]
    assert batch.labels_BT.tolist() == [[2, 0, 3, 4, 5, 0, 6, 0]]
    assert batch.loss_mask_BT.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 1]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]


def test_a_packed_batch_in_full(tmp_path: Path) -> None:
    documents = [[1, 2, 0], [3, 4, 5, 0], [6, 0], [7, 8, 9, 10, 11, 12, 0]]
    source = write_source(tmp_path / "s", documents, masks=[None, [False, False, True, True], None, None])
    loader = Loader(source, length=5, seed=0, packing="documents")
    (samples,) = loader.samples
    assert isinstance(samples, Packed)
    assert (samples.cut_documents, samples.cut_tokens) == (1, 1)
    batch = loader.batch(range(3))
    rows = {tuple(row): i for i, row in enumerate(batch.tokens_BT.tolist())}
    assert set(rows) == {(1, 2, 0, 6, 0), (3, 4, 5, 0, 0), (7, 8, 9, 10, 11)}
    two, padded, cut = rows[1, 2, 0, 6, 0], rows[3, 4, 5, 0, 0], rows[7, 8, 9, 10, 11]
    assert batch.loss_mask_BT[two].int().tolist() == [1, 1, 0, 1, 0]
    assert batch.documents_BT[two].tolist() == [0, 0, 0, 1, 1]
    assert batch.positions_BT[two].tolist() == [0, 1, 2, 0, 1]
    assert batch.loss_mask_BT[padded].int().tolist() == [0, 1, 1, 0, 0]
    assert batch.documents_BT[padded].tolist() == [0, 0, 0, 0, -1]
    assert batch.positions_BT[padded].tolist() == [0, 1, 2, 3, 0]
    assert batch.labels_BT[cut].tolist() == [8, 9, 10, 11, 12]
    assert batch.loss_mask_BT[cut].all()


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda sizes: sum(sizes) > 0),
    length=st.integers(1, 14),
    shard_tokens=st.integers(1, 40),
)
def test_packed_documents_stay_whole_and_apart(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, shard_tokens: int
) -> None:
    documents = distinct_documents(sizes)
    source = write_source(tmp_path_factory.mktemp("s") / "s", documents, shard_tokens=shard_tokens)
    loader = Loader(source, length=length, seed=1, packing="documents")
    batch = loader.batch(range(loader.samples_per_epoch))
    check_layout(batch, length)
    kept = [document[: length + 1] for document in documents]
    assert pairs(batch) == document_pairs(kept)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda sizes: sum(sizes) > 1),
    length=st.integers(1, 14),
    shard_tokens=st.integers(1, 40),
)
def test_concatenated_samples_predict_each_token_once_and_never_across_documents(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, shard_tokens: int
) -> None:
    documents = distinct_documents(sizes)
    length = min(length, sum(sizes) - 1)
    source = write_source(tmp_path_factory.mktemp("s") / "s", documents, shard_tokens=shard_tokens)
    loader = Loader(source, length=length, seed=1)
    batch = loader.batch(range(loader.samples_per_epoch))
    check_layout(batch, length)
    used = (sum(sizes) - 1) // length * length + 1
    kept = [[i for i in document if i < used] for document in documents]
    assert pairs(batch) == document_pairs(kept)


@given(sizes=st.lists(st.integers(1, 10), max_size=40))
def test_first_fit_equals_its_definition(sizes: list[int]) -> None:
    room: list[int] = []
    expected = []
    for size in sizes:
        fits = [i for i, left in enumerate(room) if left >= size]
        if not fits:
            room.append(10)
            fits = [len(room) - 1]
        room[fits[0]] -= size
        expected.append(fits[0])
    assert first_fit(np.asarray(sizes, np.int64), 10).tolist() == expected


def three_sources(folder: Path) -> Mixture:
    documents = distinct_documents([31, 17, 23])
    sources = tuple(write_source(folder / str(i), [document]) for i, document in enumerate(documents))
    return Mixture(sources=sources, weights=(0.5, 0.3, 0.2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_the_same_samples(tmp_path: Path, ranks: int) -> None:
    mixture = three_sources(tmp_path)
    whole = Loader(mixture, length=4, seed=9).batch(range(40))
    loaders = [Loader(mixture, length=4, seed=9) for _ in range(ranks)]
    parts = {rank: loader.batch(range(rank, 40, ranks)) for rank, loader in enumerate(loaders)}
    for name in FIELDS:
        for rank, part in parts.items():
            assert torch.equal(getattr(part, name), getattr(whole, name)[rank::ranks])


def test_resuming_with_other_ranks_loses_no_sample(tmp_path: Path) -> None:
    """20 samples read by 2 ranks, then 20 by 4: together the 40 that one rank reads."""
    mixture = three_sources(tmp_path)
    whole = Loader(mixture, length=4, seed=9).batch(range(40)).tokens_BT.tolist()
    consumed, read = 0, []
    for ranks, steps in ((2, 10), (4, 5)):
        for _ in range(steps):
            for rank in range(ranks):
                read += Loader(mixture, length=4, seed=9).batch([consumed + rank]).tokens_BT.tolist()
            consumed += ranks
    assert read == whole


def test_an_epoch_visits_everything_and_the_next_in_another_order(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [list(range(401))])
    loader = Loader(source, length=4, seed=0)
    assert loader.samples_per_epoch == 100
    first, second = (loader.batch(range(start, start + 100)).tokens_BT[:, 0].tolist() for start in (0, 100))
    assert sorted(first) == sorted(second) == list(range(0, 400, 4))
    assert first != second != sorted(second)


def test_mixed_samples_come_from_the_right_source(tmp_path: Path) -> None:
    batch = Loader(three_sources(tmp_path), length=4, seed=9).batch(range(10))
    sources = np.searchsorted([31, 48], batch.tokens_BT[:, 0].numpy(), side="right")
    assert np.bincount(sources).tolist() == [5, 3, 2]


def test_all_masked_and_empty_batches(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [[1, 2, 3, 0]], masks=[[False] * 4])
    for packing in ("concatenate", "documents"):
        loader = Loader(source, length=3, seed=0, packing=packing)  # type: ignore[arg-type]
        assert not loader.batch([0, 1]).loss_mask_BT.any()
        assert loader.batch([]).tokens_BT.shape == (0, 3)


def test_a_batch_moves_to_a_device(tmp_path: Path) -> None:
    batch = Loader(write_source(tmp_path / "s", [[1, 2, 3, 0]]), length=3, seed=0).batch([0])
    batch = batch.to(torch.device("meta"))
    assert all(getattr(batch, name).device.type == "meta" for name in FIELDS)


def test_too_little_data_says_how_much_is_needed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [[1, 2], [3]])
    with pytest.raises(DataError, match="holds 3 tokens, one sample needs 9"):
        Loader(source, length=8, seed=0)
    assert Loader(source, length=2, seed=0).samples_per_epoch == 1
    assert Loader(source, length=8, seed=0, packing="documents").samples_per_epoch == 1
    with pytest.raises(DataError, match="1 documents and 0 tokens"):
        Loader(write_source(tmp_path / "empty", [[]]), length=8, seed=0, packing="documents")
    with pytest.raises(DataError, match="sample of 0 tokens"):
        Loader(source, length=0, seed=0)


def test_the_fingerprint_covers_every_choice(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a", [[1, 2, 3, 4, 5, 0]])
    other = write_source(tmp_path / "b", [[1, 2, 3, 4, 6, 0]])
    loaders = [
        Loader(source, length=3, seed=0),
        Loader(source, length=4, seed=0),
        Loader(source, length=3, seed=1),
        Loader(source, length=3, seed=0, packing="documents"),
        Loader(other, length=3, seed=0),
        Loader(Mixture(sources=(source, other), weights=(1, 2)), length=3, seed=0),
        Loader(Mixture(sources=(source, other), weights=(1, 3)), length=3, seed=0),
        Loader(Mixture(sources=(other, source), weights=(1, 3)), length=3, seed=0),
    ]
    assert len({loader.fingerprint for loader in loaders}) == len(loaders)
    assert Loader(source, length=3, seed=0).fingerprint == loaders[0].fingerprint


def test_sources_of_a_mixture_have_orders_of_their_own(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [list(range(1, 200))])
    loader = Loader(Mixture(sources=(source, source), weights=(1, 1)), length=4, seed=1)
    tokens = loader.batch(range(40)).tokens_BT[:, 0]
    assert tokens[0::2].tolist() != tokens[1::2].tolist()
