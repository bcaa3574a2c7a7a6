"""Images: the bytes of a PNG or JPEG to patches.

    bytes ──► header: size within bounds ──► decode ──► upright, grey or RGB ──► resize ──► patches

`image_grid` says how many patches an image has, from its size alone; the rest follows from the bytes. Pillow
decodes, and is loaded where it is used. What cannot be used raises a `DataError` that says why; whoever knows
the file and the sample adds them.

Alpha is laid over white. Of 16 bits, the higher 8 are used. An EXIF orientation is applied: sizes are those of
the upright image. Colour profiles are ignored.

Shapes: F frames, H and W pixels, C channels, N patches, I numbers of a patch.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from braid.encoders import Encoder, Pixels
from braid.errors import DataError, how_to_install
from braid.patch_grid import patch_places

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 1 << 26
"""Most pixels of an image, for example 8,192 x 8,192: decoded, they take 256 MiB."""
MOST_BYTES = 1 << 28
"""Most bytes of a file."""

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
"""What the files begin with."""
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
"""The last chunk, without which Pillow takes a file whose pixels are complete."""
FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG segments that begin with the image's size: SOF0 to SOF15."""
WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers that no segment follows."""
START_OF_SCAN = 0xDA
ORIENTATION = 0x0112
"""The EXIF tag."""
UPRIGHT = MappingProxyType(
    {
        2: "FLIP_LEFT_RIGHT",
        3: "ROTATE_180",
        4: "FLIP_TOP_BOTTOM",
        5: "TRANSPOSE",
        6: "ROTATE_270",
        7: "TRANSVERSE",
        8: "ROTATE_90",
    }
)
"""By EXIF orientation, Pillow's name for what makes an image upright."""
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16"})
"""Pillow's names for the kinds of pixels that are accepted."""

Grid = tuple[int, int]
"""Rows and columns of patches."""


# --------------------------------------------------------------------------------------------- sizes


def image_grid(height: int, width: int, encoder: Encoder, most_patches: int) -> Grid:
    """Rows and columns of patches of an image: whole blocks, near its own size, and at most `most_patches`.

    Each side is rounded to the nearest block. If these are too many patches, an image that has more is scaled
    down to exactly as many as may be, and both sides are rounded down. So a side is less than a block away from
    where the aspect ratio would have it, unless that is less than one block. In whole numbers: the same on
    every machine.
    """
    assert encoder.pixels is not None
    block = encoder.block
    side, most = block * encoder.pixels.patch, most_patches // block**2
    assert min(height, width, most) > 0
    rows, columns = (max(1, (2 * each + side) // (2 * side)) for each in (height, width))
    if max(rows * columns * side**2, height * width) > most * side**2:
        rows = max(1, min(height // side, isqrt(most * height // width)))
        columns = max(1, min(width // side, isqrt(most * width // height)))
        rows, columns = min(rows, most), min(columns, most)
    return block * rows, block * columns


def header_size(data: bytes) -> tuple[int, int]:
    """Height and width by the header alone, within bounds."""
    if data.startswith(PNG):
        size = struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" and len(data) >= 24 else None
        size = None if size is None else size[::-1]
    elif data.startswith(JPEG):
        size = _jpeg_size(data)
    elif not data:
        raise DataError("is empty: it has no bytes")
    else:
        raise DataError(f"is neither PNG nor JPEG: its first bytes are {data[:8]!r}; convert it to one of them")
    if size is None:
        raise DataError("is damaged: its header does not say its size")
    height, width = size
    if height == 0 or width == 0:
        raise DataError(f"is {height} x {width} pixels: an image has at least one")
    if height * width > MOST_PIXELS:
        raise DataError(
            f"is {height:,} x {width:,} pixels: an image may have {MOST_PIXELS:,} in all; make it smaller"
        )
    return height, width


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width by the frame header, which comes before the first scan."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in FRAME_HEADERS:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return height, width
        if marker == START_OF_SCAN:
            return None
        if marker == 0xFF:  # a byte of padding
            at += 1
        elif marker in WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


# --------------------------------------------------------------------------------------------- pixels


def checked_size(data: bytes) -> tuple[int, int]:
    """Height and width of an image that decodes as a whole, upright."""
    width, height = _decode(data, channels=3).size
    return height, width


def image_patches(frames: Sequence[bytes], encoder: Encoder, grid: Grid) -> npt.NDArray[np.float32]:
    """patches_NI of an item with this grid, in block order. Frames are repeated at the end until there are
    enough: an image is all frames of its item."""
    pixels = encoder.pixels
    assert pixels is not None
    assert 0 < len(frames) <= pixels.frames
    rows, columns = grid
    decoded = [_resized(frame, pixels, grid) for frame in frames]
    pixels_FHWC = np.stack([*decoded, *[decoded[-1]] * (pixels.frames - len(decoded))])
    mean, std = (np.asarray(each, np.float32) for each in (pixels.mean, pixels.std))
    values_FHWC = (pixels_FHWC.astype(np.float32) / np.float32(255) - mean) / std
    cut = values_FHWC.reshape(pixels.frames, rows, pixels.patch, columns, pixels.patch, pixels.channels)
    y_N, x_N = patch_places(rows, columns, encoder.block)
    return np.ascontiguousarray(cut.transpose(1, 3, 0, 5, 2, 4)[y_N, x_N].reshape(rows * columns, -1))


def _resized(data: bytes, pixels: Pixels, grid: Grid) -> npt.NDArray[np.uint8]:
    """pixels_HWC of an image, resized to its grid."""
    from PIL import Image

    rows, columns = grid
    picture = _decode(data, pixels.channels)
    # Pillow's bicubic filter widens with the scale: it is antialiased.
    resized = picture.resize((columns * pixels.patch, rows * pixels.patch), Image.Resampling.BICUBIC)
    return np.asarray(resized, np.uint8).reshape(resized.height, resized.width, pixels.channels)


def _decode(data: bytes, channels: int) -> Image.Image:
    """An upright image of 1 or 3 channels with 8 bits."""
    height, width = header_size(data)
    picture = _open(data)
    try:
        # The formats' own classes do not check Pillow's limit, a setting of the process: ours has been checked,
        # and what is decoded has the size that was.
        if picture.size != (width, height):
            raise DataError("is damaged: its header has several sizes")
        if picture.mode not in MODES:
            raise DataError(
                f"has {picture.mode} pixels: convert it to grey or RGB, with or without transparency"
            )
        picture.load()
        orientation = picture.getexif().get(ORIENTATION, 1)
        return _upright(_opaque(picture, "L" if channels == 1 else "RGB"), orientation)
    except DataError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, zlib.error and others
        raise DataError(f"cannot be decoded: {error}") from None


def _open(data: bytes) -> Image.Image:
    """The image of a file whose header has been read; Pillow reads pixels later."""
    try:
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
    except ImportError:
        raise DataError(
            f"images need the package Pillow, which is missing: run `{how_to_install('pillow')}`"
        ) from None
    kind = PngImageFile if data.startswith(PNG) else JpegImageFile
    if kind is PngImageFile and PNG_END not in data:
        raise DataError("is truncated: its last chunk is missing")
    try:
        picture = kind(io.BytesIO(data))
    except Exception as error:
        raise DataError(f"cannot be decoded: {error}") from None
    if isinstance(picture, PngImageFile) and picture.is_animated:
        raise DataError("is an animated PNG: give its frames as the files of a video")
    return picture


def _opaque(picture: Image.Image, mode: str) -> Image.Image:
    """The image over white, as grey (L) or RGB."""
    from PIL import Image

    if picture.has_transparency_data:
        if picture.mode == "I;16":
            raise DataError("has 16 bits of grey and a transparent one: give it an alpha channel, or 8 bits")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert(mode)
    if picture.mode == "I;16":  # which Pillow clips to 8 bits, where it takes the higher ones of RGB
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return picture.convert(mode)


def _upright(picture: Image.Image, orientation: int) -> Image.Image:
    from PIL import Image

    if orientation not in UPRIGHT:
        return picture
    return picture.transpose(Image.Transpose[UPRIGHT[orientation]])
