"""What is saved comes back bit for bit, through any boxes, and other programs can read it too."""

import hashlib
import json
import struct
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from braid.checkpoint import (
    Box,
    Piece,
    ReadRequest,
    begin,
    commit,
    latest,
    read,
    read_manifest,
    save,
    verify,
    write_part,
)
from braid.errors import CheckpointError
from tests.checkpoint.helpers import ALL_DTYPES, all_same, mixed_tensors, random_bits, same_bits, whole


@pytest.mark.parametrize("chunk_bytes", [1, 48, 64 * 2**20])
def test_every_dtype_scalars_and_empty_tensors_come_back(tmp_path, chunk_bytes):
    tensors = mixed_tensors()
    path = save(tmp_path, 20, whole(tensors), extra={"tokens": 12}, chunk_bytes=chunk_bytes)
    assert path == tmp_path / "step-00000020"
    assert all_same(read(path, tensors), tensors)
    manifest = verify(path)
    assert (manifest.step, manifest.extra) == (20, {"tokens": 12})
    assert latest(tmp_path).path == path


def test_no_chunk_is_larger_than_asked(tmp_path):
    tensors = {"a": random_bits((3, 50), torch.float32, 0), "b": random_bits((1, 1, 99), torch.float64, 1)}
    path = save(tmp_path, 1, whole(tensors), extra={}, chunk_bytes=64)
    for stored in read_manifest(path).tensors.values():
        assert max(chunk.box.numel * stored.dtype.itemsize for chunk in stored.chunks) <= 64


@pytest.mark.parametrize("part_bytes", [1, 100, 10**6])
def test_one_process_may_write_several_parts_and_need_not_hold_all_tensors(tmp_path, part_bytes):
    tensors, alive = mixed_tensors(), []

    def made():
        for name, tensor in tensors.items():
            alive.append(weakref.ref(fresh := tensor.clone()))
            yield Piece.whole(name, fresh)
            del fresh
            held = sum(one().nbytes for one in alive if one() is not None)
            assert held <= part_bytes + max(tensor.nbytes for tensor in tensors.values())

    path = save(tmp_path, 1, made(), extra={}, part_bytes=part_bytes)
    assert all_same(read(path, tensors), tensors)
    sizes = sum(tensor.nbytes for tensor in tensors.values())
    parts = list(verify(path).parts)
    assert parts[0] == "part-00000.safetensors"
    assert (len(parts) == 1) == (part_bytes > sizes)


def test_every_chunk_lies_aligned_in_its_part(tmp_path):
    path = save(tmp_path, 1, whole(mixed_tensors()), extra={}, chunk_bytes=40)
    data = (path / "part-00000.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    for stored in read_manifest(path).tensors.values():
        for chunk in stored.chunks:
            assert (start + header[chunk.key]["data_offsets"][0]) % stored.dtype.itemsize == 0


def test_views_gradients_and_strides_do_not_matter(tmp_path):
    base = torch.randn(6, 8, requires_grad=True)
    tensors = {"transposed": base.T, "strided": base[::2, 1::3], "parameter": torch.nn.Parameter(base[0])}
    path = save(tmp_path, 1, whole(tensors), extra={}, chunk_bytes=20)
    assert all_same(read(path, tensors), {name: tensor.detach() for name, tensor in tensors.items()})


def test_a_checkpoint_without_tensors_still_holds_extra(tmp_path):
    path = save(tmp_path, 0, [], extra={"run": {"lr": 0.1, "names": ["ä", None]}})
    assert verify(path).extra == {"run": {"lr": 0.1, "names": ["ä", None]}}
    assert read(path, {}) == {}


@st.composite
def partition(draw, box):
    """Random boxes that cover `box` exactly once."""
    splittable = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not splittable or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(splittable))
    at = draw(st.integers(1, box.shape[dim] - 1))
    sizes, rest = list(box.shape), list(box.shape)
    sizes[dim], rest[dim] = at, box.shape[dim] - at
    offset = list(box.offset)
    offset[dim] += at
    low = Box(offset=box.offset, shape=tuple(sizes))
    high = Box(offset=tuple(offset), shape=tuple(rest))
    return draw(partition(low)) + draw(partition(high))


@st.composite
def saved_and_wanted(draw):
    """(tensors, the pieces of each writing rank, what each reading rank wants of each tensor)."""
    writers, readers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tensors, pieces, wants = {}, [[] for _ in range(writers)], [{} for _ in range(readers)]
    for index in range(draw(st.integers(1, 4))):
        name = f"block.{index}.w"
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensors[name] = random_bits(shape, draw(st.sampled_from(ALL_DTYPES)), draw(st.integers(0, 999)))
        for box in draw(partition(Box.whole(shape))):
            local = tensors[name][box.within(Box.whole(shape))]
            rank = draw(st.integers(0, writers - 1))
            pieces[rank].append(Piece(name=name, global_shape=shape, offset=box.offset, tensor=local))
        for want in wants:
            want[name] = draw(st.sampled_from(draw(partition(Box.whole(shape)))))
    return tensors, pieces, wants


@settings(max_examples=60, deadline=None)
@given(saved_and_wanted(), st.integers(1, 80))
def test_any_boxes_written_by_some_ranks_are_read_by_others_through_any_boxes(
    tmp_path_factory, case, chunk_bytes
):
    tensors, pieces, wants = case
    root = tmp_path_factory.mktemp("root")
    begin(root, 3)
    records = [write_part(root, 3, r, own, chunk_bytes=chunk_bytes) for r, own in enumerate(pieces)]
    # Records travel between ranks as JSON.
    path = commit(root, 3, json.loads(json.dumps(records)), extra={})
    verify(path)
    assert all_same(read(path, tensors), tensors)
    for want in wants:
        boxes = {
            name: ReadRequest(global_shape=tuple(tensors[name].shape), box=box, dtype=tensors[name].dtype)
            for name, box in want.items()
        }
        for name, tensor in read(path, boxes).items():
            expected = tensors[name][want[name].within(Box.whole(tensors[name].shape))]
            assert same_bits(tensor, expected)


def test_a_reader_verifies_what_it_reads_and_no_more(tmp_path):
    rows = torch.arange(8.0).reshape(4, 2)
    begin(tmp_path, 1)
    records = [
        write_part(tmp_path, 1, rank, [Piece(name="w", global_shape=(4, 2), offset=(2 * rank, 0), tensor=half)])
        for rank, half in enumerate(rows.split(2))
    ]
    path = commit(tmp_path, 1, records, extra={})
    (path / "part-00001.safetensors").unlink()
    top = ReadRequest(global_shape=(4, 2), box=Box(offset=(1, 0), shape=(1, 2)), dtype=torch.float32)
    assert torch.equal(read(path, {"w": top})["w"], rows[1:2])
    with pytest.raises(CheckpointError, match="part-00001"):
        read(path, {"w": rows})


def piece(offset, shape, name="w"):
    return Piece(name=name, global_shape=(4, 4), offset=offset, tensor=torch.ones(shape))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([[piece((0, 0), (2, 4))], [piece((2, 0), (2, 3))]], r"w: element \[2, 3\] of \[4, 4\] is in no chunk"),
        ([[piece((0, 0), (3, 4))], [piece((2, 0), (2, 4))]], r"w: element \[2, 0\] of \[4, 4\] is in 2 chunks"),
        ([[piece((0, 0), (4, 4))], [piece((0, 0), (4, 4))]], r"w: element \[0, 0\] of \[4, 4\] is in 2 chunks"),
        ([[piece((0, 0), (4, 4))], [Piece.whole("w", torch.ones(4))]], "ranks disagree about w"),
        ([[piece((0, 0), (4, 4))], [Piece.whole("w", torch.ones(4, 4).double())]], "ranks disagree about w"),
    ],
)
def test_a_tensor_not_covered_exactly_once_is_not_committed(tmp_path, ranks, says):
    begin(tmp_path, 1)
    records = [write_part(tmp_path, 1, rank, pieces) for rank, pieces in enumerate(ranks)]
    with pytest.raises(CheckpointError, match=says):
        commit(tmp_path, 1, records, extra={})
    assert latest(tmp_path).path is None


def test_two_ranks_may_not_write_one_part(tmp_path):
    begin(tmp_path, 1)
    record = write_part(tmp_path, 1, 0, [piece((0, 0), (4, 4))])
    with pytest.raises(CheckpointError, match="two ranks wrote part-00000"):
        commit(tmp_path, 1, [record, record], extra={})


def test_a_part_that_the_committing_rank_cannot_see_stops_the_commit(tmp_path):
    begin(tmp_path, 1)
    record = write_part(tmp_path, 1, 0, [piece((0, 0), (4, 4))])
    (tmp_path / "step-00000001.partial" / "part-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-00000\.safetensors: missing"):
        commit(tmp_path, 1, [record], extra={})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: piece((0, 0), (4, 5)), "is outside of"),
        (lambda: piece((-1, 0), (1, 1)), "is outside of"),
        (lambda: piece((0,), (4,)), "is outside of"),
        (lambda: piece((0, 0), (4, 4), name="new\nline"), "printable"),
        (lambda: piece((0, 0), (4, 4), name=""), "printable"),
        (lambda: Piece.whole("z", torch.ones(2, dtype=torch.complex64)), "complex64 is none of float64"),
    ],
)
def test_a_piece_that_could_not_be_stored_is_refused(make, says):
    with pytest.raises(CheckpointError, match=says):
        make()


def test_two_pieces_of_one_rank_may_not_hold_the_same_element(tmp_path):
    with pytest.raises(CheckpointError, match=r"two pieces of it hold \[0, 0\]"):
        save(tmp_path, 1, [piece((0, 0), (4, 4))] * 2, extra={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra", [{"loss": float("nan")}, {"x": torch.ones(1)}, {"x": {1, 2}}])
def test_extra_that_is_not_json_is_refused_and_leaves_nothing(tmp_path, extra):
    with pytest.raises(CheckpointError, match="plain JSON"):
        save(tmp_path, 1, [], extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_the_documented_shape(tmp_path):
    tensors = {"embed.w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "none": torch.empty(0, dtype=torch.int64)}
    path = save(tmp_path, 20, whole(tensors), extra={"lr": 0.5}, chunk_bytes=8)
    header = (
        b'{"embed.w@0,0":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        b'"embed.w@1,0":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]}}'
    )
    header += b" " * (-len(header) % 8)
    start = struct.pack("<Q", len(header)) + header
    rows = [struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)]
    sums = [hashlib.sha256(data).hexdigest() for data in (start, *rows)]
    part = "part-00000.safetensors"
    body = (
        '"format":1,\n"step":20,\n"extra":{"lr":0.5},\n"parts":{\n'
        f'"{part}":{{"size":{len(start) + 16},"header_size":{len(start)},"header_sha256":"{sums[0]}"}}}},\n'
        '"tensors":{\n"embed.w":{"shape":[2,2],"dtype":"float32","chunks":['
        f'{{"offset":[0,0],"shape":[1,2],"file":"{part}","key":"embed.w@0,0","sha256":"{sums[1]}"}},'
        f'{{"offset":[1,0],"shape":[1,2],"file":"{part}","key":"embed.w@1,0","sha256":"{sums[2]}"}}]}},\n'
        '"none":{"shape":[0],"dtype":"int64","chunks":[]}}}\n'
    )
    first = f'{{"sha256":"{hashlib.sha256(body.encode()).hexdigest()}",\n'
    assert (path / "manifest.json").read_text() == first + body
    assert (path / part).read_bytes() == start + rows[0] + rows[1]


def test_another_program_reads_it_with_json_and_safetensors_alone(tmp_path):
    tensors = mixed_tensors()
    path = save(tmp_path, 1, whole(tensors), extra={}, chunk_bytes=24)
    manifest = json.loads((path / "manifest.json").read_text())
    data = {file: load_file(path / file) for file in manifest["parts"]}
    for name, entry in manifest["tensors"].items():
        tensor = torch.empty(entry["shape"], dtype=vars(torch)[entry["dtype"]])
        for chunk in entry["chunks"]:
            ranges = zip(chunk["offset"], chunk["shape"], strict=True)
            tensor[tuple(slice(o, o + n) for o, n in ranges)] = data[chunk["file"]][chunk["key"]]
        assert same_bits(tensor, tensors[name])


def test_all_that_does_not_fit_is_listed_at_once(tmp_path):
    stored = {
        "a.weight": torch.ones(3),
        "b.weight": torch.ones(2, 2),
        "c.bias": torch.ones(1),
        "old": torch.ones(1),
    }
    path = save(tmp_path, 1, whole(stored), extra={})
    wanted = {
        "a.wieght": torch.ones(3),
        "b.weight": torch.ones(2, 3),
        "c.bias": torch.ones(1, dtype=torch.bfloat16),
        "zzz": torch.ones(1),
    }
    with pytest.raises(CheckpointError) as caught:
        read(path, wanted)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "missing  a.wieght: not in the checkpoint; nearest is a.weight",
        "missing  zzz: not in the checkpoint",
        "extra    a.weight: in the checkpoint, not wanted",
        "extra    old: in the checkpoint, not wanted",
        "shape    b.weight: stored [2, 2], wanted [2, 3]",
        "dtype    c.bias: stored float32, wanted bfloat16",
    ]


def test_an_error_about_many_tensors_counts_them(tmp_path):
    path = save(tmp_path, 1, whole({f"old.{i}": torch.ones(1) for i in range(500)}), extra={})
    with pytest.raises(CheckpointError) as caught:
        read(path, {f"new.{i}": torch.ones(1) for i in range(500)})
    lines = str(caught.value).splitlines()
    assert len(lines) < 20
    assert sum(line.strip() == "... and 494 more of these" for line in lines) == 2


def test_names_of_other_readers_may_be_left_unread(tmp_path):
    stored = {"w": torch.ones(3), "optimizer.w": torch.zeros(3)}
    path = save(tmp_path, 1, whole(stored), extra={})
    assert all_same(read(path, {"w": stored["w"]}, unread=["optimizer.w"]), {"w": stored["w"]})


def test_a_box_outside_the_tensor_is_refused(tmp_path):
    path = save(tmp_path, 1, [Piece.whole("w", torch.ones(3))], extra={})
    outside = ReadRequest(global_shape=(3,), box=Box(offset=(2,), shape=(2,)), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"w: \[2\] at \[2\] is outside of \[3\]"):
        read(path, {"w": outside})


def test_tensors_that_are_made_to_be_written_are_there_one_at_a_time(tmp_path):
    made, wanted = [], {}

    def piece(name, shape):
        wanted[name] = torch.randn(shape)

        def read():
            assert all(each() is None for each in made)
            copy = wanted[name].clone()
            made.append(weakref.ref(copy))
            return copy

        outline = torch.empty(shape, device="meta")
        return Piece(name=name, global_shape=shape, offset=(0,) * len(shape), tensor=outline, read=read)

    path = save(tmp_path, 1, [piece("a", (40, 3)), piece("b", (7,)), piece("c", ())], extra={}, chunk_bytes=64)
    assert len(made) == 3
    assert all_same(read(path, wanted), wanted)
