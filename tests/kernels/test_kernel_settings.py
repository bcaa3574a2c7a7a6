"""`train.kernels`: the fastest kernels, the references, or both side by side, as the run says."""

from dataclasses import fields, replace

import pytest
import torch

from braid import kernels, pattern
from braid.choices import KERNEL_OPS, kernel_modes
from braid.errors import ConfigError
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.recipes import load

CPU = torch.device("cpu")


def chosen(*settings):
    shape = load("tiny").model
    return kernels.choose(shape, pattern.parse(shape.pattern).kinds(), CPU, torch.float32, settings)


def test_every_op_has_a_setting():
    assert set(KERNEL_OPS) == {each.name for each in fields(kernels.Kernels)}


def test_settings_are_read_from_left_to_right():
    assert set(kernel_modes(["fused", "reference"]).values()) == {"reference"}
    modes = kernel_modes(["reference", "ssd=auto"])
    assert (modes["ssd"], modes["attention"]) == ("auto", "reference")


@pytest.mark.parametrize("wrong", ["fast", "ssd=fast", "sdd=auto", "=auto", "ssd=", ""])
def test_what_is_no_setting_is_refused_with_those_that_are(wrong):
    run = load("tiny")
    with pytest.raises(ConfigError, match=r"train\.kernels(.|\n)*must be auto, reference, fused, or op=mode"):
        plan(replace(run, train=replace(run.train, kernels=(wrong,))), 1)


def test_one_op_may_run_as_its_reference():
    auto, some = chosen("auto"), chosen("auto", "attention=reference")
    assert (auto.attention.name, some.attention.name) == ("sdpa", "reference")
    assert some.rms_norm == auto.rms_norm
    assert all(choice.name == "reference" for choice in chosen("reference").choices)


def test_a_fast_kernel_that_is_not_there_is_an_error_with_its_reason():
    with pytest.raises(
        ConfigError, match=r"train\.kernels = rms_norm=fused: (.|\n)*rms_norm: fused needs a GPU"
    ):
        chosen("rms_norm=fused")


@pytest.mark.parametrize(
    "op", ["attention", "ssd", "delta_rule", "causal_conv", "gated_norm", "router", "rms_norm", "glu"]
)
def test_the_estimate_counts_what_references_keep(op):
    run = load("hybrid-300m")
    run = replace(run, train=replace(run.train, dtype="bf16"))
    plain = replace(run, train=replace(run.train, kernels=("auto", f"{op}=reference")))
    assert estimate(plan(plain, 1)).peak > estimate(plan(run, 1)).peak
