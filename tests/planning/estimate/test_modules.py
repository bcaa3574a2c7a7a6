"""Plans with modules: a rank holds the sum over its modules, and rows on edges are counted as transfers are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from braid.config import Mesh, Run
from braid.planning.estimate import EdgeEstimate, Estimate, estimate
from braid.planning.estimate.rank import held_modules, lane_patches
from braid.planning.estimate.weights import part_of, phases_of
from braid.planning.modules import unit_name, whole_encoder
from braid.planning.plan import Plan, plan
from braid.schedule import Act
from braid.topology.items import ItemTable
from braid.topology.transfer import Lanes, Tokens, held, transfer
from tests.planning.modules import run_with
from tests.planning.test_modules import PLACEMENTS


@cache
def planned(placement: str) -> Plan:
    world, mesh, meshes, *_ = PLACEMENTS[placement]
    return plan(run_with(meshes, mesh), world)


@cache
def estimated(placement: str) -> Estimate:
    return estimate(planned(placement), "cpu")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_holds_the_sum_over_its_modules(placement: str) -> None:
    found, graph = estimated(placement), planned(placement).schedule.graph
    assert [station.ranks for station in found.stations] == list(graph.ranks)
    for station, segments in zip(found.stations, graph.held, strict=True):
        parts = [each.memory for each in station.modules.values()]
        assert {*station.modules} == {graph.segments[segment].module for segment in segments}
        for kind in ("parameters", "optimizer", "updated"):
            assert getattr(station.memory, kind) == sum(getattr(each, kind) for each in parts)
        for kind in ("gathered", "activations"):
            most = [getattr(each, kind) for each in parts]
            assert max(most) <= getattr(station.memory, kind) <= sum(most)
        assert max(each.peak for each in parts) <= station.memory.peak
        assert station.memory.peak <= sum(each.peak for each in parts) + station.features
    assert found.peak == max(station.memory.peak for station in found.stations)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shards_of_all_ranks_are_the_whole_module(placement: str) -> None:
    """Every tp rank has copies of what tp does not split; these models split evenly otherwise."""
    made, found = planned(placement), estimated(placement)
    for name, encoder in made.encoders.items():
        weights = sum(parameter.numel() for parameter in whole_encoder(encoder).parameters())
        shards = sum(
            station.modules[name].memory.parameters * len(station.ranks)
            for station in found.stations
            if name in station.modules
        )
        assert shards >= 4 * weights
        if encoder.axes.tp == 1:
            assert shards == 4 * weights


def test_a_language_model_beside_an_encoder_needs_what_it_needs_alone() -> None:
    world, mesh, *_ = PLACEMENTS["disjoint"]
    alone = estimate(plan(run_with({}, mesh), world), "cpu")
    beside = [each.modules["language"] for each in estimated("disjoint").stations[:2]]
    assert [stage.memory for stage in beside] == [stage.memory for stage in alone.stages]
    assert [stage.calls for stage in beside] == [stage.calls for stage in alone.stages]
    assert [stage.sends for stage in beside] == [stage.sends for stage in alone.stages]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_activations_follow_the_list_of_the_station(placement: str) -> None:
    """Walk each list: a part of a micro-batch is there from its first forward to its last backward."""
    made = planned(placement)
    for number, station in enumerate(estimated(placement).stations):
        costs = {name: cost for each in held_modules(made, number, "cpu") for name, cost in each.costs.items()}
        turns = [turn for op in made.schedule.ops[number] for turn in parts_of(made, op)]
        last = {(micro_batch, part): place for place, (micro_batch, part) in enumerate(turns)}
        live, most = dict[tuple[int, str], int](), 0
        for place, (micro_batch, part) in enumerate(turns):
            positions = f"{part.rpartition('/')[0]}/positions".removeprefix("/")
            live[micro_batch, part] = costs[part].kept if part in costs else 0
            live[micro_batch, positions] = costs[positions].kept
            most = max(most, sum(live.values()))
            if last[micro_batch, part] == place:
                del live[micro_batch, part]
            if not any(each[0] == micro_batch and same_module(each[1], part) for each in turns[place + 1 :]):
                live.pop((micro_batch, positions), None)
        assert station.memory.activations == most


def parts_of(made: Plan, op: Any) -> list[tuple[int, str]]:
    if op.act not in (Act.F, Act.B):
        return []
    inner = [phase for phase in made.schedule.phases[op.segment] if phase.name == op.phase]
    phases = phases_of(made, op.segment) if inner[0].kind == "segment" else inner
    module = made.schedule.graph.segments[op.segment].module
    found = [(op.micro_batch, unit_name(module, part_of(phase))) for phase in phases]
    return found if op.act is Act.F else found[::-1]


def same_module(part: str, other: str) -> bool:
    return part.rpartition("/")[0] == other.rpartition("/")[0]


# --------------------------------------------------------------------------------------------- edges


def fullest(made: Plan, name: str) -> ItemTable:
    """The table of a micro-batch whose samples all have as many items and patches as they may have, with the
    placeholders at the beginning of each text."""
    encoder, samples = made.encoders[name], made.micro_batch_samples
    module, slices = encoder.module, made.axes.tp * made.axes.cp
    patches = module.most_patches // module.most_items
    rows, width = module.model.rows(module.most_patches), made.run.data.sequence_tokens // slices
    return ItemTable(
        counts=(module.most_items,) * samples,
        rows=(module.model.rows(patches),) * (module.most_items * samples),
        patches=(patches,) * (module.most_items * samples),
        slices=slices,
        placeholders=tuple(min(width, max(0, rows - width * place)) for place in range(slices)) * samples,
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_and_bytes_of_edges_are_those_of_planned_transfers(placement: str) -> None:
    made = planned(placement)
    for edge in estimated(placement).edges:
        table, encoder = fullest(made, edge.name), made.encoders[edge.name]
        source = held(Lanes(stage=encoder.axes.pp - 1), encoder.grid, table)
        target = held(Tokens(stage=0), made.grid, table)
        plans = [transfer(source, target, rank) for rank in range(made.world)]
        made_rows = {rank: sum(stop - start for start, stop in rows) for rank, rows in source.items()}
        read_rows = {rank: sum(stop - start for start, stop in rows) for rank, rows in target.items()}
        moved = sum(stop - start for each in plans for _, start, stop in each.sends)
        kept = sum(stop - start for each in plans for start, stop in each.kept)
        assert edge.rows == moved + kept == sum(made_rows.values()) == sum(read_rows.values())
        assert edge.source_rows == max(made_rows.values())
        assert edge.target_rows == max(read_rows.values())
        assert (set(edge.source_ranks), set(edge.target_ranks)) == ({*made_rows}, {*read_rows})
        assert edge.bytes == edge.rows * made.run.model.hidden * 4
        assert edge.step_bytes == 2 * made.run.train.micro_batches * edge.bytes
        assert edge.is_local == (moved == 0 and made.world == 1)


def test_rows_wait_as_long_as_the_placement_lets_them() -> None:
    on_both, apart = estimated("colocated"), estimated("disjoint")
    (edge,) = on_both.edges
    assert edge.in_flight == 2
    assert on_both.stations[0].features == 2 * edge.target_bytes, "all that are ahead wait on the same ranks"
    (edge,) = apart.edges
    reader, other, maker = apart.stations
    assert reader.features == edge.target_bytes, "one micro-batch, received right before it is read"
    assert other.features == 0
    assert edge.source_bytes < maker.features <= (edge.in_flight + 1) * edge.source_bytes


def test_one_side_of_an_edge_sends_rows_and_the_other_their_gradients() -> None:
    """A rank on both sides sends both; a frozen encoder gets no gradients."""
    reader, other, maker = estimated("disjoint").stations
    (edge,) = estimated("disjoint").edges
    steps = planned("disjoint").run.train.micro_batches
    assert maker.edge_sends == {"vision": steps * edge.source_bytes}
    assert reader.edge_sends == {"vision": steps * edge.target_bytes}
    assert other.edge_sends == {}
    (station,) = estimated("colocated").stations
    (edge,) = estimated("colocated").edges
    assert station.edge_sends == {"vision": steps * (edge.source_bytes + edge.target_bytes)}
    frozen = run_with({"vision": Mesh(ranks=(2, 2))}, Mesh(pp=2, ranks=(0, 2)), trained=())
    reader, _, maker = estimate(plan(frozen, 4), "cpu").stations
    assert (reader.edge_sends, maker.edge_sends.keys()) == ({}, {"vision"})


@pytest.mark.parametrize("ahead", [2, 3, 4])
def test_an_encoder_that_is_further_ahead_holds_more(ahead: int) -> None:
    def found(ahead: int) -> tuple[int, int]:
        run = run_with({"vision": Mesh(tp=2)}, Mesh(pp=2, tp=2), ahead=ahead)
        (station, *_) = estimate(plan(run, 4), "cpu").stations
        return station.modules["vision"].live, station.modules["vision"].memory.activations

    live, activations = found(ahead)
    assert live == ahead
    assert activations * 2 == found(2)[1] * ahead


# ------------------------------------------------------------------------------------------ strategies


def test_each_module_is_sharded_as_its_own_mesh_says() -> None:
    """A module on one rank of a larger job has FSDP too, whose shards are main parameters: no copy."""

    def vision(run: Run, world: int) -> Any:
        run = replace(run, train=replace(run.train, dtype="bf16"))
        return estimate(plan(run, world), "cpu").stations[-1].modules["vision"].memory

    weights = sum(each.numel() for each in whole_encoder(planned("disjoint").encoders["vision"]).parameters())
    whole = vision(run_with({"vision": Mesh(ranks=(2, 2), shard="none")}, Mesh(ranks=(0, 2))), 4)
    halves = vision(run_with({"vision": Mesh(ranks=(2, 2))}, Mesh(ranks=(0, 2))), 4)
    single = vision(run_with({"vision": Mesh(ranks=(2, 1))}, Mesh(ranks=(0, 2))), 3)
    alone = vision(run_with({"vision": Mesh()}), 1)
    assert whole.parameters == single.parameters == 2 * halves.parameters == 4 * weights
    assert whole.optimizer == single.optimizer == 2 * halves.optimizer == 8 * weights
    assert (alone.parameters, alone.optimizer, alone.gathered) == (2 * weights, 12 * weights, 0)
    assert single.gathered > 0


@pytest.mark.parametrize(("dp", "patches"), [(1, 64), (2, 32), (4, 16), (8, 8), (16, 8)])
def test_lanes_hold_whole_items(dp: int, patches: int) -> None:
    """4 samples of 2 items with 8 patches each."""
    made = plan(run_with({"vision": Mesh()}, Mesh(ranks=(0, 1))), dp)
    assert made.encoders["vision"].axes.dp == dp
    assert lane_patches(made, made.encoders["vision"]) == patches


def test_recompute_keeps_less_in_every_module() -> None:
    run = run_with({"vision": Mesh()})
    full = estimate(plan(replace(run, train=replace(run.train, recompute=("full",))), 2), "cpu").stations[0]
    plain = estimate(plan(run, 2), "cpu").stations[0]
    for name, each in plain.modules.items():
        assert full.modules[name].memory.activations < each.memory.activations


def test_an_edge_has_a_size_in_bytes() -> None:
    edge = EdgeEstimate(
        name="vision",
        width=8,
        itemsize=2,
        rows=10,
        source_rows=5,
        target_rows=4,
        messages=6,
        in_flight=2,
        source_ranks=(0, 1),
        target_ranks=(1, 2),
    )
    assert (edge.bytes, edge.step_bytes, edge.source_bytes, edge.target_bytes) == (160, 960, 80, 64)
    assert not edge.is_local


def test_gradients_pass_through_a_frozen_language_model_to_an_encoder_that_learns() -> None:
    """In one process, where a segment is a single phase."""

    def backwards(trained: tuple[str, ...]) -> set[bool]:
        run = replace(run_with({"vision": Mesh()}, trained=trained), trained=("final_norm.*",))
        return {phase.backward for phase in phases_of(plan(run, 1), 0)[:2]}

    assert backwards(("*",)) == {True}
    assert backwards(()) == {False}
