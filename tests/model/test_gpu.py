"""On a GPU: the same masks bit for bit, and the same losses and gradients up to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid import architecture, kernels, pattern
from braid.model.language import LanguageModel
from braid.nn.dropout import keep_mask
from tests.model.cases import assert_near, batch, canonical_grads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = architecture.Model(
    pattern="[*-][*E]",
    hidden=64,
    vocab=17,
    dropout=0.1,
    init_std=0.1,
    attention=architecture.Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True),
    mlp=architecture.Mlp(ffn=48),
    moe=architecture.Moe(experts=4, top_k=2, ffn=32, shared_ffn=16),
)


def build(shape: architecture.Model, device: str, dtype: torch.dtype) -> LanguageModel:
    where = torch.device(device)
    layout = pattern.parse(shape.pattern)
    chosen = kernels.choose(shape, layout.kinds(), where, dtype)
    model = LanguageModel(shape, layout, chosen, device=where, dtype=dtype)
    model.initialize(1)
    return model


def test_masks_are_the_same_bits() -> None:
    masks = [
        keep_mask(
            0.3,
            seed=2**40 + 1,
            step=2,
            layer=3,
            sample_B=torch.tensor([4, 2**33], device=device),
            position_T=torch.arange(50, device=device),
            channels=70,
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*masks)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_losses_and_gradients_agree_with_the_cpu(window: int | None, dtype: torch.dtype, bound: float) -> None:
    assert SHAPE.attention is not None
    shape = replace(SHAPE, attention=replace(SHAPE.attention, window=window))
    grads = []
    for device in ("cpu", "cuda"):
        model = build(shape, device, dtype)
        losses = model(batch([[20, 17], [37], [4, 5, 6]]))
        losses.share(80).backward()
        grads.append({name: grad.cpu() for name, grad in canonical_grads(model).items()})
    assert_near(grads[1], grads[0], bound)


def test_bfloat16_uses_the_fastest_experts_and_stays_near_float64() -> None:
    shape = replace(SHAPE, pattern="*-", dropout=0.0)
    chosen = kernels.choose(SHAPE, {pattern.Kind.MOE}, torch.device("cuda"), torch.bfloat16)
    hopper = torch.cuda.get_device_capability()[0] == 9
    names = {choice.op: choice.name for choice in chosen.choices}
    ops = ("rms_norm", "glu", "router", "permute", "linear_cross_entropy", "optimizer")
    assert names == {**dict.fromkeys(ops, "fused"), "grouped_mlp": "fused" if hopper else "grouped"}
    losses = [build(shape, "cuda", d)(batch([[64]] * 2)).loss_sum for d in (torch.float64, torch.bfloat16)]
    assert abs(losses[1].item() / losses[0].item() - 1) < 0.01
    build(SHAPE, "cuda", torch.bfloat16)(batch([[30, 34], [64]])).share(100).backward()
