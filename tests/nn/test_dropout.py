"""Random masks are a pure function of who is asking."""

from __future__ import annotations

import torch

from braid.nn.dropout import dropout, keep_mask


def mask(samples: list[int], *, seed: int = 3, step: int = 5, layer: int = 2, tokens: int = 16) -> torch.Tensor:
    return keep_mask(
        0.25,
        seed=seed,
        step=step,
        layer=layer,
        sample_B=torch.tensor(samples),
        position_T=torch.arange(tokens),
        channels=64,
    )


def test_a_sample_has_its_mask_in_any_batch() -> None:
    alone, together = mask([7]), mask([1, 7, 2**40])
    assert torch.equal(alone[0], together[1])


def test_a_part_of_a_sample_has_its_part_of_the_mask() -> None:
    whole = mask([7])
    part = keep_mask(
        0.25,
        seed=3,
        step=5,
        layer=2,
        sample_B=torch.tensor([7]),
        position_T=torch.arange(8, 16),
        channels=64,
    )
    assert torch.equal(whole[:, 8:], part)


def test_every_argument_changes_the_mask() -> None:
    base = mask([7])
    others = [
        mask([8]),
        mask([7 + 2**32]),
        mask([7], seed=4),
        mask([7], seed=3 + 2**32),
        mask([7], step=6),
        mask([7], layer=3),
    ]
    for other in others:
        agreement = (base == other).double().mean().item()
        assert 0.5 < agreement < 0.75  # independent masks of rate 1/4 agree on 5/8
    assert not torch.equal(base[0, 0], base[0, 1])


def test_the_share_kept_is_the_rate_in_every_direction() -> None:
    kept = mask(list(range(32)), tokens=64).double()
    assert abs(kept.mean().item() - 0.75) < 0.005
    for dims in ((0, 1), (0, 2), (1, 2)):
        assert (kept.mean(dims) - 0.75).abs().max().item() < 0.05
    centred = kept - 0.75
    for shifted in (centred[..., 1:] * centred[..., :-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(shifted.mean().item()) < 0.005


def plain_hash(seed: int, step: int, layer: int, sample: int, position: int, channel: int) -> int:
    """The hash on Python's integers."""

    def mix(value: int) -> int:
        value %= 2**32
        value = (value ^ value >> 16) * 0x21F0AAAD % 2**32
        value = (value ^ value >> 15) * 0x735A2D97 % 2**32
        return value ^ value >> 15

    hashed = seed % 2**32
    for number in (seed >> 32, step, layer, sample, sample >> 32, position):
        hashed = mix(hashed * 0x9E3779B9 + number % 2**32)
    return mix(mix(hashed + channel) ^ mix(hashed ^ 0x9E3779B9))


def test_bits_are_those_of_plain_integers() -> None:
    samples = [4, 2**33 + 1]
    kept = mask(samples, seed=2**35 + 9)
    for b, t, c in ((0, 0, 0), (0, 15, 63), (1, 3, 17), (1, 15, 2)):
        for offset in range(8):
            place = (b, (t + offset) % 16, c)
            bits = plain_hash(2**35 + 9, 5, 2, samples[b], place[1], c)
            assert bool(kept[place]) == (bits >= 2**30)


def test_dropout_keeps_the_mean_and_passes_gradients_where_it_keeps() -> None:
    x = torch.ones(1, 16, 64, requires_grad=True)
    kept = mask([7])
    y = dropout(x, kept, 0.25)
    torch.testing.assert_close(y, kept / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.75)
