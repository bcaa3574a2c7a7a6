"""A model trained twice on the same ranks, by the oracle and by the engine: what the tests of nodes compare.

    plain, overlapped = run_ranks(case.world, train_both, case)[rank]

Weights are whole on every rank, and gradients are summed over ranks by hand: no sharding takes part. Every step
has data of its own, documents of several lengths, and an update behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from braid import kernels
from braid.architecture import Attention, DeltaNet, HyperConnections, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Mesh, Optim, Run, Train
from braid.distributed.collectives import Groups
from braid.distributed.groups import open_groups
from braid.distributed.links import open_channels
from braid.engine.node import Watch
from braid.engine.streams import IssuedNode
from braid.engine.weights import ResidentWeights
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel
from braid.nn.moe import token_dispatcher
from braid.optim.adamw import AdamW
from braid.planning import divisibility
from braid.planning.plan import Plan, plan
from braid.train import step as steps
from braid.train.state import State
from tests.engine import oracle
from tests.model.cases import batch
from tests.states import backward, language_state

VOCAB, TOKENS, RATE = 257, 8, 1e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its ranks, and how it is overlapped."""

    pattern: str = "[*E][*E]"
    world: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro_batches: int = 3
    steps: int = 2
    dtype: str = "fp32"
    tied: bool = False
    shared: bool = True
    latent: int = 0
    capacity: bool = False
    dropout: float = 0.0
    delayed: bool = False
    early_release: bool = False
    late_weights: bool = False
    paired_ends: bool = False
    dispatcher: str = "auto"
    streams: int = 0
    """Residual streams with hyper-connections; 0 for a plain one."""
    blocks: bool = False
    """Whether the engine runs whole blocks, and nothing beside them."""

    def __str__(self) -> str:
        words = [
            self.pattern,
            self.dtype,
            f"tp{self.tp}",
            f"pp{self.pp}",
            f"ep{self.ep}",
            f"m{self.micro_batches}",
        ]
        flags = (
            "tied",
            "latent",
            "capacity",
            "dropout",
            "delayed",
            "early_release",
            "late_weights",
            "paired_ends",
            "blocks",
        )
        words += [name for name in flags if getattr(self, name)] + ["alone"] * (not self.shared)
        words += [f"n{self.streams}"] * (self.streams > 0)
        return " ".join(words + [self.dispatcher] * (self.dispatcher != "auto"))

    def run(self, *, overlap: bool) -> Run:
        """The run of the engine; without `overlap`, that of the oracle."""
        overlap = overlap and not self.blocks
        moe = Moe(
            experts=4,
            top_k=2,
            ffn=6,
            shared_ffn=6 if self.shared else 0,
            latent=self.latent,
            aux_loss=0.02,
            sequence_aux_loss=0.01,
            global_aux_loss=0.03,
            z_loss=0.01,
            score="sigmoid",
            selection_bias=True,
            capacity_factor=1.2 if self.capacity else None,
            pad_to_capacity=self.capacity,
        )
        rows = 2 * self.world // self.pp // self.tp
        return Run(
            model=Model(
                pattern=self.pattern,
                hidden=8,
                vocab=VOCAB,
                tied=self.tied,
                init_std=0.3,
                dropout=self.dropout,
                attention=Attention(heads=2, kv_heads=1, head_dim=4),
                latent_attention=LatentAttention(heads=2, q_rank=5, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=3),
                mamba2=Mamba2(heads=2, head_dim=4, state=3, groups=1, conv=2),
                delta_net=DeltaNet(key_heads=1, value_heads=2, key_dim=4, value_dim=4, conv=2),
                mlp=Mlp(ffn=10),
                moe=moe,
                hyper=HyperConnections(streams=self.streams, sinkhorn_steps=4) if self.streams else None,
            ),
            data=Data(sequence_tokens=TOKENS),
            optim=Optim(lr=RATE, warmup_steps=0),
            train=Train(
                steps=8,
                batch_samples=rows * self.micro_batches,
                micro_batches=self.micro_batches,
                dtype=self.dtype,
            ),
            mesh=Mesh(
                tp=self.tp,
                pp=self.pp,
                ep=self.ep,
                shard="none",
                dispatcher=self.dispatcher,
                overlap=overlap,
                delay_weights=overlap and self.delayed,
                early_release=overlap and self.early_release,
                late_weights=overlap and self.late_weights,
                paired_ends=overlap and self.paired_ends,
            ),
        )

    def sharded(self, shard: str, *, overlap: bool) -> Run:
        run = self.run(overlap=overlap)
        moe = replace(run.model.moe, ffn=8) if run.model.moe else None
        return replace(run, model=replace(run.model, moe=moe), mesh=replace(run.mesh, shard=shard))


@dataclass(kw_only=True)
class Trained:
    """What one rank saw."""

    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, before they are summed over ranks."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    issued: list[IssuedNode] = field(default_factory=list)
    """The nodes of the last step."""


def train_both(rank: int, world: int, case: Case) -> tuple[Trained, Trained]:
    """By the oracle, which knows of no plan, and by the engine."""
    return train(rank, case, overlap=False), train(rank, case, overlap=True)


def train(rank: int, case: Case, *, overlap: bool, watched: bool = True) -> Trained:
    run = case.run(overlap=overlap)
    worked_out = plan(run, case.world)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    groups = open_groups(worked_out.grid, rank, tp_runs=runs) if case.world > 1 else Groups()
    state = make_state(worked_out, groups)
    told = Trained()
    for number in range(case.steps):
        batches = micro_batches(case, groups, number)
        counts = steps.count(state, batches)
        watch = Watch() if overlap and watched else None
        if overlap:
            parts, loads = backward(state, run, batches, counts, watch)
        else:
            parts, loads = oracle.backward(state, run, batches, counts)
        told.metrics.append(parts)
        found = state.optimizer.gradients()
        told.gradients.append({name: gradient.clone() for name, gradient in found.items()})
        for name, gradient in found.items():
            group = groups.edp if ".experts." in name else groups.slab
            if group.handle is not None:
                dist.all_reduce(gradient, group=group.handle)
        state.optimizer.update(RATE)
        steps.update_selection_biases(state.model, loads)
        told.issued = watch.issued if watch else []
    told.weights = {name: tensor.detach().clone() for name, tensor in state.weights().items()}
    return told


def make_state(worked_out: Plan, groups: Groups) -> State:
    """A rank's whole weights, from the run's seed."""
    run, dtype = worked_out.run, DTYPES[worked_out.run.train.dtype]
    shape = divisibility.local_shape(run.model, worked_out.axes)
    assert run.model.moe is not None
    model = LanguageModel(
        run.model,
        worked_out.layout,
        kernels.choose(shape, worked_out.layout.kinds(), torch.device("cpu"), dtype),
        groups=groups,
        dispatcher=token_dispatcher.choose(
            run.model.moe, run.model.hidden, groups, run.mesh.dispatcher
        ).function,
        segments=[segment.index for segment in worked_out.stages[groups.pp.rank].segments],
        dtype=dtype,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # where tp pads the vocabulary, rows have no initial value
    model.initialize(run.train.seed)
    optimizer = AdamW(
        dict(model.named_parameters()), decaying=model.decaying(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    keeper = ResidentWeights(model, [unit.path for unit in model.units()], optimizer)
    channels = open_channels(worked_out.grid, groups.world.rank, worked_out.schedule.channels())
    return language_state(worked_out, model, optimizer, keeper, model.device, channels)


def micro_batches(case: Case, groups: Groups, step: int) -> list[MicroBatch]:
    """This rank's rows: documents of several lengths, and padding."""
    rows = ((4, 4), (5,)), ((8,), (2, 2, 3)), ((1, 7), (3, 5))
    return [
        replace(
            batch(rows[(number + step) % 3], VOCAB, seed=100 * step + 10 * number + groups.dp.rank),
            sample_B=torch.arange(2) + 2 * (number * groups.dp.size + groups.dp.rank),
            step=step,
        )
        for number in range(case.micro_batches)
    ]


def assert_same_bits(plain: Trained, overlapped: Trained) -> None:
    """Every figure, every gradient, every weight."""
    for kind in ("metrics", "gradients"):
        for step, (one, other) in enumerate(zip(getattr(plain, kind), getattr(overlapped, kind), strict=True)):
            _same(one, other, f"{kind} of step {step}")
    _same(plain.weights, overlapped.weights, "weights")


def _same(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    assert one.keys() == other.keys()
    differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not differing, f"{what} differ: {differing}"
    assert all(tensor.isfinite().all() for tensor in one.values())
