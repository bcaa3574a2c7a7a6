"""Audio: log-mel spectrograms beside a DFT by its definition, and tones that spell the text behind them."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch

from braid import recipes
from braid.choices import MADE_UP
from braid.data import ItemLimits, Loader
from braid.data.audio import FLOOR, Floats, Mel, hz_to_mel, log_mel, mel_filters, mel_patches, pitches
from braid.data.items import MadeUpItems
from braid.encoders import Encoder, Projector
from braid.errors import DataError
from tests.data.helpers import write_source

SMALL = Mel(sample_rate=1000, window=30, hop=7, bins=5, frames=3)
TOKEN = 1000


def by_definition(sound: list[float], mel: Mel) -> list[list[float]]:
    """The same, one number after the other: the sum of the DFT, and filters by their corners."""
    top = 2595 * math.log10(1 + mel.sample_rate / 2 / 700)
    corner = [700 * (10 ** (top * place / (mel.bins + 1) / 2595) - 1) for place in range(mel.bins + 2)]
    hann = [math.sin(math.pi * n / mel.window) ** 2 for n in range(mel.window)]
    frames = []
    for start in range(0, len(sound) - mel.window + 1, mel.hop):
        energies = [0.0] * mel.bins
        for k in range(mel.window // 2 + 1):
            turn = [cmath.exp(-2j * math.pi * k * n / mel.window) for n in range(mel.window)]
            total = sum(sound[start + n] * hann[n] * turn[n] for n in range(mel.window)) / sum(hann)
            hz = k * mel.sample_rate / mel.window
            for m in range(mel.bins):
                low, centre, high = corner[m : m + 3]
                if low < hz < high:
                    side = (hz - low) / (centre - low) if hz <= centre else (high - hz) / (high - centre)
                    energies[m] += side * abs(total) ** 2
        frames.append([math.log10(max(energy, FLOOR)) for energy in energies])
    return frames


@pytest.mark.parametrize("samples", [0, 29, 30, 31, 36, 37, 100])
@pytest.mark.parametrize("mel", [SMALL, replace(SMALL, window=31, hop=40)], ids=["overlap", "gaps"])
def test_log_mel_is_the_spectrogram_of_its_definition(mel: Mel, samples: int) -> None:
    sound = np.random.default_rng(0).normal(size=samples)
    expected = by_definition(sound.tolist(), mel)
    found_FM = log_mel(sound, mel)
    assert found_FM.shape == (len(expected), mel.bins)
    assert found_FM == pytest.approx(np.array(expected).reshape(found_FM.shape), abs=1e-10)


def test_silence_has_a_finite_logarithm() -> None:
    assert (log_mel(np.zeros(60), SMALL) == np.log10(FLOOR)).all()


@pytest.mark.parametrize("hz", [150.0, 440.0, 1000.0, 3700.0])
def test_a_tone_is_loudest_in_the_filter_of_its_pitch(hz: float) -> None:
    mel = Mel()
    sound_T = np.sin(2 * np.pi * hz * np.arange(4000) / mel.sample_rate)
    logs_FM = log_mel(sound_T, mel)
    centres = np.linspace(0, hz_to_mel(mel.sample_rate / 2), mel.bins + 2)[1:-1]
    nearest = int(np.abs(centres - hz_to_mel(hz)).argmin())
    assert set(logs_FM.argmax(1).tolist()) <= {nearest - 1, nearest, nearest + 1}
    assert np.ptp(logs_FM.max(1)) < 0.01, "the loudness of a tone does not depend on its phase"
    louder_FM = log_mel(10 * sound_T, mel)
    assert louder_FM.max(1) == pytest.approx(logs_FM.max(1) + 2)


def test_every_filter_hears_something() -> None:
    assert (mel_filters(Mel()).max(0) > 0.4).all()


@pytest.mark.parametrize(
    ("frames", "group", "patches"), [(0, 1, 0), (2, 1, 0), (9, 1, 3), (11, 1, 3), (11, 2, 2)]
)
def test_patches_are_whole_groups_of_frames(frames: int, group: int, patches: int) -> None:
    logs_FM = np.random.default_rng(0).normal(size=(frames, SMALL.bins))
    found_NI = mel_patches(logs_FM, SMALL, group)
    assert found_NI.shape == (patches, SMALL.input)
    assert found_NI.dtype == np.float32
    flat = (logs_FM - SMALL.mean) / SMALL.std
    assert found_NI.reshape(-1) == pytest.approx(flat.reshape(-1)[: patches * SMALL.input], abs=1e-6)


def test_a_sound_of_so_many_patches_has_just_their_frames() -> None:
    for patches in (1, 2, 5):
        samples = SMALL.samples(patches)
        assert len(log_mel(np.ones(samples), SMALL)) == patches * SMALL.frames
        assert len(log_mel(np.ones(samples - 1), SMALL)) == patches * SMALL.frames - 1


# --------------------------------------------------------------------------------------------- tones


def limits(*, group: int = 1, input: int = 96) -> ItemLimits:
    encoder = Encoder(pattern="-", hidden=4, input=input, group=group, projector=Projector(width=4))
    return ItemLimits(encoder=encoder, token=TOKEN, most_items=3, most_patches=12, items="tones")


def loader(folder: Path, *, seed: int = 0, **changes: int) -> Loader:
    source = write_source(folder / "one", [[place * 7 % 1000 for place in range(3000)]])
    return Loader(source, length=48, seed=seed, synthetic={"audio": limits(**changes)})


def wanted_of(loader: Loader, samples: range) -> list[tuple[int, int]]:
    sizes = loader.items["audio"].sizes(samples)
    return [
        (sample, number) for sample, each in zip(samples, sizes, strict=True) for number in range(len(each))
    ]


def heard(frame_NM: Floats, digits: int) -> list[int]:
    """The ids that are spelled: in each register, the loudest of its pitches."""
    mel = Mel()
    centres = np.linspace(0, hz_to_mel(mel.sample_rate / 2), mel.bins + 2)[1:-1]
    scale = pitches(np.array([int(str(digit) * digits, 8) for digit in range(8)]), digits)
    nearest_PD = np.abs(hz_to_mel(scale)[..., None] - centres).argmin(-1)
    digit_ND = np.stack([frame_NM[:, nearest_PD[:, digit]].argmax(1) for digit in range(digits)], axis=1)
    return (digit_ND << 3 * np.arange(digits)).sum(1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("changes", [{}, {"group": 2}, {"input": 144}], ids=str)
def test_tones_spell_the_text_that_follows_them(tmp_path: Path, changes: Mapping[str, int]) -> None:
    """The last patch the first token, as synthetic items do; the first frame of a patch is its chord alone."""
    data = loader(tmp_path, **changes)
    batch, source = data.batch(range(20)), data.items["audio"]
    spelled = 0
    for sample, number in wanted_of(data, range(20)):
        patches_NI, grids = source.read([(sample, number)])
        (sizes,) = source.sizes([sample])
        assert grids == [(1, sizes[number])]
        assert patches_NI.shape == (sizes[number], data.synthetic["audio"].encoder.input)
        assert patches_NI.dtype == torch.float32
        tokens = [*batch.tokens_BT[sample].tolist(), int(batch.labels_BT[sample, -1])]
        behind = [p + 1 for p in range(48) if tokens[p] == TOKEN != tokens[p + 1]][number]
        first_NM = patches_NI[:, : Mel().bins].numpy().astype(np.float64)
        assert heard(first_NM, digits=4)[::-1] == tokens[behind : behind + sizes[number]]
        spelled += sizes[number]
    assert spelled > 50


def test_whoever_asks_hears_the_same(tmp_path: Path) -> None:
    data = loader(tmp_path)
    source, wanted = data.items["audio"], wanted_of(data, range(12))
    patches_NI, grids = source.read(wanted)
    apart = [source.read([each]) for each in wanted]
    assert torch.equal(torch.cat([each.patches_NI for each in apart]), patches_NI)
    assert [grid for each in apart for grid in each.grids] == grids
    assert source.read([]).patches_NI.shape == (0, 96)
    again = loader(tmp_path / "again").items["audio"].read(wanted)
    assert torch.equal(again.patches_NI, patches_NI)


def test_the_same_token_never_sounds_the_same_twice(tmp_path: Path) -> None:
    """Phases, loudness and hiss are those of a place; neither repeats."""
    source = write_source(tmp_path / "one", [[5] * 3000])
    data, other = (Loader(source, length=48, seed=seed, synthetic={"audio": limits()}) for seed in (0, 1))
    first_NI = data.items["audio"].read(wanted_of(data, range(12))).patches_NI
    others_NI = other.items["audio"].read(wanted_of(other, range(12))).patches_NI
    every = torch.cat([first_NI, others_NI])
    assert len(torch.unique(every, dim=0)) == len(every)


def test_patches_that_are_no_frames_are_refused(tmp_path: Path) -> None:
    rule = "modules.audio.model.input is 100, and a frame of tones has 48 numbers: set it to 96, or another"
    with pytest.raises(DataError, match=rule):
        loader(tmp_path, input=100)


def test_the_fingerprint_knows_tones(tmp_path: Path) -> None:
    tones = loader(tmp_path)
    bits = replace(tones, synthetic={"audio": replace(limits(), items="synthetic")})
    assert torch.equal(tones.batch(range(9)).tokens_BT, bits.batch(range(9)).tokens_BT), "places are the same"
    assert tones.fingerprint != bits.fingerprint


@pytest.mark.parametrize("kind", MADE_UP)
def test_every_made_up_kind_is_a_source_of_items(kind: str, tmp_path: Path) -> None:
    assert issubclass(resolve_name(MADE_UP[kind]), MadeUpItems)
    data = loader(tmp_path)
    data = replace(data, synthetic={"audio": replace(limits(), items=kind)})
    wanted = wanted_of(data, range(4))
    assert data.items["audio"].read(wanted).patches_NI.isfinite().all()
    assert data.items["audio"].identity["kind"] == kind


def test_the_recipe_reads_patches_of_two_frames() -> None:
    (audio,) = recipes.load("tiny-audio").modules.values()
    assert audio.model.input == Mel().input
