"""Host memory for offloaded blocks: refused with the share that would fit, per machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from braid import Trainer
from braid.errors import ConfigError
from braid.planning.plan import check, plan
from braid.train import host_pool
from braid.train.host_pool import HostNeed, host_problems
from tests.runs import small_run

GIB = 2**30


def test_the_machine_that_is_shortest_is_named_with_the_share_that_would_fit() -> None:
    needs = [
        HostNeed("a", 4 * GIB, 40 * GIB),
        HostNeed("b", 8 * GIB, 10 * GIB),
        HostNeed("b", 8 * GIB, 10 * GIB),
    ]
    (problem,) = host_problems(0.8, needs)
    assert "16.0 GiB of host memory on b, for 2 ranks; 9.0 GiB" in problem.rule
    assert problem.remedy == "about 0.45"
    assert host_problems(0.8, needs[:1]) == []
    assert host_problems(0.8, [HostNeed("c", 8 * GIB, None)]) == [], "the system does not say"


def test_nothing_starts_without_room(tmp_path: Path) -> None:
    run = small_run()
    run = replace(run, train=replace(run.train, offload=0.5))
    with (
        mock.patch.object(host_pool, "available_bytes", return_value=1000),
        pytest.raises(ConfigError, match=r"train\.offload") as caught,
    ):
        Trainer(plan(run, 1), out=tmp_path, device="cpu")
    assert re.search(r"offloaded blocks take .* GiB of host memory", str(caught.value))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_from_0_to_1(share: float) -> None:
    run = small_run()
    (problem,) = check(replace(run, train=replace(run.train, offload=share)), 1)
    assert (problem.field, problem.remedy) == ("train.offload", "0.25, auto, or 0 for none")
