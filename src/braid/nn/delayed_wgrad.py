"""Delayed wgrad: backward computes input gradients now, the schedule places weight gradients later.

The split is that of zero-bubble pipelines (Qi et al., arXiv 2401.10241).

    set_wgrad_store(model, store)
    with store.node(key):
        torch.autograd.backward(...)    # dgrad; wgrad GEMMs are queued under `key`
    ...                                 # other nodes and micro-batches; weights may be resharded
    store.drain(key)                    # wgrad, accumulated as backward itself would have done
    ...
    store.finish()                      # end of the step: every node must have been drained

Gradients are bit-identical with and without a store: the expressions are the same, and the uses of a parameter
within one node are summed before the sum is added to its `.grad`, as autograd does. Nodes that share a
parameter must be drained in the order of their backwards. Until then the inputs and output gradients of their
layers stay alive; weights need not. Post-accumulate-grad hooks do not fire.

A node may have several buckets that are drained one by one. Its layers assign parameters to them
(`assign_buckets`).

A store may know the main gradients of parameters: buffers in at least float32 that accumulate over the
micro-batches of a step. A product that can write in place (`Gradient`), as those of linear layers and of fused
experts, then accumulates into the buffer, at once or when it is drained: the first write of a step overwrites,
the others add, and the parameter's own `.grad` stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from braid.kernels.grouped_mlp.product import Gradient

Product = Callable[[], Tensor]
"""Computes the gradient of a parameter. It references inputs and output gradients, but never weights, so that
these can be resharded first."""


class Main(Protocol):
    """The owner of a parameter's main gradient: its main copy, or FSDP's gradient accumulator."""

    grad: Tensor | None
    """None until the first micro-batch of the step has contributed."""

    @property
    def dtype(self) -> torch.dtype: ...


class Mains(Protocol):
    """Maps parameters to the owners of their main gradients."""

    def get(self, parameter: Tensor, /) -> Main | None: ...


NO_MAINS: Mains = MappingProxyType({})

ALL = "all"
"""The only bucket of a node, by default."""


class DelayedWgrad:
    """The wgrad store: pending weight gradients, by the node whose backward queued them."""

    def __init__(self, mains: Mains = NO_MAINS, new_main: Callable[[Tensor], Tensor] | None = None) -> None:
        """`new_main` gives the memory of a parameter's main gradient; without it, it is allocated."""
        self._mains = mains
        self._new_main = new_main
        self._running: Hashable | None = None
        self._pending: dict[Hashable, dict[str, dict[Tensor, list[Product]]]] = {}
        self._bucket_of: dict[Tensor, str] = {}
        self._drained: set[Hashable] = set()

    @contextmanager
    def node(self, key: Hashable, buckets: Sequence[str] = (ALL,)) -> Iterator[None]:
        """Queue the weight gradients of backwards within under `key`, which is unique in the step. With a
        single bucket, all of them go there. Outside of nodes, weight gradients are computed at once."""
        assert key is not None, "a node needs a key other than None"
        assert self._running is None, f"the backward of {key} starts within that of {self._running}"
        assert key not in self._pending, f"the backward of {key} runs twice; weight gradients are pending"
        assert key not in self._drained, f"the backward of {key} runs twice; it has been drained already"
        self._pending[key] = {bucket: {} for bucket in buckets}
        self._running = key
        try:
            yield
        finally:
            self._running = None

    def put(self, parameter: Tensor, product: Product) -> Tensor | None:
        """The gradient that a layer's backward returns for the parameter; None if it is delayed or has been
        written to the main gradient. Gradients of non-leaf tensors are never delayed: autograd propagates them
        further."""
        if not parameter.is_leaf:
            return product()
        if self._running is None:
            return None if self._written(parameter, product) else product()
        buckets = self._pending[self._running]
        bucket = next(iter(buckets)) if len(buckets) == 1 else self._bucket_of.get(parameter)
        assert bucket in buckets, f"{self._running} has {', '.join(buckets)}; the parameter is in no bucket"
        buckets[bucket].setdefault(parameter, []).append(product)
        return None

    def assign_buckets(self, buckets: Mapping[Tensor, str]) -> None:
        """Assign parameters to buckets, from a layer's forward. The keys are the tensors that its backward will
        see: by the time they are drained, FSDP may have resharded and replaced the module's parameters."""
        self._bucket_of.update(buckets)

    def pending(self, key: Hashable) -> int:
        """How many weight gradients a node still has to compute."""
        buckets = self._pending.get(key, {}).values()
        return sum(len(products) for bucket in buckets for products in bucket.values())

    @torch.no_grad()
    def drain(self, key: Hashable, bucket: str | None = None) -> None:
        """Compute the pending weight gradients of a node, or of one of its buckets, in the order in which they
        were queued. The current stream must be that of the backward, or have waited for it."""
        assert key not in self._drained, f"{key} is drained twice"
        assert key in self._pending, f"{key} is drained before its backward"
        assert key != self._running, f"{key} is drained within its own backward"
        buckets = self._pending[key]
        assert bucket is None or bucket in buckets, f"{bucket} of {key} is drained twice, or does not exist"
        for each in list(buckets) if bucket is None else [bucket]:
            self._add(buckets.pop(each))
        if not buckets:
            del self._pending[key]
            self._drained.add(key)

    def _add(self, bucket: dict[Tensor, list[Product]]) -> None:
        for parameter in list(bucket):
            gradient: Tensor | None = None
            for product in bucket.pop(parameter):
                if not self._written(parameter, product):
                    gradient = product() if gradient is None else gradient.add_(product())
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _written(self, parameter: Tensor, product: Product) -> bool:
        """Accumulate into the main gradient, if there is one and the kernel can; whether it did."""
        main = self._mains.get(parameter) if isinstance(product, Gradient) else None
        if main is None:
            return False
        assert isinstance(product, Gradient)
        if main.grad is None:
            if self._new_main is None:
                empty = torch.empty(parameter.shape, dtype=main.dtype, device=parameter.device)
            else:
                empty = self._new_main(parameter)
            main.grad = product.into(empty, accumulate=False)
        else:
            product.into(main.grad, accumulate=True)
        return True

    def finish(self) -> None:
        """End the step; everything must have been drained. The next step may reuse keys."""
        pending = [
            str(key) if bucket == ALL else f"{bucket} of {key}"
            for key, buckets in self._pending.items()
            for bucket in buckets
        ]
        assert not pending, f"the step ends, but {', '.join(pending)} has not been drained"
        self._drained.clear()
        self._bucket_of.clear()


class Delaying(nn.Module):
    """A layer that delays its weight gradients if it has a wgrad store."""

    wgrad_store: DelayedWgrad | None = None


def set_wgrad_store(module: nn.Module, wgrad_store: DelayedWgrad | None) -> None:
    """Delay the weight gradients of all layers that can, from the next forward on; None turns it off."""
    for layer in module.modules():
        if isinstance(layer, Delaying):
            layer.wgrad_store = wgrad_store
