"""Meshes for FSDP2 and DTensor: made of the groups' own communicators, and right to train with."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from braid.distributed.collectives import Groups
from braid.distributed.groups import opened_groups
from braid.distributed.mesh import close_mesh, dense_mesh, expert_mesh
from braid.errors import ConfigError
from braid.topology import standard
from tests.ranks import run_ranks


def open_communicators_now() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sum_over(mesh, axis, rank: int) -> int:
    x = torch.tensor(rank)
    dist.all_reduce(x, group=mesh.get_group(axis))
    return int(x)


# --------------------------------------------------------------------------------------- communicators


def check_reuse(rank, world):
    grid = standard(tp=2, cp=2, dp=2, etp=2, ep=2)
    with opened_groups(grid, rank) as groups:
        before = open_communicators_now()
        dense = dense_mesh(groups, grid, device_type="cpu")
        expert = expert_mesh(groups, grid, device_type="cpu")
        assert dense.get_group() is groups.dp_cp.handle
        assert expert.get_group() is groups.edp.handle
        assert open_communicators_now() == before
        names = [name.partition("@")[0] for mesh in (dense, expert) for name in mesh.mesh_dim_names]
        assert names == ["dp_cp", "edp"]
        close_mesh(dense, groups)
        assert open_communicators_now() == before
        return dense.mesh.tolist(), expert.mesh.tolist()


def test_meshes_that_fsdp_uses_need_no_communicator_of_their_own():
    told = run_ranks(8, check_reuse)
    assert told[0] == ([0, 2, 4, 6], [0, 4])
    assert told[7] == ([1, 3, 5, 7], [3, 7])


def check_replicas(rank, world):
    """(ranks of the mesh, communicators made for it) for each number of replicas."""
    grid, told = standard(tp=2, dp=4), {}
    with opened_groups(grid, rank) as groups:
        before = open_communicators_now()
        for replicate in (1, 2, 4):
            mesh = dense_mesh(groups, grid, device_type="cpu", replicate=replicate)
            told[replicate] = (mesh.mesh.tolist(), open_communicators_now() - before)
            for axis in range(mesh.ndim):
                members = dist.get_process_group_ranks(mesh.get_group(axis))
                assert sum_over(mesh, axis, rank) == sum(members)
                assert members.index(rank) == mesh.get_local_rank(axis)
            close_mesh(mesh, groups)
            assert open_communicators_now() == before
    return told


def test_replicas_stand_apart_and_shards_are_neighbours():
    told = run_ranks(8, check_replicas)
    assert told[2][1] == ([0, 2, 4, 6], 0)
    assert told[2][2] == ([[0, 2], [4, 6]], 2)
    assert told[2][4] == ([[0], [2], [4], [6]], 1), "replicas are dp_cp itself; a shard of one rank is new"
    assert told[5][2] == ([[1, 3], [5, 7]], 2)


def check_outside(rank, world):
    grid = standard(dp=2, offset=1)
    with opened_groups(grid, rank) as groups:
        mesh = dense_mesh(groups, grid, device_type="cpu", replicate=2)
        told = mesh.mesh.tolist(), sum_over(mesh, 0, rank)
        close_mesh(mesh, groups)
    return told


def test_a_rank_outside_the_grid_gets_a_mesh_of_itself():
    assert run_ranks(4, check_outside) == [([[0]], 0), ([[1], [2]], 3), ([[1], [2]], 3), ([[3]], 3)]


# -------------------------------------------------------------------------------------------- training

SAMPLES, WIDTH, HIDDEN = 8, 5, 7


def mlp() -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return nn.Sequential(*layers).double()


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def gradients_of_one_process() -> dict[str, torch.Tensor]:
    model = mlp()
    model(samples()).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


CASES = (({"dp": 4}, 1), ({"dp": 4}, 2), ({"dp": 4}, 4), ({"tp": 4}, 1), ({"tp": 2, "dp": 2}, 2))
"""Arrangements of 4 ranks, and the copies of each shard; beside tp, every tp rank has the whole model here."""


def gradients_of(rank, sizes, replicate) -> dict[str, torch.Tensor]:
    grid = standard(**sizes)
    before = open_communicators_now()
    with opened_groups(grid, rank) as groups:
        mesh = dense_mesh(groups, grid, device_type="cpu", replicate=replicate)
        model = mlp()
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        data = groups.dp_cp
        for parameter in model.parameters():
            assert len(parameter.to_local()) <= -(-len(parameter) // (data.size // replicate))
        for _ in range(2):
            model.zero_grad()
            model(samples().chunk(data.size)[data.rank]).square().sum().backward()
        told = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        close_mesh(mesh, groups)
    assert open_communicators_now() == before
    return told


def check_gradients(rank, world, cases):
    return [gradients_of(rank, sizes, replicate) for sizes, replicate in cases]


@pytest.mark.parametrize(("world", "cases"), [(1, (({}, 1),)), (4, CASES)])
def test_fsdp_gradients_are_those_of_one_process(world, cases):
    expected = gradients_of_one_process()
    for told in run_ranks(world, check_gradients, cases):
        for case, gradients in zip(cases, told, strict=True):
            for name, gradient in expected.items():
                where = f"{case}: {name}"
                torch.testing.assert_close(
                    gradients[name],
                    gradient,
                    rtol=1e-12,
                    atol=1e-13,
                    msg=lambda m, where=where: f"{where}: {m}",
                )


# ---------------------------------------------------------------------------------------------- errors


def check_refusals(rank, world):
    grid = standard(tp=2, dp=2)
    with opened_groups(grid, rank) as groups:
        for replicate in (0, 3, -1):
            with pytest.raises(ConfigError, match="replicate"):
                dense_mesh(groups, grid, device_type="cpu", replicate=replicate)


def test_a_mesh_that_cannot_be_is_refused_before_anybody_waits():
    run_ranks(4, check_refusals)


def test_a_mesh_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        dense_mesh(Groups(), standard(), device_type="cpu")
