"""Every kind of layer in one model: groups equal their layers, documents stay apart, caches change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from braid import architecture
from braid.model.context import MicroBatch
from braid.model.generate import generate
from tests.model.cases import SHAPE, assert_near, batch, build, canonical_grads, part

HYBRID = replace(
    SHAPE,
    mamba2=architecture.Mamba2(heads=3, head_dim=4, state=5),
    delta_net=architecture.DeltaNet(key_heads=1, value_heads=3, key_dim=4, value_dim=5),
    latent_attention=architecture.LatentAttention(
        heads=3, q_rank=7, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=5
    ),
)
"""A shape for every kind of layer, odd sizes throughout."""

MIXERS = ("M", "G", "*", "+")


def legal_groups(longest: int) -> list[str]:
    """Every group that the pattern language allows, up to a length."""
    groups = set()
    for family in ("MG*-", "MG+-"):
        for length in range(longest + 1):
            for chosen in permutations(family, length):
                text = "".join(chosen)
                groups |= {text, text + "E"} if 0 < length < longest else {text or "E"}
    return sorted(groups)


def check_group_equals_flat(text: str) -> None:
    shape = replace(HYBRID, dropout=0.2)
    one, other = build(f"[{text}]", shape, seed=1), build(text, shape, seed=2)
    for source, target in zip(one.parameters(), other.parameters(), strict=True):
        target.data.copy_(source)
    given = batch([[11, 8], [15]])
    losses = [model(given) for model in (one, other)]
    assert torch.equal(losses[0].loss_sum, losses[1].loss_sum)
    for each in losses:
        each.share(20).backward()
    for (name, source), target in zip(one.named_parameters(), other.parameters(), strict=True):
        if source.requires_grad:
            assert torch.equal(source.grad, target.grad), name


@pytest.mark.parametrize("text", legal_groups(2))
def test_a_group_equals_its_layers(text: str) -> None:
    check_group_equals_flat(text)


@pytest.mark.long
@pytest.mark.parametrize("text", sorted(set(legal_groups(5)) - set(legal_groups(2))))
def test_every_group_equals_its_layers(text: str) -> None:
    check_group_equals_flat(text)


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_equal_documents_one_by_one(mixer: str) -> None:
    model = build(f"[{mixer}-][{mixer}E]", HYBRID)
    lengths = (13, 1, 7, 9)
    whole = batch([lengths])
    packed = model(whole)
    packed.loss_sum.backward()
    wanted = canonical_grads(model)
    model.zero_grad()
    total, start = 0.0, 0
    for length in lengths:
        losses = model(part(whole, slice(None), slice(start, start + length)))
        losses.loss_sum.backward()
        total += losses.loss_sum.item()
        start += length
    assert packed.loss_sum.item() == pytest.approx(total, rel=1e-12)
    assert_near(canonical_grads(model), wanted, 1e-12)


@pytest.mark.parametrize("pattern", ["M-", "G-", "*E", "+E", "[M*E][G-]/*E", "[G+E]M"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cached_decoding_equals_full_recomputation(pattern: str, dtype: torch.dtype) -> None:
    model = build(pattern, HYBRID, dtype)
    tokens = torch.randint(0, 17, (3, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model.logits(model.prepare(MicroBatch.of_tokens(tokens)))
        caches = model.new_caches(3)
        parts, seen = [], 0
        for size in (9, 1, 1, 4, 1, 7):
            unseen = MicroBatch.of_tokens(tokens[:, seen : seen + size], start=seen)
            parts.append(model.logits(model.prepare(unseen, caches)))
            seen += size
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=bound, atol=bound)


def test_benchmark_routing_goes_on_where_the_cache_stands() -> None:
    model = build("[*E]", replace(HYBRID, moe=replace(HYBRID.moe, routing="round_robin")))
    tokens = torch.randint(0, 17, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model.logits(model.prepare(MicroBatch.of_tokens(tokens)))
        caches = model.new_caches(1)
        parts = [
            model.logits(model.prepare(MicroBatch.of_tokens(tokens[:, a:b], start=a), caches))
            for a, b in ((0, 6), (6, 7), (7, 9))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-12)


def test_a_windowed_cache_equals_full_recomputation() -> None:
    model = build("**", replace(HYBRID, attention=replace(HYBRID.attention, window=4)))
    start = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    rows = generate(model, start, 9, temperature=0.0)
    logits = model.logits(model.prepare(MicroBatch.of_tokens(rows)))
    assert torch.equal(rows[:, 7:], logits.argmax(-1)[:, 6:-1])


def test_a_model_of_every_kind_learns_in_every_parameter() -> None:
    model = build("[M-][G*E]/*E", HYBRID)
    losses = model(batch([[20, 17], [30]]))
    losses.share(50, [50]).backward()
    idle = [
        name
        for name, gradient in canonical_grads(model).items()
        if not gradient.abs().sum() > 0 and not name.endswith("router.bias") and ".experts." not in name
    ]
    assert idle == []
