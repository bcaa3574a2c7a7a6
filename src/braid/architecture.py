"""The shape of a model as data: one frozen dataclass per layer kind, and `Model`, which holds them.

Nothing here imports torch. `braid.nn` builds modules from these values, `braid.plan` counts and checks
them. Values are choices; whatever follows from them is a property or a function elsewhere. `problems` lists
what is wrong with a value by itself; rules between values are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from braid import rules
from braid.errors import Problem

Activation = Literal["swiglu", "relu2", "gelu"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query softmax attention, the layer `*`."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; each serves heads / kv_heads query heads."""
    head_dim: int
    """Channels of one head."""
    positions: Literal["rope", "none"] = "rope"
    """How queries and keys learn where they stand: rotary, or not at all."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it. None sees all."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm per head before the rotation."""
    bias: bool = False
    """Whether the four projections have biases."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name, value in (("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim)):
            yield from rules.at_least(f"{at}.{name}", value, 1)
        yield from rules.divides(f"{at}.kv_heads", self.kv_heads, self.heads, f"{at}.heads")
        yield from rules.above(f"{at}.rope_base", self.rope_base, 0)
        if self.positions == "rope":
            yield from rules.multiple_of(f"{at}.head_dim", self.head_dim, 2)
        if self.window is not None:
            yield from rules.at_least(f"{at}.window", self.window, 1)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values come from one small latent vector (MLA), the layer `+`."""

    heads: int
    """Query, key and value heads."""
    q_rank: int | None
    """Channels of the latent that queries come from; None projects them from the hidden channels."""
    kv_rank: int
    """Channels of the latent that keys and values come from: what generation keeps of a token."""
    nope_dim: int
    """Channels of a query or key head without position."""
    rope_dim: int
    """Channels of a query or key head that are rotated; the key's are shared by all heads."""
    v_dim: int
    """Channels of a value head."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            yield from rules.at_least(f"{at}.{name}", getattr(self, name), 1)
        if self.q_rank is not None:
            yield from rules.at_least(f"{at}.q_rank", self.q_rank, 1)
        yield from rules.multiple_of(f"{at}.rope_dim", self.rope_dim, 2)
        yield from rules.above(f"{at}.rope_base", self.rope_base, 0)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """State-space mixer (SSD), the layer `M`."""

    heads: int
    """Heads, each with its own decay."""
    head_dim: int
    """Channels of one head; heads x head_dim are the inner channels."""
    state: int
    """State channels: each head remembers head_dim x state numbers."""
    groups: int = 1
    """Groups of heads that share B and C."""
    conv: int = 4
    """Taps of the causal convolution."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "head_dim", "state", "groups", "conv"):
            yield from rules.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from rules.divides(f"{at}.groups", self.groups, self.heads, f"{at}.heads")


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta rule mixer, the layer `G`."""

    key_heads: int
    """Query and key heads."""
    value_heads: int
    """Value heads; each query and key head serves value_heads / key_heads of them."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    conv: int = 4
    """Taps of the causal convolution."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv"):
            yield from rules.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from rules.divides(f"{at}.key_heads", self.key_heads, self.value_heads, f"{at}.value_heads")


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Dense feed-forward, the layer `-`."""

    ffn: int
    """Channels between the two projections."""
    activation: Activation = "swiglu"
    """swiglu has a gate and an up projection; relu2 (squared ReLU) and gelu have an up projection only."""
    bias: bool = False
    """Whether the projections have biases."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from rules.at_least(f"{at}.ffn", self.ffn, 1)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture of experts, the layer `E`."""

    experts: int
    """Routed experts."""
    top_k: int
    """Routed experts that each token visits."""
    ffn: int
    """Channels between the two projections of one routed expert."""
    activation: Activation = "swiglu"
    """Activation of routed and shared experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize_top_k: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor on the chosen scores."""
    aux_loss: float = 0.01
    """Weight of the load-balancing loss; 0 turns it off."""
    shared_ffn: int = 0
    """Channels of the shared expert that every token visits; 0 means there is none."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name, value in (("experts", self.experts), ("top_k", self.top_k), ("ffn", self.ffn)):
            yield from rules.at_least(f"{at}.{name}", value, 1)
        yield from rules.at_least(f"{at}.shared_ffn", self.shared_ffn, 0)
        yield from rules.at_least(f"{at}.aux_loss", self.aux_loss, 0)
        yield from rules.above(f"{at}.scale", self.scale, 0)
        if self.top_k > self.experts >= 1:
            yield Problem(
                field=f"{at}.top_k",
                value=self.top_k,
                rule=f"a token cannot visit more than {at}.experts ({self.experts})",
                remedy=f"1 to {self.experts}",
            )


LAYER_SHAPES = ("attention", "latent_attention", "mamba2", "delta_net", "mlp", "moe")
"""The fields of `Model` that hold the shape of a kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A language model: a pattern of layers between an embedding and a head."""

    pattern: str
    """Layers in the pattern language; `braid pattern` explains one."""
    hidden: int
    """Channels of the residual stream."""
    vocab: int
    """Token ids run from 0 to vocab - 1."""
    tied: bool = True
    """Whether the head shares the embedding's weight."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm before every layer and before the head."""
    norm_eps: float = 1e-5
    """Added to the variance inside every norm."""
    dropout: float = 0.0
    """Share of each layer's output that is dropped before it joins the residual stream."""
    init_std: float = 0.02
    """Standard deviation of initial weights; into the residual stream it is init_std / sqrt(layers)."""
    mtp_loss: float = 0.1
    """Weight of the multi-token-prediction loss, the mean over the depths of the pattern."""
    attention: Attention | None = None
    """Needed where the pattern has `*`."""
    latent_attention: LatentAttention | None = None
    """Needed where the pattern has `+`."""
    mamba2: Mamba2 | None = None
    """Needed where the pattern has `M`."""
    delta_net: DeltaNet | None = None
    """Needed where the pattern has `G`."""
    mlp: Mlp | None = None
    """Needed where the pattern has `-`."""
    moe: Moe | None = None
    """Needed where the pattern has `E`."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from rules.at_least(f"{at}.hidden", self.hidden, 1)
        yield from rules.at_least(f"{at}.vocab", self.vocab, 2)
        yield from rules.above(f"{at}.norm_eps", self.norm_eps, 0)
        yield from rules.above(f"{at}.init_std", self.init_std, 0)
        yield from rules.share(f"{at}.dropout", self.dropout)
        yield from rules.at_least(f"{at}.mtp_loss", self.mtp_loss, 0)
        for name in LAYER_SHAPES:
            layer = getattr(self, name)
            if layer is not None:
                yield from layer.problems(f"{at}.{name}")
