"""Linear layer and vocab-parallel cross-entropy in chunks of tokens, as in Liger (arXiv 2410.10989).

    logits = x_chunk · weightᵀ          overwritten by their gradient, softmax - onehot
    dx_chunk = dlogits · weight         dweight += dlogitsᵀ · x_chunk, in float32

Gradients are computed in forward, for a loss of 1, and backward multiplies them by its own gradient: logits are
then computed once. This keeps dweight in float32 until backward. With fewer tokens than channels, logits and
their gradient would be smaller than that: then forward keeps the logsumexp of each token, and backward
recomputes logits and accumulates dweight where it is wanted.

`Passes` over a chunk of logits are Triton kernels (`fused`), or plain PyTorch, with which tests run on a CPU.

Shapes: N tokens, n tokens of one chunk, C hidden channels, V ids of this rank, R >= V rows with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.distributed.collectives import Group, all_reduce_max_no_grad, all_reduce_no_grad
from braid.kernels.grouped_mlp.product import Gradient, WgradStore, WritesInPlace, empty_like, put_wgrad
from braid.kernels.linear_cross_entropy.reference import VocabShard
from braid.kernels.wgrad import write_product

CHUNK_BYTES = 2**29
"""Bytes of the logits of a chunk. Larger chunks read and write dweight less often."""
MIN_CHUNK = 256
"""Tokens of a chunk, at least: fewer do not fill a GPU's tiles."""
ALIGNMENT = 64
"""Rows of logits start at multiples of so many entries, for wide loads."""


class Sums(NamedTuple):
    """What the loss needs of the logits of each token, in at least float32."""

    top_N: Tensor
    """Maximum."""
    total_N: Tensor
    """Sum of exponentials, relative to the maximum."""
    chosen_N: Tensor
    """Logit of the label; zero where another rank holds it."""

    def part(self, tokens: slice) -> Sums:
        return Sums(*(each[tokens] for each in self))

    def logsumexp(self) -> Tensor:
        return self.top_N + self.total_N.log()

    def reduce_(self, group: Group) -> None:
        """Over the vocabulary of all ranks."""
        if group.size > 1:
            top_n = all_reduce_max_no_grad(self.top_N, group)
            own_n = self.total_N * (self.top_N - top_n).exp()
            total_n, chosen_n = all_reduce_no_grad(torch.stack([own_n, self.chosen_N]), group)
            for old, new in zip(self, (top_n, total_n, chosen_n), strict=True):
                old.copy_(new)


class LogitChunk(NamedTuple):
    """The tokens of one chunk."""

    logits_nR: Tensor
    """A pass overwrites them with their gradient."""
    row_n: Tensor
    mask_n: Tensor
    held: int
    scale: float


class Passes(Protocol):
    """Passes over the logits of a chunk. Masked tokens have a top of 0, a total of 1, a chosen logit of 0 and a
    gradient of 0."""

    def sums(self, chunk: LogitChunk, sums: Sums, *, gradient: bool) -> None:
        """Write the sums over this rank's ids; with `gradient`, overwrite the logits with the gradient of a
        loss over these ids."""
        ...

    def gradient(self, chunk: LogitChunk, logsumexp_n: Tensor, upstream: Tensor | None) -> None:
        """Overwrite the logits with their gradient, times `upstream` if given."""
        ...

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        """x times a 0-D factor, rounded once."""
        ...


class PlainPasses:
    """`Passes` in PyTorch."""

    def sums(self, chunk: LogitChunk, sums: Sums, *, gradient: bool) -> None:
        wide_nV = chunk.logits_nR[:, : chunk.held].to(sums.top_N.dtype) / chunk.scale
        padded_nV = torch.nn.functional.pad(wide_nV, (0, 1), value=-torch.inf)
        top_n = padded_nV.amax(-1)
        base_n = top_n.where(top_n != -torch.inf, 0)
        label_n = padded_nV.gather(-1, chunk.row_n.clamp(max=chunk.held)[:, None]).squeeze(-1)
        sums.top_N.copy_(top_n.where(chunk.mask_n, 0))
        sums.total_N.copy_((padded_nV - base_n[:, None]).exp().sum(-1).where(chunk.mask_n, 1))
        sums.chosen_N.copy_(label_n.where(chunk.mask_n & (chunk.row_n < chunk.held), 0))
        if gradient:
            self.gradient(chunk, sums.logsumexp(), None)

    def gradient(self, chunk: LogitChunk, logsumexp_n: Tensor, upstream: Tensor | None) -> None:
        logits_nR, row_n, mask_n, held, scale = chunk
        wide_nV = (logits_nR[:, :held].to(logsumexp_n.dtype) / scale - logsumexp_n[:, None]).exp()
        wide_nV -= (torch.arange(held, device=row_n.device) == row_n[:, None]).to(wide_nV.dtype)
        wide_nV *= (1 if upstream is None else upstream) / scale
        logits_nR[:, :held] = wide_nV.masked_fill_(~mask_n[:, None], 0)
        logits_nR[:, held:] = 0

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        return (x.to(factor.dtype) * factor).to(x.dtype)


@dataclass(frozen=True)
class ChunkedLinearCrossEntropy(WritesInPlace):
    """`LinearCrossEntropy` in chunks of tokens."""

    passes: Passes
    chunk_bytes: int = CHUNK_BYTES
    min_chunk: int = MIN_CHUNK

    def __call__(
        self,
        x_NC: Tensor,
        weight_RC: Tensor,
        row_N: Tensor,
        mask_N: Tensor,
        shard: VocabShard,
        *,
        scale: float = 1.0,
        wgrad_store: WgradStore | None = None,
    ) -> Tensor:
        """As `reference.linear_cross_entropy`."""
        # Autograd functions cannot see whether gradients are enabled: within them they never are.
        head = _Head(self, shard, scale, torch.is_grad_enabled())
        total: Tensor = _LinearCrossEntropy.apply(head, wgrad_store, weight_RC, x_NC, row_N, mask_N)
        return total

    def chunk_tokens(self, tokens: int, rows: int, itemsize: int) -> int:
        """Tokens of a chunk: a power of two, unless one chunk holds all of them."""
        fitting = max(self.chunk_bytes // max(rows * itemsize, 1), self.min_chunk)
        return min(1 << (fitting.bit_length() - 1), max(tokens, 1))


class _Head(NamedTuple):
    """What does not change from chunk to chunk."""

    config: ChunkedLinearCrossEntropy
    shard: VocabShard
    scale: float
    training: bool

    def chunks(
        self, x_NC: Tensor, weight_RC: Tensor, row_N: Tensor, mask_N: Tensor
    ) -> Iterator[tuple[slice, LogitChunk]]:
        """Chunks with their logits, which share one buffer."""
        tokens, rows = len(x_NC), len(weight_RC)
        step = self.config.chunk_tokens(tokens, rows, x_NC.element_size())
        pitch = -(-rows // ALIGNMENT) * ALIGNMENT
        buffer_nR = x_NC.new_empty(step, pitch)[:, :rows]
        for first in range(0, max(tokens, 1), step):  # one empty chunk writes the zeros of no tokens
            part = slice(first, min(first + step, tokens))
            logits_nR = torch.mm(x_NC[part], weight_RC.t(), out=buffer_nR[: part.stop - first])
            yield part, LogitChunk(logits_nR, row_N[part], mask_N[part], self.shard.held, self.scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        wgrad_store: WgradStore | None,
        weight_RC: Tensor,
        x_NC: Tensor,
        row_N: Tensor,
        mask_N: Tensor,
    ) -> Tensor:
        _, _, weight_needs, x_needs, *_ = ctx.needs_input_grad
        x_NC, row_N, mask_N = x_NC.contiguous(), row_N.contiguous(), mask_N.contiguous()
        wide = _wide(x_NC.dtype)
        now = head.training and (weight_needs or x_needs) and gradients_in_forward(*x_NC.shape)
        dx_NC = torch.empty_like(x_NC) if now and x_needs else None
        dweight_RC = torch.empty_like(weight_RC, dtype=wide) if now and weight_needs else None
        sums = Sums(*x_NC.new_empty(3, len(x_NC), dtype=wide).unbind())
        passes, group = head.config.passes, head.shard.group
        for part, chunk in head.chunks(x_NC, weight_RC, row_N, mask_N):
            own = sums.part(part)
            passes.sums(chunk, own, gradient=now and group.size == 1)
            own.reduce_(group)
            if now and group.size > 1:
                passes.gradient(chunk, own.logsumexp(), None)
            if dx_NC is not None:
                torch.mm(chunk.logits_nR, weight_RC, out=dx_NC[part])
            if dweight_RC is not None:
                write_product(dweight_RC, chunk.logits_nR, x_NC[part], accumulate=part.start > 0)
        logsumexp_N = sums.logsumexp()
        ctx.head, ctx.wgrad_store, ctx.weight, ctx.now = head, wgrad_store, weight_RC, now
        if now:
            ctx.save_for_backward(dx_NC, dweight_RC)
        elif head.training:
            ctx.save_for_backward(weight_RC, x_NC, row_N, mask_N, logsumexp_N)
        return (logsumexp_N - sums.chosen_N).where(mask_N, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        head, store, weight = ctx.head, ctx.wgrad_store, ctx.weight
        _, _, weight_needs, x_needs, *_ = ctx.needs_input_grad
        dweight: Tensor | None = None
        if ctx.now:
            dx_NC, dweight_RC = ctx.saved_tensors
            if weight_needs:
                dweight = put_wgrad(store, weight, _scaled_gradient(weight, dweight_RC, upstream))
            dx_NC = head.config.passes.scaled(dx_NC, upstream) if x_needs else None
        else:
            dx_NC = torch.empty_like(ctx.saved_tensors[1]) if x_needs else None
            recomputed = _Recomputed(head, ctx.saved_tensors, upstream, dx_NC)
            if weight_needs:
                dweight = put_wgrad(store, weight, Gradient(recomputed.write, empty_like(weight)))
            recomputed.finish(weight_needs=weight_needs)
        return None, None, dweight, dx_NC, None, None


def gradients_in_forward(tokens: int, channels: int) -> bool:
    """Whether forward computes gradients: if the weight's takes no more than logits and their gradient do."""
    return tokens >= channels


def _scaled_gradient(weight: Tensor, dweight_RC: Tensor, upstream: Tensor) -> Gradient:
    """The weight gradient that forward has computed for a loss of 1."""

    def write(gradient_RC: Tensor, accumulate: bool) -> None:
        if accumulate:
            gradient_RC.addcmul_(dweight_RC, upstream)
        else:
            torch.mul(dweight_RC, upstream, out=gradient_RC)

    return Gradient(write, empty_like(weight))


class _Recomputed:
    """Gradients that backward computes, from logits that it recomputes. The weight's accumulates where it is
    wanted, if it is wanted at once and in float32; else in a tensor of its own."""

    def __init__(self, head: _Head, saved: tuple[Tensor, ...], upstream: Tensor, dx_NC: Tensor | None) -> None:
        self.head, self.upstream, self.dx_NC = head, upstream, dx_NC
        self.saved: tuple[Tensor, ...] | None = saved
        self.own_RC: Tensor | None = None

    def write(self, gradient_RC: Tensor, accumulate: bool) -> None:
        """Of a `Gradient`: within backward, or after `finish`."""
        if self.own_RC is None and gradient_RC.dtype != _wide(gradient_RC.dtype):
            self._run_alone()
        if self.own_RC is None:
            self._run(gradient_RC, accumulate=accumulate)
        elif accumulate:
            gradient_RC.add_(self.own_RC)
        else:
            gradient_RC.copy_(self.own_RC)

    def finish(self, *, weight_needs: bool) -> None:
        """Compute what has not been computed: after backward, the weight may be gone."""
        if self.saved is not None and weight_needs:
            self._run_alone()
        elif self.saved is not None:
            self._run(None, accumulate=False)

    def _run_alone(self) -> None:
        assert self.saved is not None
        self.own_RC = torch.empty_like(self.saved[0], dtype=_wide(self.saved[0].dtype))
        self._run(self.own_RC, accumulate=False)

    def _run(self, dweight_RC: Tensor | None, *, accumulate: bool) -> None:
        assert self.saved is not None
        weight_RC, x_NC, row_N, mask_N, logsumexp_N = self.saved
        self.saved = None
        for part, chunk in self.head.chunks(x_NC, weight_RC, row_N, mask_N):
            self.head.config.passes.gradient(chunk, logsumexp_N[part], self.upstream)
            if self.dx_NC is not None:
                torch.mm(chunk.logits_nR, weight_RC, out=self.dx_NC[part])
            if dweight_RC is not None:
                adds = accumulate or part.start > 0
                write_product(dweight_RC, chunk.logits_nR, x_NC[part], accumulate=adds)
