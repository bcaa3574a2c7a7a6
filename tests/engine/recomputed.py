"""The models of `driven` and `overlap_cases`, with parts of them recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from braid.config import Run
from braid.parallel.sharding import Strategy
from braid.plan import Plan
from braid.schedule import Schedule
from braid.schedule.recompute import replayed_phases, with_replays
from tests.engine import driven, overlap_cases
from tests.engine.driven import STEPS, Grain, Ranks, differing

NAMES = (("norm",), ("activation", "core", "experts"), ("block",), ("full",))


def recomputing(run: Run, names: tuple[str, ...]) -> Run:
    return replace(run, train=replace(run.train, recompute=names))


# ------------------------------------------------------------------------------------------ overlapped


@dataclass(frozen=True, kw_only=True)
class Overlapped(overlap_cases.Case):
    """Without overlap it keeps everything."""

    recompute: tuple[str, ...] = ()
    steps: int = 2

    def run(self, *, overlap: bool) -> Run:
        return recomputing(super().run(overlap=overlap), self.recompute if overlap else ())

    def __str__(self) -> str:
        return f"{super().__str__()} {'+'.join(self.recompute)}"


# ------------------------------------------------------------------------------------- sharded weights


@dataclass(frozen=True, kw_only=True)
class Case(driven.Case):
    recompute: tuple[str, ...] = ()

    def run(self, world: int) -> Run:
        return recomputing(super().run(world), self.recompute)

    @property
    def keeping(self) -> Case:
        """The same, with everything kept."""
        return replace(self, recompute=())

    @property
    def once(self) -> bool:
        """Whether ops reduce gradients once in a step, whatever the strategy says. Where a micro-batch uses a
        weight several times, hooks that do so have other sums."""
        return not self.tied and not self.tail


class Trained(driven.Trained):
    """Its overlapped schedule has replays."""

    def _overlapped(self, planned: Plan) -> Schedule:
        built, run = super()._overlapped(planned), self.run
        shared = bool(run.model.moe and run.model.moe.shared_ffn)
        found = replayed_phases(
            planned.layout, built.phases, run.train.recompute, shared_experts=shared, dropout=False
        )
        return with_replays(built, found)


def by_hooks(case: Case, ranks: Ranks) -> list[dict[str, Tensor]]:
    """The gradient of every step by FSDP2's hooks, and the weights in the end."""
    trained = Trained(case, ranks)
    return [*(trained.by_hooks(step) for step in range(STEPS)), trained.weights()]


def by_ops(case: Case, ranks: Ranks, grain: Grain) -> list[dict[str, Tensor]]:
    """The same by a lowered schedule."""
    policy = case.strategy()
    trained = Trained(case, ranks, replace(policy, every=policy.every and not case.once), grain=grain)
    found = [*(trained.driven(step) for step in range(STEPS)), trained.weights()]
    assert trained.driver.figures == trained.figures, "what is lowered is what is run"
    return found


def differences(
    rank: int, world: int, cases: list[Case], shards: list[Strategy], grains: list[Grain]
) -> list[str]:
    """What is not the same to the last bit with and without recompute: by hooks, and by each grain of ops."""
    ranks, wrong, wanted = Ranks(rank, world), list[str](), dict[Case, list[dict[str, Tensor]]]()
    for case in cases:
        for shard in shards:
            shared = case.sharing(shard)
            assert isinstance(shared, Case)
            for grain in grains:
                hooks = grain == "schedule"
                same = hooks or not case.once or shard == "none"
                reference = shared.keeping.sharing(shard if same else "optimizer")
                assert isinstance(reference, Case)
                if reference not in wanted:
                    wanted[reference] = by_hooks(reference, ranks)
                found = by_hooks(shared, ranks) if hooks else by_ops(shared, ranks, grain)
                assert any(gradient.any() for gradient in found[0].values())
                for step, (one, other) in enumerate(zip(wanted[reference], found, strict=True)):
                    wrong += [f"{shared} by {grain}, {step}: {name}" for name in differing(one, other)]
    return wrong
