"""What waits on the host: planned bytes are moved bytes, and the peak is what is estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from braid.config import Mesh, Run
from braid.nn.offload import Key, Offloads
from braid.planning.estimate import estimate
from braid.planning.estimate.offload import host_slots
from braid.planning.plan import plan
from tests.planning.estimate.test_peak import peak_of, run_of


def offloading(
    text: str, dtype: str, share: float, names: tuple[Any, ...], mesh: Mesh, regions: tuple[Any, ...] = ()
) -> Run:
    run = run_of(text, dtype)
    train = replace(run.train, offload=share, recompute=names, offload_regions=regions)
    return replace(run, mesh=mesh, train=train)


CASES = [
    ("[*-]" * 4, "bf16", 0.5, (), Mesh()),
    ("[*E]" * 4, "fp32", 1.0, (), Mesh()),
    ("[+E]" * 3, "bf16", 1.0, ("block",), Mesh()),
    ("[M-][G-]" * 2, "fp32", 0.5, ("norm", "core"), Mesh()),
    ("[*E]" * 4, "fp32", 0.5, (), Mesh(overlap=True)),
    ("[*E]" * 4, "fp32", 1.0, ("block",), Mesh(overlap=True)),
]
REGIONS = [
    ("[*-]" * 4, "bf16", ("norm",), ("core", "activation")),
    ("[*E]" * 4, "fp32", (), ("norm", "experts")),
    ("[M-][G-]" * 2, "bf16", ("core",), ("norm", "activation")),
    ("[+E]" * 3, "fp32", ("core",), ("norm", "experts")),
    ("[*E]" * 2, "bf16", ("core",), ("norm", "experts")),
]


@pytest.mark.parametrize(("text", "dtype", "share", "names", "mesh"), CASES, ids=lambda value: str(value)[:20])
def test_planned_bytes_are_moved_and_the_peak_is_within_a_tenth(
    text: str, dtype: str, share: float, names: tuple[Any, ...], mesh: Mesh
) -> None:
    check_bytes(offloading(text, dtype, share, names, mesh))


@pytest.mark.parametrize(("text", "dtype", "names", "regions"), REGIONS, ids=lambda value: str(value)[:20])
def test_planned_bytes_of_regions_are_moved(
    text: str, dtype: str, names: tuple[Any, ...], regions: tuple[Any, ...]
) -> None:
    run = offloading(text, dtype, 0.5, names, Mesh(), regions)
    check_bytes(run)
    recomputing = replace(run.train, offload=0.0, offload_regions=(), recompute=(*names, *regions))
    away, again = (estimate(plan(each, 1), "cpu") for each in (run, replace(run, train=recomputing)))
    (stage,), (same,) = away.stages, again.stages
    assert stage.offload is not None
    assert stage.offload.offloaded > 0
    assert stage.memory.activations >= same.memory.activations, "no more leaves than recompute would drop"


def check_bytes(run: Run) -> None:
    """Moved bytes are planned bytes, and the peak is within a twentieth of the estimate. With overlap, a tenth:
    copies start within the backward of a block, of which the estimate counts all until it ends."""
    share, worked_out = run.train.offload, plan(run, 1)
    moved: list[dict[Key, int]] = []
    finish = Offloads.finish

    def finished(offloads: Offloads) -> None:
        assert offloads.without_room == 0
        moved.append(offloads.moved)
        finish(offloads)

    with mock.patch.object(Offloads, "finish", finished):
        peak = peak_of(worked_out)
    estimated = estimate(worked_out, "cpu")
    assert 0.95 * peak <= estimated.peak <= (1.1 if run.mesh.overlap else 1.05) * peak
    slots = host_slots(worked_out, 0, "cpu")
    (found,) = moved
    planned = {(segment, block): size for (segment, block, _), size in slots.items()}
    assert {(segment, block) for _, segment, block in found} <= planned.keys()
    for (_, segment, block), size in found.items():
        assert planned[segment, block] - 512 < size <= planned[segment, block]
    (stage,) = estimated.stages
    assert stage.offload is not None
    of_one = sum(size for (micro_batch, *_), size in found.items() if micro_batch == 0)
    assert stage.offload.offloaded >= of_one
    assert stage.offload.pool == sum(slots.values())
    if share < 1:  # then none stays because nothing runs meanwhile
        assert stage.offload.offloaded == of_one


def test_offload_lowers_the_peak_and_says_where_activations_are() -> None:
    runs = (offloading("[*-]" * 4, "bf16", share, (), Mesh()) for share in (0.0, 0.5))
    kept, away = (estimate(plan(run, 1), "cpu") for run in runs)
    (plain,), (stage,) = kept.stages, away.stages
    assert plain.offload is None
    assert stage.offload is not None
    assert away.peak < kept.peak
    assert stage.offload.held + stage.offload.offloaded == plain.memory.activations
    assert stage.offload.recomputed == 0
