"""What the tests of both kinds of attention share: batches, oracles, packed documents, caches."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels import attention as kernels
from braid.nn.attention import Attention
from braid.nn.latent_attention import LatentAttention
from braid.nn.rotary import Rotary, rotary_tables
from tests.nn.float64 import float32_means_float64

CPU = torch.device("cpu")
HIDDEN, EPS = 30, 1e-6
Layer = Attention | LatentAttention
Tensors = dict[str, Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(shape: architecture.Attention | architecture.LatentAttention) -> Layer:
    """The layer, with random weights everywhere."""
    kind: Any = Attention if isinstance(shape, architecture.Attention) else LatentAttention
    module = kind(shape, HIDDEN, EPS, kernels.choose(CPU, torch.float64).function, dtype=torch.float64)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) * (0.3 if parameter.dim() > 1 else 1)
    return module


def positions_of(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Positions and documents of rows that are lists of document lengths."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in rows]
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return torch.stack(positions), torch.stack(documents)


def tables(module: Layer, positions: Tensor) -> Rotary | None:
    shape = module.shape
    if isinstance(shape, architecture.Attention) and shape.positions == "none":
        return None
    return rotary_tables(positions, shape.rope_dim, shape.rope_base, torch.float64, shape.rope_scaling)


def run(module: Layer, x: Tensor, rows: Sequence[Sequence[int]], start: int = 0, **cache: Any) -> Tensor:
    """The layer's output for rows of documents; positions count from `start`."""
    positions, documents = positions_of(rows)
    window = module.shape.window if isinstance(module.shape, architecture.Attention) else None
    spans = kernels.spans_of(documents, window, CPU)
    return module(x, spans, tables(module, positions + start), **cache)  # type: ignore[arg-type]


def gradients(module: nn.Module) -> Tensors:
    """Every canonical tensor's gradient."""
    return {
        name: tensor.read(module.get_parameter(tensor.parameter).grad)
        for name, tensor in module.canonical().items()  # type: ignore[operator]
    }


def assert_near(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    """Each tensor within `bound` of the other, relative to its norm."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = ((actual[name] - tensor).norm() / tensor.norm()).item()
        assert error < bound, f"{name}: {error:.1e}"


# --------------------------------------------------------------------------------------------- transformers


def assert_equals_theirs(
    module: Layer,
    theirs: nn.Module,
    rotary: nn.Module,
    mask_of: Callable[..., Tensor],
    to_canonical: Callable[[Tensors], Tensors],
    rows: Sequence[Sequence[int]],
    from_zero: Container[str] = (),
) -> None:
    """Output and gradients of our layer and of one of transformers are the same to 1e-9, on the same weights.
    `to_canonical` turns their tensors by name (weights, gradients) into ours; of the weights in `from_zero`
    they store what we store less one."""
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) * 0.3
    with torch.no_grad():
        weights = to_canonical(dict(theirs.named_parameters()))
    tensors = module.canonical()
    assert weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        tensor.write(module.get_parameter(tensor.parameter), weights[name] + (1 if name in from_zero else 0))

    positions, _ = positions_of(rows)
    x, x_theirs = (normal(*positions.shape, HIDDEN, seed=50).requires_grad_() for _ in range(2))
    y = run(module, x, rows)
    with float32_means_float64():
        mask = mask_of(theirs.config, x_theirs, None, None, positions)
        y_theirs, _ = theirs(x_theirs, position_embeddings=rotary(x_theirs, positions), attention_mask=mask)
        probe = normal(*y.shape, seed=51)
        y_theirs.backward(probe)
    y.backward(probe)
    assert_near({"y": y, "x": x.grad}, {"y": y_theirs, "x": x_theirs.grad}, 1e-9)  # type: ignore[dict-item]
    grads = to_canonical({name: parameter.grad for name, parameter in theirs.named_parameters()})  # type: ignore[misc]
    assert_near(gradients(module), grads, 1e-9)


# ------------------------------------------------------------------------------------- documents and caches


def assert_packed_equals_separate(module: Layer) -> None:
    """Documents in one row neither see one another nor change one another's gradients."""
    lengths = [5, 1, 20, 11]
    x, x_apart = (normal(1, sum(lengths), HIDDEN, seed=60).requires_grad_() for _ in range(2))
    y = run(module, x, [lengths])
    probe = normal(*y.shape, seed=61)
    y.backward(probe)
    packed = gradients(module) | {"y": y.detach(), "x": x.grad}  # type: ignore[dict-item]
    packed = {name: tensor.clone() for name, tensor in packed.items()}
    module.zero_grad()
    documents = x_apart.split(lengths, 1)
    y_apart = torch.cat([run(module, document, [[document.shape[1]]]) for document in documents], 1)
    y_apart.backward(probe)
    separate = gradients(module) | {"y": y_apart.detach(), "x": x_apart.grad}  # type: ignore[dict-item]
    assert_near(packed, separate, 1e-12)


@torch.no_grad()
def assert_cached_equals_full(module: Layer, rows: int, parts: Sequence[int]) -> None:
    """Tokens that come in parts, over a cache, give what they give at once."""
    tokens = sum(parts)
    x = normal(rows, tokens, HIDDEN, seed=70)
    full = run(module, x, [[tokens]] * rows)
    cache = module.new_cache(rows, CPU, torch.float64)
    outputs, start = [], 0
    for length in parts:
        new = x[:, start : start + length]
        outputs.append(run(module, new, [[length]] * rows, start, cache=cache))
        start += length
    assert_near({"y": torch.cat(outputs, 1)}, {"y": full}, 1e-12)


PARTS = ((9, *[1] * 28), (1,) * 37, (5, 4, 1, 20, 7), (37,))
"""Ways in which 37 tokens come: prefill then one by one, one by one, in parts, at once."""
