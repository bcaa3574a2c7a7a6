"""Images: which files are accepted, how large they become, and in which order their patches are cut."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from braid.data.images import MOST_PIXELS, checked_size, header_size, image_grid, image_patches
from braid.errors import DataError
from braid.patch_grid import patch_places
from tests.data.pictures import encoded, encoder, noise, png

# --------------------------------------------------------------------------------------------- sizes

sides = st.integers(1, 5000) | st.sampled_from([1, 2, 60_000])


@settings(deadline=None, max_examples=300)
@given(height=sides, width=sides, patch=st.integers(1, 20), block=st.integers(1, 3), blocks=st.integers(1, 400))
def test_the_grid_keeps_the_aspect_ratio_within_its_bounds(
    height: int, width: int, patch: int, block: int, blocks: int
) -> None:
    """Whole blocks, at most as many as may be, and each side less than a block from the scaled image's: unless
    that is below one block, or the other side had to be widened to one."""
    most = blocks * block**2
    rows, columns = image_grid(height, width, encoder(patch=patch, group=block**2), most)
    assert rows % block == columns % block == 0
    assert 0 < rows * columns <= most
    side = patch * block
    scale = min(1.0, sqrt(blocks / (height * width)) * side)
    exact = (height * scale / side, width * scale / side)
    if min(exact) >= 1:
        for found, wanted in zip((rows, columns), exact, strict=True):
            assert abs(found / block - wanted) < 1 + 1e-6
    else:
        short, long = sorted(zip(exact, (rows, columns), strict=True))
        assert short[1] == block
        assert abs(long[1] / block - min(long[0], blocks)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("size", "most", "grid"),
    [
        ((32, 64), 1000, (4, 8)),  # as it is
        ((39, 56), 1000, (4, 8)),  # to the nearest block of 16 pixels
        ((40, 55), 1000, (6, 6)),
        ((3, 3), 1000, (2, 2)),
        ((320, 640), 64, (4, 10)),  # 16 blocks of 1 : 2 are 2.83 x 5.66, rounded down
        ((320, 320), 64, (8, 8)),
        ((5, 4000), 64, (2, 32)),
        ((4000, 5), 64, (32, 2)),
        ((320, 640), 4, (2, 2)),
    ],
)
def test_grids(size: tuple[int, int], most: int, grid: tuple[int, int]) -> None:
    assert image_grid(*size, encoder(patch=8), most) == grid


# --------------------------------------------------------------------------------------------- patches


@pytest.mark.parametrize(("block", "channels", "frames"), [(1, 3, 1), (2, 3, 1), (2, 1, 3), (3, 3, 2)])
def test_patches_are_the_normalised_pixels(block: int, channels: int, frames: int) -> None:
    """Not resized: every number of every patch, by its own index. (frame, channel, y, x), in block order."""
    patch, rows, columns = 3, 2 * block, 3 * block
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.5, 0.6, 0.7)[:channels]
    shape = encoder(patch=patch, group=block**2, channels=channels, frames=frames, mean=mean, std=std)
    given = [noise(rows * patch, columns * patch, channels, seed=frame) for frame in range(frames)]
    patches_NI = image_patches([encoded(each) for each in given], shape, (rows, columns))
    assert patches_NI.shape == (rows * columns, shape.input)
    assert patches_NI.dtype == np.float32
    pixels = np.stack(given).reshape(frames, rows * patch, columns * patch, channels).astype(np.float32)
    places = zip(*(each.tolist() for each in patch_places(rows, columns, block)), strict=True)
    for found_I, (y, x) in zip(patches_NI, places, strict=True):
        cut = pixels[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
        normal = (cut / np.float32(255) - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
        assert np.array_equal(found_I, np.moveaxis(normal, 3, 1).reshape(-1))


def test_joining_neighbouring_patches_is_a_pixel_shuffle() -> None:
    """Row (i, j) has patches (2i, 2j), (2i, 2j + 1), (2i + 1, 2j), (2i + 1, 2j + 1), one after the other."""
    rows, columns, shape = 4, 6, encoder(patch=2)
    data = png(2 * rows, 2 * columns)
    whole = image_patches([data], encoder(patch=2, group=1), (rows, columns)).reshape(rows, columns, -1)
    joined = image_patches([data], shape, (rows, columns)).reshape(rows // 2, columns // 2, -1)
    for i in range(rows // 2):
        for j in range(columns // 2):
            four = whole[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(-1)
            assert np.array_equal(joined[i, j], four)


def test_frames_are_repeated_until_there_are_enough() -> None:
    shape, a, b = encoder(patch=2, frames=3), png(4, 4, seed=1), png(4, 4, seed=2)
    for frames, filled in (([a], [a, a, a]), ([a, b], [a, b, b])):
        assert np.array_equal(image_patches(frames, shape, (2, 2)), image_patches(filled, shape, (2, 2)))


def test_resizing_is_pillows_antialiased_bicubic() -> None:
    shape, picture = encoder(patch=4, group=1, mean=(0.0,) * 3, std=(1.0,) * 3), noise(50, 70)
    patches_NI = image_patches([encoded(picture)], shape, (2, 3))
    resized = np.asarray(Image.fromarray(picture).resize((12, 8), Image.Resampling.BICUBIC), np.float32) / 255
    expected = resized.reshape(2, 4, 3, 4, 3).transpose(0, 2, 4, 1, 3).reshape(6, -1)
    assert np.array_equal(patches_NI, expected.astype(np.float32))
    flat = image_patches([encoded(np.tile(noise(1, 1), (50, 70, 1)))], shape, (2, 3))
    assert np.ptp(flat.reshape(6, 3, 16), axis=(0, 2)).max() == 0


# --------------------------------------------------------------------------------------------- kinds of pixels


def values(data: bytes, height: int, width: int, channels: int = 3) -> np.ndarray:
    """The pixels of an image as they are read, from 0 to 255."""
    shape = encoder(patch=1, group=1, channels=channels, mean=(0.0,) * channels, std=(1.0,) * channels)
    return (image_patches([data], shape, (height, width)) * 255).round().reshape(height, width, channels)


def test_grey_and_palettes_become_rgb_and_back() -> None:
    grey, colours = noise(3, 5, 1), noise(3, 5)
    assert np.array_equal(values(encoded(grey), 3, 5), np.repeat(grey[:, :, None], 3, 2))
    assert np.array_equal(values(encoded(grey), 3, 5, channels=1)[:, :, 0], grey)
    luma = np.asarray(Image.fromarray(colours).convert("L"))
    assert np.array_equal(values(encoded(colours), 3, 5, channels=1)[:, :, 0], luma)
    palette = Image.fromarray(colours).quantize(4)
    assert np.array_equal(values(encoded(palette), 3, 5), np.asarray(palette.convert("RGB")))
    assert np.array_equal(values(encoded(Image.new("1", (5, 3), 1)), 3, 5), np.full((3, 5, 3), 255))


def test_alpha_is_laid_over_white() -> None:
    picture = np.zeros((1, 3, 4), np.uint8)
    picture[0, :, :3], picture[0, :, 3] = (200, 100, 0), (0, 51, 255)
    expected = [[255, 255, 255], [244, 224, 204], [200, 100, 0]]
    assert values(encoded(picture), 1, 3)[0].tolist() == expected
    grey = Image.merge("LA", [Image.new("L", (1, 1), 100), Image.new("L", (1, 1), 51)])
    assert values(encoded(grey), 1, 1)[0].tolist() == [[224] * 3]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert values(encoded(palette, transparency=0), 1, 2)[0].tolist() == [[255] * 3, [40, 50, 60]]


def test_of_16_bits_the_higher_8_count() -> None:
    grey = np.asarray([[0, 255, 256, 0x1234, 0xFFFF]], np.uint16)
    assert values(encoded(grey), 1, 5, channels=1)[0, :, 0].tolist() == [0, 0, 1, 0x12, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_and_sizes_are_upright(orientation: int) -> None:
    picture, exif = noise(4, 6), Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, exif=exif)
    assert header_size(data) == (4, 6)
    turned = {
        1: picture,
        2: picture[:, ::-1],
        3: picture[::-1, ::-1],
        4: picture[::-1],
        5: picture.transpose(1, 0, 2),
        6: np.rot90(picture, -1),
        7: picture[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(picture),
    }[orientation]
    assert checked_size(data) == turned.shape[:2]
    assert np.array_equal(values(data, *turned.shape[:2]), turned)


# --------------------------------------------------------------------------------------------- refused


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb(height: int, width: int) -> bytes:
    """A PNG of which only the header is true."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def jpeg_of_size(height: int, width: int) -> bytes:
    """A JPEG whose frame header says so."""
    data = bytearray(encoded(noise(8, 8), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("made", [bomb, jpeg_of_size])
def test_impossible_sizes_are_refused_by_the_header(made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Pillow would say: it is not asked."""
    monkeypatch.setattr("braid.data.images._open", lambda _: pytest.fail("decoded"))
    with pytest.raises(DataError, match="is 60,000 x 60,000 pixels: an image may have 67,108,864 in all"):
        checked_size(made(60_000, 60_000))
    for size in ((0, 0), (0, 5), (5, 0)):
        with pytest.raises(DataError, match=f"is {size[0]} x {size[1]} pixels: an image has at least one"):
            checked_size(made(*size))
    assert header_size(made(8192, MOST_PIXELS // 8192)) == (8192, 8192)
    with pytest.raises(DataError, match="8,192 x 8,193"):
        header_size(made(8192, 8193))


def test_what_decodes_has_the_size_of_the_header() -> None:
    """A second frame header cannot smuggle in another size."""
    small, large = encoded(noise(8, 8), "JPEG"), jpeg_of_size(40_000, 40_000)
    at, end = large.index(b"\xff\xc0"), large.index(b"\xff\xc4")
    with pytest.raises(DataError, match="is damaged: its header has several sizes"):
        checked_size(small[:at] + small[at:end] + large[at:end] + small[end:])


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_truncated_files_are_refused(format: str) -> None:
    data = encoded(noise(20, 20), format)
    assert checked_size(data) == (20, 20)
    for length in range(len(data)):
        with pytest.raises(DataError):
            checked_size(data[:length])


def test_a_progressive_jpeg_is_accepted_and_refused_if_truncated() -> None:
    data = encoded(noise(20, 20), "JPEG", progressive=True)
    assert checked_size(data) == (20, 20)
    with pytest.raises(DataError, match=r"cannot be decoded: .*truncated"):
        checked_size(data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty: it has no bytes"),
        (b"plain text", "is neither PNG nor JPEG: its first bytes are b'plain te'"),
        (encoded(noise(4, 4), "GIF"), "is neither PNG nor JPEG: its first bytes are b'GIF8"),
        (b"\xff\xd8\xff\xe0\0\0", "is damaged: its header does not say its size"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "is damaged: its header does not say its size"),
        (encoded(Image.new("CMYK", (4, 4)), "JPEG"), "has CMYK pixels: convert it to grey or RGB"),
    ],
)
def test_other_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        checked_size(data)


def test_an_animation_is_refused() -> None:
    frames = [Image.fromarray(noise(4, 4, seed=each)) for each in range(2)]
    file = io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match="is an animated PNG: give its frames as the files of a video"):
        checked_size(file.getvalue())


def test_without_pillow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(4, 4)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"images need the package Pillow, which is missing: run `.*"):
        checked_size(data)


@settings(deadline=None, max_examples=200)
@given(
    data=st.binary(max_size=300),
    cut=st.integers(0, 300),
    start=st.sampled_from([png(6, 7), encoded(noise(6, 7), "JPEG")]),
)
def test_whatever_the_bytes_there_is_a_size_or_a_reason(data: bytes, cut: int, start: bytes) -> None:
    try:
        height, width = checked_size(start[:cut] + data)
    except DataError as error:
        assert str(error)
    else:
        assert 0 < height * width <= MOST_PIXELS
