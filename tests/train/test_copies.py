"""Copies of weights on several ranks: they stay the same to the bit, and one that does not is named."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.config import Mesh
from braid.errors import NumericsError
from braid.planning.plan import plan
from braid.train.copies import bit_sum, minority
from braid.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.helpers import run_on


@given(st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_the_minority_is_whoever_disagrees_with_more_than_half(sums):
    holders = [10 + place for place in range(len(sums))]
    wrong = minority(holders, sums)
    (most, count), *_ = Counter(sums).most_common()
    if len(set(sums)) == 1:
        assert wrong == ()
    elif count > len(sums) / 2:
        assert wrong == tuple(rank for rank, each in zip(holders, sums, strict=True) if each != most)
    else:
        assert wrong == tuple(holders)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_any_flipped_bit_changes_the_sum(dtype):
    tensor = torch.randn(5, 7).to(dtype)
    before, bits = bit_sum(tensor), tensor.view(torch.uint8)
    for place in range(bits.shape[-1] * 5):
        row, column = divmod(place, bits.shape[-1])
        for bit in range(8):
            bits[row, column] ^= 1 << bit
            assert bit_sum(tensor) != before
            bits[row, column] ^= 1 << bit
    assert bit_sum(tensor) == before


def flipped(rank, world, run, out, culprit, name, moment):
    """What a run says after a bit of a copy flips on one rank, and how many steps went well before it."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True, environment=environment) as trainer:
        for _ in range(3):
            assert trainer.step().diverged == ()
        if rank == culprit:
            optimizer = trainer.state.optimizer
            name = next(each for each in optimizer.main if each.endswith(name))
            tensor = optimizer.moment(moment, name) if moment else optimizer.main[name].detach()
            tensor.view(torch.int32).view(-1)[0] ^= 1
        with pytest.raises(NumericsError) as error:
            trainer.step()
        return str(error.value), trainer.state.step


CASES = [
    (
        2,
        Mesh(replicate=2),
        "embedding.weight",
        "",
        "ranks 0-1 differ, and there is no majority: embedding.weight",
    ),
    (3, Mesh(replicate=3), "embedding.weight", "exp_avg", "rank 1, of ranks 0-2: exp_avg of embedding.weight"),
    (2, Mesh(shard="none"), "final_norm.weight", "", "ranks 0-1 differ"),
    (2, Mesh(tp=2), "final_norm.weight", "exp_avg_sq", "no majority: exp_avg_sq of final"),
]


@pytest.mark.parametrize(("world", "mesh", "name", "moment", "said"), CASES, ids=range(len(CASES)))
def test_a_bit_that_flips_in_a_copy_is_found(world, mesh, name, moment, said, corpus, tmp_path):
    run = run_on(corpus, check_copies_every=1, batch_samples=12)
    run = replace(run, mesh=mesh)
    for text, step in run_ranks(world, flipped, run, tmp_path, 1, name, moment):
        assert said in text
        assert step == 4


def clean(rank, world, run, out):
    """The names that a rank compares, over steps in which nothing happens."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    with Trainer(plan(run, world), out=out, device="cpu", quiet=True, environment=environment) as trainer:
        results = [trainer.step() for _ in range(4)]
        assert all(result.diverged == () for result in results)
        return [copy.name for copies in trainer.state.copies._by_group.values() for copy in copies]


MESHES = [
    (2, {"tp": 2}, {"kv_heads": 1}, "bf16"),
    (2, {"pp": 2}, {}, "fp32"),
    (2, {"ep": 2, "shard": "optimizer"}, {}, "fp32"),
    (4, {"tp": 2, "replicate": 2}, {"kv_heads": 1}, "bf16"),
    (4, {"cp": 2, "shard": "none"}, {}, "fp32"),
]


@pytest.mark.long
@pytest.mark.parametrize(("world", "mesh", "model", "dtype"), MESHES, ids=range(len(MESHES)))
def test_copies_stay_the_same_to_the_bit(world, mesh, model, dtype, corpus, tmp_path):
    run = run_on(corpus, check_copies_every=1, batch_samples=12, dtype=dtype)
    shape = replace(run.model, tied=True)
    shape = replace(shape, attention=replace(shape.attention, **model))
    pattern = "[*-]|[*E]" if "pp" in mesh else shape.pattern
    run = replace(run, mesh=Mesh(**mesh), model=replace(shape, pattern=pattern))
    for names in run_ranks(world, clean, run, tmp_path):
        assert names or "ep" in mesh, "without a copy there is nothing to compare"
