"""The MoE layer against transformers': outputs and the gradient of every weight, in float64.

Each oracle names, for every canonical tensor, the parameter that holds it there and where in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from braid import architecture
from tests.nn.moe_cases import build, forward, grads, of_rows, randn
from tests.nn.moe_cases import tensors as tensors_of

pytest.importorskip("transformers")

HIDDEN, FFN, EXPERTS = 14, 6, 8
Place = tuple[str, Callable[[Tensor], Tensor]]


class WithoutRounding(TorchFunctionMode):
    """Computes in float64 what transformers casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """A layer of transformers, and the shape that means the same here."""

    layer: nn.Module
    shape: architecture.Moe
    places: dict[str, Place]


def whole(tensor: Tensor) -> Tensor:
    return tensor


def fused_experts(experts: int, ffn: int) -> dict[str, Place]:
    """Gate above up in one parameter."""
    places: dict[str, Place] = {}
    for e in range(experts):
        places[f"experts.{e}.gate.weight"] = ("experts.gate_up_proj", lambda t, e=e: t[e, :ffn])
        places[f"experts.{e}.up.weight"] = ("experts.gate_up_proj", lambda t, e=e: t[e, ffn:])
        places[f"experts.{e}.down.weight"] = ("experts.down_proj", lambda t, e=e: t[e])
    return places


def shared_expert(prefix: str, names: tuple[str, ...] = ("gate", "up", "down")) -> dict[str, Place]:
    return {f"shared.{name}.weight": (f"{prefix}.{name}_proj.weight", whole) for name in names}


ROUTER: dict[str, Place] = {"router.weight": ("gate.weight", whole)}
BIASED_ROUTER: dict[str, Place] = {**ROUTER, "router.bias": ("gate.e_score_correction_bias", whole)}


def mixtral() -> Oracle:
    from transformers.models.mixtral import modeling_mixtral as theirs

    config = theirs.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=3
    )
    return Oracle(
        layer=theirs.MixtralSparseMoeBlock(config),
        shape=architecture.Moe(experts=EXPERTS, top_k=3, ffn=FFN),
        places=ROUTER | fused_experts(EXPERTS, FFN),
    )


def qwen3_moe(normalize: bool) -> Oracle:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    config = theirs.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=normalize,
    )
    return Oracle(
        layer=theirs.Qwen3MoeSparseMoeBlock(config),
        shape=architecture.Moe(experts=EXPERTS, top_k=3, ffn=FFN, normalize_top_k=normalize),
        places=ROUTER | fused_experts(EXPERTS, FFN),
    )


def qwen3_next() -> Oracle:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    config = theirs.Qwen3NextConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        shared_expert_intermediate_size=9,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    gate: dict[str, Place] = {"shared_gate.weight": ("shared_expert_gate.weight", whole)}
    return Oracle(
        layer=theirs.Qwen3NextSparseMoeBlock(config),
        shape=architecture.Moe(experts=EXPERTS, top_k=3, ffn=FFN, shared_ffn=9, shared_gate=True),
        places=ROUTER | gate | fused_experts(EXPERTS, FFN) | shared_expert("shared_expert"),
    )


def deepseek_v3() -> Oracle:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    return Oracle(
        layer=theirs.DeepseekV3MoE(config),
        shape=architecture.Moe(
            experts=12,
            top_k=4,
            ffn=FFN,
            shared_ffn=2 * FFN,
            score="sigmoid",
            scale=2.5,
            groups=4,
            top_groups=2,
            selection_bias=True,
        ),
        places=BIASED_ROUTER | fused_experts(12, FFN) | shared_expert("shared_experts"),
    )


def deepseek_v4() -> Oracle:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = theirs.DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        intermediate_size=FFN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        scoring_func="sqrtsoftplus",
        swiglu_limit=0.7,
        num_hidden_layers=1,
        mlp_layer_types=["moe"],
    )
    return Oracle(
        layer=theirs.DeepseekV4SparseMoeBlock(config, layer_idx=0),
        shape=architecture.Moe(
            experts=EXPERTS,
            top_k=3,
            ffn=FFN,
            shared_ffn=FFN,
            score="sqrt_softplus",
            scale=1.5,
            selection_bias=True,
            glu=architecture.Glu(limit=0.7),
        ),
        places=BIASED_ROUTER | fused_experts(EXPERTS, FFN) | shared_expert("shared_experts"),
    )


def nemotron_h(latent: int) -> Oracle:
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    config = theirs.NemotronHConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        moe_shared_expert_intermediate_size=9,
        moe_latent_size=latent or None,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        mlp_bias=False,
    )
    places = BIASED_ROUTER | shared_expert("shared_experts", ("up", "down"))
    for e in range(EXPERTS):
        places[f"experts.{e}.up.weight"] = ("experts.up_proj", lambda t, e=e: t[e])
        places[f"experts.{e}.down.weight"] = ("experts.down_proj", lambda t, e=e: t[e])
    if latent:
        places["latent.down.weight"] = ("fc1_latent_proj.weight", whole)
        places["latent.up.weight"] = ("fc2_latent_proj.weight", whole)
    return Oracle(
        layer=theirs.NemotronHMoE(config),
        shape=architecture.Moe(
            experts=EXPERTS,
            top_k=4,
            ffn=FFN,
            activation="relu2",
            shared_ffn=9,
            latent=latent,
            score="sigmoid",
            scale=2.5,
            groups=2,
            top_groups=2,
            selection_bias=True,
        ),
        places=places,
    )


def gpt_oss() -> Oracle:
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    config = theirs.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=3
    )
    config.swiglu_alpha, config.swiglu_limit = 1.702, 0.7
    places: dict[str, Place] = {"router.weight": ("router.weight", whole)}
    for e in range(EXPERTS):
        for start, name in enumerate(("gate", "up")):
            places[f"experts.{e}.{name}.weight"] = (
                "experts.gate_up_proj",
                lambda t, e=e, start=start: t[e, :, start::2].T,
            )
            places[f"experts.{e}.{name}.bias"] = (
                "experts.gate_up_proj_bias",
                lambda t, e=e, start=start: t[e, start::2],
            )
        places[f"experts.{e}.down.weight"] = ("experts.down_proj", lambda t, e=e: t[e].T)
        places[f"experts.{e}.down.bias"] = ("experts.down_proj_bias", lambda t, e=e: t[e])
    return Oracle(
        layer=theirs.GptOssMLP(config),
        shape=architecture.Moe(
            experts=EXPERTS,
            top_k=3,
            ffn=FFN,
            bias=True,
            softmax_after_top_k=True,
            glu=architecture.Glu(alpha=1.702, limit=0.7, offset=1.0),
        ),
        places=places,
    )


ORACLES: tuple[tuple[str, Callable[[], Oracle]], ...] = (
    ("mixtral", mixtral),
    ("qwen3_moe", lambda: qwen3_moe(normalize=True)),
    ("qwen3_moe, not normalised", lambda: qwen3_moe(normalize=False)),
    ("qwen3_next", qwen3_next),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v4", deepseek_v4),
    ("nemotron_h", lambda: nemotron_h(latent=0)),
    ("nemotron_h, latent", lambda: nemotron_h(latent=5)),
    ("gpt_oss", gpt_oss),
)


def filled(layer: nn.Module) -> nn.Module:
    """In float64, with random weights and selection biases."""
    layer = layer.double()
    for seed, (name, tensor) in enumerate([*layer.named_parameters(), *layer.named_buffers()]):
        # GPT-OSS's router has a bias on its logits, which is not part of the layer here.
        tensor.data.copy_(0 * tensor if name == "router.bias" else 0.5 * randn(*tensor.shape, seed=seed))
    return layer


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize(("rows", "row_tokens"), [(1, 37), (3, 5)])
@pytest.mark.parametrize("make", [make for _, make in ORACLES], ids=[name for name, _ in ORACLES])
def test_outputs_and_gradients(make: Callable[[], Oracle], rows: int, row_tokens: int) -> None:
    oracle = make()
    assert not list(oracle.shape.problems("moe"))
    theirs = filled(oracle.layer)
    tensors = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    moe = build(oracle.shape, HIDDEN)
    ours = tensors_of(moe)
    assert moe.canonical().keys() == oracle.places.keys()
    for name, tensor in moe.canonical().items():
        holder, view = oracle.places[name]
        tensor.write(ours[tensor.parameter], view(tensors[holder].detach()))

    x_NC = randn(rows * row_tokens, HIDDEN, seed=5)
    x_ours, x_theirs = x_NC.clone().requires_grad_(), x_NC.clone().requires_grad_()
    actual, _ = forward(moe, x_ours, of_rows(rows, row_tokens))
    with WithoutRounding():
        expected = theirs(x_theirs.view(rows, row_tokens, HIDDEN))
    expected = (expected[0] if isinstance(expected, tuple) else expected).flatten(0, 1)
    assert relative(actual, expected) < 1e-12

    weights = randn(*actual.shape, seed=6)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative(x_ours.grad, x_theirs.grad) < 1e-11
    for name, grad in grads(moe).items():
        holder, view = oracle.places[name]
        wanted = tensors[holder].grad
        assert relative(grad, torch.zeros_like(grad) if wanted is None else view(wanted)) < 1e-11, name
