"""A hybrid of 1 B parameters for one machine with 8 GPUs: docs/hybrid-1b.md."""

from braid.architecture import Attention, Mamba2, Mlp, Model
from braid.config import Data, Mesh, Optim, Run, Train


def hybrid_1b() -> Run:
    """1.1 B parameters: 18 blocks, one in six with attention, others with Mamba-2; exports as nemotron_h."""
    return Run(
        model=Model(
            pattern="[M-][M-][M-][*-][M-][M-]" * 3,
            hidden=2048,
            vocab=32768,
            attention=Attention(heads=16, kv_heads=4, head_dim=128, positions="none"),
            mamba2=Mamba2(heads=64, head_dim=64, state=128, groups=8),
            mlp=Mlp(ffn=8192, activation="relu2"),
        ),
        data=Data(sources=("data/web",), tokenizer="tokenizer.json", sequence_tokens=4096),
        optim=Optim(lr=6e-4, schedule="wsd", warmup_steps=500, decay_steps=4000),
        mesh=Mesh(shard="gradients"),
        train=Train(
            steps=20_000, batch_samples=256, micro_batches=4, dtype="bf16", eval_every=500, save_every=500
        ),
    )
