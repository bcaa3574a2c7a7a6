"""Audio: log-mel spectrograms as patches of an encoder, and tones that spell the text behind them.

    samples ──► frames of `window`, every `hop` ──► Hann ──► |DFT|² ──► mel filters ──► log ──► patches

Mel filters are triangles on the HTK scale, mel = 2595 log10(1 + Hz / 700). A patch is `frames` frames one after
the other, (frame, bin) flat; nothing is padded.

`Tones` need no files: like `SyntheticItems`, an item says which tokens follow it, here as sound. Each patch is
a chord: three bits of a token's id choose one of eight pitches, and each three bits have a register of their
own.

Shapes: T samples of sound, F frames, M mel bins, K frequencies of the DFT, N patches, I = `frames` · M numbers
of a patch, D digits of a token id, S samples of a frame, or those that one chord lasts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from braid.data.items import MadeUpItems, Patches
from braid.errors import DataError

Floats = npt.NDArray[np.float64]

FLOOR = 1e-8
"""Least energy of a bin: silence has a logarithm too."""
DIGIT_BITS = 3
"""Bits of a token id that choose a pitch."""
LOWEST_HZ, HIGHEST_HZ = 200.0, 3600.0
"""Pitches are evenly spaced on the mel scale between these."""
LOUDNESS = (0.5, 1.0)
"""Range of the amplitude of a tone."""
HISS = 0.01
"""Amplitude of the noise behind the tones."""


@dataclass(frozen=True, kw_only=True)
class Mel:
    """How sound becomes patches."""

    sample_rate: int = 8000
    """Samples per second."""
    window: int = 512
    """Samples of a frame."""
    hop: int = 256
    """Samples from one frame to the next."""
    bins: int = 48
    """Mel filters, from 0 Hz to half the sample rate."""
    frames: int = 2
    """Frames of a patch."""
    mean: float = -5.0
    """Subtracted from the logarithms, which are to the base of 10."""
    std: float = 2.0
    """What is left is divided by it."""

    @property
    def input(self) -> int:
        """Numbers of a patch."""
        return self.frames * self.bins

    @property
    def patch_samples(self) -> int:
        """From the start of one patch to that of the next."""
        return self.frames * self.hop

    def samples(self, patches: int) -> int:
        """Samples of a sound of so many patches: the last window ends with the sound."""
        return patches * self.patch_samples + self.window - self.hop


def hz_to_mel(hz: npt.ArrayLike) -> Floats:
    return 2595.0 * np.log10(1.0 + np.asarray(hz, np.float64) / 700.0)


def mel_to_hz(mel: npt.ArrayLike) -> Floats:
    return 700.0 * (10.0 ** (np.asarray(mel, np.float64) / 2595.0) - 1.0)


@cache
def mel_filters(mel: Mel) -> Floats:
    """K x M, read-only: a filter rises from the centre of the one before it to 1 at its own, then falls to the
    next."""
    frequency_K = np.fft.rfftfreq(mel.window, 1 / mel.sample_rate)
    edges = mel_to_hz(np.linspace(0.0, hz_to_mel(mel.sample_rate / 2), mel.bins + 2))
    low_M, centre_M, high_M = edges[:-2], edges[1:-1], edges[2:]
    rising_KM = (frequency_K[:, None] - low_M) / (centre_M - low_M)
    falling_KM = (high_M - frequency_K[:, None]) / (high_M - centre_M)
    filters_KM: Floats = np.maximum(0.0, np.minimum(rising_KM, falling_KM))
    filters_KM.flags.writeable = False
    return filters_KM


def log_mel(sound_T: npt.ArrayLike, mel: Mel) -> Floats:
    """F x M: logarithms of the energies of mel filters. Samples behind the last whole window do not count; a
    sound that is shorter than a window has no frames."""
    sound = np.asarray(sound_T, np.float64)
    if len(sound) < mel.window:
        return np.zeros((0, mel.bins))
    frames_FS = np.lib.stride_tricks.sliding_window_view(sound, mel.window)[:: mel.hop]
    hann_S = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(mel.window) / mel.window)
    # The sum of the window scales energies, so that they do not depend on its length.
    spectrum_FK = np.fft.rfft(frames_FS * hann_S, axis=1) / hann_S.sum()
    power_FK = spectrum_FK.real**2 + spectrum_FK.imag**2
    logs_FM: Floats = np.log10(np.maximum(power_FK @ mel_filters(mel), FLOOR))
    return logs_FM


def mel_patches(logs_FM: Floats, mel: Mel, group: int = 1) -> npt.NDArray[np.float32]:
    """N x I: frames as patches, in whole groups of `group`. Frames that do not fill the last group are left
    out."""
    patches = len(logs_FM) // (mel.frames * group) * group
    whole_FM = logs_FM[: patches * mel.frames]
    return ((whole_FM - mel.mean) / mel.std).reshape(patches, mel.input).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tones(MadeUpItems):
    """Made-up sounds of one module, one chord for each token that it shows, in the order of `SyntheticItems`.
    Phases, loudness and hiss are drawn from seed, module, sample and place."""

    def __post_init__(self) -> None:
        bins = Mel().bins
        if self.input % bins:
            raise DataError(
                f"modules.{self.name}.model.input is {self.input}, and a frame of tones has {bins} numbers: "
                f"set it to {Mel().input}, or another multiple of {bins}"
            )

    @cached_property
    def mel(self) -> Mel:
        """As many frames make a patch as the encoder reads."""
        return Mel(frames=self.input // Mel().bins)

    @property
    def digits(self) -> int:
        """D: tones of a chord."""
        return math.ceil(self.samples.bits / DIGIT_BITS)

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "kind": "tones", "mel": asdict(self.mel)}

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        shown = self.samples.shown(self.name, wanted)
        mel, group = self.mel, self.limits.encoder.group
        chords_NS = self._chords(shown.id_N, shown.sample_N, shown.position_N)
        parts, start = [np.zeros((0, mel.input), np.float32)], 0
        for length in shown.lengths:
            own_NS = chords_NS[start : start + length]
            # The last chord lasts until the last window ends.
            sound_T = np.concatenate(
                [own_NS[:, : mel.patch_samples].reshape(-1), own_NS[-1, mel.patch_samples :]]
            )
            parts.append(mel_patches(log_mel(sound_T, mel), mel, group))
            start += length
        return Patches(torch.from_numpy(np.concatenate(parts)), shown.grids)

    def _chords(self, id_N: torch.Tensor, sample_N: torch.Tensor, position_N: torch.Tensor) -> Floats:
        """The sound of each token."""
        mel, digits = self.mel, self.digits
        length = mel.samples(1)
        drawn = self.samples.words(self.name, sample_N, position_N, 2 * digits + length)
        uniform = (drawn / 2.0**32).numpy()
        phase_ND, loudness_ND = 2 * np.pi * uniform[:, :digits], uniform[:, digits : 2 * digits]
        loudness_ND = LOUDNESS[0] + (LOUDNESS[1] - LOUDNESS[0]) * loudness_ND
        turns_S = 2 * np.pi * np.arange(length) / mel.sample_rate
        sound_NS = HISS * (2 * uniform[:, 2 * digits :] - 1)
        hz_ND = pitches(id_N.numpy(), digits)
        for digit in range(digits):
            angle_NS = hz_ND[:, digit, None] * turns_S + phase_ND[:, digit, None]
            sound_NS += loudness_ND[:, digit, None] / digits * np.sin(angle_NS)
        return sound_NS


def pitches(id_N: npt.NDArray[np.int64], digits: int) -> Floats:
    """N x D: the frequencies that spell token ids, lowest bits first."""
    each = 1 << DIGIT_BITS
    scale = mel_to_hz(np.linspace(hz_to_mel(LOWEST_HZ), hz_to_mel(HIGHEST_HZ), digits * each))
    place_D = np.arange(digits)
    digit_ND = id_N[:, None] >> DIGIT_BITS * place_D & each - 1
    chosen_ND: Floats = scale[place_D * each + digit_ND]
    return chosen_ND
