"""What a step has to know about its data before the first op, summed over all ranks: tokens, and items.

One all-reduce of whole numbers carries the token counts of every micro-batch, the table of each module's items
(`topology/items.py`) and whether any rank found something wrong, so all ranks raise the same error.

Shapes: M micro-batches of the step, K numbers of each; B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.data.items import ItemSource
from braid.distributed.collectives import all_reduce_no_grad
from braid.errors import BraidError, DataError
from braid.launch.process import fail_together
from braid.model.context import MicroBatch, MicroBatchTotals
from braid.model.language import StepFraction
from braid.model.mtp import targets
from braid.planning.modules import ModulePlan
from braid.planning.plan import Plan
from braid.topology.items import ItemTable, Refusal, SampleItems, TableShape, decode, encode, problems_of
from braid.train.state import JobState, State

ItemSources = Mapping[str, ItemSource]
"""Where the items of each module come from. Samples have none for a module that is not listed."""

NO_ITEMS: ItemSources = MappingProxyType({})

TOKEN_COUNTS = 5
"""Counts of a micro-batch, besides one for each MTP depth."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Token counts of a step, over all ranks."""

    tokens: int
    """Tokens that count in the loss."""
    mtp_tokens: list[int]
    """Tokens that count in each MTP depth."""
    totals: list[MicroBatchTotals]
    """Size of every micro-batch, over all ranks that share it."""
    fractions: list[StepFraction]
    """Each micro-batch's fraction of the step."""
    tables: Mapping[str, list[ItemTable]] = field(default_factory=dict)
    """By module, the items of every micro-batch."""


def count(state: State, batches: Sequence[MicroBatch], items: ItemSources = NO_ITEMS, first: int = 0) -> Counts:
    """Count the tokens and items of the step's micro-batches over all ranks; `first` is the step's first
    sample. Token ids outside the vocabulary are an error, raised on every rank, as is an item that does not fit
    its placeholders. Collective over the job, whose other ranks call `await_counts`, or `fail_to_count` if they
    cannot read their batches."""
    model, encoders = state.model, state.plan.encoders
    problem: DataError | None = None
    rows: list[list[int]] = []
    try:
        for batch in batches:
            model.check(batch)
    except DataError as error:
        problem = error
    for batch in batches:
        numbers = _token_counts(batch, len(model.layout.mtp))
        for name, each in encoders.items():
            try:
                numbers += _table(state, each, batch, items.get(name))
            except DataError as error:
                problem = problem or error
                numbers += [0] * table_shape(state.plan, each).size
        numbers[0] = int(problem is not None)
        rows.append(numbers)
    return _summed(state, torch.tensor(rows), problem, first)


def await_counts(state: JobState, micro_batches: int, first: int = 0) -> Counts:
    """`count` on a rank outside the language model's grid, which reads no tokens."""
    return _summed(state, _no_counts(state, micro_batches), None, first)


def fail_to_count(state: State, micro_batches: int, problem: DataError) -> Counts:
    """`count` on a rank that cannot read its batches. All ranks raise the error."""
    mine_MK = _no_counts(state, micro_batches)
    mine_MK[:, 0] = 1
    return _summed(state, mine_MK, problem, 0)


def _no_counts(state: JobState, micro_batches: int) -> Tensor:
    size = TOKEN_COUNTS + len(state.plan.layout.mtp)
    size += sum(table_shape(state.plan, each).size for each in state.plan.encoders.values())
    return torch.zeros(micro_batches, size, dtype=torch.int64)


def table_shape(plan: Plan, module: ModulePlan) -> TableShape:
    """The size of the table of a module's items in a micro-batch."""
    slices = plan.axes.tp * plan.axes.cp
    return TableShape(samples=plan.micro_batch_samples, items=module.module.most_items, slices=slices)


def _token_counts(batch: MicroBatch, depths: int) -> list[int]:
    """The first is for problems."""
    tokens_B = (batch.documents_BT >= 0).sum(1)
    return [
        0,
        len(batch.documents_BT),
        int(tokens_B.sum()),
        int((tokens_B > 0).sum()),
        int(batch.loss_mask_BT.sum()),
        *(int(targets(batch, depth).loss_mask_BT.sum()) for depth in range(depths)),
    ]


def _table(state: State, module: ModulePlan, batch: MicroBatch, source: ItemSource | None) -> list[int]:
    """The numbers of this rank's samples in the table of a micro-batch."""
    shape, samples = table_shape(state.plan, module), batch.sample_B.tolist()
    found_BT = batch.tokens_BT == module.module.token
    found_BS = found_BT.reshape(len(samples), shape.slices, -1).sum(2).tolist()
    sizes: Sequence[Sequence[int]] = [()] * len(samples)
    if source is not None:
        with item_errors(module.name, samples):
            sizes = source.sizes(samples)
    first = state.model.groups.dp.rank * len(samples)
    held = [
        SampleItems(
            rows=tuple(_rows(module, patches) for patches in of_sample),
            patches=tuple(of_sample),
            placeholders=tuple(placeholders),
        )
        for of_sample, placeholders in zip(sizes, found_BS, strict=True)
    ]
    return encode(shape, first, held)


@contextmanager
def item_errors(module: str, samples: Sequence[int]) -> Iterator[None]:
    """Whatever a source of items raises is an error of the data, which all ranks can raise together."""
    try:
        yield
    except BraidError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        which = f"samples {samples[0]} to {samples[-1]}"
        raise DataError(f"items of {module!r} in {which} cannot be read: {told}") from error


def _rows(module: ModulePlan, patches: int) -> int:
    """The rows of an item, or why the encoder refuses it."""
    if patches < 1:
        return Refusal.EMPTY
    encoder = module.module.model
    return Refusal.SIZE if patches % encoder.group else encoder.rows(patches)


def _summed(state: JobState, mine_MK: Tensor, problem: DataError | None, first: int) -> Counts:
    """The counts over all ranks, from those of each rank's own rows. Collective over the job."""
    # On the host: a device tensor would wait for the step before. The error flag rides along with the counts,
    # so that checking ids costs no collective of its own. One rank of each data-parallel lane fills in its
    # rows; any rank may have found something wrong, such as a disk that only its own machine cannot read.
    if not isinstance(state, State) or state.model.groups.tp_cp.rank or state.model.groups.pp.rank:
        mine_MK = F.pad(mine_MK[:, :1], (0, mine_MK.shape[1] - 1))
    table_MK = all_reduce_no_grad(mine_MK, state.job)
    numbers_MK = table_MK.tolist()
    if any(row[0] for row in numbers_MK):
        with fail_together(state.job):
            if problem is not None:
                raise problem
    counted = TOKEN_COUNTS + len(state.plan.layout.mtp)
    _, _, valid, filled, *losses = ([row[k] for row in numbers_MK] for k in range(counted))
    return Counts(
        tokens=sum(losses[0]),
        mtp_tokens=[sum(depth) for depth in losses[1:]],
        totals=[MicroBatchTotals(tokens=row[2], rows=row[1]) for row in numbers_MK],
        fractions=[
            StepFraction(tokens=t / max(1, sum(valid)), rows=r / max(1, sum(filled)))
            for t, r in zip(valid, filled, strict=True)
        ],
        tables=_tables(state.plan, [row[counted:] for row in numbers_MK], first),
    )


def _tables(plan: Plan, numbers_MK: Sequence[Sequence[int]], first: int) -> dict[str, list[ItemTable]]:
    """The tables of all modules. Every rank finds the same problems and raises the same error."""
    shapes = {name: table_shape(plan, each) for name, each in plan.encoders.items()}
    ends = list(pairwise(accumulate((shape.size for shape in shapes.values()), initial=0)))
    problems: list[str] = []
    tables: dict[str, list[ItemTable]] = {}
    for (name, shape), (start, stop) in zip(shapes.items(), ends, strict=True):
        own = [row[start:stop] for row in numbers_MK]
        for micro_batch, numbers in enumerate(own):
            problems += problems_of(shape, numbers, first + micro_batch * shape.samples, name)
        if not problems:
            tables[name] = [decode(shape, numbers) for numbers in own]
    if problems:
        raise DataError("items do not fit the text\n  " + "\n  ".join(problems))
    return tables
