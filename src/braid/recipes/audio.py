"""Models that listen."""

from __future__ import annotations

from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Module, Optim, Run, Train
from braid.encoders import Encoder, Projector


def tiny_audio() -> Run:
    """Small transformer that listens: made-up chords spell the text behind them; two minutes on 2 CPU cores."""
    hidden = 128
    encoder = Encoder(
        pattern="[*-][*-]",
        hidden=64,
        input=96,  # two frames of 48 mel bins: 64 ms
        attention=Attention(heads=4, kv_heads=4, head_dim=16),
        mlp=Mlp(ffn=192, activation="gelu"),
        projector=Projector(width=hidden),
    )
    return Run(
        model=Model(
            pattern="[*-][*-][*-]",
            hidden=hidden,
            vocab=258,
            attention=Attention(heads=4, kv_heads=2, head_dim=32, qk_norm=True),
            mlp=Mlp(ffn=320),
        ),
        data=Data(sequence_tokens=64),
        optim=Optim(lr=3e-3, warmup_steps=20),
        train=Train(steps=120, batch_samples=16, eval_every=40, save_every=60),
        # Many sounds of a chord or two, so that most of the text is spelled by the one just before it.
        modules={"audio": Module(model=encoder, token=257, most_items=32, most_patches=64, items="tones")},
    )
