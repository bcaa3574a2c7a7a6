"""Small models that train on a laptop in minutes."""

from __future__ import annotations

from dataclasses import replace

from braid.architecture import Attention, DeltaNet, HyperConnections, Mamba2, Mlp, Model, Moe
from braid.config import Data, Mesh, Module, Optim, Run, Train
from braid.encoders import Encoder, Pixels, PositionTable, Projector


def tiny() -> Run:
    """Small hybrid of attention, Mamba-2, gated delta net, MLP and MoE; a few minutes on 2 CPU cores."""
    return Run(
        model=Model(
            pattern="[M-][*E][G-][ME]/*-",
            hidden=128,
            vocab=257,
            attention=Attention(heads=4, kv_heads=2, head_dim=32, qk_norm=True),
            mamba2=Mamba2(heads=8, head_dim=32, state=32),
            delta_net=DeltaNet(key_heads=2, value_heads=4, key_dim=32, value_dim=32),
            mlp=Mlp(ffn=320),
            moe=Moe(experts=8, top_k=2, ffn=128, shared_ffn=128, score="sigmoid", selection_bias=True),
        ),
        data=Data(sequence_tokens=256),
        optim=Optim(lr=3e-3, warmup_steps=20),
        train=Train(steps=250, batch_samples=16, eval_every=50, save_every=100),
    )


def tiny_mhc() -> Run:
    """tiny with manifold-constrained hyper-connections (mHC) and four residual streams; four minutes."""
    run = tiny()
    return replace(run, model=replace(run.model, hyper=HyperConnections()))


def tiny_multimodal() -> Run:
    """tiny with a small encoder of items that are made up: each shows the text that follows it."""
    run = tiny()
    encoder = Encoder(
        pattern="[*-][*-]",
        hidden=64,
        input=48,
        group=2,
        attention=Attention(heads=4, kv_heads=4, head_dim=16),
        mlp=Mlp(ffn=192, activation="gelu"),
        projector=Projector(width=run.model.hidden),
    )
    vision = Module(model=encoder, token=257, most_items=4, most_patches=32, items="synthetic")
    return replace(run, model=replace(run.model, vocab=258), modules={"vision": vision})


def tiny_vlm(world: int = 1) -> Run:
    """Vision-language model that reads strips of handwritten digits; four minutes of CPU time.

    On several ranks the encoder has the second half of them to itself.
    """
    hidden, pixels = 64, Pixels(patch=8, channels=1, mean=(0.2,), std=(0.3,))
    language = world - world // 2
    apart = world > 1
    encoder = Encoder(
        pattern="[*-][*-]",
        hidden=96,
        init_std=0.1,
        input=pixels.input,
        pixels=pixels,
        positions=PositionTable(rows=8, columns=8),
        attention=Attention(heads=4, kv_heads=4, head_dim=24, positions="none", qk_norm=True),
        mlp=Mlp(ffn=192, activation="relu2"),
        projector=Projector(width=hidden),
    )
    vision = Module(
        model=encoder,
        token=257,
        most_patches=16,
        items="image",
        mesh=Mesh(ranks=(language, world // 2) if apart else None),
    )
    return Run(
        model=Model(
            pattern="[*-][*-]",
            hidden=hidden,
            vocab=258,
            init_std=0.1,
            attention=Attention(heads=4, kv_heads=4, head_dim=16, qk_norm=True),
            mlp=Mlp(ffn=128, activation="relu2"),
        ),
        data=Data(corpus="digits", sequence_tokens=24, packing="documents"),
        optim=Optim(lr=2e-3, warmup_steps=50),
        train=Train(
            steps=1200, batch_samples=48, eval_every=200, eval_samples=500, log_every=50, exact_match=True
        ),
        mesh=Mesh(ranks=(0, language) if apart else None),
        modules={"vision": vision},
    )
