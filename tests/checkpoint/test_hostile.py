"""A forged checkpoint with right checksums ends in CheckpointError, never in anything else."""

import builtins
import hashlib
import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.checkpoint import Piece, read, save, verify
from braid.errors import CheckpointError
from tests.checkpoint.helpers import forge_manifest, manifest_document, sign

WANTED = {"w": torch.zeros(4, 4)}
PART = "part-00000.safetensors"


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "root", 1, [Piece.whole("w", torch.ones(4, 4))], extra={}, chunk_bytes=32)


def refuse(path):
    with pytest.raises(CheckpointError):
        verify(path)
    with pytest.raises(CheckpointError):
        read(path, WANTED)


def renamed_part(document, name):
    document["parts"] = {name: document["parts"][PART]}
    for chunk in document["tensors"]["w"]["chunks"]:
        chunk["file"] = name


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "x\n", "x\0", "é", "manifest.json"]
)
def test_a_part_can_only_be_a_plain_name(path, name):
    (path.parent / "outside").write_bytes((path / PART).read_bytes())
    document = manifest_document(path)
    renamed_part(document, name)
    forge_manifest(path, document)
    refuse(path)


def test_a_link_out_of_the_directory_is_not_followed(path):
    outside = path.parent / "outside"
    (path / PART).rename(outside)
    (path / PART).symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read(path, WANTED)
    refuse(path)


@pytest.mark.parametrize("name", ["manifest.json", PART])
def test_a_pipe_does_not_hang_the_reader(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    refuse(path)


def tensor(document):
    return document["tensors"]["w"]


def chunk(document):
    return tensor(document)["chunks"][0]


EDITS = {
    "huge shape": lambda d: tensor(d).update(shape=[2**62, 4]),
    "overflowing shape": lambda d: tensor(d).update(shape=[2**200, 4]),
    "huge chunk": lambda d: chunk(d).update(shape=[2**40, 4]),
    "huge tensor and chunk": lambda d: (
        tensor(d).update(shape=[2**40, 4], chunks=[chunk(d)]),
        chunk(d).update(shape=[2**40, 4]),
        d["parts"][PART].update(size=2**44 + d["parts"][PART]["header_size"]),
    ),
    "chunk outside": lambda d: chunk(d).update(offset=[100, 0]),
    "chunk of other dims": lambda d: chunk(d).update(offset=[0], shape=[8]),
    "chunk with an offset of other dims": lambda d: chunk(d).update(shape=[8]),
    "many dims": lambda d: tensor(d).update(shape=[1] * 64),
    "negative offset": lambda d: chunk(d).update(offset=[-1, 0]),
    "negative shape": lambda d: tensor(d).update(shape=[-4, -4]),
    "true as size": lambda d: tensor(d).update(shape=[True, 4]),
    "float as size": lambda d: tensor(d).update(shape=[4.0, 4]),
    "text as shape": lambda d: tensor(d).update(shape="44"),
    "overlapping chunks": lambda d: tensor(d)["chunks"][1].update(offset=[0, 0]),
    "doubled chunk": lambda d: tensor(d)["chunks"].append(chunk(d)),
    "lost chunk": lambda d: tensor(d)["chunks"].pop(),
    "no chunks": lambda d: tensor(d).update(chunks=[]),
    "empty chunk": lambda d: tensor(d)["chunks"].append({**chunk(d), "shape": [0, 4], "key": "other"}),
    "chunks swapped": lambda d: chunk(d).update(key="w@2,0"),
    "unknown dtype": lambda d: tensor(d).update(dtype="object"),
    "list as dtype": lambda d: tensor(d).update(dtype=[]),
    "other dtype of equal size": lambda d: tensor(d).update(dtype="int32"),
    "unknown part": lambda d: chunk(d).update(file="part-00001.safetensors"),
    "unknown key": lambda d: chunk(d).update(key="v@0,0"),
    "unprintable key": lambda d: chunk(d).update(key="w\ud800"),
    "upper-case checksum": lambda d: chunk(d).update(sha256=chunk(d)["sha256"].upper()),
    "no checksum": lambda d: chunk(d).update(sha256=None),
    "other checksum": lambda d: chunk(d).update(sha256="0" * 64),
    "missing field": lambda d: chunk(d).pop("sha256"),
    "added field": lambda d: chunk(d).update(pickle="gASVAAAA"),
    "huge header": lambda d: d["parts"][PART].update(header_size=2**40),
    "tiny header": lambda d: d["parts"][PART].update(header_size=0),
    "part without chunks": lambda d: d["parts"].update(empty={**d["parts"][PART], "size": 8, "header_size": 8}),
    "parts as list": lambda d: d.update(parts=[]),
    "tensors as text": lambda d: d.update(tensors="w"),
    "tensor as null": lambda d: d["tensors"].update(w=None),
    "extra as list": lambda d: d.update(extra=[1]),
    "next format": lambda d: d.update(format=2),
    "no format": lambda d: d.pop("format"),
    "negative step": lambda d: d.update(step=-1),
    "step as text": lambda d: d.update(step="1"),
    "empty name": lambda d: d["tensors"].update({"": tensor(d)}),
    "surrogate in name": lambda d: d["tensors"].update({"\ud800": tensor(d)}),
    "endless name": lambda d: d["tensors"].update({"w" * 5000: tensor(d)}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_forged_manifest_is_refused(path, edit):
    document = manifest_document(path)
    edit(document)
    forge_manifest(path, document)
    refuse(path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"}",
        b'"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'"format":1,"extra":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'"format":' + b"[" * 500 + b"]" * 500 + b"}",
        b'"step":' + b"9" * 100_000 + b"}",
        b'"\xff":1}',
        b'"format":1}',
        b'"format":NaN}',
        pickle.dumps({"w": 1}),
    ],
    ids=[
        "nothing",
        "no fields",
        "deep",
        "deep extra",
        "nested format",
        "long",
        "utf-8",
        "bare",
        "nan",
        "pickle",
    ],
)
def test_text_that_is_no_manifest_is_refused(path, body):
    (path / "manifest.json").write_bytes(sign(body))
    refuse(path)


def test_a_forged_header_is_refused(path):
    """The part itself is hostile, and the manifest vouches for it."""
    part = path / PART
    document = manifest_document(path)
    size = document["parts"][PART]["header_size"]
    for header in (b"\xff" * size, b" " * size, (2**63).to_bytes(8, "little") + part.read_bytes()[8:size]):
        part.write_bytes(header + part.read_bytes()[size:])
        document["parts"][PART]["header_sha256"] = hashlib.sha256(header).hexdigest()
        forge_manifest(path, document)
        refuse(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_in_any_place_is_refused_or_harmless(tmp_path_factory, data):
    """Whatever stands where, only CheckpointError is raised, and what is read is what was saved."""
    root = tmp_path_factory.mktemp("root")
    path = save(root, 1, [Piece.whole("w", torch.ones(4, 4))], extra={}, chunk_bytes=32)
    document = manifest_document(path)
    at = document
    while True:
        places = list(range(len(at))) if isinstance(at, list) else sorted(at.keys() - {"sha256"})
        place = data.draw(st.sampled_from(places))
        if isinstance(at[place], (dict, list)) and at[place] and data.draw(st.booleans()):
            at = at[place]
        else:
            break
    at[place] = data.draw(json_values)
    forge_manifest(path, document)
    try:
        tensors = read(path, WANTED)
    except CheckpointError:
        return
    assert torch.equal(tensors["w"], torch.ones(4, 4))


def test_nothing_is_ever_unpickled(path, monkeypatch):
    def refuse_to_load(*_args, **_kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse_to_load)
    monkeypatch.setattr(builtins, "eval", refuse_to_load)
    verify(path)
    assert torch.equal(read(path, WANTED)["w"], torch.ones(4, 4))


def test_a_manifest_that_says_what_is_true_still_loads_when_written_otherwise(path):
    """Another writer may use other whitespace and order: the rules are about content."""
    document = manifest_document(path)
    forge_manifest(path, json.loads(json.dumps(document, indent=3, sort_keys=True)))
    assert torch.equal(read(path, WANTED)["w"], torch.ones(4, 4))
