"""The shape of a mixture: what is refused, and what to set instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.architecture import Activation, Glu, Mlp, Moe

GOOD = Moe(experts=12, top_k=4, ffn=8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score": "sigmoid", "selection_bias": True, "groups": 4, "top_groups": 2},
        {"score": "sqrt_softplus", "selection_bias": True, "selection_bias_rate": 0.0},
        {"groups": 6, "top_groups": 2},  # as many experts as a token visits
        {"top_k": 1, "normalize_top_k": False},
        {"softmax_after_top_k": True, "groups": 6, "top_groups": 4},
        {"routing": "sinkhorn", "aux_loss": 0.0, "z_loss": 0.1},
        {"routing": "round_robin", "capacity_factor": 1.0, "pad_to_capacity": True},
        {"aux_loss": 0.1, "sequence_aux_loss": 0.1, "global_aux_loss": 0.1, "z_loss": 0.1},
        {"activation": "relu2", "latent": 4, "shared_ffn": 3, "shared_gate": True, "bias": True},
        {"glu": Glu(alpha=1.702, limit=7.0, offset=1.0), "jitter": 0.1, "drop": "last_position"},
    ],
)
def test_combinations_that_work(changes: dict[str, object]) -> None:
    assert not list(replace(GOOD, **changes).problems("moe"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field", "rule", "remedy"),
    [
        ({"top_k": 13}, "top_k", "must not exceed moe.experts (12)", "1 to 12"),
        ({"top_k": 1}, "normalize_top_k", "no gradient", "False"),
        ({"top_k": 1, "softmax_after_top_k": True}, "softmax_after_top_k", "no gradient", "above 1"),
        ({"softmax_after_top_k": True, "score": "sigmoid"}, "softmax_after_top_k", "no softmax", "False"),
        ({"selection_bias": True}, "selection_bias", "independent scores", "sigmoid or sqrt_softplus"),
        ({"groups": 5}, "groups", "must divide", "4 or 6"),
        ({"groups": 4, "top_groups": 3}, "top_groups", "must divide", "2 or 4"),
        ({"top_groups": 2}, "top_groups", "must not exceed moe.groups (1)", "1 to 1"),
        ({"groups": 6, "top_groups": 1}, "top_groups", "hold 2 experts", "moe.top_k to 2"),
        ({"routing": "sinkhorn"}, "aux_loss", "sinkhorn", "0.0, or moe.routing to top_k"),
        ({"routing": "sinkhorn", "aux_loss": 0.0, "sequence_aux_loss": 0.1}, "sequence_aux_loss", "s", "0.0"),
        ({"routing": "sinkhorn", "aux_loss": 0.0, "global_aux_loss": 0.1}, "global_aux_loss", "s", "0.0"),
        ({"routing": "sinkhorn", "aux_loss": 0.0, "capacity_factor": 1.0}, "capacity_factor", "s", "None"),
        ({"routing": "sinkhorn", "aux_loss": 0.0, "groups": 2}, "groups", "sinkhorn", "1, or"),
        (
            {"routing": "round_robin", "score": "sigmoid", "selection_bias": True},
            "selection_bias",
            "round_robin",
            "False",
        ),
        ({"capacity_factor": 0.0}, "capacity_factor", "above 0", "above 0"),
        ({"pad_to_capacity": True}, "pad_to_capacity", "no capacity", "1.0 or more"),
        ({"shared_gate": True}, "shared_gate", "there is no shared expert", "shared_ffn above 0"),
        ({"jitter": 1.0}, "jitter", "fraction", "below 1"),
        ({"latent": -1}, "latent", "at least 0", "0 or more"),
        ({"z_loss": -0.1}, "z_loss", "at least 0", "0 or more"),
        ({"scale": 0.0}, "scale", "above 0", "above 0"),
        ({"glu": Glu(limit=0.0)}, "glu.limit", "above 0", "above 0"),
        ({"glu": Glu(alpha=-1.0)}, "glu.alpha", "above 0", "above 0"),
        ({"glu": Glu(offset=float("nan"))}, "glu.offset", "must be a finite number", "a finite number"),
        ({"glu": Glu(limit=7.0), "activation": "relu2"}, "glu", "relu2 has no gate", "swiglu"),
    ],
)
def test_each_rule(changes: dict[str, object], field: str, rule: str, remedy: str) -> None:
    (problem,) = replace(GOOD, **changes).problems("moe")  # type: ignore[arg-type]
    assert problem.field == f"moe.{field}"
    assert rule in problem.rule
    assert remedy in problem.remedy


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_a_dense_mlp_without_gate_takes_no_numbers_for_one(activation: Activation) -> None:
    (problem,) = Mlp(ffn=4, activation=activation, glu=Glu(alpha=1.702)).problems("mlp")
    assert problem.field == "mlp.glu"
