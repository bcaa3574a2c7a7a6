"""Strips of digits: the same every time, labelled right, and held out by image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn import datasets

from braid.data import ByteTokenizer, ItemLimits, Loader, digit_strips, open_splits
from braid.data.digit_strips import HEIGHT, PROMPT, SIDES, WIDTH, build_strips, load_digits, make_strip
from tests.data.pictures import encoder


def test_a_strip_is_a_function_of_its_split_and_number() -> None:
    first, again = make_strip(load_digits("train"), 7), make_strip(load_digits("train"), 7)
    assert np.array_equal(first.pixels_HW, again.pixels_HW)
    assert (first.text, first.images) == (again.text, again.images)
    assert make_strip(load_digits("train"), 8).images != first.images
    assert make_strip(load_digits("validation"), 7).images != first.images


def test_validation_strips_have_images_of_their_own() -> None:
    train, validation = load_digits("train"), load_digits("validation")
    assert sorted([*train.number_D, *validation.number_D]) == list(range(1797))
    assert 300 < len(validation.number_D) < 420
    for digits in (train, validation):
        used = {image for number in range(300) for image in make_strip(digits, number).images}
        assert used <= set(digits.number_D.tolist())
        assert set(digits.label_D) == set(range(10))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_strip_shows_the_digits_that_it_says(split: digit_strips.Split) -> None:
    """Every digit is found in its strip, at some place and size, left to right; there is no other ink."""
    digits, bunch = load_digits(split), datasets.load_digits()
    for number in range(20):
        strip = make_strip(digits, number)
        assert strip.pixels_HW.shape == (HEIGHT, WIDTH)
        assert 2 <= len(strip.text) <= 4
        assert strip.text == "".join(str(bunch.target[image]) for image in strip.images)
        left, rest = 0, strip.pixels_HW.copy()
        for image in strip.images:
            x, y, side = _found(strip.pixels_HW, bunch.images[image], left)
            rest[y : y + side, x : x + side] = 0
            left = x + side
        assert not rest.any()


def _found(pixels_HW: np.ndarray, digit_HW: np.ndarray, left: int) -> tuple[int, int, int]:
    picture = Image.fromarray((digit_HW * 255 / 16).round().astype(np.uint8))
    for side in reversed(SIDES):
        wanted = np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC))
        for x in range(left, WIDTH - side + 1):
            for y in range(HEIGHT - side + 1):
                if np.array_equal(pixels_HW[y : y + side, x : x + side], wanted):
                    return x, y, side
    raise AssertionError("the digit is nowhere")


def test_places_sizes_and_numbers_of_digits_vary() -> None:
    strips = [make_strip(load_digits("train"), number) for number in range(100)]
    assert {len(strip.text) for strip in strips} == {2, 3, 4}
    firsts = {int(np.flatnonzero(strip.pixels_HW.any(0))[0]) for strip in strips}
    assert len(firsts) > 10


def test_a_corpus_of_strips_is_one_of_prompts_and_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digit_strips, "STRIPS", {"train": 6, "validation": 3})
    build_strips(tmp_path / "strips", ByteTokenizer())
    limits = ItemLimits(
        encoder=encoder(patch=8, group=1, channels=1, mean=(0.0,), std=(1.0,)),
        token=257,
        most_items=1,
        most_patches=16,
    )
    splits = open_splits(tmp_path / "strips")
    assert splits.validation is not None
    for source, split, count in ((splits.train, "train", 6), (splits.validation, "validation", 3)):
        assert source.documents == count
        loader = Loader(source, 24, 0, "documents", images={"vision": limits})
        texts, strips = {}, [make_strip(load_digits(split), number) for number in range(count)]  # type: ignore[arg-type]
        batch = loader.batch(range(count))
        for row in range(count):
            tokens, counts = batch.tokens_BT[row].tolist(), batch.loss_mask_BT[row]
            assert tokens[:16] == [257] * 16
            assert bytes(tokens[16 : 16 + len(PROMPT)]).decode() == PROMPT
            *answer, end = batch.labels_BT[row][counts].tolist()
            assert end == ByteTokenizer().end_of_document
            patches = loader.items["vision"].read([(row, 0)])
            assert patches.grids == [(2, 8)]
            texts[bytes(answer).decode()] = patches.patches_NI.numpy()
        assert sorted(texts) == sorted(strip.text for strip in strips)
        for strip in strips:
            cut = strip.pixels_HW.reshape(2, 8, 8, 8).transpose(0, 2, 1, 3).reshape(16, 64)
            np.testing.assert_allclose(texts[strip.text], cut / 255, atol=1e-6)
