"""The items of a step: which of them this rank encodes, and where their rows go.

Lanes follow from the tables of a step (`train/counts.py`), so items are read after these are known, and before
the first op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from braid.choices import MADE_UP
from braid.data.items import Patches
from braid.distributed.collectives import Group
from braid.engine.edges import Direction, EdgeLinks
from braid.launch.process import fail_together
from braid.model.encoder import EncoderModel, Items, module_seed
from braid.nn.dtypes import DTYPES
from braid.planning.plan import Plan
from braid.topology.items import ItemTable
from braid.topology.transfer import Lanes, Tokens, Transfer, held, transfer
from braid.train.counts import ItemSources, item_errors
from braid.train.item_prefetch import ItemPrefetch, Lane, lane_items
from braid.train.module_state import ModuleState
from braid.train.state import JobState

Tables = Mapping[str, Sequence[ItemTable]]


def read_items(
    state: JobState,
    tables: Tables,
    sources: ItemSources,
    samples: Sequence[Sequence[int]],
    *,
    step: int,
    training: bool = True,
    prefetch: ItemPrefetch | None = None,
) -> dict[str, list[Items]]:
    """For each encoder of this rank, the items of its lane in every micro-batch; `samples` are the global
    indices of those of each micro-batch. Collective over the job: what cannot be read fails on all ranks.
    `prefetch` may have read them already."""
    seed = state.plan.run.train.seed
    with fail_together(state.job):
        return {
            name: [
                _items(
                    module,
                    table,
                    sources,
                    own,
                    step=step,
                    seed=module_seed(seed, name),
                    training=training,
                    prefetch=prefetch,
                )
                for table, own in zip(tables[name], samples, strict=True)
            ]
            for name, module in state.encoders.items()
        }


def _items(
    module: ModuleState,
    table: ItemTable,
    sources: ItemSources,
    samples: Sequence[int],
    *,
    step: int,
    seed: int,
    training: bool,
    prefetch: ItemPrefetch | None,
) -> Items:
    assert isinstance(module.model, EncoderModel)
    groups, width = module.model.groups, module.model.shape.input
    mine = table.items_of_lane(groups.dp.rank, groups.dp.size)
    wanted = lane_items(table, samples, mine)
    lengths = table.patches[mine.start : mine.stop]
    # Later stages need to know of the patches, not to have them.
    patches = Patches(torch.zeros(sum(lengths), width), [(1, length) for length in lengths])
    if 0 in module.model.segments and wanted:
        with item_errors(module.name, [sample for sample, _ in wanted]):
            source = sources[module.name]
            patches = (
                source.read(wanted) if prefetch is None else prefetch.take(module.name, source, samples, wanted)
            )
    items = Items(
        patches_NI=patches.patches_NI,
        lengths=lengths,
        grids=patches.grids,
        samples=[sample for sample, _ in wanted],
        numbers=[number for _, number in wanted],
        step=step,
        seed=seed,
        training=training,
    )
    module.model.check(items)
    return items


def prefetch_items(
    state: JobState, sources: ItemSources, samples: Sequence[Sequence[int]], prefetch: ItemPrefetch
) -> None:
    """Begin to read the items of a later step, whose micro-batches have these global samples. Made-up items are
    left out: the sizes of all of them take longer than the patches of a lane."""
    lanes = {
        name: Lane(sources[name], module.model.groups.dp.rank, module.model.groups.dp.size)
        for name, module in state.encoders.items()
        if name in sources and 0 in module.model.segments and state.plan.run.modules[name].items not in MADE_UP
    }
    prefetch.begin(lanes, samples)


def edge_links(state: JobState, tables: Tables) -> EdgeLinks | None:
    """The transfers of a step; None for a language model alone."""
    plan = state.plan
    if not plan.encoders:
        return None
    dtype, width = DTYPES[plan.run.train.dtype], plan.run.model.hidden
    return EdgeLinks(
        groups=state.edges,
        transfers=transfers(plan, state.job, tables),
        reads=_reads(plan, state.job),
        no_rows=partial(_no_rows, width, dtype, state.device),
    )


def item_metrics(plan: Plan, tables: Tables) -> dict[str, float]:
    """Of every module: the rows of a step, and how many times the mean the lane with most patches has, in the
    worst micro-batch."""
    metrics: dict[str, float] = {}
    for name, each in plan.encoders.items():
        fullest = max((_fullest(table, each.axes.dp) for table in tables[name]), default=1.0)
        rows = sum(sum(table.rows) for table in tables[name])
        metrics |= {f"{name}.rows": float(rows), f"{name}.fullest_lane": fullest}
    return metrics


def _fullest(table: ItemTable, lanes: int) -> float:
    starts = table.patch_starts
    held = (table.items_of_lane(lane, lanes) for lane in range(lanes))
    most = max(starts[items.stop] - starts[items.start] for items in held)
    return most * lanes / max(1, starts[-1])


def transfers(plan: Plan, job: Group, tables: Tables) -> dict[tuple[str, int], Transfer]:
    """What this rank sends and receives forward, by edge and micro-batch."""
    planned: dict[tuple[str, int], Transfer] = {}
    for name, each in plan.encoders.items():
        for micro_batch, table in enumerate(tables[name]):
            source = held(Lanes(stage=each.axes.pp - 1), each.grid, table)
            target = held(Tokens(stage=0), plan.grid, table)
            planned[each.edge, micro_batch] = transfer(source, target, job.rank)
    return planned


def _reads(plan: Plan, job: Group) -> frozenset[tuple[Direction, str]]:
    """Rows are read by the target of an edge, their gradients by its source."""
    graph = plan.schedule.graph
    sides: list[tuple[Direction, str, int]] = []
    for edge in graph.edges:
        sides += [("F", edge.name, edge.target), ("B", edge.name, edge.source)]
    return frozenset((way, name) for way, name, segment in sides if job.rank in graph.segments[segment].ranks)


def _no_rows(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, width, dtype=dtype, device=device)
