"""Runs for the tests of CUDA graphs, the same on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from braid.architecture import Attention, HyperConnections, Mamba2, Mlp, Model, Moe
from braid.config import Data, Mesh, Optim, Run, Train
from braid.model.context import MicroBatch
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.device import choose_device
from braid.train.state import State
from braid.train.step import begin_step

TOKENS = 24


def run_of(pattern: str, *, dtype: str = "fp32", micro_batches: int = 3, **settings: object) -> Run:
    """A small run; `settings` are those of `Train`, or of the model where they are the names of its fields."""
    train = {name: value for name, value in settings.items() if name in Train.__dataclass_fields__}
    model = {name: value for name, value in settings.items() if name in Model.__dataclass_fields__}
    mesh = {name: value for name, value in settings.items() if name in Mesh.__dataclass_fields__}
    shape = Model(
        pattern=pattern,
        hidden=16,
        vocab=257,
        attention=Attention(heads=2, kv_heads=1, head_dim=8),
        mlp=Mlp(ffn=24),
        mamba2=Mamba2(heads=2, head_dim=8, groups=1, state=8),
        moe=Moe(experts=4, top_k=2, ffn=16, shared_ffn=16, jitter=0.1, aux_loss=0.01),
    )
    return Run(
        model=replace(shape, **model),
        data=Data(sequence_tokens=TOKENS),
        optim=Optim(lr=1e-2, warmup_steps=2),
        train=Train(
            steps=50,
            batch_samples=2 * micro_batches,
            micro_batches=micro_batches,
            dtype=dtype,
            **train,
        ),
        mesh=Mesh(**mesh),
    )


HYPER = HyperConnections(streams=2)


class Documents:
    """A loader of packed documents whose lengths differ from row to row."""

    items = MappingProxyType({})

    def __init__(self, vocab: int, tokens: int = TOKENS) -> None:
        self.vocab, self.tokens = vocab, tokens

    def batch(self, samples: range) -> MicroBatch:
        rows = [self._row(sample) for sample in samples]
        columns = zip(*rows, strict=True)
        tokens_BT, labels_BT, mask_BT, positions_BT, documents_BT = map(torch.stack, columns)
        return MicroBatch(
            tokens_BT=tokens_BT,
            labels_BT=labels_BT,
            loss_mask_BT=mask_BT,
            positions_BT=positions_BT,
            documents_BT=documents_BT,
            sample_B=torch.tensor(list(samples)),
        )

    def _row(self, sample: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(sample)
        ids = torch.randint(self.vocab, (self.tokens + 1,), generator=generator)
        cuts = torch.rand(self.tokens, generator=generator) < 4 / self.tokens
        documents = cuts.cumsum(0)
        starts = torch.where(cuts, torch.arange(self.tokens), 0).cummax(0).values
        mask = torch.rand(self.tokens, generator=generator) < 0.9
        return ids[:-1], ids[1:], mask, torch.arange(self.tokens) - starts, documents


def new_state(run: Run, device: str = "cpu") -> State:
    state = make_state(plan(run, 1), choose_device(device))
    states.initialize(state, run)
    return state


def train(state: State, run: Run, steps: int, loader: object = None) -> list[tuple[float, ...]]:
    """Losses, gradient norms and all metrics of some steps."""
    loader = Documents(run.model.vocab, run.data.sequence_tokens) if loader is None else loader
    told = []
    for _ in range(steps):
        result = begin_step(state, run, loader, 1e-2).result()
        told.append((result.loss, result.grad_norm, *(result.metrics[name] for name in sorted(result.metrics))))
    return told


def weights(state: State) -> dict[str, torch.Tensor]:
    moments = {
        f"{kind} {name}": state.optimizer.moment(kind, name)
        for name in state.optimizer.main
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {**{name: each.detach() for name, each in state.weights().items()}, **moments}


def same(a: State, b: State) -> list[str]:
    """Weights and moments that differ in any bit."""
    ours, theirs = weights(a), weights(b)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


# ------------------------------------------------------------------------------------------------ on a GPU


def gpu_run(pattern: str, *, window: int | None = None, **settings: object) -> Run:
    """A run in sizes and a dtype that the fused kernels take."""
    run = run_of(pattern, dtype="bf16", **settings)
    assert run.model.moe is not None
    larger = replace(
        run.model,
        hidden=256,
        attention=Attention(heads=4, kv_heads=2, head_dim=64, window=window),
        mlp=Mlp(ffn=512),
        mamba2=Mamba2(heads=8, head_dim=64, groups=2, state=64),
        moe=replace(run.model.moe, ffn=256, shared_ffn=256),
    )
    return replace(run, model=larger, data=replace(run.data, sequence_tokens=512))


def on_gpu(run: Run) -> State:
    return new_state(run, "cuda")


def with_graphs(run: Run) -> Run:
    return replace(run, train=replace(run.train, graphs="step"))
