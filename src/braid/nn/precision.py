"""Low precision of a layer's modules: which products they multiply in which formats, and what that sends.

Blocks of scales are those of whole weights. A column-parallel layer has some of their rows, a row-parallel one
some of their columns, experts some of the ffn channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from braid.distributed.collectives import Group, Groups
from braid.kernels.grouped_mlp import FusedGroupedMlp
from braid.kernels.precision import (
    FORMATS,
    BlockKernels,
    Losses,
    LowPrecisionGroupedMlp,
    Products,
    Shards,
    Slice,
)
from braid.kernels.precision.block_experts import BlockGroupedMlp, why_emulated
from braid.kernels.precision.products import amax_reduces
from braid.nn.cost import Call, Workload, in_phase, no_grad_call, recomputed_calls
from braid.nn.linear import Linear, RowLinear
from braid.nn.moe.experts import Experts
from braid.precision import Precision, ProductFormats

ELEMENTS = "fp8_elements_"
"""What the names of the metrics begin with that count elements."""


class LossTally:
    """What quantisation loses in a step, by the kind of tensor. It counts between `start` and `metrics`, so
    that evaluations do not count; whoever replays activations pauses it."""

    def __init__(self) -> None:
        self.counting = False
        self._sums: dict[str, float | Tensor] = {}

    def start(self) -> None:
        self.counting, self._sums = True, {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def add(self, tensor: str, lost: Losses, copies: int) -> None:
        for name, number in lost._asdict().items():
            key = f"fp8_{name}_{tensor}"
            exact = number.double() if isinstance(number, Tensor) else number
            self._sums[key] = self._sums.get(key, 0.0) + exact / copies

    def metrics(self) -> dict[str, float | Tensor]:
        """Numbers of elements, to be summed over ranks; `loss_shares` makes shares of them."""
        self.counting = False
        return self._sums


def loss_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the share of saturated and of zeroed elements in place of their numbers."""
    shares = dict(metrics)
    for name in metrics:
        if name.startswith(ELEMENTS):
            tensor, elements = name.removeprefix(ELEMENTS), shares.pop(name)
            for lost in ("saturated", "zeroed"):
                shares[f"fp8_{lost}_{tensor}"] /= max(1.0, elements)
    return shares


def set_precision(
    inner: nn.Module,
    precision: Precision,
    groups: Groups,
    tally: LossTally | None = None,
    kernels: BlockKernels | None = None,
) -> None:
    """The formats of a layer, from its next forward on, and the kernels of its dense layers. A layer with a
    single output, the gate of a shared expert, stays as it is, as routers do."""
    replicas = groups.dp_cp.size
    for module in inner.modules():
        if isinstance(module, Linear) and module.channels_out > 1 and precision.dense.quantised:
            split = groups.tp.size > 1 and module.copies.size == 1
            outputs = groups.tp if split else None
            module.products = _products(
                precision.dense,
                tally,
                outputs=outputs,
                copies=replicas * module.copies.size,
                kernels=kernels,
            )
        elif isinstance(module, RowLinear) and precision.dense.quantised:
            module.products = _products(
                precision.dense, tally, inputs=module.group, copies=replicas, kernels=kernels
            )
        elif isinstance(module, Experts) and (precision.experts.quantised or precision.experts_down.quantised):
            module.grouped_mlp = _grouped_mlp(module, precision, tally, groups.edp.size)


def _grouped_mlp(
    module: Experts, precision: Precision, tally: LossTally | None, copies: int
) -> LowPrecisionGroupedMlp:
    """By kernels for Hopper, if those without quantisation are and sizes fit."""
    reason = why_emulated(
        precision,
        hidden=module.channels,
        ffn=module.ffn,
        projections=len(module.projections),
        biased=module.shape.bias,
        etp=module.etp.size,
    )
    fused = reason is None and isinstance(module.grouped_mlp, FusedGroupedMlp)
    kernels = BlockKernels() if fused else None
    into = _products(precision.experts, tally, outputs=module.etp, copies=copies, kernels=kernels)
    down = _products(precision.experts_down, tally, inputs=module.etp, copies=copies, kernels=kernels)
    return (BlockGroupedMlp if fused else LowPrecisionGroupedMlp)(into=into, down=down)


class QuantisedWeight(NamedTuple):
    """A weight that products take quantised."""

    path: str
    """Of its module."""
    name: str
    products: Products


def matrix(weight: Tensor) -> Tensor:
    """A weight, or a part of it, as products see it: outputs, inputs, after experts."""
    return weight if weight.dim() == 2 else weight.flatten(1, -2)


def quantised_weights(model: nn.Module) -> Iterator[QuantisedWeight]:
    """All of a model."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | RowLinear) and module.products is not None:
            yield QuantisedWeight(path, "weight", module.products)
        elif isinstance(module, Experts) and isinstance(module.grouped_mlp, LowPrecisionGroupedMlp):
            yield QuantisedWeight(path, "w_in_EFGC", module.grouped_mlp.into)
            yield QuantisedWeight(path, "w_down_ECF", module.grouped_mlp.down)


def amax_calls(inner: nn.Module, tokens: int, rows: int, *, replayed: bool) -> tuple[Call, ...]:
    """The all-reduces of largest magnitudes of a layer, for `tokens` of dense layers and `rows` of experts, but
    for those of weights that are quantised once a step; `replayed`: whether experts are recomputed."""
    calls: tuple[Call, ...] = ()
    for module in inner.modules():
        if isinstance(module, Linear | RowLinear) and module.products is not None:
            calls += tuple(_calls(module.products, tokens, (module.channels_out, module.channels_in)))
        elif isinstance(module, Experts) and isinstance(module.grouped_mlp, LowPrecisionGroupedMlp):
            experts, ffn = len(module.expert_ids), module.ffn
            into = (experts, ffn * len(module.projections), module.channels)
            of_experts = (
                *_calls(module.grouped_mlp.into, rows, into),
                *_calls(module.grouped_mlp.down, rows, (experts, module.channels, ffn)),
            )
            calls += in_phase(of_experts + (recomputed_calls(of_experts) if replayed else ()), "experts")
    return calls


def temporary_bytes(inner: nn.Module, tokens: int, rows: int, workload: Workload) -> int:
    """Temporary bytes of the backward of a layer in low precision, at most at a time. Emulated: float32 tensors
    of one operand while it is quantised, and what the operand before stands for. By then other tensors that the
    layer saved are gone, which makes up for the gradient of its outputs. By kernels: quantised operands, and a
    weight gradient before it is added."""
    each = 0
    for module in inner.modules():
        if isinstance(module, Linear | RowLinear) and module.products is not None:
            of = (tokens, module.channels_out, module.channels_in)
            products, shape = module.products, (workload.rows, tokens // workload.rows, module.channels_in)
            fused = products.kernels is not None and products.kernels.takes(products, of[1:], shape)
            each = max(each, _by_kernels(products, of) if fused else _emulated(products, of, workload))
        elif isinstance(module, Experts) and _emulates(module):
            assert isinstance(module.grouped_mlp, LowPrecisionGroupedMlp)
            count, mlp, projected = len(module.expert_ids), module.grouped_mlp, len(module.projections)
            into = (rows, module.ffn * projected, module.channels)
            for products, of in ((mlp.into, into), (mlp.down, (rows, module.channels, module.ffn))):
                each = max(each, _emulated(products, of, workload, experts=count))
    return each


def _emulates(module: Experts) -> bool:
    mlp = module.grouped_mlp
    return isinstance(mlp, LowPrecisionGroupedMlp) and not isinstance(mlp, BlockGroupedMlp)


QUANTISING = 13
"""Bytes that quantising takes for each element: its scale, the quotient, that without NaN, all in float32, and
the value. What is not float32 is converted first."""
DEQUANTISING = 13
"""Of an element that is multiplied by its scale: the value, float32 of both, the product."""
STANDS = 4
"""Of what a quantised element stands for."""


def _emulated(products: Products, of: tuple[int, int, int], workload: Workload, *, experts: int = 1) -> int:
    tokens, outputs, inputs = of
    grad, x, weight = tokens * outputs, tokens * inputs, experts * outputs * inputs
    quantising, peak = QUANTISING + (4 if workload.narrow != 4 else 0), 0
    if products.weight_grad is not None:
        peak = max(quantising * grad, STANDS * grad + quantising * x)
    if products.input_grad is not None:
        peak = max(peak, quantising * grad, STANDS * grad + DEQUANTISING * weight)
    return peak


def _by_kernels(products: Products, of: tuple[int, int, int]) -> int:
    tokens, outputs, inputs = of
    grad, x, weight = tokens * outputs, tokens * inputs, outputs * inputs
    by_channels = 0 if products.input_grad is None else grad
    if products.weight_grad is None:
        return by_channels + weight
    return by_channels + grad + x + 4 * weight


def _calls(products: Products, tokens: int, weight: tuple[int, ...]) -> Iterator[Call]:
    for each in amax_reduces(products, tokens, weight):
        purpose = f"largest magnitudes of {each.tensor}"
        for call in no_grad_call("all_reduce", each.group, 4 * each.floats, purpose):
            yield call._replace(direction="backward" if each.backward else "forward")


def _products(
    formats: ProductFormats,
    tally: LossTally | None,
    *,
    inputs: Group | None = None,
    outputs: Group | None = None,
    copies: int = 1,
    kernels: BlockKernels | None = None,
) -> Products:
    def part(group: Group | None) -> Slice | None:
        return None if group is None or group.size == 1 else Slice(group)

    return Products(
        forward=None if formats.forward is None else FORMATS[formats.forward],
        input_grad=None if formats.input_grad is None else FORMATS[formats.input_grad],
        weight_grad=None if formats.weight_grad is None else FORMATS[formats.weight_grad],
        shards=Shards(inputs=part(inputs), outputs=part(outputs)),
        tally=tally,
        copies=copies,
        kernels=kernels,
    )
