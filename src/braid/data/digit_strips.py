"""Strips of handwritten digits, and what they say: a small task for vision-language models, without download.

    strip of 2 to 4 digits, 16 x 64 pixels ──► "= " ──► "407"

The digits are the 1,797 images of scikit-learn (the test part of UCI's optical recognition of handwritten
digits, 8 x 8 pixels). Each is scaled and placed at random, in order and without overlap. Validation strips are
made of other images than training strips, so that a model that reads them has learned to read digits, not to
know these.

A strip is a pure function of its split and number.

Shapes: D digit images, H and W pixels.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from braid.data.build import new_splits
from braid.data.files import Progress
from braid.data.media import Medium, Picture
from braid.data.order import in_random_share
from braid.data.shards import ShardWriter, marker_of
from braid.data.tokenizer import Tokenizer
from braid.errors import DataError, how_to_install

Split = Literal["train", "validation"]

PROMPT = "= "
"""The text between a strip and its digits."""
HEIGHT, WIDTH = 16, 64
"""Pixels of a strip."""
SIDES = range(10, 15)
"""Sides of a digit in a strip."""
COUNTS = range(2, 5)
"""Digits of a strip."""
STRIPS: Mapping[Split, int] = MappingProxyType({"train": 20_000, "validation": 1_000})
"""How many a corpus has."""
EXAMPLES = 8
"""How many of the validation strips are files as well."""
HELD_OUT = 0.2
"""About the share of the digit images that only validation strips have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """The images of digits that the strips of a split are made of."""

    split: Split
    number_D: npt.NDArray[np.int64]
    """Which of scikit-learn's images they are."""
    pixels_DHW: npt.NDArray[np.uint8]
    """Ink is bright."""
    label_D: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Strip:
    """Digits side by side, and what they say."""

    pixels_HW: npt.NDArray[np.uint8]
    text: str
    images: tuple[int, ...]
    """Which of scikit-learn's images its digits are."""


def load_digits(split: Split) -> Digits:
    """The images of a split, from scikit-learn."""
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(
            "the corpus of digits needs the package scikit-learn, which is missing: run "
            f"`{how_to_install('scikit-learn')}`"
        ) from None
    found = datasets.load_digits()
    held_out = (in_random_share(image, HELD_OUT, seed=0) for image in range(len(found.target)))
    number_D = np.flatnonzero([each == (split == "validation") for each in held_out])
    return Digits(
        split=split,
        number_D=number_D,
        pixels_DHW=(found.images[number_D] * 255 / 16).round().astype(np.uint8),
        label_D=found.target[number_D].astype(np.int64),
    )


def make_strip(digits: Digits, number: int) -> Strip:
    """Strip `number` of a split."""
    from PIL import Image

    draw = _draws(f"strip/{digits.split}/{number}")
    count = COUNTS[draw(len(COUNTS))]
    chosen = [draw(len(digits.label_D)) for _ in range(count)]
    sides = [SIDES[draw(len(SIDES))] for _ in range(count)]
    # So many free columns before each digit, in all; the rest are behind the last one.
    free = sorted(draw(WIDTH - sum(sides) + 1) for _ in range(count))
    pixels_HW = np.zeros((HEIGHT, WIDTH), np.uint8)
    for place, (digit, side) in enumerate(zip(chosen, sides, strict=True)):
        x, y = free[place] + sum(sides[:place]), draw(HEIGHT - side + 1)
        picture = Image.fromarray(digits.pixels_DHW[digit]).resize((side, side), Image.Resampling.BICUBIC)
        pixels_HW[y : y + side, x : x + side] = np.asarray(picture, np.uint8)
    return Strip(
        pixels_HW=pixels_HW,
        text="".join(map(str, digits.label_D[chosen])),
        images=tuple(digits.number_D[chosen].tolist()),
    )


def _draws(name: str) -> Callable[[int], int]:
    """Numbers below a bound, drawn from a name."""
    words = iter(np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * 32), "<u4").tolist())
    return lambda below: int(next(words)) % below


def png(pixels_HW: npt.NDArray[np.uint8]) -> bytes:
    """The file of a grey image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels_HW).save(file, "png")
    return file.getvalue()


def build_strips(output: Path, tokenizer: Tokenizer, progress: Progress | None = None) -> None:
    """Write strips as a new source with two splits, as if built from rows of prompt and response."""
    splits = [load_digits("train"), load_digits("validation")]
    total, done = sum(STRIPS.values()), 0
    with new_splits(output, [digits.split for digits in splits], tokenizer) as writers:
        for digits, writer in zip(splits, writers, strict=True):
            for number in range(STRIPS[digits.split]):
                _add(writer, make_strip(digits, number), f"strip {number}", tokenizer)
                done += 1
                if progress is not None:
                    progress(done, total)


def _add(writer: ShardWriter, strip: Strip, origin: str, tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode(PROMPT), tokenizer.encode(strip.text)
    marker, end = marker_of(tokenizer.vocab), tokenizer.end_of_document
    ids = np.concatenate([[marker], prompt, answer, [end]]).astype(np.int64)
    height, width = strip.pixels_HW.shape
    picture = Picture(data=png(strip.pixels_HW), height=height, width=width)
    medium = Medium(kind="image", position=0, pictures=(picture,))
    writer.add(ids, np.arange(len(ids)) > len(prompt), origin, [medium])


def example_strips(folder: Path) -> list[Path]:
    """The first validation strips as files, named by number and digits: to look at, and to generate from."""
    folder.mkdir(parents=True, exist_ok=True)
    digits, files = load_digits("validation"), []
    for number in range(EXAMPLES):
        strip = make_strip(digits, number)
        files.append(folder / f"{number}-{strip.text}.png")
        if not files[-1].exists():
            files[-1].write_bytes(png(strip.pixels_HW))
    return files
