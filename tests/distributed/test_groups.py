"""Groups of a grid: who is in them, that each communicator exists once, and that nothing is left behind."""

import os
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from braid.distributed.collectives import ALONE, Groups, all_reduce_no_grad
from braid.distributed.groups import close_groups, open_groups, opened_groups
from braid.errors import ConfigError
from braid.topology import FAMILIES, Grid, View, standard
from tests.ranks import run_ranks

ARRANGEMENTS = (
    {"tp": 2, "dp": 4, "ep": 4},
    {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "dp": 2, "pp": 2, "etp": 2},
    {"tp": 4, "dp": 2, "ep": 8},
    {"dp": 8, "ep": 2},
)


def named(groups: Groups):
    return {field.name: getattr(groups, field.name) for field in fields(Groups) if field.name != "tp_runs"}


def open_communicators_now() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sum_of_ranks(group, rank: int) -> int:
    return int(all_reduce_no_grad(torch.tensor(rank), group))


def test_every_family_is_a_field_and_every_field_a_family():
    assert set(FAMILIES) | {"ends", "dispatch"} == set(named(Groups()))


# ------------------------------------------------------------------------------------------ membership


def check_sums(rank, world):
    for sizes in ARRANGEMENTS:
        grid = standard(**sizes)
        with opened_groups(grid, rank) as groups:
            for name, (view, axes) in FAMILIES.items():
                group = named(groups)[name]
                members = grid.group_of(rank, axes, view)
                assert (group.size, group.rank) == (len(members), members.index(rank)), name
                assert (group.handle is None) == (len(members) == 1), name
                assert sum_of_ranks(group, rank) == sum(members), name


def test_a_sum_over_each_group_is_the_sum_of_its_ranks():
    run_ranks(8, check_sums)


def ends_of(rank, world):
    with opened_groups(standard(tp=2, pp=4), rank) as groups:
        assert (groups.ends.size, groups.ends.handle is None) in ((1, True), (2, False))
        return sum_of_ranks(groups.ends, rank)


def test_the_ends_of_a_pipeline_are_together_and_all_others_alone():
    assert run_ranks(8, ends_of) == [0 + 6, 1 + 7, 2, 3, 4, 5, 0 + 6, 1 + 7]


def check_gathering_order(rank, world):
    with opened_groups(standard(tp=2, cp=2, dp=2), rank) as groups:
        gathered = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=groups.tp_cp.handle)
        assert groups.tp_cp.rank == groups.cp.rank * 2 + groups.tp.rank
    return [int(x) for x in gathered]


def test_tp_cp_counts_cp_outside_and_tp_inside():
    assert run_ranks(8, check_gathering_order)[5] == [4, 5, 6, 7]


def check_runs(rank, world):
    with opened_groups(standard(tp=8), rank, tp_runs=[1, 2, 4, 8, 4]) as groups:
        assert set(groups.tp_runs) == {2, 4}
        assert groups.tp_run(1) is ALONE
        assert groups.tp_run(8) is groups.tp
        return [sum_of_ranks(groups.tp_run(length), rank) for length in (2, 4)]


def test_runs_are_neighbours_within_tp():
    told = run_ranks(8, check_runs)
    assert told[0] == told[1] == [0 + 1, 0 + 1 + 2 + 3]
    assert told[6] == told[7] == [6 + 7, 4 + 5 + 6 + 7]


# -------------------------------------------------------------------------------------- communicators


def check_sharing(rank, world):
    with opened_groups(standard(tp=2, dp=4, ep=4), rank) as groups:
        assert groups.dp.handle is groups.dp_cp.handle
        assert groups.slab.handle is groups.world.handle is dist.group.WORLD
        assert groups.ep.handle is groups.ep_etp.handle is not groups.dp.handle
        assert groups.dispatch.handle is not groups.ep.handle
        assert sum_of_ranks(groups.dispatch, rank) == sum_of_ranks(groups.ep, rank)
        assert groups.tp.handle is groups.tp_cp.handle
        assert groups.cp is groups.pp is groups.etp is ALONE
        return open_communicators_now()


def test_families_with_the_same_ranks_share_a_communicator():
    # the default one, tp, dp, ep, edp, dispatch
    assert run_ranks(8, check_sharing) == [6] * 8


def check_leaks(rank, world):
    before, descriptors = open_communicators_now(), []
    for _ in range(6):
        groups = open_groups(standard(tp=2, cp=2, dp=2, etp=2, ep=2), rank, tp_runs=[2])
        assert open_communicators_now() > before
        assert sum_of_ranks(groups.dp_cp, rank) == (12 if rank % 2 == 0 else 16)
        close_groups(groups)
        del groups
        assert open_communicators_now() == before
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return descriptors


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors in /proc")
def test_opened_and_closed_again_and_again_nothing_is_left():
    for descriptors in run_ranks(8, check_leaks):
        assert max(descriptors[1:]) <= descriptors[0] + 4, descriptors


def check_closing_at_once(rank, world):
    """How many groups all ranks together had made when this rank had opened its own, time after time."""
    store, make = dist.distributed_c10d._get_default_store(), dist.new_group
    counts = []

    def counted(*arguments, **options):
        handle = make(*arguments, **options)
        store.add("made", 1)
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        for _ in range(3):
            groups = open_groups(standard(tp=2, cp=2, dp=2, ep=4), rank)
            counts.append(store.add("made", 0))
            close_groups(groups)
            dist.barrier()
    return counts


def check_timeouts(rank, world):
    """Of the default communicator it is the job's."""
    wait = timedelta(seconds=77)
    with opened_groups(standard(tp=2, dp=2, ep=4), rank, timeout=wait) as groups:
        own = {name: group for name, group in named(groups).items() if group.size > 1}
        assert {"tp", "dp", "dispatch"} <= own.keys()
        for name, group in own.items():
            if group.handle is not dist.group.WORLD:
                assert group.handle._get_backend(torch.device("cpu")).options._timeout == wait, name


def test_every_communicator_waits_as_long_as_it_was_told():
    run_ranks(4, check_timeouts)


def test_groups_may_be_closed_as_soon_as_they_are_open():
    # 8 ranks each call for 4 groups of tp, of cp, of dp (which edp is), and 2 of tp_cp, of dp_cp; ep is tp_cp,
    # and dispatch has its own
    for counts in run_ranks(8, check_closing_at_once):
        assert counts == [8 * (4 * 3 + 2 + 2 + 2) * (time + 1) for time in range(3)]


def check_closing_on_error(rank, world):
    before = open_communicators_now()
    with pytest.raises(KeyError), opened_groups(standard(dp=2, tp=2), rank):
        raise KeyError
    return open_communicators_now() - before


def test_an_error_closes_the_groups():
    assert run_ranks(4, check_closing_on_error) == [0] * 4


# ---------------------------------------------------------------------- grids that are not the whole job


def check_part_of_the_job(rank, world, grid):
    with opened_groups(grid, rank, tp_runs=[1]) as groups:
        sums = {name: sum_of_ranks(group, rank) for name, group in named(groups).items()}
        assert (groups.world is ALONE) == (rank not in grid.ranks)
    with opened_groups(standard(dp=4), rank) as everyone:
        assert sum_of_ranks(everyone.dp, rank) == 6
    return sums["tp"], sums["world"]


def test_a_rank_outside_the_grid_is_alone_and_holds_nobody_up():
    told = run_ranks(4, check_part_of_the_job, standard(tp=2, offset=2))
    assert told == [(0, 0), (1, 1), (5, 5), (5, 5)]


def test_ranks_may_be_listed():
    dense, expert = View.of(tp=2, cp=1, dp=1, pp=1), View.of(etp=1, ep=2, edp=1, pp=1)
    grid = Grid(dense=dense, others={"expert": expert}, shared=("pp",), explicit=(0, 3))
    assert run_ranks(4, check_part_of_the_job, grid) == [(3, 3), (1, 1), (2, 2), (3, 3)]


def check_two_grids(rank, world):
    """A pair of grids on different ranks, then one over all: ranks have opened different numbers by then."""
    with opened_groups(standard(tp=2), rank) as first, opened_groups(standard(dp=2, offset=2), rank) as second:
        with opened_groups(standard(tp=2, dp=2), rank) as both:
            return [sum_of_ranks(group, rank) for group in (first.tp, second.dp, both.tp, both.dp)]


def test_grids_side_by_side():
    assert run_ranks(4, check_two_grids) == [[1, 0, 1, 2], [1, 1, 1, 4], [2, 5, 5, 2], [3, 5, 5, 4]]


# ------------------------------------------------------------------------------------ without a process


def test_one_rank_needs_no_process_group():
    groups = open_groups(standard(), 0, tp_runs=[1])
    assert all(group is ALONE for group in named(groups).values())
    close_groups(groups)


def test_more_ranks_than_the_job_has_are_refused():
    with pytest.raises(ConfigError, match="world = 1\n") as caught:
        open_groups(standard(dp=8), 0)
    assert caught.value.problems[0].remedy == "8 or more ranks"


def test_a_run_that_does_not_divide_tp_is_refused():
    with pytest.raises(ConfigError, match="must divide tp"):
        open_groups(standard(), 0, tp_runs=[3])


# ------------------------------------------------------------- acceptance: an expert view beside a dense one


def check_equal_factors(rank, world):
    """Equal sizes in both views: the same ranks, the same communicators."""
    with opened_groups(standard(tp=2, cp=2, dp=2, etp=2, ep=2), rank) as groups:
        pairs = ((groups.tp, groups.etp), (groups.cp, groups.ep), (groups.dp, groups.edp))
        assert all(dense.handle is expert.handle for dense, expert in pairs)


def test_equal_factors_share_communicators_pairwise():
    run_ranks(8, check_equal_factors)


def check_stages(rank, world):
    with opened_groups(standard(tp=2, dp=2, pp=2, etp=2), rank) as groups:
        return sum_of_ranks(groups.edp, rank), groups.edp.size


def test_experts_are_shared_within_a_stage_only():
    told = run_ranks(8, check_stages)
    assert told == [(2, 2), (4, 2), (2, 2), (4, 2), (10, 2), (12, 2), (10, 2), (12, 2)]


def check_sizes(rank, world):
    sizes = []
    for ep in (1, 4):
        with opened_groups(standard(tp=2, dp=4, ep=ep), rank) as groups:
            sizes.append({name: group.size for name, group in named(groups).items()})
    return sizes


def test_sizes_without_and_with_an_expert_view():
    for without, experts in run_ranks(8, check_sizes):
        assert without["dp_cp"] == 4
        assert (without["ep"], without["etp"], without["edp"]) == (1, 1, 8)
        assert (experts["ep"], experts["etp"], experts["edp"], experts["ep_etp"]) == (4, 1, 2, 4)
