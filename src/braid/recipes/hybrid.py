"""Hybrid models for one GPU."""

from __future__ import annotations

from braid.architecture import Attention, DeltaNet, Mamba2, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train


def hybrid_300m() -> Run:
    """300M parameters: attention, Mamba-2, gated delta net, MLP and MoE; minutes on one GPU."""
    return Run(
        model=Model(
            pattern="[M-][GE][*-][ME][G-][*E]" * 2 + "/*E",
            hidden=1024,
            vocab=257,
            attention=Attention(heads=16, kv_heads=4, head_dim=64, qk_norm=True),
            mamba2=Mamba2(heads=32, head_dim=64, state=128, groups=8),
            delta_net=DeltaNet(key_heads=8, value_heads=16, key_dim=64, value_dim=128),
            mlp=Mlp(ffn=2816),
            moe=Moe(experts=16, top_k=2, ffn=512, shared_ffn=512, score="sigmoid", selection_bias=True),
        ),
        data=Data(sequence_tokens=2048),
        optim=Optim(lr=6e-4, warmup_steps=20),
        train=Train(steps=200, batch_samples=32, micro_batches=2, dtype="bf16", eval_every=100, save_every=0),
    )
