"""The work of a layer on one rank: matrix products, kernels and bytes moved, per pass, for predictions of time.

Every module has a closed-form `work(workload)` beside its `cost` and `flops`. It lists what a GPU runs with the
fused kernels for one micro-batch, in three passes:

    forward    its operations (`Work.flops`) are `flops` of the module
    backward   gradients of inputs; those of small weights too, where one kernel computes both
    wgrad      gradients of weights, which a schedule may delay

A **piece** is one of three things, by what decides how long it takes: a `Product` by its sizes, a `Kernel` by
its own measurements, `Moved` by bytes alone. Collectives are not included: `Cost` has them.

Like the cost model, this one assumes rows of one document without padding, and balanced experts. Small pieces
count by the kernels that the host starts for them (`launches`), with bytes rounded to what matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from braid.distributed.collectives import Group
from braid.kernels.attention import pairs_seen
from braid.nn.cost import Workload

Pass = Literal["forward", "backward", "wgrad"]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or `groups` of them in one launch: m rows, n columns, sums over k."""

    m: int
    n: int
    k: int
    groups: int = 1
    counted: int | None = None
    """Operations that count, if not those of the sizes: groups that are rounded up, padding, products that are
    recomputed or that split a float32 factor into narrow ones."""
    format: str = ""
    """What its factors are quantised to; nothing for the dtype of the run."""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.groups if self.counted is None else self.counted


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with a name, whose speed is measured by itself."""

    name: str
    key: tuple[tuple[str, int | str], ...]
    """What its speed depends on besides its size, sorted by name."""
    flops: int
    """Operations of this pass; those of a recurrence are counted token by token."""
    bytes: int
    """Bytes that it reads and writes at least."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Work that takes as long as its bytes: norms, activations, residuals, RoPE, permutations, casts."""

    bytes: int
    """Read and written."""
    flops: int = 0
    """Operations on the way that the module counts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Work of one kind that runs in one go."""

    what: Product | Kernel | Moved
    launches: int = 1
    """Kernels that the host starts."""
    region: str = ""
    """The region of `nn.recompute` that replays it; that of whole blocks is not named."""
    counts_as: Pass | None = None
    """The pass whose gradients it computes, if it runs in another one."""


@dataclass(frozen=True)
class Work:
    """The pieces of every pass, in order. Works add up."""

    forward: tuple[Piece, ...] = ()
    backward: tuple[Piece, ...] = ()
    wgrad: tuple[Piece, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, other.backward + self.backward, other.wgrad + self.wgrad)

    def times(self, count: int) -> Work:
        """The work of `count` such modules in sequence."""
        return Work(self.forward * count, self.backward * count, self.wgrad * count)

    def in_region(self, region: str) -> Work:
        """The same work, with a forward that a region replays."""
        return replace(self, forward=tuple(replace(piece, region=region) for piece in self.forward))

    def passes(self) -> Mapping[Pass, tuple[Piece, ...]]:
        return {"forward": self.forward, "backward": self.backward, "wgrad": self.wgrad}

    def flops(self, which: Pass) -> int:
        """Operations that count for a pass, wherever they run."""
        return sum(
            piece.what.flops
            for runs_in, pieces in self.passes().items()
            for piece in pieces
            if (piece.counts_as or runs_in) == which
        )

    def replayed(self, regions: Iterable[str]) -> tuple[Piece, ...]:
        """What backward runs again if these regions are recomputed."""
        return tuple(piece for piece in self.forward if piece.region in regions)


# ------------------------------------------------------------------------------------------ products


def linear_work(
    tokens: int, outputs: int, inputs: int, *, groups: int = 1, rows: int | None = None, bias_bytes: int = 0
) -> Work:
    """x · Wᵀ of `tokens` vectors, in all groups alike; `rows` are those of all groups, if they do not divide.
    `bias_bytes` are read to sum the gradient of a bias."""
    counted = None if rows is None else 2 * rows * outputs * inputs
    sums = moved(wgrad=bias_bytes, launches=2).wgrad
    return Work(
        forward=(Piece(Product(tokens, outputs, inputs, groups, counted)),),
        backward=(Piece(Product(tokens, inputs, outputs, groups, counted)),),
        wgrad=(Piece(Product(outputs, inputs, tokens, groups, counted)), *sums),
    )


# ---------------------------------------------------------------------------------- kernels and bytes


def moved(
    forward: int = 0,
    backward: int = 0,
    wgrad: int = 0,
    *,
    launches: int | tuple[int, int] = 1,
    region: str = "",
    flops: tuple[int, int] = (0, 0),
) -> Work:
    """Bytes of each pass; none for a pass without any. `launches` and `flops` are those of forward and of
    what follows."""
    first, then = (launches, launches) if isinstance(launches, int) else launches
    return Work(
        (Piece(Moved(forward, flops[0]), first, region),) if forward else (),
        (Piece(Moved(backward, flops[1]), then),) if backward else (),
        (Piece(Moved(wgrad), then),) if wgrad else (),
    )


def kernel_work(
    name: str,
    key: Mapping[str, int | str],
    *,
    flops: tuple[int, int],
    moves: tuple[int, int],
    launches: tuple[int, int] = (1, 1),
    region: str = "",
) -> Work:
    """A named kernel: operations, bytes and launches of forward and backward."""
    sorted_key = tuple(sorted(key.items()))
    forward, backward = (Kernel(name, sorted_key, *each) for each in zip(flops, moves, strict=True))
    return Work((Piece(forward, launches[0], region),), (Piece(backward, launches[1]),))


def activation_work(workload: Workload, entries: int, projections: int) -> Work:
    """The activation of an MLP with `entries` ffn channels of all tokens, in one kernel: it reads all
    projections, and backward writes their gradients."""
    size = entries * workload.narrow
    return moved((projections + 1) * size, (2 * projections + 1) * size, region="activation")


def gradient_sums(users: int, size: int) -> Work:
    """Autograd adds up the gradients of a tensor of `size` bytes that several layers read."""
    return moved(backward=3 * size).times(max(users - 1, 0))


def attention_work(
    workload: Workload, heads: int, kv_heads: int, dims: tuple[int, int], *, window: int | None, causal: bool
) -> Work:
    """Softmax attention of this rank's heads, with so many channels of a key and of a value. Backward has two
    kernels, and each recomputes scores and their gradient: 3 products for queries, 4 for keys and values, after
    2 in forward. With equal dims it takes 3.5 times the operations of forward."""
    tokens, (qk, v) = workload.local_tokens(), dims
    pairs = visible_pairs(workload, window, causal=causal)
    q, y = tokens * heads * qk * workload.narrow, tokens * heads * v * workload.narrow
    keys_values = tokens * kv_heads * (qk + v) * workload.narrow
    lse, length = tokens * heads * workload.wide, document_tokens(workload)
    return kernel_work(
        "attention",
        {"causal": int(causal), "head_dim": qk, "v_dim": v, "tokens": min(window or length, length)},
        flops=(2 * heads * (qk + v) * pairs, 2 * heads * (4 * qk + 3 * v) * pairs),
        moves=(q + keys_values + y + lse, 3 * (q + keys_values + y) + 4 * lse),
        launches=(1, 2),
        region="core",
    )


def document_tokens(workload: Workload) -> int:
    """Tokens that may attend to each other: a row, or one of the equal items of an encoder's pack."""
    return -(-workload.tokens // workload.items) if workload.items else workload.tokens


def visible_pairs(workload: Workload, window: int | None, *, causal: bool) -> int:
    """Pairs of query and key in the masks of all rows."""
    if not workload.items:
        return workload.rows * pairs_seen(workload.tokens, window, causal=causal)
    least, longer = divmod(workload.tokens, workload.items)
    short = (workload.items - longer) * pairs_seen(least, window, causal=causal)
    return workload.rows * (short + longer * pairs_seen(least + 1, window, causal=causal))


# ------------------------------------------------------------------------------ copies around collectives


def exchange_copies(group: Group, size: int, times: int = 1) -> Work:
    """An all-to-all of `size` bytes puts slices one after another before it, and together again after it."""
    return moved(4 * size, 4 * size, launches=2).times(times if group.size > 1 else 0)


def gather_copies(workload: Workload, group: Group, part: int) -> Work:
    """Collectives join slices along the first dim. With several rows, tokens are not there: an all-gather of
    `part` bytes from each rank copies its input and output, the reduce-scatter of its backward its input."""
    if group.size == 1 or workload.rows == 1:
        return Work()
    return moved(2 * part * (1 + group.size), 2 * part * group.size, launches=(2, 1))


def scatter_copies(workload: Workload, group: Group, part: int) -> Work:
    """The same for a reduce-scatter that leaves `part` bytes, and the all-gather of its backward."""
    work = gather_copies(workload, group, part)
    return Work(work.backward, work.forward)
