"""A small legal run for tests to start from."""

from __future__ import annotations

from braid.architecture import Attention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train


def small_run() -> Run:
    return Run(
        model=Model(
            pattern="[*-][*E]",
            hidden=16,
            vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=4),
            mlp=Mlp(ffn=24),
            moe=Moe(experts=4, top_k=2, ffn=8, shared_ffn=8),
        ),
        data=Data(sequence_tokens=32),
        optim=Optim(lr=1e-2, warmup_steps=2),
        train=Train(steps=8, batch_samples=4, micro_batches=2, eval_samples=4),
    )
