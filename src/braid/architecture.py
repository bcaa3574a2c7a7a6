"""Model architecture as data: one frozen dataclass per layer kind, and `Trunk` and `Model`, which contain them.

Does not import torch. `braid.nn` builds modules from these dataclasses, `braid.planning.plan` validates them.
Fields are independent settings; derived values are properties. `problems` checks a dataclass by itself; rules
between several of them are in the plan. Field docstrings are the help texts of the command line, one line each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from braid import validators
from braid.errors import Problem
from braid.pattern import Kind, Layer, parse
from braid.yarn import Yarn as Yarn

Activation = Literal["swiglu", "relu2", "gelu", "gelu_tanh"]
"""swiglu has gate and up projections; relu2 (squared ReLU), gelu (with erf) and gelu_tanh (its approximation)
have only an up projection."""


@dataclass(frozen=True, kw_only=True)
class Glu:
    """Parameters of a gated activation: gate · sigmoid(alpha · gate) · (up + offset).

    The defaults are SwiGLU; alpha 1.702 is quick-GeGLU; GPT-OSS uses alpha 1.702, limit 7, offset 1.
    """

    alpha: float = 1.0
    """Slope of the sigmoid."""
    limit: float | None = None
    """Clamp gate to at most limit and up to ± limit; None does not clamp."""
    offset: float = 0.0
    """Added to up after clamping."""

    def problems(self, at: str, activation: Activation) -> Iterator[Problem]:
        yield from validators.above(f"{at}.alpha", self.alpha, 0)
        if self.limit is not None:
            yield from validators.above(f"{at}.limit", self.limit, 0)
        yield from validators.finite(f"{at}.offset", self.offset)
        if activation != "swiglu" and self != Glu():
            yield Problem(
                field=at,
                value=self,
                rule=f"applies to gated activations, but {activation} has no gate",
                remedy="alpha 1, no limit and offset 0, or set the activation to swiglu",
            )


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention (GQA), the layer `*`."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads; each is shared by heads / kv_heads query heads."""
    head_dim: int
    """Channels per head."""
    positions: Literal["rope", "none"] = "rope"
    """Position encoding: rotary (RoPE), or none (NoPE)."""
    rope_base: float = 10_000.0
    """RoPE base (theta)."""
    rope_fraction: float = 1.0
    """Fraction of the channels of a head that are rotated (the first ones)."""
    rope_scaling: Yarn | None = None
    """Context extension; None for none."""
    window: int | None = None
    """Sliding window: a token attends to itself and the window - 1 tokens before it. None: full attention."""
    window_pattern: str = "S"
    """S (sliding window) or L (long: full attention) for each attention layer in turn, repeated as needed."""
    sinks: bool = False
    """Attention sinks: a learned logit per query head in the denominator of the softmax (GPT-OSS)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, before RoPE."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Channels that qk_norm normalizes together: those of each head, or those of all heads (OLMo)."""
    bias: bool = False
    """Biases on all projections; `o_bias` may make an exception of the output projection."""
    o_bias: bool | None = None
    """Bias on the output projection; None: like `bias`."""
    scale: float | None = None
    """Factor on the attention scores, before the softmax; None: head_dim ** -0.5."""
    gate: bool = False
    """Output gate: multiply the attention output by the sigmoid of a separate projection."""

    @property
    def rope_dim(self) -> int:
        """Rotated channels per head."""
        return int(self.head_dim * self.rope_fraction)

    def of_layer(self, nth: int) -> Attention:
        """The shape of the model's attention layer `nth` (`pattern.Layer.nth`): its own window, or none."""
        sliding = self.window_pattern[nth % len(self.window_pattern)] == "S"
        return replace(self, window=self.window if sliding else None, window_pattern="S")

    @property
    def has_o_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias if self.o_bias is None else self.o_bias

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores, before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def problems(self, at: str) -> Iterator[Problem]:
        for name, value in (("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim)):
            yield from validators.at_least(f"{at}.{name}", value, 1)
        yield from validators.divides(f"{at}.kv_heads", self.kv_heads, self.heads, f"{at}.heads")
        yield from validators.above(f"{at}.rope_base", self.rope_base, 0 if self.rope_scaling is None else 1)
        bad_fraction = list(validators.fraction(f"{at}.rope_fraction", self.rope_fraction, one_allowed=True))
        if bad_fraction:
            yield from bad_fraction
        elif self.positions == "rope" and self.rope_fraction == 1:
            yield from validators.multiple_of(f"{at}.head_dim", self.head_dim, 2)
        elif self.positions == "rope" and (self.rope_dim < 2 or self.rope_dim % 2):
            yield Problem(
                field=f"{at}.rope_fraction",
                value=self.rope_fraction,
                rule=f"must select an even number of channels, not {self.rope_dim} of {self.head_dim}",
                remedy=f"n / {self.head_dim} with an even n",
            )
        if self.rope_scaling is not None:
            yield from self.rope_scaling.problems(f"{at}.rope_scaling")
        if self.window is not None:
            yield from validators.at_least(f"{at}.window", self.window, 1)
        if "S" not in self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            yield Problem(
                field=f"{at}.window_pattern",
                value=self.window_pattern,
                rule="must be a text of S (sliding window) and L (full attention) with at least one S",
                remedy=f"S for a window in every layer; {at}.window to None for full attention in every layer",
            )
        elif self.window is None and "L" in self.window_pattern:
            yield Problem(
                field=f"{at}.window_pattern",
                value=self.window_pattern,
                rule=f"there is no window to give to some layers: {at}.window is None",
                remedy=f"S, or {at}.window to a number of tokens",
            )
        if self.scale is not None:
            yield from validators.above(f"{at}.scale", self.scale, 0)
        if not self.qk_norm:
            rule, otherwise = f"there is no norm: {at}.qk_norm is False", f"{at}.qk_norm to True"
            over = f"{at}.qk_norm_over"
            yield from validators.must_be(over, self.qk_norm_over, "head", rule=rule, otherwise=otherwise)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA, DeepSeek-V2), the layer `+`: keys and values are projected from a small
    latent vector. RoPE rotates channels i and i + rope_dim / 2 together, as everywhere in braid; DeepSeek's
    checkpoints interleave the two."""

    heads: int
    """Query, key and value heads."""
    q_rank: int | None
    """Rank of the query latent; None projects queries from the hidden channels."""
    kv_rank: int
    """Rank of the key-value latent, which is what the KV cache stores."""
    nope_dim: int
    """Channels of a query or key head without RoPE."""
    rope_dim: int
    """Channels of a query or key head with RoPE; those of the key are shared by all heads."""
    v_dim: int
    """Channels of a value head."""
    rope_base: float = 10_000.0
    """RoPE base (theta)."""
    rope_scaling: Yarn | None = None
    """Context extension; None for none."""
    norm_eps: float | None = None
    """Epsilon of the norms of the latents; None: that of the model's other norms."""

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores, before the softmax."""
        yarn_scale = 1.0 if self.rope_scaling is None else self.rope_scaling.score_scale
        return (self.nope_dim + self.rope_dim) ** -0.5 * yarn_scale

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        if self.q_rank is not None:
            yield from validators.at_least(f"{at}.q_rank", self.q_rank, 1)
        if self.norm_eps is not None:
            yield from validators.above(f"{at}.norm_eps", self.norm_eps, 0)
        yield from validators.multiple_of(f"{at}.rope_dim", self.rope_dim, 2)
        yield from validators.above(f"{at}.rope_base", self.rope_base, 0 if self.rope_scaling is None else 1)
        if self.rope_scaling is not None:
            yield from self.rope_scaling.problems(f"{at}.rope_scaling")


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 state-space mixer (SSD), the layer `M`."""

    heads: int
    """Heads, each with its own decay."""
    head_dim: int
    """Channels per head; the inner dimension is heads x head_dim."""
    state: int
    """State size: the recurrent state of a head is head_dim x state."""
    groups: int = 1
    """Groups of heads that share B and C."""
    conv: int = 4
    """Kernel size of the causal convolution."""
    dt_min: float = 0.0
    """Lower bound of the time step dt = softplus(projection + bias)."""
    dt_max: float | None = None
    """Upper bound of the time step; None for none."""
    norm_per_group: bool = True
    """Gated RMSNorm over each group separately, instead of over all inner channels."""
    bias: bool = False
    """Biases on the projections."""
    conv_bias: bool = True
    """Bias on the convolution."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("heads", "head_dim", "state", "groups", "conv"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from validators.divides(f"{at}.groups", self.groups, self.heads, f"{at}.heads")
        yield from validators.at_least(f"{at}.dt_min", self.dt_min, 0)
        if self.dt_max is not None:
            yield from validators.above(f"{at}.dt_max", self.dt_max, self.dt_min)


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta net mixer, the layer `G`."""

    key_heads: int
    """Query and key heads."""
    value_heads: int
    """Value heads; value_heads / key_heads of them share a query and key head."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    conv: int = 4
    """Kernel size of the causal convolution."""
    negative_eigenvalues: bool = False
    """Step size beta in (0, 2) instead of (0, 1), so that state transitions may have negative eigenvalues."""
    gate_norm_eps: float | None = None
    """Epsilon of the norm before the output gate; None for that of the model."""

    def problems(self, at: str) -> Iterator[Problem]:
        if self.gate_norm_eps is not None:
            yield from validators.above(f"{at}.gate_norm_eps", self.gate_norm_eps, 0)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        yield from validators.divides(f"{at}.key_heads", self.key_heads, self.value_heads, f"{at}.value_heads")


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Dense feed-forward network, the layer `-`."""

    ffn: int
    """Intermediate channels."""
    activation: Activation = "swiglu"
    """Activation function."""
    glu: Glu = Glu()
    """Parameters of swiglu."""
    bias: bool = False
    """Biases on the projections."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.ffn", self.ffn, 1)
        yield from self.glu.problems(f"{at}.glu", self.activation)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture of experts, the layer `E`."""

    experts: int
    """Routed experts."""
    top_k: int
    """Routed experts per token."""
    ffn: int
    """Intermediate channels of each routed expert."""
    activation: Activation = "swiglu"
    """Activation function of routed and shared experts."""
    glu: Glu = Glu()
    """Parameters of swiglu."""
    bias: bool = False
    """Biases on the projections of routed experts."""
    latent: int = 0
    """Latent MoE: project tokens to this many channels before dispatch; 0 dispatches all hidden channels."""
    shared_ffn: int = 0
    """Intermediate channels of the shared expert; 0 for no shared expert."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    """Score function of the router."""
    softmax_after_top_k: bool = False
    """Apply the softmax to the selected logits only, after top-k."""
    normalize_top_k: bool = True
    """Normalize the selected scores to sum to 1."""
    scale: float = 1.0
    """Factor on the selected scores."""
    routing: Literal["top_k", "sinkhorn", "round_robin"] = "top_k"
    """Expert selection. sinkhorn balances scores over each sequence in training; round_robin: benchmarks."""
    groups: int = 1
    """Group-limited routing: number of expert groups."""
    top_groups: int = 1
    """Groups per token; a group's score is the sum of its top_k / top_groups best experts."""
    selection_bias: bool = False
    """Aux-loss-free balancing: a per-expert bias on the scores for selection, updated without a gradient."""
    selection_bias_rate: float = 1e-3
    """Update of a selection bias per step."""
    aux_loss: float = 0.01
    """Coefficient of the load-balancing loss per micro-batch; 0 disables."""
    sequence_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss per sequence."""
    global_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over all micro-batches of the step so far."""
    z_loss: float = 0.0
    """Coefficient of the router z-loss, which keeps logits small."""
    capacity_factor: float | None = None
    """In training, drop tokens beyond this multiple of an expert's even share of a sequence. None: no drops."""
    drop: Literal["lowest_probability", "last_position"] = "lowest_probability"
    """Which tokens an expert over capacity drops."""
    pad_to_capacity: bool = False
    """Pad every expert to its capacity, so that shapes do not depend on the routing."""
    jitter: float = 0.0
    """In training, multiply the router's input by random factors from 1 - jitter to 1 + jitter."""
    router_dtype: Literal["input", "float32", "float64"] = "float32"
    """Dtype of the router logits; the dtype of the activations if that is wider."""
    router_bias: bool = False
    """A learned bias on the router logits (GPT-OSS); selection_bias is the one without a gradient."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("experts", "top_k", "ffn", "groups", "top_groups"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 1)
        for name in ("latent", "shared_ffn", "selection_bias_rate", *BALANCE_LOSSES, "z_loss"):
            yield from validators.at_least(f"{at}.{name}", getattr(self, name), 0)
        yield from validators.above(f"{at}.scale", self.scale, 0)
        yield from validators.fraction(f"{at}.jitter", self.jitter)
        yield from self.glu.problems(f"{at}.glu", self.activation)
        if not self.shared_ffn:
            rule, otherwise = "there is no shared expert to gate", f"{at}.shared_ffn above 0"
            gate = f"{at}.shared_gate"
            yield from validators.must_be(gate, self.shared_gate, False, rule=rule, otherwise=otherwise)
        yield from self._choice_problems(at)
        yield from self._score_problems(at)
        yield from self._routing_problems(at)
        yield from self._capacity_problems(at)

    def _choice_problems(self, at: str) -> Iterator[Problem]:
        """Rules for top_k, groups and top_groups."""
        if self.top_k > self.experts >= 1:
            yield Problem(
                field=f"{at}.top_k",
                value=self.top_k,
                rule=f"must not exceed {at}.experts ({self.experts})",
                remedy=f"1 to {self.experts}",
            )
        yield from validators.divides(f"{at}.groups", self.groups, self.experts, f"{at}.experts")
        yield from validators.divides(f"{at}.top_groups", self.top_groups, self.top_k, f"{at}.top_k")
        if self.top_groups > self.groups >= 1:
            yield Problem(
                field=f"{at}.top_groups",
                value=self.top_groups,
                rule=f"must not exceed {at}.groups ({self.groups})",
                remedy=f"1 to {self.groups}",
            )
        elif self.groups > 1 and self.top_groups >= 1 and self.experts % self.groups == 0:
            in_reach = self.experts // self.groups * self.top_groups
            if self.top_k > in_reach:
                yield Problem(
                    field=f"{at}.top_groups",
                    value=self.top_groups,
                    rule=f"the selected groups hold {in_reach} experts, fewer than {at}.top_k ({self.top_k})",
                    remedy=f"more groups, or {at}.top_k to {in_reach} or less",
                )

    def _score_problems(self, at: str) -> Iterator[Problem]:
        """Rules for score function, normalization and selection bias."""
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
                rule="the softmax of a single logit is always 1, so the router gets no gradient with top_k 1",
                remedy=f"False with {at}.normalize_top_k False, or {at}.top_k above 1",
            )
        elif self.normalize_top_k and self.top_k == 1:
            yield Problem(
                field=f"{at}.normalize_top_k",
                value=True,
                rule="a single normalized score is always 1, so the router gets no gradient with top_k 1",
                remedy=f"False, or {at}.top_k above 1",
            )
        if self.selection_bias and self.score == "softmax":
            yield Problem(
                field=f"{at}.selection_bias",
                value=True,
                rule="needs independent scores, but softmax scores depend on one another",
                remedy=f"False, or {at}.score to sigmoid or sqrt_softplus",
            )

    def _routing_problems(self, at: str) -> Iterator[Problem]:
        """Options that only top_k routing supports."""
        if self.routing == "top_k":
            return
        unused: tuple[tuple[str, object, object], ...] = (
            ("groups", self.groups, 1),
            ("selection_bias", self.selection_bias, False),
        )
        if self.routing == "sinkhorn":
            unused += tuple((name, getattr(self, name), 0.0) for name in BALANCE_LOSSES)
            unused += (("capacity_factor", self.capacity_factor, None),)
        rule = f"cannot be combined with {at}.routing {self.routing}, which balances tokens itself"
        otherwise = f"{at}.routing to top_k"
        for name, value, off in unused:
            yield from validators.must_be(f"{at}.{name}", value, off, rule=rule, otherwise=otherwise)

    def _capacity_problems(self, at: str) -> Iterator[Problem]:
        if self.capacity_factor is not None:
            yield from validators.above(f"{at}.capacity_factor", self.capacity_factor, 0)
        else:
            rule = f"there is no capacity: {at}.capacity_factor is None"
            otherwise, padded = f"{at}.capacity_factor to 1.0 or more", f"{at}.pad_to_capacity"
            yield from validators.must_be(padded, self.pad_to_capacity, False, rule=rule, otherwise=otherwise)


BALANCE_LOSSES = ("aux_loss", "sequence_aux_loss", "global_aux_loss")
"""Fields of `Moe` with the coefficients of load-balancing losses."""


@dataclass(frozen=True, kw_only=True)
class HyperConnections:
    """Manifold-constrained hyper-connections (mHC): several residual streams, mixed around every layer."""

    streams: int = 4
    """Residual streams; a layer reads a weighted sum of them and writes to each."""
    sinkhorn_steps: int = 20
    """Sinkhorn iterations that make the mixing matrices doubly stochastic."""
    eps: float = 1e-6
    """Added to input weights and to entries and sums of the mixing matrices, to keep them positive."""
    exit: Literal["learned", "mean"] = "learned"
    """How streams are merged before the head: a learned per-token weighted sum, or the mean."""

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
"""The field of `Trunk` with the shape of each kind of layer; kinds that are not listed are not implemented."""


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """A pattern of layers around a residual stream: what language models and encoders have in common."""

    pattern: str
    """Layer pattern, for example [M-][*E]; see `braid pattern --help`."""
    hidden: int
    """Hidden size: channels of the residual stream."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm of every layer, and before the head."""
    norm_position: Literal["pre", "post", "attention_post"] = "pre"
    """Norm a layer's input, its output, or outputs for attention and the MLP or MoE after it (OLMo Hybrid)."""
    norm_eps: float = 1e-5
    """Epsilon of every norm, added to the variance."""
    residual_scale: float = 1.0
    """Factor on the output of each layer, before it is added to the residual stream."""
    dropout: float = 0.0
    """Dropout on the output of each layer, before it is added to the residual stream."""
    init_std: float = 0.02
    """Standard deviation of initial weights; init_std / sqrt(layers) for projections into the residual."""
    attention: Attention | None = None
    """Required if the pattern has `*`."""
    latent_attention: LatentAttention | None = None
    """Required if the pattern has `+`."""
    mamba2: Mamba2 | None = None
    """Required if the pattern has `M`."""
    delta_net: DeltaNet | None = None
    """Required if the pattern has `G`."""
    mlp: Mlp | None = None
    """Required if the pattern has `-`."""
    moe: Moe | None = None
    """Required if the pattern has `E`."""
    hyper: HyperConnections | None = None
    """Hyper-connections; None for a plain residual stream."""

    @property
    def causal(self) -> bool:
        """Whether attention sees no token after its query."""
        return True

    @property
    def final_norm(self) -> bool:
        """Whether there is a norm behind the last layer."""
        return True

    @property
    def layer_scale(self) -> float | None:
        """LayerScale: initial value of a learned factor per channel on the output of each layer; None: none."""
        return None

    @property
    def stream(self) -> tuple[int, ...]:
        """Shape of a token's residual stream: (hidden,), or (streams, hidden)."""
        return (self.hidden,) if self.hyper is None else (self.hyper.streams, self.hidden)

    def has_post_norm(self, layer: Layer) -> bool:
        """Whether the norm of a layer stands after it. An MLP or MoE belongs to the nearest mixer before it,
        however the pattern groups them."""
        if self.norm_position != "attention_post":
            return self.norm_position == "post"
        layout = parse(self.pattern)
        layers = layout.layers if layer.depth is None else layout.mtp[layer.depth].layers
        mixers = [each.kind for each in layers if each.kind.is_mixer and each.number <= layer.number]
        return bool(mixers) and mixers[-1] in (Kind.ATTENTION, Kind.LATENT_ATTENTION)

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.hidden", self.hidden, 1)
        yield from validators.above(f"{at}.norm_eps", self.norm_eps, 0)
        for name in ("residual_scale", "init_std"):
            yield from validators.above(f"{at}.{name}", getattr(self, name), 0)
        yield from validators.fraction(f"{at}.dropout", self.dropout)
        for _, name in SHAPE_OF:
            layer = getattr(self, name)
            if layer is not None:
                yield from layer.problems(f"{at}.{name}")
        if self.hyper is not None:
            yield from self.hyper.problems(f"{at}.hyper")
            scale, position, otherwise = f"{at}.residual_scale", f"{at}.norm_position", f"{at}.hyper to None"
            rule = "hyper-connections weight the output of each layer themselves"
            yield from validators.must_be(scale, self.residual_scale, 1, rule=rule, otherwise=otherwise)
            rule = "hyper-connections are defined around layers that norm their input"
            yield from validators.must_be(position, self.norm_position, "pre", rule=rule, otherwise=otherwise)


@dataclass(frozen=True, kw_only=True)
class Model(Trunk):
    """A decoder-only language model: embedding, a pattern of layers, head."""

    vocab: int
    """Vocabulary size."""
    tied: bool = True
    """Tie the weights of the head and the embedding."""
    embedding_scale: float = 1.0
    """Factor on token embeddings, those that MTP depths read included."""
    logits_scale: float = 1.0
    """Divisor of the logits."""
    mtp_loss: float = 0.1
    """Coefficient of the multi-token-prediction loss, averaged over the MTP depths."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from super().problems(at)
        yield from validators.at_least(f"{at}.vocab", self.vocab, 2)
        for name in ("embedding_scale", "logits_scale"):
            yield from validators.above(f"{at}.{name}", getattr(self, name), 0)
        yield from validators.at_least(f"{at}.mtp_loss", self.mtp_loss, 0)
