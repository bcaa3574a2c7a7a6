"""Delayed wgrad, weight gradients that wait: backward finds the gradients of inputs, which others need soon,
and leaves the products that give the gradients of weights with a wgrad store, until the schedule has time for
them.

    set_wgrad_store(model, store)
    with store.node(key):
        torch.autograd.backward(...)    # gradients of inputs; products are left under `key`
    ...                                 # other nodes, other micro-batches, weights that are released
    store.drain(key)                    # gradients of weights, as backward itself would have added them
    ...
    store.finish()                      # the step is over: nothing may be left

With or without a wgrad store, gradients are the same to the last bit: the same expressions give them, and what
the uses of a parameter in one node add up to is added to its `.grad` as a whole, as autograd does. Nodes that
share a parameter are drained in the order of their backwards. Until then inputs and output gradients of their
layers must keep their memory; weights need not. Hooks that autograd calls when it has accumulated a gradient
are not called.

A node may have several buckets, which are drained one by one. Its layers say which gradients go where (`sort`).

A wgrad store may know the main gradients of parameters: those in at least float32 that grow over the
micro-batches of a step. A product that can write where it is told (`Gradient`) then writes there, at once or
when it is drained: the first of a step overwrites, the others add, and the parameter's own `.grad` stays None.
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
"""Gives the gradient of a parameter. It holds on to inputs and output gradients, never to weights."""


class Main(Protocol):
    """What has the main gradient of a parameter: its main copy, or whoever reduces its gradients."""

    grad: Tensor | None
    """None until a micro-batch has left something."""

    @property
    def dtype(self) -> torch.dtype: ...


class Mains(Protocol):
    """Finds it."""

    def get(self, parameter: Tensor, /) -> Main | None: ...


NONE: Mains = MappingProxyType({})

ALL = "all"
"""The bucket of a node that has no other."""


class DelayedWgrad:
    """Products that wait, by the node whose backward left them."""

    def __init__(self, mains: Mains = NONE) -> None:
        self._mains = mains
        self._running: Hashable | None = None
        self._left: dict[Hashable, dict[str, dict[Tensor, list[Product]]]] = {}
        self._bucket_of: dict[Tensor, str] = {}
        self._drained: set[Hashable] = set()

    @contextmanager
    def node(self, key: Hashable, buckets: Sequence[str] = (ALL,)) -> Iterator[None]:
        """What is left within is left under `key`: its micro-batch and its name, or anything else that no other
        node of the step has. It is put into `buckets`: all of it into one, where there is but one. Outside of
        every node a backward finds weight gradients at once."""
        assert key is not None, "None is no key of a node"
        assert self._running is None, f"the backward of {key} starts within that of {self._running}"
        assert key not in self._left, f"the backward of {key} runs twice; its weight gradients still wait"
        assert key not in self._drained, f"the backward of {key} runs twice; it is already drained"
        self._left[key] = {bucket: {} for bucket in buckets}
        self._running = key
        try:
            yield
        finally:
            self._running = None

    def leave(self, parameter: Tensor, product: Product) -> Tensor | None:
        """Called by a layer's backward: the gradient that it returns for the parameter, None where that waits.
        What is computed from parameters is no business of the wgrad store: autograd takes the gradient
        further."""
        if not parameter.is_leaf:
            return product()
        if self._running is None:
            return None if self._written(parameter, product) else product()
        buckets = self._left[self._running]
        bucket = next(iter(buckets)) if len(buckets) == 1 else self._bucket_of.get(parameter)
        assert bucket in buckets, f"{self._running} has {', '.join(buckets)}, and no layer says which is meant"
        buckets[bucket].setdefault(parameter, []).append(product)
        return None

    def sort(self, buckets: Mapping[Tensor, str]) -> None:
        """Called by a layer's forward: where the gradients of its parameters go, if there are several buckets.
        Parameters are meant as its backward will have them, not as its module has them when they are drained:
        weights may have been gathered and released meanwhile."""
        self._bucket_of.update(buckets)

    def pending(self, key: Hashable) -> int:
        """How many products wait under a node."""
        return sum(len(products) for left in self._left.get(key, {}).values() for products in left.values())

    @torch.no_grad()
    def drain(self, key: Hashable, bucket: str | None = None) -> None:
        """Compute what waits under a node, or in one bucket of it, and add it to the parameters' gradients, in
        the order in which it was left. Runs where its caller runs: on the stream of the backward, or one that
        has waited for it."""
        assert key not in self._drained, f"{key} is drained twice"
        assert key in self._left, f"{key} is drained, but its backward has not run"
        assert key != self._running, f"{key} is drained within its own backward"
        buckets = self._left[key]
        assert bucket is None or bucket in buckets, f"{bucket} of {key} is drained twice, or was never there"
        for each in list(buckets) if bucket is None else [bucket]:
            self._add(buckets.pop(each))
        if not buckets:
            del self._left[key]
            self._drained.add(key)

    def _add(self, left: dict[Tensor, list[Product]]) -> None:
        for parameter in list(left):
            gradient: Tensor | None = None
            for product in left.pop(parameter):
                if not self._written(parameter, product):
                    gradient = product() if gradient is None else gradient.add_(product())
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _written(self, parameter: Tensor, product: Product) -> bool:
        """Whether the product could be put with the parameter's main gradient."""
        main = self._mains.get(parameter) if isinstance(product, Gradient) else None
        if main is None:
            return False
        assert isinstance(product, Gradient)
        if main.grad is None:
            empty = torch.empty(parameter.shape, dtype=main.dtype, device=parameter.device)
            main.grad = product.into(empty, accumulate=False)
        else:
            product.into(main.grad, accumulate=True)
        return True

    def finish(self) -> None:
        """The end of a step: all is drained. The next one may use the same keys."""
        left = [
            str(key) if bucket == ALL else f"{bucket} of {key}"
            for key, buckets in self._left.items()
            for bucket in buckets
        ]
        assert not left, f"the step ends, but nobody has drained {', '.join(left)}"
        self._drained.clear()
        self._bucket_of.clear()


class Delaying(nn.Module):
    """A layer that leaves its weight gradients with a wgrad store, where it has been handed one."""

    wgrad_store: DelayedWgrad | None = None


def set_wgrad_store(module: nn.Module, wgrad_store: DelayedWgrad | None) -> None:
    """Every layer of a module that can delay its weight gradients leaves them there from its next forward on;
    None takes the wgrad store back."""
    for layer in module.modules():
        if isinstance(layer, Delaying):
            layer.wgrad_store = wgrad_store
