"""Images and videos of a source: from rows to patches bit by bit, and every way in which that can fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from braid.data import ByteTokenizer, ItemLimits, Loader, build, open_source, open_splits, verify
from braid.data.images import image_grid, image_patches
from braid.data.item_stream import patches_of_each
from braid.data.media import RECORD
from braid.data.shards import INDEX
from braid.errors import DataError
from tests.data.pictures import built, encoded, encoder, limits, noise, png, write_rows
from tests.data.test_images import bomb, jpeg_of_size
from tests.data.test_shards import rewritten

PHOTO, SCAN = encoded(noise(9, 14, seed=1), "JPEG"), png(13, 6, seed=2)
FILES = {"photo.jpg": PHOTO, "deep/scan.png": SCAN, "f0.png": png(8, 8, seed=3), "f1.png": png(8, 8, seed=4)}
ROWS: list[dict[str, object]] = [
    {"content": [{"text": "see "}, {"image": "photo.jpg"}, {"text": " and "}, {"image": "deep/scan.png"}]},
    {"text": "no picture"},
    {"content": [{"video": ["f0.png", "f1.png", "f0.png"]}, {"text": "moves"}]},
    {"prompt": [{"image": "./deep/../photo.jpg"}, {"text": "what?"}], "response": "noise"},
]
END = 256
MARKER = 257


def taken(**shape: object) -> ItemLimits:
    """Patches of 2 x 2 pixels, four of them a row; ids of text are bytes."""
    allowed = limits(**{"items": 8, "patches": 256, **shape})  # type: ignore[arg-type]
    return ItemLimits(encoder=allowed.encoder, token=300, most_items=8, most_patches=allowed.most_patches)


def reader(source, length: int = 400, packing: str = "documents", **shape: object) -> Loader:
    return Loader(source, length, 0, packing, images={"vision": taken(**shape)})  # type: ignore[arg-type]


def test_a_marker_for_each_image_and_the_files_as_they_came(tmp_path: Path) -> None:
    source = built(tmp_path, FILES, ROWS)
    ids = source.read(0, source.tokens).ids_S.tolist()
    texts = [
        b"see ",
        MARKER,
        b" and ",
        MARKER,
        END,
        b"no picture",
        END,
        MARKER,
        b"moves",
        END,
        MARKER,
        b"what?",
    ]
    parts = [[each] if isinstance(each, int) else list(each) for each in [*texts, b"noise", END]]
    assert ids == [each for part in parts for each in part]
    assert source.media == {"image": 3, "video": 1}
    (shard,) = source.shards
    assert shard.media is not None
    stored = [shard.media.read(picture) for picture in range(6)]
    frames = [FILES["f0.png"], FILES["f1.png"], FILES["f0.png"]]
    assert stored == [PHOTO, SCAN, *frames, PHOTO]
    mask = source.read(0, source.tokens).loss_mask_S
    assert mask.tolist() == [True] * (len(ids) - 12) + [False] * 6 + [True] * 6
    verify(source)


def test_what_is_read_are_the_patches_of_the_original_files(tmp_path: Path) -> None:
    """Each document in its sample; sizes from the records alone, patches and grids from the bytes."""
    source, shape = built(tmp_path, FILES, ROWS), encoder(patch=2, frames=2)
    loader = reader(source, frames=2)
    assert loader.samples_per_epoch == 1, "the four documents fit into one sample"
    vision = loader.items["vision"]
    share = [patches_of_each(items, taken()) for items in (2, 2, 2, 2, 1)]
    frames = [[PHOTO], [SCAN], [FILES["f0.png"], FILES["f1.png"]], [FILES["f0.png"]], [PHOTO]]
    sizes = [(9, 14), (13, 6), (8, 8), (8, 8), (9, 14)]
    grids = [image_grid(*size, shape, most) for size, most in zip(sizes, share, strict=True)]
    expected = [
        image_patches(*each, grid) for each, grid in zip([(f, shape) for f in frames], grids, strict=True)
    ]
    assert vision.sizes([0]) == [tuple(map(len, expected))]
    found = vision.read([(0, number) for number in range(5)])
    assert list(found.grids) == grids
    assert torch.equal(found.patches_NI, torch.from_numpy(np.concatenate(expected)))
    again = vision.read([(0, 3), (0, 1)])
    assert torch.equal(again.patches_NI, torch.from_numpy(np.concatenate([expected[3], expected[1]])))
    assert vision.read([]).patches_NI.shape == (0, shape.input)
    tokens = loader.batch([0]).tokens_BT[0].tolist()
    assert tokens.count(300) == sum(map(len, expected)) // 4
    assert MARKER not in tokens


def test_placeholders_and_the_text_before_an_image_count_in_no_loss(tmp_path: Path) -> None:
    source = built(tmp_path, FILES, [{"content": [{"text": "ab"}, {"image": "f0.png"}, {"text": "c"}]}])
    batch = reader(source, length=10, patches=16).batch([0])
    assert batch.tokens_BT[0].tolist() == [*b"ab", 300, 300, 300, 300, *b"c", END, 0, 0]
    assert batch.labels_BT[0].tolist() == [*b"b", 300, 300, 300, 300, *b"c", END, 0, 0, 0]
    assert batch.loss_mask_BT[0].tolist() == [True, *[False] * 4, True, True, *[False] * 3]
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert batch.documents_BT[0].tolist() == [0] * 8 + [-1] * 2


def test_a_document_that_begins_with_an_image_begins_once(tmp_path: Path) -> None:
    source = built(tmp_path, FILES, [{"text": "x"}, {"content": [{"image": "f0.png"}, {"text": "c"}]}])
    for packing in ("concatenate", "documents"):
        batch = reader(source, length=7, packing=packing, patches=16).batch([0])
        assert batch.tokens_BT[0].tolist() == [*b"x", END, 300, 300, 300, 300, *b"c"]
        assert batch.documents_BT[0].tolist() == [0, 0, 1, 1, 1, 1, 1]
        assert batch.loss_mask_BT[0].tolist() == [True, False, False, False, False, True, True]


def test_both_splits_have_their_images(tmp_path: Path) -> None:
    rows = [{"content": [{"text": str(n)}, {"image": "f0.png"}]} for n in range(40)]
    result = build(write_rows(tmp_path / "in", FILES, rows), tmp_path / "out", ByteTokenizer(), validation=0.3)
    splits = open_splits(tmp_path / "out")
    assert splits.validation is not None
    counts = [split.media["image"] for split in (splits.train, splits.validation)]
    assert sum(counts) == result.images == 40
    assert counts[1] == result.validation_documents > 0
    for split in (splits.train, splits.validation):
        verify(split)


def test_shards_each_have_their_own_media(tmp_path: Path) -> None:
    rows = [{"content": [{"text": "a" * n}, {"image": f"f{n % 2}.png"}, {"text": "b"}]} for n in range(1, 9)]
    rows.insert(0, {"text": "a long text without any picture"})
    file = write_rows(tmp_path / "in", FILES, rows)
    build(file, tmp_path / "one", ByteTokenizer())
    build(file, tmp_path / "many", ByteTokenizer(), shard_tokens=9)
    one, many = open_source(tmp_path / "one"), open_source(tmp_path / "many")
    assert len(many.shards) > 3
    assert any(shard.media is None for shard in many.shards)
    verify(many)
    for packing in ("concatenate", "documents"):
        a, b = (reader(source, 16, packing, patches=64) for source in (one, many))
        assert a.samples_per_epoch == b.samples_per_epoch
        samples = range(a.samples_per_epoch)
        assert torch.equal(a.batch(samples).tokens_BT, b.batch(samples).tokens_BT)
        wanted = [(sample, n) for sample in samples for n in range(len(a.items["vision"].sizes([sample])[0]))]
        assert len(wanted) == 8
        both = (each.items["vision"].read(wanted).patches_NI for each in (a, b))
        assert torch.equal(*both)


def test_a_source_of_text_is_stored_as_before_there_were_images(tmp_path: Path) -> None:
    """Whatever else could be in its rows: the same bytes in the same files."""
    content = [{"content": [{"text": "hello"}]}, {"prompt": "p", "response": [{"text": "r"}]}]
    plain = [{"text": "hello"}, {"prompt": "p", "response": "r"}]
    for name, rows in (("a", content), ("b", plain)):
        build(write_rows(tmp_path / name, {}, rows), tmp_path / f"{name}-out", ByteTokenizer())
    held = [{file.name: file.read_bytes() for file in (tmp_path / f"{name}-out").iterdir()} for name in "ab"]
    assert held[0] == held[1]
    assert sorted(held[0]) == ["00000.mask", "00000.offsets", "00000.tokens", "index.json"]
    index = json.loads(held[0]["index.json"])
    assert index["version"] == 1
    assert "media" not in index["shards"][0]
    fingerprint = "2b9c94ef24bad27e3316f2de4bc74c2cb37c562924df2a00e19d25e66e4780df"
    assert open_source(tmp_path / "a-out").fingerprint == fingerprint


# --------------------------------------------------------------------------------------------- bad rows


def cut_jpeg() -> bytes:
    return PHOTO[: len(PHOTO) * 4 // 5]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.jpg", cut_jpeg(), r"cannot be decoded: .*(?i:truncated)"),
        ("empty.png", bomb(0, 0), "is 0 x 0 pixels"),
        ("huge.png", bomb(60_000, 60_000), "is 60,000 x 60,000 pixels: an image may have 67,108,864"),
        ("huge.jpg", jpeg_of_size(60_000, 60_000), "is 60,000 x 60,000 pixels"),
        ("print.jpg", None, "has CMYK pixels"),
        ("text.png", b"not an image", "is neither PNG nor JPEG"),
        ("none.png", b"", "is empty"),
    ],
)
def test_a_bad_image_is_named_and_nothing_is_left(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    from PIL import Image

    content = encoded(Image.new("CMYK", (4, 4)), "JPEG") if content is None else content
    rows = [ROWS[0], {"content": [{"text": "a"}, {"image": name}]}]
    file = write_rows(tmp_path / "in", {**FILES, name: content}, rows)
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2, content\[1\]\.image: {name}: {reason}"):
        build(file, tmp_path / "out", ByteTokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def folder(path: Path) -> str:
    (path / "in" / "a.png").mkdir()
    return "a.png"


def link_out(path: Path) -> str:
    (path / "secret.png").write_bytes(SCAN)
    (path / "in" / "link.png").symlink_to(path / "secret.png")
    return "link.png"


def folder_link_out(path: Path) -> str:
    (path / "away").mkdir()
    (path / "away" / "scan.png").write_bytes(SCAN)
    (path / "in" / "near").symlink_to(path / "away")
    return "near/scan.png"


def circle(path: Path) -> str:
    (path / "in" / "a.png").symlink_to("a.png")
    return "a.png"


def pipe(path: Path) -> str:
    os.mkfifo(path / "in" / "a.png")
    return "a.png"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda path: "../scan.png", "leads out of"),
        (lambda path: str(path / "in" / "photo.jpg"), "leads out of"),
        (lambda path: "deep/../../in/../scan.png", "leads out of"),
        (link_out, "leads out of"),
        (folder_link_out, "leads out of"),
        (lambda path: "gone.png", "does not exist"),
        (lambda path: "", "is not a file"),
        (folder, "is not a file"),
        (pipe, "is not a file"),
        (circle, "does not exist|cannot be read"),
        (lambda path: "a\0b.png", "cannot be read"),
        (lambda path: "x" * 5000, "cannot be read"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(
    tmp_path: Path, made: Callable[[Path], str], reason: str
) -> None:
    file = write_rows(tmp_path / "in", FILES, [])
    (tmp_path / "scan.png").write_bytes(SCAN)
    file.write_text(json.dumps({"content": [{"video": ["f0.png", made(tmp_path)]}]}))
    told = rf"rows\.jsonl, line 1, content\[0\]\.video\[1\]: (?s:.*): ({reason})"
    with pytest.raises(DataError, match=told) as refused:
        build(file, tmp_path / "out", ByteTokenizer())
    assert str(refused.value).count("rows.jsonl") == 1, "said once"
    assert not (tmp_path / "out").exists()


def test_a_link_that_stays_inside_is_followed(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in", FILES, [{"content": [{"image": "link.png"}]}])
    (tmp_path / "in" / "link.png").symlink_to("deep/scan.png")
    build(file, tmp_path / "out", ByteTokenizer())
    assert open_source(tmp_path / "out").media == {"image": 1}


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.data.rows.MOST_BYTES", 50)
    with pytest.raises(DataError, match=rf"photo\.jpg: has {len(PHOTO)} bytes, and may have 50"):
        built(tmp_path, FILES, ROWS)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"content": "text"}, "has 'content' as text"),
        ({"content": [], "text": "t"}, "has the fields 'content', 'text'"),
        ({"content": ["text"]}, r'content\[0\]: is "text"; a part is'),
        ({"content": [{"text": "a"}, {"image": 3}]}, r"content\[1\]: is"),
        ({"content": [{"video": []}]}, r"content\[0\]: .*at least one frame"),
        ({"content": [{"video": "f0.png"}]}, r"content\[0\]: is"),
        ({"content": [{"video": ["f0.png", 1]}]}, r"content\[0\]: is"),
        ({"content": [{"text": "a", "image": "f0.png"}]}, r"content\[0\]: is"),
        ({"content": [{"sound": "a.wav"}]}, r"content\[0\]: is"),
        ({"content": [{"text": "\ud800"}]}, r"content\[0\]: has an unpaired surrogate"),
        ({"prompt": "p", "response": [{"picture": 1}]}, r"response\[0\]: is"),
    ],
)
def test_a_bad_part_is_named(tmp_path: Path, row: dict[str, object], reason: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2(, |: ){reason}"):
        built(tmp_path, FILES, [{"text": "good"}, row])


def test_frames_of_a_video_have_one_size(tmp_path: Path) -> None:
    row = {"content": [{"video": ["f0.png", "deep/scan.png"]}]}
    with pytest.raises(
        DataError, match=r"video\[1\]: deep/scan\.png: is 13 x 6 pixels, and the first frame 8 x 8"
    ):
        built(tmp_path, FILES, [row])


# --------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["00000.media", "00000.records"])
def test_missing_truncated_and_long_files_are_refused_at_opening(tmp_path: Path, name: str) -> None:
    built(tmp_path, FILES, ROWS)
    file = tmp_path / "out" / name
    content = file.read_bytes()
    for changed, reason in ((content[:-1], "truncated"), (content + b"\0", "too long")):
        file.write_bytes(changed)
        with pytest.raises(DataError, match=f"{name} is {reason}"):
            open_source(tmp_path / "out")
    file.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        open_source(tmp_path / "out")


def test_no_single_flipped_bit_passes(tmp_path: Path) -> None:
    built(tmp_path, FILES, ROWS)
    for file in sorted((tmp_path / "out").iterdir()):
        content = file.read_bytes()
        for bit in range(0, 8 * len(content), 61):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << (bit % 8)
            file.write_bytes(flipped)
            with pytest.raises(DataError, match=file.name):
                verify(open_source(tmp_path / "out"))
        file.write_bytes(content)
    verify(open_source(tmp_path / "out"))


@pytest.mark.parametrize(
    ("field", "picture", "value", "reason"),
    [
        ("position", 0, -1, "picture 0: its marker is outside the tokens"),
        ("position", 5, 10_000, "picture 5: its marker is outside the tokens"),
        ("position", 1, 0, "picture 1: its marker is before the last"),
        ("position", 1, 4, "picture 1: it is no frame of the video before it"),
        ("kind", 0, 2, "picture 0: its kind is unknown"),
        ("height", 0, 0, "picture 0: its size is impossible"),
        ("width", 0, 1 << 40, "picture 0: its size is impossible"),
        ("height", 3, 9, "picture 3: it is no frame of the video before it"),
        ("start", 2, 1, "picture 2: its bytes do not follow those before it"),
        ("bytes", 5, 0, "picture 5: its bytes are too many, or none"),
        ("bytes", 5, 7, "its pictures have"),
    ],
)
def test_damaged_records_are_refused_at_opening(
    tmp_path: Path, field: str, picture: int, value: int, reason: str
) -> None:
    built(tmp_path, FILES, ROWS)
    records = np.fromfile(tmp_path / "out" / "00000.records", RECORD)
    records[field][picture] = value
    records.tofile(tmp_path / "out" / "00000.records")
    with pytest.raises(DataError, match=rf"00000\.records is damaged: {reason}"):
        open_source(tmp_path / "out")


def test_markers_are_where_the_records_say(tmp_path: Path) -> None:
    """A placeholder too many, or too few, in the stored tokens: found when they are read, and by `verify`."""
    source = built(tmp_path, FILES, ROWS)
    loader = reader(source)
    tokens = tmp_path / "out" / "00000.tokens"
    ids = np.fromfile(tokens, "<u2")
    for place, value in ((0, MARKER), (4, 65)):
        changed = ids.copy()
        changed[place] = value
        with tokens.open("r+b") as file:  # in place: the loader has mapped the file
            file.write(changed.tobytes())
        with pytest.raises(DataError, match=r"sample 0: .*00000\.tokens is damaged: .*mark"):
            loader.batch([0])
        with pytest.raises(DataError, match=r"00000\.tokens"):
            verify(open_source(tmp_path / "out"))


def test_a_damaged_or_lost_file_names_file_sample_and_item(tmp_path: Path) -> None:
    """Even if it happens while the run reads it."""
    source = built(tmp_path, FILES, ROWS)
    vision, media = reader(source).items["vision"], tmp_path / "out" / "00000.media"
    content = media.read_bytes()
    media.write_bytes(content[:-5])
    vision.read([(0, 0)])
    where = r"sample 0, item 5 \(pictures 5 to 5 of .*00000\.media\)"
    with pytest.raises(DataError, match=where + r": .*00000\.media is damaged: its bytes \d+ to \d+"):
        vision.read([(0, 5)])
    media.write_bytes(content[:-5] + b"\0" * 5)
    with pytest.raises(DataError, match=where + r": .*00000\.media is damaged"):
        vision.read([(0, 5)])
    media.unlink()
    with pytest.raises(DataError, match=r"sample 0, item 0 .*00000\.media cannot be read: .*No such file"):
        vision.read([(0, 0)])


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    built(tmp_path, FILES, ROWS)
    index = tmp_path / "out" / INDEX
    (shard,) = json.loads(index.read_text())["shards"]
    shard["media"]["media"]["name"] = "../in/photo.jpg"
    rewritten(index, shards=[shard])
    with pytest.raises(
        DataError, match=r"names a file '\.\./in/photo\.jpg': its files must be in the same folder"
    ):
        open_source(tmp_path / "out")
    shard["media"] = {"media": 3}
    rewritten(index, shards=[shard])
    with pytest.raises(DataError, match="is not a valid index"):
        open_source(tmp_path / "out")
