"""A model on ranks that share its weights, trained by FSDP2's hooks or by the ops of a plan: what the tests of
sharding compare.

    hooks  = Hooked(case, ranks).step(0)               the oracle: whole segments, FSDP2's own hooks
    driven = Driven(case, ranks, grain).step(0)        the engine

Every step has data of its own and an update behind it. `Comparison` has models go through several steps both
ways; models that are built once begin again for every case that they serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from braid.architecture import Attention, HyperConnections, Mamba2, Mlp, Model, Moe
from braid.choices import Strategy
from braid.config import Data, Mesh, Optim, Run, Train
from braid.distributed.collectives import Groups
from braid.distributed.groups import open_groups
from braid.engine.executor import execute
from braid.engine.fsdp_weights import FsdpWeights
from braid.model.context import MicroBatch
from braid.optim.adamw import MOMENTS
from braid.planning import plan as plans
from braid.planning.plan import Plan, plan
from braid.schedule.lifetime import UnitStats
from braid.schedule.lowering import POLICIES, Policy, lowered
from braid.train import state as states
from braid.train import step as steps
from braid.train.build import make_state, open_meshes
from braid.train.device import choose_device
from braid.train.state import State
from tests.engine import oracle

ROWS, TOKENS, VOCAB = 2, 6, 257
"""Of one rank's part of a micro-batch."""

RATE = 1e-2

Grain = Literal["blocks", "phases", "late"]
"""What an op computes: a whole block; phases of the overlapped schedule; the same with weight gradients that
come late."""


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

    def run(self, world: int, grain: Grain = "blocks") -> Run:
        dp = world // (self.mesh.tp * self.mesh.cp * self.mesh.pp)
        overlap = grain != "blocks"
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
            mesh=replace(self.mesh, overlap=overlap, delay_weights=grain == "late"),
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

    def __init__(self, case: Case, ranks: Ranks, grain: Grain = "blocks", policy: Policy | None = None) -> None:
        self.world = ranks.world
        planned = self._planned(case, grain, policy)
        self.groups, meshes = ranks.of(planned)
        self.state = self._made(planned, meshes)
        states.initialize(self.state, planned.run)
        self.model, self.run, self.case = self.state.model, planned.run, case
        self._first = self.weights()

    def again(self, case: Case, grain: Grain = "blocks", policy: Policy | None = None) -> None:
        """Back to the first weights, for another case of the same model."""
        assert case.built == self.case.built, "that is another model"
        optimizer = self.state.optimizer
        with torch.no_grad():
            for name, weight in self.state.weights().items():
                weight.copy_(self._first[name])
            for moment, name in product(MOMENTS, optimizer.main):
                optimizer.moment(moment, name).zero_()
        optimizer.set_updates(0)
        optimizer.copy_to_model()
        planned = self._planned(case, grain, policy)
        self.case, self.run, self.state.plan = case, planned.run, planned
        vars(self.state).pop("program", None)
        self.state._evaluations.clear()

    def _planned(self, case: Case, grain: Grain, policy: Policy | None) -> Plan:
        planned = plan(case.run(self.world, grain), self.world)
        if policy is None:
            return planned
        meshes = {unit.path: unit.mesh for unit in planned.units}
        language = plans._language_schedule(planned.run, self.world, planned.layout)
        built = plans._complete(
            language, planned.run, self.world, planned.grid, planned.layout, {}, planned.selection
        )
        return replace(planned, schedule=lowered(built, meshes, policy))

    def _made(self, planned: Plan, meshes: dict[str, DeviceMesh]) -> State:
        raise NotImplementedError

    def _backward(self, batches: list[MicroBatch]) -> None:
        raise NotImplementedError

    def _totals(self, batches: list[MicroBatch]) -> Tensor:
        raise NotImplementedError

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

    def step(self, number: int) -> dict[str, Tensor]:
        """The gradient of a step, with an update behind it."""
        self._backward(self.batches(number))
        found = {name: gradient.clone() for name, gradient in self.state.optimizer.gradients().items()}
        self.state.optimizer.update(RATE)
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.state.weights().items()}

    def evaluated(self) -> float:
        """The loss of one more batch."""
        return float(self._totals([replace(batch, training=False) for batch in self.batches(1000)])[0])


class Hooked(Trained):
    """By FSDP2's hooks."""

    def _made(self, planned: Plan, meshes: dict[str, DeviceMesh]) -> State:
        return oracle.hooked_state(planned, self.groups, meshes)

    def _backward(self, batches: list[MicroBatch]) -> None:
        oracle.backward(self.state, self.run, batches, steps.count(self.state, batches))

    def _totals(self, batches: list[MicroBatch]) -> Tensor:
        return oracle.evaluate(self.state, batches)


class Driven(Trained):
    """By the ops of a plan."""

    work: type[steps.LanguageStep] = steps.LanguageStep

    def _made(self, planned: Plan, meshes: dict[str, DeviceMesh]) -> State:
        return make_state(planned, choose_device("cpu"), self.groups, meshes)

    @property
    def keeper(self) -> FsdpWeights:
        assert isinstance(self.state.keeper, FsdpWeights)
        return self.state.keeper

    @property
    def stats(self) -> UnitStats:
        """Of the last step."""
        return self.keeper.stats

    def _backward(self, batches: list[MicroBatch]) -> None:
        doing = self.work(self.state, self.run, batches, steps.count(self.state, batches))
        links = self.state.links(ROWS, self.run)
        self.state.log = execute(self.state.program, doing, self.keeper, links)
        doing.end()

    @torch.no_grad()
    def _totals(self, batches: list[MicroBatch]) -> Tensor:
        work = steps.LanguageEvaluation(self.state, batches)
        execute(self.state.evaluation(len(batches)), work, self.keeper, self.state.links(ROWS, self.run))
        return work.totals


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
    """Steps by ops beside steps by hooks, which are run once for each case. Each have models of their own,
    which are built once and begin again for each case."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._hooked: dict[Case, Hooked] = {}
        self._driven: dict[Case, Driven] = {}
        self._by_hooks: dict[Case, Steps] = {}

    def by_hooks(self, case: Case) -> Steps:
        if case not in self._by_hooks:
            trained = self._built(self._hooked, case, Hooked)
            trained.again(case)
            self._by_hooks[case] = [*(trained.step(number) for number in range(STEPS)), trained.weights()]
        return self._by_hooks[case]

    def by_ops(self, case: Case, grain: Grain, policy: Policy) -> Steps:
        trained = self._built(self._driven, case, Driven)
        trained.again(case, grain, policy)
        found = self.drive(trained)
        if not policy.reduce_every:
            units = len(trained.keeper.modules)
            assert trained.stats.reductions == units, "every unit once in a step"
        return found

    def drive(self, trained: Driven) -> Steps:
        return [*(trained.step(number) for number in range(STEPS)), trained.weights()]

    def differences(self, case: Case, grain: Grain = "blocks", *, once: bool = False) -> list[str]:
        """What is not the same to the last bit as by hooks that recompute nothing. With `once`, gradients are
        reduced once in a step, whatever the strategy says, as hooks do it for a strategy that shards optimizer
        states."""
        policy, hooks = case.strategy(), case.keeping
        if once and policy.reduce_every:
            policy, hooks = replace(policy, reduce_every=False), hooks.sharing("optimizer")
        return steps_differing(self.by_hooks(hooks), self.by_ops(case, grain, policy))

    def forget(self) -> None:
        """Let go of models, so that the next case has new ones."""
        self._hooked.clear()
        self._driven.clear()

    def _built(self, models: dict[Case, Any], case: Case, kind: type[Any]) -> Any:
        """Models of other patterns are let go."""
        if case.built not in models:
            for other in [*models]:
                if other.sharing(case.mesh.shard) != case.built:
                    del models[other]
            models[case.built] = kind(case, self.ranks)
        return models[case.built]
