"""The shape of a model as data: one frozen dataclass per layer kind, and `Model`, which holds them.

Nothing here imports torch. `braid.nn` builds modules from these values, `braid.planning.plan` counts and checks
them. Values are choices; whatever follows from them is a property or a function elsewhere. `problems` lists
what is wrong with a value by itself; rules between values are the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from braid import validators
from braid.errors import Problem
from braid.pattern import Kind

Activation = Literal["swiglu", "relu2", "gelu"]
"""swiglu has a gate and an up projection; relu2 (squared ReLU) and gelu have an up projection only."""


@dataclass(frozen=True, kw_only=True)
class Glu:
    """The numbers of a gated activation: gate · sigmoid(alpha · gate) · (up + offset).

    The defaults are SwiGLU; alpha 1.702 is quick-GeGLU; GPT-OSS has alpha 1.702, limit 7, offset 1.
    """

    alpha: float = 1.0
    """Steepness of the sigmoid."""
    limit: float | None = None
    """The gate is cut off above the limit, up outside of ± limit; None cuts nothing."""
    offset: float = 0.0
    """Added to up, after the cut."""

    def problems(self, at: str, activation: Activation) -> Iterator[Problem]:
        yield from validators.above(f"{at}.alpha", self.alpha, 0)
        if self.limit is not None:
            yield from validators.above(f"{at}.limit", self.limit, 0)
        yield from validators.finite(f"{at}.offset", self.offset)
        if activation != "swiglu" and self != Glu():
            yield Problem(
                field=at,
                value=self,
                rule=f"is for gated activations, and {activation} has no gate",
                remedy="alpha 1, no limit and offset 0, or the activation to swiglu",
            )


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Rotary frequencies for texts longer than a model first saw. Channels that turn often keep their
    frequency, channels that turn seldom are slowed down by `factor`, and a ramp joins the two."""

    factor: float
    """How many times longer the texts are."""
    original_tokens: int
    """Tokens of the texts that the model first saw."""
    beta_fast: float = 32.0
    """Channels that turn more often than this over the original tokens keep their frequency."""
    beta_slow: float = 1.0
    """Channels that turn less often than this over the original tokens are slowed down by the whole factor."""
    ramp: Literal["channels", "rotations"] = "channels"
    """What the ramp is linear in: the number of the channel, or how often it turns (Llama 3, with mscale 0)."""
    mscale: float = 1.0
    """How much longer rotated queries and keys get as factor grows, which sharpens attention; 0 leaves them."""
    mscale_all_dim: float = 0.0
    """How much of that is taken from the rotated channels again; latent attention gives it to all channels."""

    @property
    def rotary_scale(self) -> float:
        """Factor on rotated queries and keys."""
        return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor on the scores of latent attention."""
        return self._sharper(self.mscale_all_dim) ** 2

    def _sharper(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.factor", self.factor, 1)
        yield from validators.at_least(f"{at}.original_tokens", self.original_tokens, 1)
        yield from validators.above(f"{at}.beta_slow", self.beta_slow, 0)
        # Over rotations the ramp divides by the difference; over channels the ramp may be empty (Kimi-K2).
        higher = validators.above if self.ramp == "rotations" else validators.at_least
        yield from higher(f"{at}.beta_fast", self.beta_fast, self.beta_slow)
        yield from validators.at_least(f"{at}.mscale", self.mscale, 0)
        yield from validators.at_least(f"{at}.mscale_all_dim", self.mscale_all_dim, 0)


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
    rope_fraction: float = 1.0
    """Share of a head's channels that are rotated: the first ones."""
    rope_scaling: Yarn | None = None
    """Rotary frequencies for longer texts; None leaves them."""
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it. None sees all."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm per head before the rotation."""
    bias: bool = False
    """Whether all projections have biases."""
    gate: bool = False
    """Whether each channel of a head's output is multiplied by a sigmoid of its own projection."""

    @property
    def rope_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rope_fraction)

    def problems(self, at: str) -> Iterator[Problem]:
        for name, value in (("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim)):
            yield from validators.at_least(f"{at}.{name}", value, 1)
        yield from validators.divides(f"{at}.kv_heads", self.kv_heads, self.heads, f"{at}.heads")
        yield from validators.above(f"{at}.rope_base", self.rope_base, 0 if self.rope_scaling is None else 1)
        no_share = list(validators.share(f"{at}.rope_fraction", self.rope_fraction, one_allowed=True))
        if no_share:
            yield from no_share
        elif self.positions == "rope" and self.rope_fraction == 1:
            yield from validators.multiple_of(f"{at}.head_dim", self.head_dim, 2)
        elif self.positions == "rope" and (self.rope_dim < 2 or self.rope_dim % 2):
            yield Problem(
                field=f"{at}.rope_fraction",
                value=self.rope_fraction,
                rule=f"rotates channels in pairs, but {self.rope_dim} of {at}.head_dim ({self.head_dim})",
                remedy=f"n / {self.head_dim} with an even n",
            )
        if self.rope_scaling is not None:
            yield from self.rope_scaling.problems(f"{at}.rope_scaling")
        if self.window is not None:
            yield from validators.at_least(f"{at}.window", self.window, 1)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values come from one small latent vector (MLA), the layer `+`. Rotary channels i
    and i + rope_dim / 2 turn together, as in all of braid; DeepSeek's checkpoints have the two side by side."""

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
    rope_scaling: Yarn | None = None
    """Rotary frequencies for longer texts; None leaves them."""

    @property
    def score_scale(self) -> float:
        """Factor on the products of queries and keys, before the softmax."""
        sharper = 1.0 if self.rope_scaling is None else self.rope_scaling.score_scale
        return (self.nope_dim + self.rope_dim) ** -0.5 * sharper

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        if self.q_rank is not None:
            yield from validators.at_least(f"{at}.q_rank", self.q_rank, 1)
        yield from validators.multiple_of(f"{at}.rope_dim", self.rope_dim, 2)
        yield from validators.above(f"{at}.rope_base", self.rope_base, 0 if self.rope_scaling is None else 1)
        if self.rope_scaling is not None:
            yield from self.rope_scaling.problems(f"{at}.rope_scaling")


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
    dt_min: float = 0.0
    """Lower limit of a token's time step, which is softplus(projection + bias)."""
    dt_max: float | None = None
    """Upper limit of a token's time step; None for no limit."""
    norm_per_group: bool = True
    """Whether the gated norm takes each group's channels by themselves, or all inner channels together."""
    bias: bool = False
    """Whether the projections have biases."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "head_dim", "state", "groups", "conv"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from validators.divides(f"{at}.groups", self.groups, self.heads, f"{at}.heads")
        yield from validators.at_least(f"{at}.dt_min", self.dt_min, 0)
        if self.dt_max is not None:
            yield from validators.above(f"{at}.dt_max", self.dt_max, self.dt_min)


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
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from validators.divides(f"{at}.key_heads", self.key_heads, self.value_heads, f"{at}.value_heads")


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Dense feed-forward, the layer `-`."""

    ffn: int
    """Channels between the two projections."""
    activation: Activation = "swiglu"
    """What happens between the two."""
    glu: Glu = Glu()
    """The numbers of swiglu."""
    bias: bool = False
    """Whether the projections have biases."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.ffn", self.ffn, 1)
        yield from self.glu.problems(f"{at}.glu", self.activation)


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
    glu: Glu = Glu()
    """The numbers of swiglu."""
    bias: bool = False
    """Whether the projections of the routed experts have biases."""
    latent: int = 0
    """Channels to which tokens are projected before they travel to routed experts; 0: they travel whole."""
    shared_ffn: int = 0
    """Channels of the shared expert that every token visits; 0 means there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied with a sigmoid of the token."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    """How router logits become scores."""
    softmax_after_top_k: bool = False
    """Whether the softmax is taken over the chosen logits alone, rather than before the choice."""
    normalize_top_k: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor on the chosen scores."""
    routing: Literal["top_k", "sinkhorn", "round_robin"] = "top_k"
    """Who chooses experts: the best scores; in training, scores evened out over each sequence; or, for
    benchmarks alone, each in its turn."""
    groups: int = 1
    """Groups of neighbouring experts; a token's experts come from its best groups."""
    top_groups: int = 1
    """Groups that a token's experts come from. A group counts as its top_k / top_groups best scores."""
    selection_bias: bool = False
    """Whether each expert has a bias on its score, for the choice alone, that training moves towards even load
    without a gradient."""
    selection_bias_rate: float = 1e-3
    """How far a step moves each selection bias."""
    aux_loss: float = 0.01
    """Weight of the load-balancing loss over a micro-batch; 0 turns it off."""
    sequence_aux_loss: float = 0.0
    """Weight of the load-balancing loss over each sequence."""
    global_aux_loss: float = 0.0
    """Weight of the load-balancing loss over the step so far: this micro-batch and those before it."""
    z_loss: float = 0.0
    """Weight of the loss that keeps router logits small."""
    capacity_factor: float | None = None
    """In training, an expert takes this many times its even share of a sequence's tokens, rounded up, and the
    others go without it. None drops nobody."""
    drop: Literal["lowest_probability", "last_position"] = "lowest_probability"
    """Who goes without, where an expert is full."""
    pad_to_capacity: bool = False
    """Whether every expert computes its full capacity, so that shapes do not depend on the routing."""
    jitter: float = 0.0
    """In training, the router sees each channel times a random number from 1 - jitter to 1 + jitter."""
    router_dtype: Literal["input", "float32", "float64"] = "float32"
    """Dtype of the router's logits, or that of the activations where it is wider."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("experts", "top_k", "ffn", "groups", "top_groups"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        for name in ("latent", "shared_ffn", "selection_bias_rate", *BALANCE_LOSSES, "z_loss"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 0)
        yield from validators.above(f"{at}.scale", self.scale, 0)
        yield from validators.share(f"{at}.jitter", self.jitter)
        yield from self.glu.problems(f"{at}.glu", self.activation)
        if self.shared_gate and not self.shared_ffn:
            yield Problem(
                field=f"{at}.shared_gate",
                value=True,
                rule="gates the shared expert, and there is none",
                remedy=f"False, or {at}.shared_ffn above 0",
            )
        yield from self._choice_problems(at)
        yield from self._score_problems(at)
        yield from self._routing_problems(at)
        yield from self._capacity_problems(at)

    def _choice_problems(self, at: str) -> Iterator[Problem]:
        """How many experts a token visits, and out of how many."""
        if self.top_k > self.experts >= 1:
            yield Problem(
                field=f"{at}.top_k",
                value=self.top_k,
                rule=f"a token cannot visit more than {at}.experts ({self.experts})",
                remedy=f"1 to {self.experts}",
            )
        yield from validators.divides(f"{at}.groups", self.groups, self.experts, f"{at}.experts")
        yield from validators.divides(f"{at}.top_groups", self.top_groups, self.top_k, f"{at}.top_k")
        if self.top_groups > self.groups >= 1:
            yield Problem(
                field=f"{at}.top_groups",
                value=self.top_groups,
                rule=f"there are only {at}.groups ({self.groups}) to choose from",
                remedy=f"1 to {self.groups}",
            )
        elif self.groups > 1 and self.top_groups >= 1 and self.experts % self.groups == 0:
            in_reach = self.experts // self.groups * self.top_groups
            if self.top_k > in_reach:
                yield Problem(
                    field=f"{at}.top_groups",
                    value=self.top_groups,
                    rule=f"so many groups hold {in_reach} experts, fewer than {at}.top_k ({self.top_k})",
                    remedy=f"more groups, or {at}.top_k to {in_reach} or less",
                )

    def _score_problems(self, at: str) -> Iterator[Problem]:
        """What scores, probabilities and biases need of one another."""
        if self.softmax_after_top_k and self.score != "softmax":
            yield Problem(
                field=f"{at}.softmax_after_top_k",
                value=True,
                rule=f"there is no softmax: {at}.score is {self.score}",
                remedy=f"False, or {at}.score to softmax",
            )
        elif self.softmax_after_top_k and self.top_k == 1:
            yield Problem(
                field=f"{at}.softmax_after_top_k",
                value=True,
                rule="the softmax of one logit is always 1, so the router has no gradient where top_k is 1",
                remedy=f"False with {at}.normalize_top_k False, or {at}.top_k above 1",
            )
        elif self.normalize_top_k and self.top_k == 1:
            yield Problem(
                field=f"{at}.normalize_top_k",
                value=True,
                rule="one score divided by itself is always 1, so the router has no gradient where top_k is 1",
                remedy=f"False, or {at}.top_k above 1",
            )
        if self.selection_bias and self.score == "softmax":
            yield Problem(
                field=f"{at}.selection_bias",
                value=True,
                rule="needs scores that do not depend on one another, which softmax has not",
                remedy=f"False, or {at}.score to sigmoid or sqrt_softplus",
            )

    def _routing_problems(self, at: str) -> Iterator[Problem]:
        """What the best scores can be combined with, and other ways of choosing cannot."""
        if self.routing == "top_k":
            return
        unused: tuple[tuple[str, object, object], ...] = (
            ("groups", self.groups, 1),
            ("selection_bias", self.selection_bias, False),
        )
        if self.routing == "sinkhorn":
            unused += tuple((name, getattr(self, name), 0.0) for name in BALANCE_LOSSES)
            unused += (("capacity_factor", self.capacity_factor, None),)
        for name, value, off in unused:
            if value != off:
                yield Problem(
                    field=f"{at}.{name}",
                    value=value,
                    rule=f"cannot be combined with {at}.routing {self.routing}, which spreads tokens by itself",
                    remedy=f"{off}, or {at}.routing to top_k",
                )

    def _capacity_problems(self, at: str) -> Iterator[Problem]:
        if self.capacity_factor is not None:
            yield from validators.above(f"{at}.capacity_factor", self.capacity_factor, 0)
        elif self.pad_to_capacity:
            yield Problem(
                field=f"{at}.pad_to_capacity",
                value=True,
                rule=f"there is no capacity: {at}.capacity_factor is None",
                remedy=f"False, or {at}.capacity_factor to 1.0 or more",
            )


BALANCE_LOSSES = ("aux_loss", "sequence_aux_loss", "global_aux_loss")
"""The fields of `Moe` that weigh load-balancing losses."""


@dataclass(frozen=True, kw_only=True)
class HyperConnections:
    """Several residual streams, with manifold-constrained hyper-connections around every layer."""

    streams: int = 4
    """Streams; a layer reads a sum of them and writes to each."""
    sinkhorn_steps: int = 20
    """Steps towards mixing matrices whose rows and columns add up to 1."""
    eps: float = 1e-6
    """Added to what has to stay positive: weights of the sum, entries and sums of the mixing matrices."""
    exit: Literal["learned", "mean"] = "learned"
    """How streams become one before the head: a sum with weights of each token, or their mean."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("streams", "sinkhorn_steps"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from validators.above(f"{at}.eps", self.eps, 0)


SHAPE_OF = (
    (Kind.ATTENTION, "attention"),
    (Kind.LATENT_ATTENTION, "latent_attention"),
    (Kind.MAMBA2, "mamba2"),
    (Kind.DELTA_NET, "delta_net"),
    (Kind.MLP, "mlp"),
    (Kind.MOE, "moe"),
)
"""The field of `Model` that holds the shape of each kind of layer; a kind without one cannot be built."""


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
    hyper: HyperConnections | None = None
    """Residual streams and what connects them with the layers; None for one stream."""

    @property
    def stream(self) -> tuple[int, ...]:
        """Sizes of what a token has between layers: channels, or streams of channels."""
        return (self.hidden,) if self.hyper is None else (self.hyper.streams, self.hidden)

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.hidden", self.hidden, 1)
        yield from validators.at_least(f"{at}.vocab", self.vocab, 2)
        yield from validators.above(f"{at}.norm_eps", self.norm_eps, 0)
        yield from validators.above(f"{at}.init_std", self.init_std, 0)
        yield from validators.share(f"{at}.dropout", self.dropout)
        yield from validators.at_least(f"{at}.mtp_loss", self.mtp_loss, 0)
        for _, name in SHAPE_OF:
            layer = getattr(self, name)
            if layer is not None:
                yield from layer.problems(f"{at}.{name}")
        if self.hyper is not None:
            yield from self.hyper.problems(f"{at}.hyper")
