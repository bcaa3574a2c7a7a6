"""The harness itself: what a test that uses ranks can rely on."""

import multiprocessing
import os
import signal
import sys
import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run_ranks


def sum_over_ranks(rank, world, factor):
    x = torch.full((3,), float(rank + 1)) * factor
    dist.all_reduce(x)
    return rank, torch.get_num_threads(), x


def fail_on(rank, world, failing):
    if rank == failing:
        raise ValueError(f"planted on rank {rank}")
    dist.all_reduce(torch.ones(1))


def die_on(rank, world, dying):
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank, world, hanging):
    if rank == hanging:
        wait_for_nobody()


def wait_for_nobody():
    threading.Event().wait()


class HangsOnArrival:
    """An argument that a rank never finishes reading: it hangs before it is a rank."""

    def __reduce__(self):
        return wait_for_nobody, ()


def main_file(rank, world):
    return getattr(sys.modules["__main__"], "__file__", None)


def return_a_lambda(rank, world):
    return lambda: None


@pytest.mark.parametrize("world", [1, 2, 8])
def test_results_come_back_in_rank_order_from_one_threaded_ranks(world):
    results = run_ranks(world, sum_over_ranks, 2.0)
    assert [rank for rank, _, _ in results] == list(range(world))
    assert {threads for _, threads, _ in results} == {1}
    for _, _, x in results:
        assert torch.equal(x, torch.full((3,), float(world * (world + 1))))


@pytest.mark.parametrize("failing", [0, 2])
def test_the_failing_ranks_traceback_is_the_failure_text(failing):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, fail_on, failing)
    text = str(caught.value)
    assert text.startswith(f"rank {failing} of 3 failed")
    assert "in fail_on" in text
    assert f"ValueError: planted on rank {failing}" in text


def test_a_rank_that_dies_is_named_before_those_that_only_lost_it():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, die_on, 1)
    assert str(caught.value).startswith("rank 1 ended with exit code -9")


def test_a_rank_that_hangs_is_named_with_the_place_it_stood_in():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, hang_on, 2, timeout_s=3)
    text = str(caught.value)
    assert "hanging after 3 s" in text
    assert "rank 2 stood here" in text
    assert "in wait_for_nobody" in text


def test_a_rank_that_hangs_before_it_can_tell_its_stack_is_named_as_well():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, hang_on, HangsOnArrival(), timeout_s=0.5)
    first, *each = str(caught.value).splitlines()
    assert first == "hanging after 0.5 s: rank 0, 1 of 2"
    assert each[::2] == ["rank 0 stood here:", "rank 1 stood here:"]
    assert set(each[1::2]) == {"(it has not got so far: it is still being started)"}


def test_ranks_do_not_run_the_main_file_again(tmp_path, monkeypatch):
    """Whoever started the tests from a script would start them in every rank."""
    script, ran = tmp_path / "main.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w').close()\n")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert run_ranks(2, main_file) == [None, None]
    assert not ran.exists()
    assert sys.modules["__main__"] is main


def test_a_result_that_cannot_travel_is_a_failure_with_its_reason():
    with pytest.raises(RanksFailed, match=r"(?s)rank \d of 2 failed.*pickle"):
        run_ranks(2, return_a_lambda)


def test_no_rank_outlives_the_call():
    with pytest.raises(RanksFailed):
        run_ranks(4, hang_on, 0, timeout_s=3)
    assert multiprocessing.active_children() == []
