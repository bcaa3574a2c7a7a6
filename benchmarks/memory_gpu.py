"""Memory of a training step on one GPU: what `braid plan` says, and what the allocator held. Three recipes.

    python -m benchmarks.memory_gpu

Each recipe is built and trained for three steps as `braid train` does it, on random rows that are one document
each. A line for every kind of memory is printed beside what was estimated, so that a wrong term shows at once:

    state         weights, main copies and moments, before the first step
    activations   what is there after forward beyond these
    gradients     what is there after the last backward of a step beyond the state
    peak          `max_memory_allocated` over the last two steps
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import machine
from braid.architecture import Attention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Run, Train
from braid.model.context import MicroBatch
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.train.build import make_state
from braid.train.counts import count
from braid.train.device import choose_device
from braid.train.state import State
from braid.train.step import backward

STEPS = 3
GIB = 2**30


def recipes() -> Iterator[tuple[str, Run]]:
    """A dense model, one with experts, a hybrid: the shapes of published models, cut to a few layers."""
    dense = Model(
        pattern="[*-]" * 16,
        hidden=2048,
        vocab=128_256,
        attention=Attention(heads=32, kv_heads=8, head_dim=64, rope_base=500_000.0),
        mlp=Mlp(ffn=8192),
    )
    experts = Model(
        pattern="[*E]" * 4,
        hidden=2048,
        vocab=151_936,
        tied=False,
        attention=Attention(heads=32, kv_heads=4, head_dim=128, rope_base=1e6, qk_norm=True),
        moe=Moe(experts=128, top_k=8, ffn=768, aux_loss=0.0, global_aux_loss=1e-3),
    )
    hybrid = Model(
        pattern="[M-][M-][*-][M-]",
        hidden=4096,
        vocab=131_072,
        tied=False,
        attention=Attention(heads=32, kv_heads=8, head_dim=128, positions="none"),
        mamba2=Mamba2(heads=128, head_dim=64, state=128, groups=8, dt_min=0.001),
        mlp=Mlp(ffn=21_504, activation="relu2"),
    )
    for name, model, tokens, samples in (
        ("dense-1b", dense, 4096, 8),
        ("experts-4-layers", experts, 4096, 8),
        ("hybrid-4-layers", hybrid, 8192, 4),
    ):
        train = Train(steps=STEPS, batch_samples=samples, micro_batches=2, dtype="bf16", eval_samples=0)
        data = Data(sequence_tokens=tokens, tokenizer="none.json")
        yield name, Run(model=model, data=data, train=train)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of memory."""

    estimated: int
    measured: int

    def __str__(self) -> str:
        ratio = self.estimated / max(1, self.measured)
        return f"{self.estimated / GIB:9.3f} {self.measured / GIB:9.3f} GiB {ratio:7.3f}"


def measure(run: Run) -> dict[str, Row]:
    """Train a few steps and compare."""
    worked_out = plan(run, 1)
    told = estimate(worked_out, "cuda").stages[0].memory
    before = torch.cuda.memory_allocated()
    state = make_state(worked_out, choose_device("cuda"))
    _fill(state)
    ready = torch.cuda.memory_allocated()
    real = {"state": ready - before}
    for step in range(STEPS):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        batches = random_batches(run, step)
        counts = count(state, batches)
        if step == 0:
            real["activations"] = _activations(state, batches[0])
        backward(state, run, batches, counts)
        torch.cuda.synchronize()
        real["gradients"] = torch.cuda.memory_allocated() - ready
        state.optimizer.update(1e-4)
        torch.cuda.synchronize()
    real["peak"] = torch.cuda.max_memory_allocated() - before
    estimated = {
        "state": told.parameters + told.optimizer,
        "activations": told.activations,
        "gradients": told.updated,
        "peak": told.peak,
    }
    return {kind: Row(estimated=estimated[kind], measured=real[kind]) for kind in estimated}


@torch.no_grad()
def _fill(state: State) -> None:
    """Weights from the device's own random numbers: those of a run's seed take a minute."""
    for name, parameter in state.model.named_parameters():
        parameter.normal_(std=0.02)
        if state.optimizer.main[name] is not parameter:
            state.optimizer.main[name].copy_(parameter)


def _activations(state: State, batch: MicroBatch) -> int:
    """What forward leaves, beside what was there."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    losses = state.model.losses(state.model.prepare(batch))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del losses
    gc.collect()
    return held


def random_batches(run: Run, step: int) -> list[MicroBatch]:
    """Random rows, each a single document."""
    rows, tokens = run.train.batch_samples // run.train.micro_batches, run.data.sequence_tokens
    generator = torch.Generator().manual_seed(step)
    shape = (rows, tokens)
    return [
        MicroBatch(
            tokens_BT=torch.randint(run.model.vocab, shape, generator=generator),
            labels_BT=torch.randint(run.model.vocab, shape, generator=generator),
            loss_mask_BT=torch.ones(shape, dtype=torch.bool),
            positions_BT=torch.arange(tokens).expand(shape).contiguous(),
            documents_BT=torch.zeros(shape, dtype=torch.int64),
            sample_B=torch.arange(rows) + number * rows,
            step=step,
        )
        for number in range(run.train.micro_batches)
    ]


def main() -> None:
    origin = machine.describe()
    figures: dict[str, Any] = {}
    for name, run in recipes():
        rows = measure(run)
        print(f"{name}\n{'':14}estimated  measured         ratio")
        for kind, row in rows.items():
            print(f"  {kind:<12}{row}")
        figures[name] = {
            kind: {
                "estimated": row.estimated,
                "measured": row.measured,
                "ratio": row.estimated / max(1, row.measured),
            }
            for kind, row in rows.items()
        }
        gc.collect()
        torch.cuda.empty_cache()
    print(machine.write("memory_gpu", {"recipes": figures}, origin))


if __name__ == "__main__":
    main()
