"""What a module says that autograd keeps is what autograd keeps, to the byte: in one process, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from braid import kernels, pattern
from braid.architecture import Attention, DeltaNet, Glu, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.kernels.attention import reference, spans_of
from braid.lora import Lora
from braid.model.language import LanguageModel
from braid.nn import attention, delta_net, latent_attention, mamba2, mlp
from braid.nn.cost import Workload
from braid.nn.norm import norm
from braid.nn.rotary import rotary_tables
from tests.model.cases import batch
from tests.planning.estimate.reality import kept

CPU = torch.device("cpu")
HIDDEN = 48
EVERY = list(pattern.Kind)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = ((2, 70), (1, 128), (3, 192))
"""Rows and tokens: the last chunk of recurrent mixers is not full, a single row, and more chunks."""


def chosen(dtype: torch.dtype) -> kernels.Kernels:
    shape = Model(pattern="E", hidden=HIDDEN, vocab=9, moe=Moe(experts=16, top_k=2, ffn=24))
    return kernels.choose(shape, EVERY, CPU, dtype)


def check(module: nn.Module, workload: Workload, *given: Any, shared: Any = ()) -> None:
    """The module's own count against what its forward leaves."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    x_BTC = torch.randn(workload.rows, workload.tokens, HIDDEN).to(workload.dtype).requires_grad_()
    cost: Any = module.cost
    assert cost(workload).kept == kept(lambda: module(x_BTC, *given), module.parameters(), shared)


@pytest.fixture(params=SIZES, ids=str)
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def workload(request: pytest.FixtureRequest, size: tuple[int, int]) -> Workload:
    return Workload(rows=size[0], tokens=size[1], dtype=request.param, device="cpu")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(workload: Workload, kind: Any) -> None:
    module = norm(kind, HIDDEN, 1e-5, dtype=workload.dtype)
    x_BTC = torch.randn(workload.rows, workload.tokens, HIDDEN).to(workload.dtype).requires_grad_()
    cost = module.cost(workload, workload.local_tokens())
    assert cost.kept == kept(lambda: module(x_BTC), module.parameters())


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qk_norm": True, "gate": True, "bias": True, "o_bias": False},
        {"qk_norm": True, "qk_norm_over": "all"},
        {"positions": "none", "scale": 0.1},
        {"rope_fraction": 0.5},
        {"sinks": True},
    ],
    ids=str,
)
def test_attention(workload: Workload, kv_heads: int, more: dict[str, Any]) -> None:
    shape = Attention(heads=4, kv_heads=kv_heads, head_dim=8, **more)
    places_BT = torch.arange(workload.tokens).expand(workload.rows, -1)
    rotary = None
    if shape.positions == "rope":
        rotary = rotary_tables(places_BT, shape.rope_dim, 1e4, workload.dtype)
    attend = kernels.attention.choose(CPU, workload.dtype).function
    module = attention.Attention(shape, HIDDEN, 1e-5, attend, dtype=workload.dtype)
    check(module, workload, spans_of(torch.zeros_like(places_BT), None, CPU), rotary, shared=rotary or ())


def test_reference_attention_keeps_its_scores(workload: Workload) -> None:
    """Within a tenth at these sizes: which copies of q, k and v its products keep depends on the sizes."""
    workload = replace(workload, references=frozenset({"attention"}))
    module = attention.Attention(
        Attention(heads=4, kv_heads=2, head_dim=8), HIDDEN, 1e-5, reference.attend, dtype=workload.dtype
    )
    places_BT = torch.arange(workload.tokens).expand(workload.rows, -1)
    rotary = rotary_tables(places_BT, 8, 1e4, workload.dtype)
    x_BTC = torch.randn(workload.rows, workload.tokens, HIDDEN).to(workload.dtype).requires_grad_()
    spans = spans_of(torch.zeros_like(places_BT), None, CPU)
    found = kept(lambda: module(x_BTC, spans, rotary), module.parameters(), rotary)
    assert module.cost(workload).kept == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("q_rank", "v_dim"), [(16, 10), (None, 10), (16, 14), (16, 18)])
def test_latent_attention(workload: Workload, q_rank: int | None, v_dim: int) -> None:
    shape = LatentAttention(heads=4, q_rank=q_rank, kv_rank=12, nope_dim=6, rope_dim=8, v_dim=v_dim)
    places_BT = torch.arange(workload.tokens).expand(workload.rows, -1)
    rotary = rotary_tables(places_BT, shape.rope_dim, 1e4, workload.dtype)
    attend = kernels.attention.choose(CPU, workload.dtype).function
    module = latent_attention.LatentAttention(shape, HIDDEN, 1e-5, attend, dtype=workload.dtype)
    check(module, workload, spans_of(torch.zeros_like(places_BT), None, CPU), rotary, shared=rotary)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"norm_per_group": False, "conv": 3, "bias": True}], ids=str)
def test_mamba2(workload: Workload, groups: int, more: dict[str, Any]) -> None:
    shape = Mamba2(heads=4, head_dim=6, state=20, groups=groups, **more)
    ssd = kernels.ssd.choose(CPU, workload.dtype).function
    check(mamba2.Mamba2(shape, HIDDEN, 1e-5, ssd, dtype=workload.dtype), workload)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_delta_net(workload: Workload, key_heads: int) -> None:
    shape = DeltaNet(key_heads=key_heads, value_heads=4, key_dim=8, value_dim=12)
    rule = kernels.delta_rule.choose(CPU, workload.dtype).function
    check(delta_net.DeltaNet(shape, HIDDEN, 1e-5, rule, dtype=workload.dtype), workload)


@pytest.mark.parametrize(
    "shape",
    [
        Mlp(ffn=40),
        Mlp(ffn=40, activation="relu2", bias=True),
        Mlp(ffn=40, activation="gelu"),
        Mlp(ffn=40, glu=Glu(alpha=1.7, limit=7.0, offset=1.0)),
        Mlp(ffn=40, glu=Glu(offset=1.0)),
        Mlp(ffn=40, glu=Glu(limit=2.0)),
    ],
    ids=str,
)
def test_mlp(workload: Workload, shape: Mlp) -> None:
    check(mlp.Mlp(shape, HIDDEN, dtype=workload.dtype), workload)


# --------------------------------------------------------------------------------------- whole models


def model_of(text: str, moe: Moe, dtype: torch.dtype, **more: Any) -> LanguageModel:
    parts: dict[str, Any] = {
        "attention": Attention(heads=4, kv_heads=2, head_dim=8, qk_norm=True),
        "latent_attention": LatentAttention(heads=4, q_rank=16, kv_rank=12, nope_dim=6, rope_dim=8, v_dim=10),
        "mamba2": Mamba2(heads=4, head_dim=6, state=20, groups=2),
        "delta_net": DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=12),
        "mlp": Mlp(ffn=20),
    }
    shape = Model(pattern=text, hidden=HIDDEN, vocab=17, moe=moe, **{**parts, **more})
    layout = pattern.parse(text)
    model = LanguageModel(shape, layout, kernels.choose(shape, layout.kinds(), CPU, dtype), dtype=dtype)
    model.initialize(1)
    return model


def check_model(model: LanguageModel, rows: int = 2, tokens: int = 130) -> None:
    context = model.prepare(batch([[tokens]] * rows))
    depths = len(model.layout.mtp)
    real = kept(lambda: model.losses(context).share(10, [10] * depths), model.parameters())
    costs = model.costs(Workload(rows=rows, tokens=tokens, dtype=model.dtype, device="cpu"))
    assert sum(cost.kept for cost in costs.values()) == real


VARIED: dict[str, Any] = {
    "dropout": 0.1,
    "norm_position": "attention_post",
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logits_scale": 2.0,
    "delta_net": DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=12, negative_eigenvalues=True),
}
"""Settings that half of the whole models have."""

MOES = (
    Moe(experts=16, top_k=2, ffn=24, aux_loss=0.0),
    Moe(
        experts=16,
        top_k=3,
        ffn=24,
        aux_loss=0.0,
        score="sigmoid",
        shared_ffn=20,
        shared_gate=True,
        selection_bias=True,
    ),
    Moe(experts=16, top_k=2, ffn=24, aux_loss=0.1, sequence_aux_loss=0.1, z_loss=0.1, latent=16),
    Moe(experts=4, top_k=2, ffn=24, score="sqrt_softplus", z_loss=0.1, global_aux_loss=0.1),
    Moe(experts=16, top_k=2, ffn=24, softmax_after_top_k=True, sequence_aux_loss=0.1, aux_loss=0.0, jitter=0.1),
    Moe(experts=16, top_k=1, ffn=24, router_dtype="input", bias=True, activation="relu2", aux_loss=0.0),
    Moe(experts=16, top_k=2, ffn=24, router_dtype="float64", shared_ffn=12, latent=8, normalize_top_k=False),
    Moe(
        experts=16, top_k=2, ffn=24, routing="round_robin", glu=Glu(offset=1.0), aux_loss=0.0, router_bias=True
    ),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moe", MOES, ids=range(len(MOES)))
def test_experts(moe: Moe, dtype: torch.dtype) -> None:
    check_model(model_of("E", moe, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("targets", ["*.experts.*", "*.experts.*.gate", "*.experts.*.up"])
@pytest.mark.parametrize("moe", [MOES[0], MOES[3], MOES[7]], ids=["grouped", "reference", "offset"])
def test_experts_with_adapters(moe: Moe, targets: str, dtype: torch.dtype) -> None:
    model = model_of("E", moe, dtype)
    model.adapt(Lora(rank=8, targets=(targets,)))
    check_model(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("text", ["[M-][*E][G-][ME]/*-", "[+-][+E]/+E/+E"])
def test_whole_models(text: str, tied: bool, dtype: torch.dtype) -> None:
    check_model(model_of(text, MOES[0], dtype, tied=tied, **(VARIED if tied else {})))


def test_more_tokens_than_the_loss_takes_at_a_time() -> None:
    check_model(model_of("-", MOES[0], torch.bfloat16, norm="layer"), rows=1, tokens=2500)
