"""Gated delta net: transformers' Qwen3-Next layer, packed documents, and generation token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.delta_rule import REFERENCE
from braid.nn.delta_net import DeltaNet
from tests.nn.float64 import float32_means_float64

CPU = torch.device("cpu")
HIDDEN, EPS, K, V, TAPS = 11, 1e-6, 5, 7, 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def delta_net(key_heads: int, repeats: int, dtype: torch.dtype = torch.float64) -> DeltaNet:
    """A layer whose every weight is random and of ordinary size."""
    shape = architecture.DeltaNet(
        key_heads=key_heads, value_heads=key_heads * repeats, key_dim=K, value_dim=V, conv=TAPS
    )
    module = DeltaNet(shape, HIDDEN, EPS, REFERENCE.function, dtype=dtype)
    generator = torch.Generator().manual_seed(key_heads * 10 + repeats)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def canonical_values(module: DeltaNet, *, grads: bool = False) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    return {
        name: tensor.read(parameters[tensor.parameter].grad if grads else parameters[tensor.parameter].detach())
        for name, tensor in module.canonical().items()
    }


def assert_near(actual: Tensor, expected: Tensor, bound: float, name: str = "output") -> None:
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < bound, f"{name}: relative error {error:.1e}"


# ------------------------------------------------------------------------------------------ oracle


def to_qwen3_next(tensors: dict[str, Tensor], key_heads: int) -> dict[str, Tensor]:
    """Canonical tensors, or their gradients, as transformers fuses them: the outputs of both projections are
    ordered by key head, the channels of the convolution by part."""

    def interleaved(names: str) -> Tensor:
        parts = [tensors[f"{name}.weight"].unflatten(0, (key_heads, -1)) for name in names]
        return torch.cat(parts, 1).flatten(0, 1)

    return {
        "in_proj_qkvz.weight": interleaved("qkvz"),
        "in_proj_ba.weight": interleaved("ba"),
        "conv1d.weight": torch.cat([tensors[f"conv.{name}.weight"] for name in "qkv"]).unsqueeze(1),
        "A_log": tensors["A_log"],
        "dt_bias": tensors["dt_bias"],
        "norm.weight": tensors["gate_norm.weight"],
        "out_proj.weight": tensors["o.weight"],
    }


def qwen3_next(module: DeltaNet) -> nn.Module:
    """transformers' layer with the same weights."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    shape = module.shape
    config = modeling.Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=EPS,
        linear_conv_kernel_dim=TAPS,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
    )
    layer = modeling.Qwen3NextGatedDeltaNet(config, 0).double()
    layer.load_state_dict(to_qwen3_next(canonical_values(module), shape.key_heads), strict=True)
    return layer


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [37, 70])
@pytest.mark.parametrize(("key_heads", "repeats"), [(2, 1), (2, 3), (3, 2)])
def test_equals_qwen3_next(rows: int, tokens: int, key_heads: int, repeats: int) -> None:
    module = delta_net(key_heads, repeats)
    oracle = qwen3_next(module)
    x, probe = random(rows, tokens, HIDDEN).requires_grad_(), random(HIDDEN, rows, tokens).movedim(0, -1)
    oracle_x = x.detach().clone().requires_grad_()
    with float32_means_float64():
        expected = oracle(oracle_x)
    actual = module(x)
    assert_near(actual, expected, 1e-9)
    actual.backward(probe)
    expected.backward(probe)
    assert_near(x.grad, oracle_x.grad, 1e-9, "input")
    grads = to_qwen3_next(canonical_values(module, grads=True), key_heads)
    wanted = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert_near(grad, wanted[name], 1e-9, name)


def test_float32_stays_near_qwen3_next_in_float32() -> None:
    module = delta_net(3, 2)
    oracle = qwen3_next(module).float()
    x = random(2, 70, HIDDEN).float()
    assert_near(module.float()(x), oracle(x), 1e-5)


# --------------------------------------------------------------------------------------- documents


def test_packed_documents_equal_documents_apart() -> None:
    lengths = [1, 2, 30, 64, 3, 90]
    documents = torch.repeat_interleave(torch.tensor([7, 0, 3, 1, 0, -1]), torch.tensor(lengths))
    x, probe = random(1, sum(lengths), HIDDEN).requires_grad_(), random(sum(lengths), HIDDEN)
    module = delta_net(2, 3)
    results = []
    for y in (module(x, documents[None]), torch.cat([module(piece) for piece in x.split(lengths, 1)], 1)):
        y.backward(probe[None])
        results.append({"output": y.detach(), "input": x.grad, **canonical_values(module, grads=True)})
        x.grad = None
        module.zero_grad()
    packed, apart = results
    for name, expected in apart.items():
        assert_near(packed[name], expected, 1e-12, name)


def test_documents_of_one_row_do_not_touch_another() -> None:
    x = random(2, 50, HIDDEN)
    documents = torch.zeros(2, 50, dtype=torch.int64)
    documents[1, 20:] = 1
    y = delta_net(3, 2)(x, documents)
    assert_near(y[:1], delta_net(3, 2)(x[:1]), 1e-12)


# -------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("prefill", [1, 2, 40, 70])
@torch.no_grad()
def test_cached_tokens_equal_the_whole_row(prefill: int) -> None:
    module = delta_net(2, 3)
    x = random(3, 75, HIDDEN)
    cache = module.new_cache(3, CPU, torch.float64)
    pieces = [module(piece, cache=cache) for piece in x.split([prefill, *[1] * (75 - prefill)], 1)]
    assert_near(torch.cat(pieces, 1), module(x), 1e-12)


@torch.no_grad()
def test_the_memory_of_a_bfloat16_layer_is_float32() -> None:
    module = delta_net(2, 3, torch.bfloat16)
    x = random(2, 20, HIDDEN).bfloat16()
    cache = module.new_cache(2, CPU, torch.bfloat16)
    whole = module(x)
    pieces = torch.cat([module(piece, cache=cache) for piece in x.split([9, *[1] * 11], 1)], 1)
    assert pieces.dtype == whole.dtype == cache.conv_BEQ.dtype == torch.bfloat16
    assert cache.state_BHKV.dtype == torch.float32
    assert_near(pieces.double(), whole.double(), 0.02)


# --------------------------------------------------------------------------------------- the facts


def test_canonical_tensors_cover_every_parameter_once() -> None:
    module = delta_net(3, 2)
    covered = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for tensor in module.canonical().values():
        tensor.write(covered[tensor.parameter], tensor.read(covered[tensor.parameter]) + 1)
    assert all(bool((count == 1).all()) for count in covered.values())
    assert {name: tensor.shape for name, tensor in module.canonical().items()} == {
        "q.weight": (3 * K, HIDDEN),
        "k.weight": (3 * K, HIDDEN),
        "v.weight": (6 * V, HIDDEN),
        "z.weight": (6 * V, HIDDEN),
        "b.weight": (6, HIDDEN),
        "a.weight": (6, HIDDEN),
        "conv.q.weight": (3 * K, TAPS),
        "conv.k.weight": (3 * K, TAPS),
        "conv.v.weight": (6 * V, TAPS),
        "A_log": (6,),
        "dt_bias": (6,),
        "gate_norm.weight": (V,),
        "o.weight": (HIDDEN, 6 * V),
    }


def test_flops_count_matrices_and_memories() -> None:
    weights = HIDDEN * (2 * 3 * K + 2 * 6 * V + 2 * 6) + HIDDEN * 6 * V + TAPS * (2 * 3 * K + 6 * V)
    assert delta_net(3, 2).flops(10) == 10 * (2 * weights + 6 * 6 * K * V)
