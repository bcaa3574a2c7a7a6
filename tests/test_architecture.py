"""Numbers that follow from shapes, against the formulas of the papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from braid.architecture import Attention, HyperConnections, LatentAttention, Model, Yarn


def test_yarn_sharpens_rotated_channels_by_mscale():
    """0.1 * mscale * ln(factor) + 1, as in section 3.4 of the paper."""
    plain = Yarn(factor=4.0, original_tokens=8)
    assert plain.rotary_scale == pytest.approx(0.1 * math.log(4.0) + 1)
    assert plain.score_scale == 1.0
    less = Yarn(factor=40.0, original_tokens=8, mscale=0.707)
    assert less.rotary_scale == pytest.approx(0.0707 * math.log(40.0) + 1)


def test_yarn_extends_a_context():
    def refused(factor):
        return [problem.field for problem in Yarn(factor=factor, original_tokens=8).problems("yarn")]

    assert refused(0.5) == ["yarn.factor"]
    assert refused(1.0) == []


def test_yarn_keeps_frequencies_above_those_that_it_divides():
    def refused(fast, slow, ramp):
        scaling = Yarn(factor=4.0, original_tokens=8, beta_fast=fast, beta_slow=slow, ramp=ramp)
        return [problem.field for problem in scaling.problems("yarn")]

    for ramp in ("channels", "rotations"):
        assert refused(2.0, 1.0, ramp) == []
        assert refused(1.0, 2.0, ramp) == ["yarn.beta_fast"]
    assert refused(1.0, 1.0, "channels") == []
    assert refused(1.0, 1.0, "rotations") == ["yarn.beta_fast"], "the ramp would divide by zero"


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


def test_scores_are_scaled_by_the_width_of_a_head_unless_a_scale_is_given():
    shape = Attention(heads=2, kv_heads=1, head_dim=16)
    assert shape.score_scale == pytest.approx(0.25)
    assert replace(shape, scale=0.015625).score_scale == 0.015625


@pytest.mark.parametrize(
    ("bias", "o_bias", "expected"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_the_output_projection_has_a_bias_like_the_others_unless_told_otherwise(bias, o_bias, expected):
    assert Attention(heads=2, kv_heads=1, head_dim=16, bias=bias, o_bias=o_bias).has_o_bias is expected


MODEL = Model(pattern="*", hidden=8, vocab=9, attention=Attention(heads=2, kv_heads=1, head_dim=4))
LATENT = LatentAttention(heads=2, q_rank=3, kv_rank=5, nope_dim=12, rope_dim=4, v_dim=7)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (replace(MODEL, embedding_scale=0.0), "model.embedding_scale"),
        (replace(MODEL, residual_scale=-1.0), "model.residual_scale"),
        (replace(MODEL, logits_scale=float("nan")), "model.logits_scale"),
        (replace(MODEL, residual_scale=0.5, hyper=HyperConnections()), "model.residual_scale"),
        (replace(MODEL, attention=replace(MODEL.attention, scale=0.0)), "model.attention.scale"),
        (replace(MODEL, latent_attention=replace(LATENT, norm_eps=0.0)), "model.latent_attention.norm_eps"),
    ],
)
def test_a_scale_that_cannot_be_applied_is_a_problem(model, field):
    assert [problem.field for problem in model.problems("model")] == [field]
