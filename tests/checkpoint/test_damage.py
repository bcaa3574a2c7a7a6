"""A damaged checkpoint is never loaded: it is named, and the one before it is used."""

import random
import shutil

import pytest
import torch

from braid.checkpoint import (
    Piece,
    begin,
    commit,
    latest,
    prune,
    read,
    read_manifest,
    save,
    set_aside,
    verify,
    write_part,
)
from braid.errors import CheckpointError
from tests.checkpoint.helpers import all_same, flip_bit, mixed_tensors, whole


@pytest.fixture
def two_parts(tmp_path):
    """A checkpoint of two writing ranks, with every dtype, in small chunks."""
    tensors = mixed_tensors()
    pieces = whole(tensors)
    begin(tmp_path, 20)
    records = [write_part(tmp_path, 20, rank, pieces[rank::2], chunk_bytes=40) for rank in range(2)]
    return commit(tmp_path, 20, records, extra={"note": "é", "lr": 1e-05}), tensors


@pytest.mark.parametrize("flips", [100, pytest.param(400, marks=pytest.mark.long)])
def test_no_flipped_bit_is_ever_tolerated(flips, two_parts):
    path, tensors = two_parts
    files = sorted(path.iterdir())
    assert [file.name for file in files] == [
        "manifest.json",
        "part-00000.safetensors",
        "part-00001.safetensors",
    ]
    places = [(file, bit) for file in files for bit in range(8 * file.stat().st_size)]
    for file, bit in random.Random(0).sample(places, flips):
        flip_bit(file, bit)
        with pytest.raises(CheckpointError):
            verify(path)
        with pytest.raises(CheckpointError):
            read(path, tensors)
        flip_bit(file, bit)
    assert all_same(read(path, tensors), tensors)


def test_every_bit_of_the_first_bytes_of_each_file_counts(two_parts):
    path, _ = two_parts
    for file in path.iterdir():
        for bit in range(8 * 16):
            flip_bit(file, bit)
            with pytest.raises(CheckpointError):
                verify(path)
            flip_bit(file, bit)


@pytest.mark.parametrize("file", ["manifest.json", "part-00000.safetensors"])
def test_a_flip_that_leaves_the_meaning_of_the_text_is_found_too(tmp_path, file):
    """In JSON, the escapes of e9 and E9 are the same letter, and their texts differ in one bit."""
    path = save(tmp_path, 1, [Piece.whole("é", torch.ones(4))], extra={})
    at = (path / file).read_bytes().index(rb"\u00e9") + len(rb"\u00")
    flip_bit(path / file, 8 * at + 5)
    assert rb"\u00E9" in (path / file).read_bytes()
    with pytest.raises(CheckpointError, match=f"{file}: checksum mismatch"):
        verify(path)


def test_a_flipped_bit_names_file_and_tensor(tmp_path):
    path = save(tmp_path, 1, [Piece.whole("embed.weight", torch.ones(4))], extra={})
    part = path / "part-00000.safetensors"
    flip_bit(part, 8 * part.stat().st_size - 1)
    says = r"part-00000\.safetensors: embed\.weight at \[0\]: checksum mismatch"
    with pytest.raises(CheckpointError, match=says):
        verify(path)
    with pytest.raises(CheckpointError, match=says):
        read(path, {"embed.weight": torch.ones(4)})


def test_verify_lists_all_damage(two_parts):
    path, _ = two_parts
    for part in path.glob("part-*"):
        flip_bit(part, 8 * part.stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert str(caught.value).count("checksum mismatch") == 2


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors", "part-00001.safetensors"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["deleted", "empty", "one byte short", "half", "one byte long", "directory"],
)
def test_truncated_deleted_or_grown_files_are_found(two_parts, name, spoil):
    path, tensors = two_parts
    spoil(path / name)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    with pytest.raises(CheckpointError, match=name):
        read(path, tensors)


def test_swapped_parts_are_found(two_parts):
    path, tensors = two_parts
    first, second = path / "part-00000.safetensors", path / "part-00001.safetensors"
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    with pytest.raises(CheckpointError):
        verify(path)
    with pytest.raises(CheckpointError):
        read(path, tensors)


def saved_steps(root, *steps):
    return [save(root, step, [Piece.whole("w", torch.full((3,), float(step)))], extra={}) for step in steps]


def spoil(path):
    part = path / "part-00000.safetensors"
    flip_bit(part, 8 * part.stat().st_size - 1)


def test_latest_passes_over_damaged_ones_and_says_why(tmp_path):
    one, two, three, four = saved_steps(tmp_path, 1, 2, 10, 11)
    spoil(four)
    (three / "manifest.json").unlink()
    found = latest(tmp_path)
    assert found.path == two
    assert [damaged.path for damaged in found.damaged] == [four, three]
    assert "checksum mismatch" in found.damaged[0].reason
    assert "no manifest.json" in found.damaged[1].reason
    for path in (one, two):
        spoil(path)
    assert latest(tmp_path).path is None
    assert len(latest(tmp_path).damaged) == 4


def test_latest_of_nothing_is_none(tmp_path):
    assert latest(tmp_path / "absent") == latest(tmp_path)
    assert (latest(tmp_path).path, latest(tmp_path).damaged) == (None, ())


def test_latest_looks_only_at_names_of_its_own(tmp_path):
    (path,) = saved_steps(tmp_path, 5)
    for name in ("step-00000009.partial", "step-00000009.removed", "step-9", "step-000000009", "best"):
        shutil.copytree(path, tmp_path / name)
    (tmp_path / "step-00000010").touch()
    found = latest(tmp_path)
    assert (found.path, found.damaged) == (path, ())


def test_a_directory_under_the_wrong_step_is_damaged(tmp_path):
    (path,) = saved_steps(tmp_path, 5)
    path.rename(tmp_path / "step-00000006")
    found = latest(tmp_path)
    assert found.path is None
    assert "contains step 5" in found.damaged[0].reason


def test_prune_keeps_the_newest(tmp_path):
    paths = saved_steps(tmp_path, 1, 2, 3, 4)
    assert prune(tmp_path, keep=2) == [paths[1], paths[0]]
    assert sorted(tmp_path.iterdir()) == paths[2:]
    assert prune(tmp_path, keep=2) == []


def test_prune_never_deletes_the_last_whole_one(tmp_path):
    paths = saved_steps(tmp_path, 1, 2, 3, 4)
    spoil(paths[2])
    spoil(paths[3])
    assert prune(tmp_path, keep=2) == [paths[0]]
    assert latest(tmp_path).path == paths[1]


def test_prune_does_not_read_again_what_was_just_written(tmp_path, monkeypatch):
    paths = saved_steps(tmp_path, 1, 2, 3)
    spoil(paths[1])
    monkeypatch.setattr("braid.checkpoint.choosing.verify", None)
    assert prune(tmp_path, keep=2, written=paths[2]) == [paths[0]]
    monkeypatch.undo()
    assert prune(tmp_path, keep=1, written=paths[0]) == [paths[1]], "one that is gone vouches for nothing"


def test_prune_never_deletes_what_is_plainly_damaged(tmp_path):
    paths = saved_steps(tmp_path, 1, 2, 3, 4)
    (paths[0] / "manifest.json").unlink()
    (paths[1] / "part-00000.safetensors").unlink()
    assert prune(tmp_path, keep=1) == [paths[2]]
    assert sorted(tmp_path.iterdir()) == [paths[0], paths[1], paths[3]]


def test_what_is_set_aside_is_not_seen_any_more(tmp_path):
    first, second = saved_steps(tmp_path, 1, 2)
    assert set_aside(second).name == "step-00000002.damaged"
    saved_steps(tmp_path, 2)
    assert set_aside(second).name == "step-00000002.damaged-2"
    assert latest(tmp_path).path == first
    assert prune(tmp_path, keep=1) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_prune_must_keep_something(tmp_path):
    with pytest.raises(CheckpointError, match="keep >= 1"):
        prune(tmp_path, keep=0)


def test_checkpoints_that_are_links_to_another_place_are_saved_again_and_pruned(tmp_path):
    """As somebody does whose disk got full: what the links lead to stays."""
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2):
        path = save(root, step, whole(mixed_tensors(seed=step)), extra={})
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    again = save(root, 2, whole(mixed_tensors(seed=9)), extra={})
    assert not again.is_symlink()
    newest = save(root, 3, whole(mixed_tensors(seed=3)), extra={})
    prune(root, keep=2, written=newest)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000003"]
    assert all(read_manifest(elsewhere / f"step-0000000{step}").step == step for step in (1, 2))
