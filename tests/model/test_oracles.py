"""Whole models against somebody else's: transformers' Llama, and a mixture written token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from braid import architecture
from tests.model.cases import SHAPE, assert_near, batch, build, canonical_grads

NAMES = {
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    match name.split("."):
        case ["blocks", index, *path, "weight"]:
            return f"model.layers.{index}.{NAMES['.'.join(path)]}.weight"
        case ["embedding", _]:
            return "model.embed_tokens.weight"
        case ["final_norm", _]:
            return "model.norm.weight"
        case _:
            return "lm_head.weight"


class Float64Rotary(nn.Module):
    """Llama's rotary tables, whose own code rounds to float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = torch.tensor([500.0 ** (-2 * i / 10) for i in range(5)], dtype=torch.float64)
        angles = torch.outer(position_ids[0].double(), torch.cat([frequencies, frequencies]))
        return angles.cos()[None], angles.sin()[None]


def in_float64(llama: nn.Module) -> nn.Module:
    """The model with torch's own norm and exact tables: transformers' round to float32 on the way."""
    llama.model.rotary_emb = Float64Rotary()
    for name, module in list(llama.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            parent, _, attribute = name.rpartition(".")
            setattr(llama.get_submodule(parent), attribute, nn.RMSNorm(30, eps=1e-5))
    return llama.double()


@pytest.mark.parametrize("rows", [1, 3])
def test_llama(rows: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=30,
        intermediate_size=41,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    llama = in_float64(transformers.LlamaForCausalLM(config))
    shape = architecture.Model(
        pattern="",
        hidden=30,
        vocab=17,
        tied=False,
        init_std=0.2,
        attention=architecture.Attention(heads=6, kv_heads=3, head_dim=10, rope_base=500.0),
        mlp=architecture.Mlp(ffn=41),
    )
    model = build("[*-][*-]", shape)
    theirs = dict(llama.named_parameters())
    assert {llama_name(name) for name in model.canonical()} == theirs.keys()
    for name, tensor in model.canonical().items():
        theirs[llama_name(name)].data.copy_(tensor.read(model.get_parameter(tensor.parameter)))

    given = batch([[37]] * rows)
    logits = model.logits(model.prepare(given))
    expected = llama(given.tokens_BT).logits
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    losses = model(given)
    losses.share(int(losses.token_count)).backward()
    labels = given.labels_BT.where(given.loss_mask_BT, -100)
    nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    wanted = {name: theirs[llama_name(name)].grad for name in model.canonical()}
    assert_near(canonical_grads(model), wanted, 1e-10)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_mixture_of_experts_token_by_token(score: str) -> None:
    assert SHAPE.moe is not None
    moe = replace(SHAPE.moe, experts=40, score=score, scale=1.5, aux_loss=0.3)
    model = build("E", replace(SHAPE, moe=moe))
    given = batch([[7], [5]])
    losses = model(given)
    losses.share(9).backward()

    weights = {
        name: tensor.read(model.get_parameter(tensor.parameter)).detach().clone().requires_grad_()
        for name, tensor in model.canonical().items()
    }
    loss_sum, aux = plain_mixture(weights, moe, given.tokens_BT, given)
    torch.testing.assert_close(losses.loss_sum, loss_sum, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(losses.aux["load_balance"], aux, rtol=1e-12, atol=0.0)
    (loss_sum / 9 + aux).backward()
    grads = canonical_grads(model)
    wanted = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
    assert_near(grads, wanted, 1e-11)
    unvisited = [name for name, weight in weights.items() if weight.grad is None]
    assert unvisited
    assert not any(grads[name].any() for name in unvisited)


def plain_mixture(
    weights: dict[str, Tensor], moe: architecture.Moe, tokens: Tensor, given: object
) -> tuple[Tensor, Tensor]:
    """Loss and load-balancing loss of the pattern `E`, one token at a time."""

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * weights[f"{name}.weight"]

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = weights[f"{name}.gate.weight"] @ x, weights[f"{name}.up.weight"] @ x
        return weights[f"{name}.down.weight"] @ (gate * torch.sigmoid(gate) * up)

    loss_sum = torch.zeros((), dtype=torch.float64)
    visits, shares = [0] * moe.experts, []
    for b, t in ((b, t) for b in range(tokens.shape[0]) for t in range(tokens.shape[1])):
        x = weights["embedding.weight"][tokens[b, t]]
        inner = normed(x, "blocks.0.moe.norm")
        logits = weights["blocks.0.moe.router.weight"] @ inner
        scores = logits.softmax(0) if moe.score == "softmax" else logits.sigmoid()
        best = sorted(range(moe.experts), key=lambda e: (-float(scores[e].detach()), e))[: moe.top_k]
        y = mlp(inner, "blocks.0.moe.shared")
        for e in best:
            y = y + mlp(inner, f"blocks.0.moe.experts.{e}") * moe.scale * scores[e] / scores[best].sum()
        if int(given.documents_BT[b, t]) >= 0:  # type: ignore[attr-defined]
            shares.append(scores / scores.sum())
            for e in best:
                visits[e] += 1
        out = weights["embedding.weight"] @ normed(x + y, "final_norm")
        if bool(given.loss_mask_BT[b, t]):  # type: ignore[attr-defined]
            loss_sum = loss_sum - out.log_softmax(0)[given.labels_BT[b, t]]  # type: ignore[attr-defined]
    fractions = torch.tensor(visits, dtype=torch.float64) / sum(visits)
    return loss_sum, moe.aux_loss * moe.experts * (fractions * torch.stack(shares).mean(0)).sum()
