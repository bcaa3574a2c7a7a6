"""Launching by what was compiled: each kind of arguments is compiled for once, and no kind runs as another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


class Kernel:
    """Remembers what it was compiled for and what it ran."""

    def __init__(self, *names: str) -> None:
        self.fn, self.arg_names = object(), list(names)
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def compile_and_run(*given: Any, **constants: Any) -> Any:
            self.compiled.append(given)
            return SimpleNamespace(
                function="code", packed_metadata="facts", run=lambda *what: self.ran.append(what)
            )

        return compile_and_run


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    from braid.kernels import launch

    active = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    return launch.Launcher()


def test_the_second_launch_goes_by_what_the_first_compiled(launch):
    kernel, x = Kernel("x", "bias", "rows", "BLOCK"), torch.zeros(32)
    for rows in (7, 8):
        launch(kernel, (rows, 2), (x, None), (rows,), {"BLOCK": 4}, warps=4)
    assert kernel.compiled == [(x, None, 7)]
    wanted = (8, 2, 1, "stream", "code", "facts", None, None, None, x.data_ptr(), 0, 8, 4)
    assert kernel.ran == [wanted]


@pytest.mark.parametrize("grid", [(0, 1), (3, 0)])
def test_a_grid_without_programs_launches_nothing(launch, grid):
    kernel, x = Kernel("x", "rows", "BLOCK"), torch.zeros(32)
    launch(kernel, (1, 1), (x,), (7,), {"BLOCK": 4}, warps=4)
    launch(kernel, grid, (x,), (7,), {"BLOCK": 4}, warps=4)
    assert (len(kernel.compiled), kernel.ran) == (1, [])


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (torch.zeros(8), torch.ones(8), True),
        (torch.zeros(8), torch.zeros(8, dtype=torch.int32), False),
        (torch.zeros(8), None, False),
    ],
)
def test_what_is_compiled_depends_on_kinds_and_not_on_values(launch, first, second, alike):
    kernel, x = Kernel("x", "given", "BLOCK"), torch.zeros(32)
    for given in (first, second, first, second):
        launch(kernel, (1, 1), (x, given), (), {"BLOCK": 4}, warps=4)
    assert len(kernel.compiled) == (1 if alike else 2)
    assert len(kernel.ran) == (3 if alike else 2)


def test_constants_warps_and_kernels_are_told_apart(launch):
    one, other, x = Kernel("x", "BLOCK"), Kernel("x", "BLOCK"), torch.zeros(32)
    for kernel, block, warps in ((one, 4, 4), (one, 8, 4), (one, 4, 8), (other, 4, 4)):
        launch(kernel, (1, 1), (x,), (), {"BLOCK": block}, warps=warps)
    assert (len(one.compiled), len(other.compiled)) == (3, 1)


def test_descriptors_are_told_apart_by_their_blocks(launch):
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = Kernel("x", "BLOCK")
    small, large = (TensorDescriptor.from_tensor(torch.zeros(32, 64), block) for block in ([8, 16], [16, 16]))
    for descriptor in (small, large, small):
        launch(kernel, (1, 1), (descriptor,), (), {"BLOCK": 4}, warps=4)
    assert kernel.compiled == [(small,), (large,)]
    (ran,) = kernel.ran
    assert ran[-2] is small


def test_numbers_are_told_apart_as_triton_does(launch):
    """One, multiples of 16 and those that need 64 bits may have kernels of their own."""
    kernel, x = Kernel("x", "rows", "BLOCK"), torch.zeros(32)
    for rows in (3, 1, 16, 2**31 + 1, 5, 1, 48, 2**31 + 3):
        launch(kernel, (1, 1), (x,), (rows,), {"BLOCK": 4}, warps=4)
    assert [rows for _, rows in kernel.compiled] == [3, 1, 16, 2**31 + 1]
    assert [ran[-2] for ran in kernel.ran] == [5, 1, 48, 2**31 + 3]


def test_tensors_that_begin_elsewhere_are_left_to_triton(launch):
    kernel, x = Kernel("x", "BLOCK"), torch.zeros(32)
    for _ in range(3):
        launch(kernel, (1, 1), (x[1:],), (), {"BLOCK": 4}, warps=4)
    assert (len(kernel.compiled), kernel.ran) == (3, [])


def test_a_copy_begins_anew(launch):
    from copy import deepcopy

    kernel, x = Kernel("x", "BLOCK"), torch.zeros(32)
    for launcher in (launch, deepcopy(launch), launch):
        launcher(kernel, (1, 1), (x,), (), {"BLOCK": 4}, warps=4)
    assert (len(kernel.compiled), len(kernel.ran)) == (2, 1)
