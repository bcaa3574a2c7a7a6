"""Models that train on a laptop in minutes."""

from __future__ import annotations

from braid.architecture import Attention, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train


def tiny() -> Run:
    """A small hybrid on Python's own source: two minutes on 2 CPU cores."""
    return Run(
        model=Model(
            pattern="[*-][*E][*-][*E]",
            hidden=128,
            vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=32, qk_norm=True),
            mlp=Mlp(ffn=384),
            moe=Moe(experts=8, top_k=2, ffn=128, shared_ffn=128),
        ),
        data=Data(sequence_tokens=256),
        optim=Optim(lr=3e-3, warmup_steps=20),
        train=Train(steps=400, batch_samples=16, eval_every=100, save_every=100),
    )
