"""Both kinds of attention on ranks that share heads (tp) and tokens (cp): the answer of one process.

Every rank's weights are cut out of the same whole tensors, as `canonical()` says. Its output must be its slice
of one process's output; its gradients, once summed over the ranks that are said to hold copies and over cp,
must be its part of one process's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid import architecture
from braid.distributed import collectives
from braid.distributed.collectives import Groups, all_reduce_no_grad
from braid.distributed.groups import opened_groups
from braid.kernels import attention as kernels
from braid.nn.attention import Attention
from braid.nn.canonical import Canonical
from braid.nn.latent_attention import LatentAttention
from braid.topology import standard
from tests.nn.attention_cases import CPU, EPS, Layer, normal, run
from tests.ranks import run_ranks

HIDDEN, TOKENS = 7, 16
ONE_EACH = ((TOKENS,), (TOKENS,))
PACKED = ((5, 1, 10), (9, 7))
BOUND = 1e-12


@dataclass(frozen=True)
class Case:
    """A layer, and rows of documents for it."""

    shape: architecture.Attention | architecture.LatentAttention
    rows: Sequence[Sequence[int]] = ONE_EACH

    @property
    def kv_heads(self) -> int:
        shape = self.shape
        return shape.kv_heads if isinstance(shape, architecture.Attention) else shape.heads

    def suits(self, tp: int, cp: int) -> bool:
        """Whether so many ranks can share it."""
        if self.shape.heads % (tp * cp):
            return False
        return self.kv_heads % tp == 0 or tp % self.kv_heads == 0

    def more_flops(self, tp: int) -> int:
        """What tp ranks compute more than one process: keys and values of heads that several of them hold."""
        if not isinstance(self.shape, architecture.Attention):
            return 0
        return max(0, tp - self.kv_heads) * 2 * self.shape.head_dim * 2 * TOKENS * HIDDEN


PLAIN = architecture.Attention(heads=8, kv_heads=8, head_dim=4, rope_base=50.0)
LATENT = architecture.LatentAttention(
    heads=8, q_rank=5, kv_rank=6, nope_dim=3, rope_dim=2, v_dim=4, rope_base=50.0
)
YARN = architecture.Yarn(factor=5.0, original_tokens=7, beta_fast=3.0, beta_slow=0.2, mscale_all_dim=1.3)
EVERYTHING = replace(PLAIN, gate=True, qk_norm=True, bias=True)
OVER_ALL = replace(EVERYTHING, qk_norm_over="all")
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "as many kv heads": Case(PLAIN),
        "4 kv heads, no positions": Case(replace(PLAIN, kv_heads=4, positions="none", gate=True)),
        "2 kv heads, everything": Case(replace(EVERYTHING, kv_heads=2, rope_fraction=0.5), PACKED),
        "2 kv heads, windowed": Case(replace(PLAIN, kv_heads=2, window=3, bias=True, sinks=True)),
        "1 kv head, everything": Case(replace(OVER_ALL, kv_heads=1, window=4, sinks=True), PACKED),
        "6 kv heads of 12": Case(replace(OVER_ALL, heads=12, kv_heads=6)),
        "latent": Case(LATENT, PACKED),
        "latent, plain queries": Case(replace(LATENT, q_rank=None, rope_scaling=YARN)),
    }
)


# ------------------------------------------------------------------------------------------- what a rank does


def build(case: Case, groups: Groups = Groups()) -> Layer:
    """The layer as a rank has it, out of whole tensors that are the same for everyone."""
    kind: Any = Attention if isinstance(case.shape, architecture.Attention) else LatentAttention
    attend = kernels.choose(CPU, torch.float64).function
    module = kind(case.shape, HIDDEN, EPS, attend, groups=groups, dtype=torch.float64)
    for seed, (_, tensor) in enumerate(sorted(module.canonical().items())):
        whole = normal(*tensor.shape, seed=seed) * (0.5 if len(tensor.shape) > 1 else 1)
        tensor.write(module.get_parameter(tensor.parameter), tensor.held.of(whole))
    return module


def grad_of(module: Layer, tensor: Canonical) -> Tensor:
    grad = module.get_parameter(tensor.parameter).grad
    assert grad is not None
    return tensor.read(grad)


@dataclass(frozen=True)
class Answer:
    """What a rank finds: of its own tokens, and of the weights it holds."""

    output: Tensor
    input_grad: Tensor
    grads: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, ...]]
    flops: int


def answer(case: Case, groups: Groups = Groups()) -> Answer:
    module = build(case, groups)
    x, probe = (normal(len(case.rows), TOKENS, HIDDEN, seed=seed) for seed in (50, 51))
    place, ranks = groups.cp.rank * groups.tp.size + groups.tp.rank, groups.tp.size * groups.cp.size
    x_own, probe_own = (whole.chunk(ranks, 1)[place].clone() for whole in (x, probe))
    output = run(module, x_own.requires_grad_(), case.rows)
    output.backward(probe_own)
    tensors = module.canonical()
    assert x_own.grad is not None
    return Answer(
        output=output.detach(),
        input_grad=x_own.grad,
        grads={
            name: all_reduce_no_grad(all_reduce_no_grad(grad_of(module, tensor), tensor.copies), groups.cp)
            for name, tensor in tensors.items()
        },
        offsets={name: tensor.held.offset for name, tensor in tensors.items()},
        flops=module.flops(TOKENS),
    )


def answers(rank: int, world: int, topologies: Sequence[tuple[int, int]]) -> dict[tuple[str, int, int], Answer]:
    """All cases that suit these topologies of one world."""
    found = {}
    for tp, cp in topologies:
        with opened_groups(standard(tp=tp, cp=cp), rank, tp_runs=(2,) if tp == 4 else ()) as groups:
            for name, case in CASES.items():
                if case.suits(tp, cp):
                    found[name, tp, cp] = answer(case, groups)
    return found


# ---------------------------------------------------------------------------------------------- the comparison


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < BOUND, f"{what}: {error:.1e}"


def assert_parts(parts: Sequence[Answer], alone: Answer, name: str, where: str) -> None:
    """Every rank's part of a gradient is right, and together they leave nothing out."""
    whole = alone.grads[name]
    seen = torch.zeros_like(whole, dtype=torch.bool)
    for rank, part in enumerate(parts):
        grad, offset = part.grads[name], part.offsets[name]
        box = tuple(slice(start, start + size) for start, size in zip(offset, grad.shape, strict=True))
        assert_near(grad, whole[box], f"{where}, gradient of {name} on rank {rank}")
        seen[box] = True
    assert bool(seen.all()), f"{where}: nobody holds some of {name}"


@pytest.mark.parametrize(
    ("world", "topologies"),
    [(2, ((2, 1), (1, 2))), (4, ((4, 1), (2, 2), (1, 4))), (8, ((4, 2), (2, 4)))],
    ids=["2 ranks", "4 ranks", "8 ranks"],
)
def test_any_ranks_give_the_answer_of_one(world: int, topologies: Sequence[tuple[int, int]]) -> None:
    on_ranks = run_ranks(world, answers, topologies)
    alone = {name: answer(case) for name, case in CASES.items()}
    assert {(tp, cp) for _, tp, cp in on_ranks[0]} == set(topologies)
    for name, tp, cp in on_ranks[0]:
        parts, one, where = [found[name, tp, cp] for found in on_ranks], alone[name], f"{name}, tp{tp} cp{cp}"
        assert_near(torch.cat([part.output for part in parts], 1), one.output, f"{where}, output")
        assert_near(torch.cat([part.input_grad for part in parts], 1), one.input_grad, f"{where}, input")
        assert parts[0].grads.keys() == one.grads.keys()
        for tensor in one.grads:
            assert_parts(parts, one, tensor, where)
        assert sum(part.flops for part in parts) == one.flops + CASES[name].more_flops(tp), where


@pytest.mark.parametrize(
    ("kv_heads", "tp", "cp"),
    [(2, 4, 1), (1, 4, 2), (2, 2, 2), (2, 2, 4), (8, 4, 2), (6, 1, 4), (6, 2, 2)],
)
def test_no_kind_of_sharing_is_left_out(kv_heads: int, tp: int, cp: int) -> None:
    """Fewer key-value heads than tp; on a tp rank fewer than cp, as many, neither a multiple of the other."""
    assert any(case.kv_heads == kv_heads and case.suits(tp, cp) for case in CASES.values())


# --------------------------------------------------------------------------------------------- what is sent


def sent(rank: int, world: int, name: str) -> list[tuple[str, int]]:
    """The collectives of a forward with tp 2 and cp 2, each with the numbers that a rank puts into it."""
    case, calls = CASES[name], []

    def recorded(kind: str, place: tuple[Any, str]) -> Any:
        plain = getattr(*place)

        def call(output: Tensor, own: Tensor, *more: Any, group: dist.ProcessGroup) -> None:
            calls.append((kind, own.numel()))
            plain(output, own, *more, group=group)

        return mock.patch.object(*place, call)

    with ExitStack() as stack:
        groups = stack.enter_context(opened_groups(standard(tp=2, cp=2), rank))
        stack.enter_context(recorded("gather", (collectives, "_all_gather")))
        stack.enter_context(recorded("scatter", (collectives, "_reduce_scatter")))
        stack.enter_context(recorded("swap", (dist, "all_to_all_single")))
        run(build(case, groups), normal(2, TOKENS // 4, HIDDEN, seed=0), case.rows)
    return calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "2 kv heads, everything",
            [
                ("gather", 2 * 4 * HIDDEN),
                ("swap", 2 * 8 * (4 + 2 + 2) * 4),  # queries, the key and value twice; no gates
                ("swap", 2 * 16 * 2 * 4),
                ("scatter", 2 * 8 * HIDDEN),
            ],
        ),
        (
            "latent",
            [
                ("gather", 2 * 4 * (5 + 6 + 2)),  # both latents and the shared key
                ("swap", 2 * 8 * 4 * (3 + 2)),
                ("gather", 2 * 8 * 2),
                ("swap", 2 * 8 * 4 * (3 + 4)),
                ("swap", 2 * 16 * 2 * 4),
                ("scatter", 2 * 8 * HIDDEN),
            ],
        ),
    ],
)
def test_nothing_travels_that_could_stay(name: str, expected: list[tuple[str, int]]) -> None:
    assert run_ranks(4, sent, name) == [expected] * 4
