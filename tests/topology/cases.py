"""The models that every topology is compared on, and the data that they are trained on.

    hybrid    every mixer but latent attention, MLP, experts, MTP; few key-value heads with norms over all of
              them, one group, two key heads and negative eigenvalues; scaled scores and residual branches
    latent    latent attention, experts behind a latent, group-limited routing; more experts than ranks
    tied      one weight for embedding and head, dropout, whole documents with padding, MTP, no experts; norms
              after attention and its MLP, before Mamba-2 and its MLP; a sliding window in every second
              attention layer, attention sinks; scaled embeddings, residual branches and logits
    capacity  experts that drop tokens and are padded to capacity, noise on the router, padding; norms after all
              layers
    sinkhorn  scores evened out over whole sequences, one expert for each token, one key head
    hyper     three residual streams with hyper-connections around every mixer, MLP and experts; MTP; norms of
              each head, windows, sinks, a bias on the router

Sizes are the smallest that all ranks can share: up to 4 of tp, 8 of tp · cp, and 3 of dp.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Literal

from braid.architecture import Attention, DeltaNet, HyperConnections, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.prove.proof import make_corpus as make_corpus
from braid.prove.shrink import LEARNING_RATE as LEARNING_RATE

Dtype = Literal["bf16", "fp32", "fp64"]

STEPS = 2
"""Optimizer steps that are compared: the second one shows what the first has left in weights and moments. More
only amplify."""

EPS = 1e-8
"""Of AdamW."""

VOCAB = 259
"""No tp but 7 divides it: the last rank always has padding."""

HYBRID = Model(
    pattern="[M-][G*E]/*E",
    hidden=24,
    vocab=VOCAB,
    tied=False,
    init_std=0.2,
    mtp_loss=0.3,
    residual_scale=0.7,
    attention=Attention(
        heads=8,
        kv_heads=2,
        head_dim=4,
        qk_norm=True,
        qk_norm_over="all",
        bias=True,
        o_bias=False,
        scale=0.3,
        gate=True,
    ),
    mamba2=Mamba2(heads=8, head_dim=2, state=3, groups=1, conv=3, norm_per_group=False, bias=True),
    delta_net=DeltaNet(
        key_heads=2,
        value_heads=8,
        key_dim=3,
        value_dim=2,
        conv=3,
        negative_eigenvalues=True,
        gate_norm_eps=1e-3,
    ),
    mlp=Mlp(ffn=24, bias=True),
    moe=Moe(
        experts=4,
        top_k=2,
        ffn=24,
        shared_ffn=8,
        shared_gate=True,
        bias=True,
        aux_loss=0.02,
        sequence_aux_loss=0.02,
        global_aux_loss=0.02,
        z_loss=0.01,
        selection_bias=True,
        selection_bias_rate=0.05,
        score="sigmoid",
    ),
)

LATENT = Model(
    pattern="[+E]+[+E]",
    hidden=16,
    vocab=VOCAB,
    tied=False,
    init_std=0.2,
    latent_attention=LatentAttention(
        heads=8, q_rank=5, kv_rank=7, nope_dim=3, rope_dim=2, v_dim=3, norm_eps=1e-2
    ),
    moe=Moe(
        experts=8,
        top_k=2,
        ffn=24,
        latent=9,
        shared_ffn=8,
        groups=4,
        top_groups=2,
        aux_loss=0.02,
        global_aux_loss=0.02,
        selection_bias=True,
        selection_bias_rate=0.05,
        score="sqrt_softplus",
        scale=1.5,
    ),
)

TIED = Model(
    pattern="[*-][M-]/*",
    hidden=16,
    vocab=VOCAB,
    tied=True,
    norm="layer",
    norm_position="attention_post",
    dropout=0.2,
    init_std=0.2,
    embedding_scale=3.0,
    residual_scale=0.6,
    logits_scale=1.5,
    attention=Attention(
        heads=8, kv_heads=8, head_dim=2, window=5, window_pattern="LS", sinks=True, rope_fraction=1.0
    ),
    mamba2=Mamba2(heads=8, head_dim=2, state=3, groups=2, conv=3),
    mlp=Mlp(ffn=16, activation="gelu"),
)

CAPACITY = Model(
    pattern="[*E]M[E]",
    hidden=16,
    vocab=VOCAB,
    norm_position="post",
    init_std=0.2,
    dropout=0.1,
    attention=Attention(heads=8, kv_heads=4, head_dim=2, positions="none", bias=True),
    mamba2=Mamba2(heads=8, head_dim=2, state=3, groups=4, conv=2),
    moe=Moe(
        experts=4,
        top_k=2,
        ffn=24,
        capacity_factor=1.0,
        pad_to_capacity=True,
        jitter=0.1,
        aux_loss=0.02,
        sequence_aux_loss=0.05,
    ),
)

SINKHORN = Model(
    pattern="[*E][GE]",
    hidden=16,
    vocab=VOCAB,
    tied=False,
    init_std=0.2,
    attention=Attention(heads=8, kv_heads=1, head_dim=2),
    delta_net=DeltaNet(key_heads=1, value_heads=8, key_dim=3, value_dim=2, conv=3),
    moe=Moe(
        experts=4,
        top_k=1,
        normalize_top_k=False,
        ffn=24,
        activation="relu2",
        routing="sinkhorn",
        aux_loss=0.0,
        z_loss=0.02,
    ),
)

HYPER = Model(
    pattern="[*E]-[MGE]/*E",
    hidden=16,
    vocab=VOCAB,
    tied=False,
    init_std=0.2,
    mtp_loss=0.3,
    dropout=0.1,
    attention=Attention(
        heads=8, kv_heads=2, head_dim=4, window=3, window_pattern="SL", sinks=True, qk_norm=True
    ),
    mamba2=Mamba2(heads=8, head_dim=2, state=3, groups=1, conv=3),
    delta_net=DeltaNet(key_heads=2, value_heads=8, key_dim=3, value_dim=2, conv=3),
    mlp=Mlp(ffn=24),
    moe=Moe(experts=8, top_k=2, ffn=24, shared_ffn=8, aux_loss=0.02, score="sigmoid", router_bias=True),
    hyper=HyperConnections(streams=3, sinkhorn_steps=4),
)

MODELS = MappingProxyType(
    {
        "hybrid": HYBRID,
        "latent": LATENT,
        "tied": TIED,
        "capacity": CAPACITY,
        "sinkhorn": SINKHORN,
        "hyper": HYPER,
    }
)

NO_GRADIENT = MappingProxyType({"capacity": frozenset({"blocks.0.attention.k.bias"})})
"""Tensors whose gradient is zero whatever the data, by model. Without positions, a key bias adds the same
number to all scores of a query, and softmax does not see it."""

PADDED = frozenset({"tied", "capacity"})
"""Models that are trained on whole documents, with padding between them."""


def run_of(
    model: str,
    corpus: Path | str,
    *,
    samples: int = 16,
    micro_batches: int = 2,
    dtype: Dtype = "fp64",
    steps: int = STEPS,
    precision: tuple[str, ...] = (),
) -> Run:
    """The run of a model on one process. `samples` are those of a step."""
    return Run(
        model=MODELS[model],
        data=Data(
            sources=(str(corpus),),
            sequence_tokens=16,
            packing="documents" if model in PADDED else "concatenate",
        ),
        # Streams begin as copies, so that gradients of their first mixings are nothing but rounding: not for
        # AdamW to make steps of.
        optim=Optim(lr=LEARNING_RATE, clip=0.5, eps=1e-3 if model == "hyper" else EPS),
        train=Train(
            steps=steps,
            batch_samples=samples,
            micro_batches=micro_batches,
            eval_samples=5,
            dtype=dtype,
            precision=precision,
        ),
    )
