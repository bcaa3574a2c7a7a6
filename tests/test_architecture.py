"""Numbers that follow from shapes, against the formulas of the papers."""

from __future__ import annotations

import math

import pytest

from braid.architecture import LatentAttention, Yarn


def test_yarn_sharpens_rotated_channels_by_mscale():
    """0.1 * mscale * ln(factor) + 1, as in section 3.4 of the paper."""
    plain = Yarn(factor=4.0, original_tokens=8)
    assert plain.rotary_scale == pytest.approx(0.1 * math.log(4.0) + 1)
    assert plain.score_scale == 1.0
    less = Yarn(factor=40.0, original_tokens=8, mscale=0.707)
    assert less.rotary_scale == pytest.approx(0.0707 * math.log(40.0) + 1)


def test_yarn_of_deepseek_sharpens_all_channels_instead():
    both = Yarn(factor=40.0, original_tokens=8, mscale=0.707, mscale_all_dim=0.707)
    assert both.rotary_scale == 1.0
    assert both.score_scale == pytest.approx((0.0707 * math.log(40.0) + 1) ** 2)


def test_latent_scores_are_scaled_by_the_whole_width_of_a_head():
    shape = {"heads": 2, "q_rank": 3, "kv_rank": 5, "nope_dim": 12, "rope_dim": 4, "v_dim": 7}
    assert LatentAttention(**shape).score_scale == pytest.approx(16**-0.5)
    yarn = Yarn(factor=40.0, original_tokens=8, mscale_all_dim=1.0)
    sharper = (0.1 * math.log(40.0) + 1) ** 2
    assert LatentAttention(**shape, rope_scaling=yarn).score_scale == pytest.approx(16**-0.5 * sharper)
