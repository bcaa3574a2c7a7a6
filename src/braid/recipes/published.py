"""Architectures of published models. Tokenizer and data are not included."""

from __future__ import annotations

from braid.architecture import (
    Attention,
    DeltaNet,
    Glu,
    HyperConnections,
    LatentAttention,
    Mamba2,
    Mlp,
    Model,
    Moe,
    Yarn,
)
from braid.config import Data, Optim, Run, Train


def _pretraining(model: Model, *, sequence_tokens: int, peak_lr: float) -> Run:
    """Generic pre-training settings around an architecture; override them for a real run."""
    return Run(
        model=model,
        data=Data(sequence_tokens=sequence_tokens),
        optim=Optim(lr=peak_lr, schedule="wsd", warmup_steps=2_000, decay_steps=20_000),
        train=Train(
            steps=100_000,
            batch_samples=1024,
            micro_batches=8,
            dtype="bf16",
            eval_every=1_000,
            save_every=1_000,
        ),
    )


def nemotron_h_8b() -> Run:
    """Nemotron-H 8B: Mamba-2 and MLP, four NoPE attention layers."""
    model = Model(
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        hidden=4096,
        vocab=131_072,
        tied=False,
        attention=Attention(heads=32, kv_heads=8, head_dim=128, positions="none"),
        mamba2=Mamba2(heads=128, head_dim=64, state=128, groups=8, dt_min=0.001),
        mlp=Mlp(ffn=21_504, activation="relu2"),
    )
    return _pretraining(model, sequence_tokens=8192, peak_lr=8e-4)


def nemotron_nano_30b_a3b() -> Run:
    """Like Nemotron-3-Nano 30B-A3B: Mamba-2 and MoE, six NoPE attention layers."""
    model = Model(
        pattern="MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME",
        hidden=2688,
        vocab=131_072,
        tied=False,
        attention=Attention(heads=32, kv_heads=2, head_dim=128, positions="none"),
        mamba2=Mamba2(heads=64, head_dim=64, state=128, groups=8, dt_min=0.001),
        moe=Moe(
            experts=128,
            top_k=6,
            ffn=1856,
            activation="relu2",
            shared_ffn=3712,
            score="sigmoid",
            scale=2.5,
            selection_bias=True,
            aux_loss=0.0,
            sequence_aux_loss=1e-4,
        ),
    )
    return _pretraining(model, sequence_tokens=8192, peak_lr=1e-3)


def _qwen_hybrid(pattern: str, *, vocab: int, experts: int, top_k: int) -> Run:
    """Gated delta nets and gated attention with the shapes that Qwen3-Next and Qwen3.5 35B-A3B share."""
    model = Model(
        pattern=pattern,
        hidden=2048,
        vocab=vocab,
        tied=False,
        norm_eps=1e-6,
        attention=Attention(
            heads=16,
            kv_heads=2,
            head_dim=256,
            rope_base=1e7,
            rope_fraction=0.25,
            qk_norm=True,
            gate=True,
        ),
        delta_net=DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        moe=Moe(experts=experts, top_k=top_k, ffn=512, shared_ffn=512, shared_gate=True, aux_loss=1e-3),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=4e-4)


def qwen3_next_80b_a3b() -> Run:
    """Qwen3-Next 80B-A3B: three gated delta nets per gated attention, 512 experts."""
    return _qwen_hybrid("[GE][GE][GE][*E]" * 12, vocab=151_936, experts=512, top_k=10)


def qwen3_5_35b_a3b() -> Run:
    """Qwen3.5 35B-A3B without vision: three gated delta nets per gated attention, 256 experts, MTP."""
    return _qwen_hybrid("[GE][GE][GE][*E]" * 10 + "/*E", vocab=248_320, experts=256, top_k=8)


def qwen3_30b_a3b() -> Run:
    """Qwen3 30B-A3B: GQA, 128 experts in every block."""
    model = Model(
        pattern="[*E]" * 48,
        hidden=2048,
        vocab=151_936,
        tied=False,
        norm_eps=1e-6,
        attention=Attention(heads=32, kv_heads=4, head_dim=128, rope_base=1e6, qk_norm=True),
        moe=Moe(experts=128, top_k=8, ffn=768, aux_loss=0.0, global_aux_loss=1e-3),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=4e-4)


def gpt_oss_20b() -> Run:
    """GPT-OSS 20B-A3.6B: attention sinks, a sliding window in every second layer, 32 experts."""
    model = Model(
        pattern="[*E]" * 24,
        hidden=2880,
        vocab=201_088,
        tied=False,
        attention=Attention(
            heads=64,
            kv_heads=8,
            head_dim=64,
            rope_base=150_000.0,
            rope_scaling=Yarn(factor=32.0, original_tokens=4096, truncate=False),
            window=128,
            window_pattern="SL",
            sinks=True,
            bias=True,
        ),
        moe=Moe(
            experts=32,
            top_k=4,
            ffn=2880,
            glu=Glu(alpha=1.702, limit=7.0, offset=1.0),
            bias=True,
            softmax_after_top_k=True,
            router_bias=True,
            aux_loss=0.0,
            global_aux_loss=1e-3,
        ),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=4e-4)


def granite_4_h_350m() -> Run:
    """Granite 4.0 H 350M: Mamba-2 and MLP, four NoPE attention layers, scaled residuals."""
    mixers = "M" * 10 + "*MM*MMM*" + "M" * 9 + "*MMMM"
    model = Model(
        pattern="".join(f"[{mixer}-]" for mixer in mixers),
        hidden=768,
        vocab=100_352,
        embedding_scale=12.0,
        residual_scale=0.246,
        logits_scale=3.0,
        attention=Attention(heads=12, kv_heads=4, head_dim=64, positions="none", scale=1 / 64),
        mamba2=Mamba2(heads=48, head_dim=32, state=128, norm_per_group=False),
        mlp=Mlp(ffn=2048),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=1e-3)


def olmo_hybrid_7b() -> Run:
    """OLMo Hybrid 7B: three gated delta nets per NoPE attention, which has post-norm and wide QK-norms."""
    model = Model(
        pattern="[G-][G-][G-][*-]" * 8,
        hidden=3840,
        vocab=100_352,
        tied=False,
        norm_position="attention_post",
        norm_eps=1e-6,
        attention=Attention(
            heads=30, kv_heads=30, head_dim=128, positions="none", qk_norm=True, qk_norm_over="all"
        ),
        delta_net=DeltaNet(
            key_heads=30,
            value_heads=30,
            key_dim=96,
            value_dim=192,
            negative_eigenvalues=True,
            gate_norm_eps=1e-5,
        ),
        mlp=Mlp(ffn=11_008),
    )
    return _pretraining(model, sequence_tokens=8192, peak_lr=3e-4)


def qwen2_5_7b() -> Run:
    """Qwen2.5 7B: GQA with biases on queries, keys and values."""
    model = Model(
        pattern="[*-]" * 28,
        hidden=3584,
        vocab=152_064,
        tied=False,
        norm_eps=1e-6,
        attention=Attention(heads=28, kv_heads=4, head_dim=128, rope_base=1e6, bias=True, o_bias=False),
        mlp=Mlp(ffn=18_944),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=3e-4)


def glm_4_5_air() -> Run:
    """GLM-4.5-Air 106B-A12B: GQA with partial RoPE, 128 experts, one MTP depth."""
    model = Model(
        pattern="[*-]" + "[*E]" * 45 + "/*E",
        hidden=4096,
        vocab=151_552,
        tied=False,
        mtp_loss=0.3,
        attention=Attention(
            heads=96, kv_heads=8, head_dim=128, rope_base=1e6, rope_fraction=0.5, bias=True, o_bias=False
        ),
        mlp=Mlp(ffn=10_944),
        moe=Moe(
            experts=128,
            top_k=8,
            ffn=1408,
            shared_ffn=1408,
            score="sigmoid",
            selection_bias=True,
            aux_loss=0.0,
            sequence_aux_loss=1e-4,
        ),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=2.5e-4)


def deepseek_v3() -> Run:
    """DeepSeek-V3 671B-A37B: MLA, 256 experts, one MTP depth."""
    model = Model(
        pattern="[+-]" * 3 + "[+E]" * 58 + "/+E",
        hidden=7168,
        vocab=129_280,
        tied=False,
        norm_eps=1e-6,
        mtp_loss=0.3,
        latent_attention=LatentAttention(
            heads=128,
            q_rank=1536,
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            v_dim=128,
            rope_scaling=Yarn(factor=40.0, original_tokens=4096, mscale=1.0, mscale_all_dim=1.0),
        ),
        mlp=Mlp(ffn=18_432),
        moe=Moe(
            experts=256,
            top_k=8,
            ffn=2048,
            shared_ffn=2048,
            score="sigmoid",
            scale=2.5,
            groups=8,
            top_groups=4,
            selection_bias=True,
            aux_loss=0.0,
            sequence_aux_loss=1e-4,
        ),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=2.2e-4)


def deepseek_v4_like() -> Run:
    """Like DeepSeek-V4 284B-A13B: mHC with four residual streams, 256 experts; plain MLA."""
    model = Model(
        pattern="[+E]" * 43 + "/+E",
        hidden=4096,
        vocab=129_280,
        tied=False,
        norm_eps=1e-6,
        mtp_loss=0.3,
        latent_attention=LatentAttention(
            heads=64, q_rank=1024, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        moe=Moe(
            experts=256,
            top_k=6,
            ffn=2048,
            shared_ffn=2048,
            glu=Glu(limit=10.0),
            score="sqrt_softplus",
            scale=1.5,
            selection_bias=True,
            aux_loss=0.0,
            sequence_aux_loss=1e-4,
        ),
        hyper=HyperConnections(streams=4, sinkhorn_steps=20, eps=1e-6),
    )
    return _pretraining(model, sequence_tokens=4096, peak_lr=2.2e-4)
