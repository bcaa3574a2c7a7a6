"""A model on ranks, trained by FSDP2's hooks or by the driver: what the tests of sharding compare.

    hooks  = Trained(case, ranks).by_hooks(step)       what `train.step` does
    driven = Trained(case, ranks).driven(step)         a lowered schedule and no hooks

Every step has data of its own and an update behind it. `Comparison` has models go through several steps both
ways; models that are built once begin again for every case that they serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from braid.architecture import Attention, HyperConnections, Mamba2, Mlp, Model, Moe
from braid.collectives import Groups
from braid.config import Data, Mesh, Optim, Run, Train
from braid.engine.executor import Turn
from braid.engine.sharding import Driver, execute_sharded, named_units, units_of_phases, units_of_segments
from braid.model.context import MicroBatch
from braid.optim.adamw import MOMENTS
from braid.parallel.groups import open_groups
from braid.parallel.sharding import Strategy
from braid.plan import Plan, plan
from braid.schedule import Op, Schedule, Span, forward_only, interleaved, with_sums
from braid.schedule.lifetime import Figures, Uses, prove
from braid.schedule.lowering import POLICIES, Policy, Sharding, lower, uses_of_phases, uses_of_segments
from braid.schedule.overlapped import Options, overlapped
from braid.schedule.phases import chains
from braid.schedule.recompute import dropped_tensors, replayed_phases, with_replays
from braid.train import state as states
from braid.train.building import make_state, open_meshes
from braid.train.device import choose_device
from braid.train.step import _Evaluation, _NodeStep, _Step, backward, count

ROWS, TOKENS, VOCAB = 2, 6, 257
"""Of one rank's part of a micro-batch."""

RATE = 1e-2

Grain = Literal["schedule", "segments", "phases", "late"]
"""What an op is about: what the run's own schedule says; single segments, also where there is no pipeline;
phases of the overlapped schedule; the same with weight gradients that come late."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its ranks, and how its weights are shared."""

    block: str = "[*E]"
    blocks: int = 3
    micro_batches: int = 3
    mesh: Mesh = field(default_factory=Mesh)
    dtype: str = "fp32"
    experts: int = 4
    latent: int = 0
    tied: bool = False
    tail: str = ""
    """What follows the blocks in the pattern: MTP depths."""
    recompute: tuple[str, ...] = ()
    streams: int = 0
    """Residual streams with hyper-connections; 0 for a plain one."""
    between: str = "|"
    """What stands between blocks: by itself each is a segment."""

    def run(self, world: int) -> Run:
        dp = world // (self.mesh.tp * self.mesh.cp * self.mesh.pp)
        return Run(
            model=Model(
                pattern=self.between.join([self.block] * self.blocks) + self.tail,
                hidden=8,
                vocab=VOCAB,
                tied=self.tied,
                init_std=0.3,
                attention=Attention(heads=2, kv_heads=2, head_dim=4),
                mamba2=Mamba2(heads=2, head_dim=4, state=3, groups=1, conv=2),
                mlp=Mlp(ffn=12),
                moe=Moe(
                    experts=self.experts,
                    top_k=2,
                    ffn=8,
                    latent=self.latent,
                    shared_ffn=4,
                    aux_loss=0.02,
                    z_loss=0.01,
                ),
                hyper=HyperConnections(streams=self.streams, sinkhorn_steps=4) if self.streams else None,
            ),
            data=Data(sequence_tokens=TOKENS),
            optim=Optim(lr=RATE, warmup_steps=0),
            train=Train(
                steps=8,
                batch_samples=dp * ROWS * self.micro_batches,
                micro_batches=self.micro_batches,
                dtype=self.dtype,
                recompute=self.recompute,
                recompute_span=self.blocks,
            ),
            mesh=self.mesh,
        )

    def strategy(self) -> Policy:
        return POLICIES[self.mesh.shard]

    def sharing(self, shard: Strategy) -> Case:
        return replace(self, mesh=replace(self.mesh, shard=shard))

    @property
    def keeping(self) -> Case:
        """The same, with nothing recomputed."""
        return replace(self, recompute=())

    @property
    def built(self) -> Case:
        """One case for all that are about the same shards of the same model."""
        return replace(self.keeping, micro_batches=1)


class Ranks:
    """Groups and meshes, opened once for each arrangement: torch meets them again."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._opened: dict[str, tuple[Groups, dict[str, DeviceMesh]]] = {}

    def of(self, planned: Plan) -> tuple[Groups, dict[str, DeviceMesh]]:
        key = f"{planned.grid} {planned.axes}"
        if key not in self._opened:
            groups = open_groups(planned.grid, self.rank)
            self._opened[key] = groups, open_meshes(planned, choose_device("cpu"), groups)
        return self._opened[key]


class Trained:
    """One model on its way."""

    def __init__(
        self, case: Case, ranks: Ranks, policy: Policy | None = None, *, grain: Grain = "schedule"
    ) -> None:
        self.case, self.world = case, ranks.world
        planned = plan(case.run(self.world), self.world)
        self.groups, meshes = ranks.of(planned)
        self.state = make_state(planned, choose_device("cpu"), self.groups, meshes)
        states.initialize(self.state, planned.run)
        self.model = self.state.model
        self.units = named_units(self.model, self.model.units())
        self.driver = Driver(self.model, self.units)
        self._first = self.weights()
        self._begin(case, planned, policy, grain)

    def again(self, case: Case, policy: Policy | None = None, *, grain: Grain = "schedule") -> None:
        """Back to the first weights, for another case of the same model."""
        assert case.built == self.case.built, "that is another model"
        optimizer = self.state.optimizer
        with torch.no_grad():
            for name, weight in self.state.weights().items():
                weight.copy_(self._first[name])
            for moment, name in product(MOMENTS, optimizer.main):
                optimizer.moment(moment, name).zero_()
        optimizer.updates = 0
        optimizer.publish()
        self._begin(case, plan(case.run(self.world), self.world), policy, grain)

    def _begin(self, case: Case, planned: Plan, policy: Policy | None, grain: Grain) -> None:
        self.case, self.run = case, planned.run
        self.policy = case.strategy() if policy is None else policy
        self.grain: Grain = grain
        phases = grain in ("phases", "late")
        self.state.schedule = self._overlapped(planned) if phases else planned.schedule
        self.uses = self._uses()
        self.figures = Figures(0, 0, 0)
        self.log: tuple[Span, ...] = ()

    @property
    def sharding(self) -> Sharding:
        meshes = {name: unit.mesh for name, unit in self.units.items()}
        return Sharding(units=meshes, uses=self.uses, policy=self.policy)

    def _uses(self) -> Uses:
        if not self.state.schedule.phases:
            pipeline = self.grain == "segments" or self.groups.pp.size > 1
            return uses_of_segments(units_of_segments(self.units, pipeline=pipeline))
        phases = [phase for segment in self.state.schedule.phases for phase in segment]
        meshes = {name: unit.mesh for name, unit in self.units.items()}
        units = units_of_phases(meshes, phases, tied=self.case.tied)
        return uses_of_phases(units, unread={"embed"})

    def _overlapped(self, planned: Plan) -> Schedule:
        pp, hyper = self.run.mesh.pp, self.case.streams > 0
        kind = {
            "tied": self.case.tied,
            "shared_experts": True,
            "latent": bool(self.case.latent),
            "hyper": hyper,
        }
        built = with_sums(
            overlapped(
                chains(planned.layout, pp, posts=pp == 1, **kind),
                pp=pp,
                micro_batches=self.case.micro_batches,
                options=Options(delayed=self.grain == "late"),
            ),
            {"embedding": (0, pp - 1)} if self.case.tied or planned.layout.mtp else {},
        )
        names, layout = self.case.recompute, planned.layout
        again = replayed_phases(layout, built.phases, names, shared_experts=True, dropout=False, hyper=hyper)
        dropped = dropped_tensors(layout, built.phases, names, self.case.blocks, hyper=hyper)
        return with_replays(built, again, dropped)

    # -------------------------------------------------------------------------------------- steps

    def batches(self, step: int) -> list[MicroBatch]:
        """This rank's rows: of its own, and of the step's."""
        made = []
        for number in range(self.case.micro_batches):
            seed = ((step * 97 + number) * 89 + self.groups.dp.rank) * 83
            tokens = torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
            batch = MicroBatch.of_tokens(tokens[:, :-1])
            mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
            made.append(replace(batch, labels_BT=tokens[:, 1:], loss_mask_BT=mask, training=True, step=step))
        return made

    def by_hooks(self, step: int) -> dict[str, Tensor]:
        """The gradient of a step, by what the training loop does."""
        batches = self.batches(step)
        backward(self.state, self.run, batches, count(self.model, batches))
        return self.update()

    def driven(self, step: int) -> dict[str, Tensor]:
        """The gradient of a step, by a lowered schedule."""
        self.execute(step, WORK[self.grain])
        return self.update()

    def execute(self, step: int, work: type[_Step]) -> None:
        batches = self.batches(step)
        doing = work(self.state, self.run, batches, count(self.model, batches))
        self._run(self.schedule(), doing)
        doing.end()

    def _run(self, schedule: Schedule, work: Any) -> None:
        rank = self.groups.pp.rank
        ops = lower(schedule.ops[rank], self.sharding, rank)
        self.figures = prove(ops, self.units, self.uses)
        listed = replace(schedule, ops=tuple(ops if each == rank else () for each in range(schedule.pp)))
        wires = self.state.wires(ROWS, self.run)
        self.log = execute_sharded(listed, rank, work, wires, self.driver, self.uses)
        self.state.optimizer.gather()

    def schedule(self) -> Schedule:
        if self.grain != "segments":
            return self.state.schedule
        return interleaved(1, len(self.model.segments), self.case.micro_batches)

    def update(self) -> dict[str, Tensor]:
        found = {name: gradient.clone() for name, gradient in self.state.optimizer.gradients().items()}
        self.state.optimizer.update(RATE)
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.state.weights().items()}

    # --------------------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def evaluated(self, *, driven: bool) -> float:
        """The loss of one more batch."""
        batches = [replace(batch, training=False) for batch in self.batches(1000)]
        work = _Evaluation(self.model, batches)
        schedule = forward_only(self.groups.pp.size, 1, len(batches))
        if driven:
            self._run(schedule, work)
        else:
            for number in range(len(batches)):
                work.forward((number, 0), None)
            for unit in self.units.values():
                unit.module.reshard()
        return float(work.totals[0])


class _Driven(_Step):
    """What a step is made of, where sharding is none of its business."""

    def before_backward(self, turn: Turn) -> None:
        pass

    def after_backward(self, turn: Turn) -> None:
        if turn[1] == self.model.segments[0]:
            del self.contexts[turn[0]]

    def sum_copies(self, op: Op) -> None:
        self.state.optimizer.gather()
        super().sum_copies(op)


class Driven(_Driven):
    """As the schedule goes."""


class DrivenNodes(_Driven, _NodeStep):
    """Phase by phase."""


class Cut(_Driven):
    """Segment by segment."""

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        number, segment = turn
        if number not in self.contexts:
            self.contexts[number] = self.model.prepare(self.batches[number], whole=self.counts.wholes[number])
        y, losses = self.model.run((segment,), x, self.contexts[number])
        cost = losses.share(self.counts.tokens, (), self.counts.parts[number])
        return y, cost if cost.requires_grad else None


WORK: Mapping[Grain, type[_Step]] = MappingProxyType(
    {"schedule": Driven, "segments": Cut, "phases": DrivenNodes, "late": DrivenNodes}
)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same to the last bit."""
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


STEPS = 2
"""Steps that are compared."""

Steps = list[dict[str, Tensor]]
"""The gradient of every step, and the weights in the end."""


def steps_differing(one: Steps, other: Steps) -> list[str]:
    """What is not the same to the last bit, and when."""
    return [
        f"{'weight' if step == STEPS else f'gradient of step {step}'} {name}"
        for step, (first, second) in enumerate(zip(one, other, strict=True))
        for name in differing(first, second)
    ]


class Comparison:
    """Steps by the driver beside steps by hooks, which are run once for each case. Hooks and driver have models
    of their own, which are built once and begin again for each case."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._hooked: dict[Case, Trained] = {}
        self._driven: dict[Case, Trained] = {}
        self._by_hooks: dict[Case, Steps] = {}

    def by_hooks(self, case: Case) -> Steps:
        if case not in self._by_hooks:
            trained = self._built(self._hooked, case)
            trained.again(case)
            self._by_hooks[case] = [*(trained.by_hooks(step) for step in range(STEPS)), trained.weights()]
        return self._by_hooks[case]

    def by_ops(self, case: Case, grain: Grain, policy: Policy) -> Steps:
        trained = self._built(self._driven, case)
        trained.again(case, policy, grain=grain)
        found = self.drive(trained)
        assert any(gradient.any() for gradient in found[0].values())
        assert trained.driver.figures == trained.figures, "what is lowered is what is run"
        if not policy.every:
            assert trained.figures.reductions == len(trained.units), "every unit once in a step"
        return found

    def drive(self, trained: Trained) -> Steps:
        return [*(trained.driven(step) for step in range(STEPS)), trained.weights()]

    def differences(self, case: Case, grain: Grain = "schedule", *, once: bool = False) -> list[str]:
        """What is not the same to the last bit as by hooks that recompute nothing. With `once`, gradients are
        reduced once in a step, whatever the strategy says, as hooks do it for a strategy that shards optimizer
        states."""
        policy, hooks = case.strategy(), case.keeping
        if once and policy.every:
            policy, hooks = replace(policy, every=False), hooks.sharing("optimizer")
        return steps_differing(self.by_hooks(hooks), self.by_ops(case, grain, policy))

    def hooks_differ(self, case: Case) -> list[str]:
        """What is not the same with and without recompute, by hooks both times."""
        return steps_differing(self.by_hooks(case.keeping), self.by_hooks(case))

    def forget(self) -> None:
        """Let go of models, so that the next case has new ones."""
        self._hooked.clear()
        self._driven.clear()

    def _built(self, models: dict[Case, Trained], case: Case) -> Trained:
        """Models of other patterns are let go."""
        if case.built not in models:
            for other in [*models]:
                if other.sharing(case.mesh.shard) != case.built:
                    del models[other]
            models[case.built] = Trained(case, self.ranks)
        return models[case.built]
