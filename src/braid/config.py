"""A run as data: `Run` and its parts, the way it is written to JSON, and what differs between two runs.

Every value here is a choice that somebody makes. Whatever follows from the choices is computed by
`braid.plan`, after all overrides are in, so that nothing derived can go stale. A recipe is a function
that returns a `Run`; the command line can set any field of it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from braid import validators
from braid.architecture import Model
from braid.choices import DispatcherName, Dtype, Recompute, Strategy
from braid.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on."""

    sources: tuple[str, ...] = ()
    """Folders made by `braid data build`, or Megatron .bin/.idx prefixes. None: Python's standard library."""
    weights: tuple[float, ...] = ()
    """Share of samples from each source; none: in proportion to their tokens."""
    validation: tuple[str, ...] = ()
    """Sources to evaluate on; none: the validation part beside each source, where there is one."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json (extra `hf`); must be the one the sources were built with."""
    sequence_tokens: int = 512
    """Tokens in one sample."""
    packing: Literal["concatenate", "documents"] = "concatenate"
    """concatenate: documents are joined and cut into samples. documents: whole ones, padded (fine-tuning)."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.sequence_tokens", self.sequence_tokens, 1)
        if self.weights and len(self.weights) != len(self.sources):
            yield Problem(
                field=f"{at}.weights",
                value=self.weights,
                rule=f"needs one weight for each of the {len(self.sources)} in {at}.sources",
                remedy=f"{len(self.sources)} weights, or none",
            )
        for place, weight in enumerate(self.weights):
            yield from validators.above(f"{at}.weights[{place}]", weight, 0)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine falls at once; wsd stays at the peak and falls linearly at the end."""
    warmup_steps: int = 0
    """Steps over which the rate rises from 0 to its peak."""
    decay_steps: int = 0
    """wsd: how many of the last steps the rate falls for."""
    final_lr_share: float = 0.1
    """The last step's rate as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Gradients longer than this are scaled down to it; 0 does not clip."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.above(f"{at}.lr", self.lr, 0)
        yield from validators.above(f"{at}.eps", self.eps, 0)
        for name, value in (("warmup_steps", self.warmup_steps), ("decay_steps", self.decay_steps)):
            yield from validators.at_least(f"{at}.{name}", value, 0)
        for name, amount in (("weight_decay", self.weight_decay), ("clip", self.clip)):
            yield from validators.at_least(f"{at}.{name}", amount, 0)
        yield from validators.share(f"{at}.final_lr_share", self.final_lr_share, one_allowed=True)
        for place, beta in enumerate(self.betas):
            yield from validators.share(f"{at}.betas[{place}]", beta)
        if self.schedule == "wsd" and self.decay_steps == 0:
            yield Problem(
                field=f"{at}.decay_steps",
                value=0,
                rule=f"{at}.schedule wsd falls over the last steps and must know how many",
                remedy="1 or more",
            )


LONGEST_STALL_S = 1_000_000
"""Eleven days: whoever waits longer does not watch."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at a time, in which arithmetic."""

    steps: int
    """Optimizer steps."""
    batch_samples: int
    """Samples in one step, over all ranks and micro-batches."""
    micro_batches: int = 1
    """Micro-batches in one step; part of the run's meaning, the same on every topology."""
    seed: int = 0
    """Seed of initial weights, data order and random masks."""
    dtype: Dtype = "fp32"
    """Arithmetic of the model. bf16 keeps fp32 main parameters and optimizer state."""
    recompute: tuple[Recompute, ...] = ()
    """Activation checkpointing: what backward computes again instead of keeping it: norms, activations of MLPs,
    cores of mixers, MLPs of experts, hyper-connections, whole blocks, all of these. Changes no result."""
    recompute_span: int = 0
    """Blocks between residual streams that are kept, where hyper-connections are recomputed and whole blocks
    are not; 0 for as many as hold the least. Changes nothing elsewhere."""
    deterministic: bool = False
    """Whether to refuse kernels whose result depends on timing. CPU runs are deterministic anyway."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates once, at the end."""
    eval_samples: int = 64
    """Samples in one evaluation; 0 turns evaluation off."""
    log_every: int = 10
    """Steps between progress lines. metrics.jsonl holds every step."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves once, at the end. An interrupted run saves as well."""
    keep: int = 2
    """Checkpoints kept."""
    max_skipped: int = 5
    """Steps in a row that may be skipped because loss or gradients are not finite."""
    stall_timeout_s: float = 600.0
    """A rank that makes no progress for so many seconds ends the run, and all ranks report; 0 turns it off."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.seed(f"{at}.seed", self.seed)
        ones = ("steps", "batch_samples", "micro_batches", "log_every", "keep")
        zeros = ("recompute_span", "eval_every", "eval_samples", "save_every", "max_skipped")
        for low, names in ((1, ones), (0, zeros)):
            for name in names:
                yield from validators.at_least(f"{at}.{name}", typing.cast(float, getattr(self, name)), low)
        if self.stall_timeout_s != 0 and not 1 <= self.stall_timeout_s <= LONGEST_STALL_S:
            yield Problem(
                field=f"{at}.stall_timeout_s",
                value=self.stall_timeout_s,
                rule=f"is between 1 and {LONGEST_STALL_S:,} seconds, and longer than the longest op",
                remedy="600; 0 turns it off",
            )
        yield from validators.multiple_of(
            f"{at}.batch_samples", self.batch_samples, self.micro_batches, f"{at}.micro_batches"
        )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How ranks share the work; what tp, cp and pp leave over is data parallel. None of it changes a result."""

    tp: int = 1
    """Tensor parallel, with sequence parallel: ranks that share the heads and channels of dense layers, and the
    tokens between layers."""
    cp: int = 1
    """Context parallel: ranks that share the tokens of a sequence."""
    pp: int = 1
    """Pipeline parallel: ranks that share the blocks of the model."""
    ep: int = 1
    """Expert parallel: ranks that share the experts of a layer, out of all ranks of a pipeline stage."""
    etp: int = 1
    """Expert tensor parallel: ranks that share the ffn channels of an expert."""
    shard: Strategy = "all"
    """What data-parallel ranks share instead of copying it: nothing; the optimizer's state; gradients as well;
    weights as well."""
    replicate: int = 1
    """Copies of the shards: ranks share within a copy, and sum gradients between copies."""
    dispatcher: DispatcherName = "auto"
    """How tokens reach experts on other ranks."""
    schedule: Literal["auto", "dual_pipe_v"] = "auto"
    """In which order a pipeline works. auto: 1F1B, or interleaved where ranks hold several segments.
    dual_pipe_v: folded, two segments per rank, forwards of one beside backwards of the other, weight gradients
    where a rank would be idle; a smaller bubble."""
    overlap: bool = False
    """Whether tokens of one micro-batch travel to experts and back while another one computes: a step needs two
    at least. Takes the memory of one more micro-batch."""
    delay_weights: bool = False
    """With overlap: whether weight gradients wait until there is communication to hide behind them. With
    dual_pipe_v they always do."""
    late_weights: bool = False
    """With delay_weights: whether those of experts are added in two parts, the larger one a block later. In
    simulation it hides more where transfers take about as long as computation, and experts longer than mixers;
    less or nothing elsewhere; so it was on a GPU, by one part in a hundred either way. Holds memory of experts
    for longer."""
    paired_ends: bool = False
    """With overlap, without a pipeline: whether the first two forwards of a step run beside each other, and
    so do its last two backwards, which have nothing beside them otherwise. Takes the memory of one more
    micro-batch."""
    early_release: bool = False
    """With overlap: whether a backward's mixers come before the experts of the forward beside it, so that their
    memory is free earlier; less communication is hidden."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("tp", "cp", "pp", "ep", "etp", "replicate"):
            yield from validators.at_least(f"{at}.{name}", typing.cast(int, getattr(self, name)), 1)
        folded = self.schedule == "dual_pipe_v"
        for name, wrong in (
            ("delay_weights", self.delay_weights and not (self.overlap or folded)),
            ("early_release", self.early_release and not self.overlap),
            ("paired_ends", self.paired_ends and not self.overlap),
        ):
            if wrong:
                rule = f"only a schedule with {at}.overlap goes into phases that can be moved"
                yield Problem(field=f"{at}.{name}", value=True, rule=rule, remedy=f"{at}.overlap as well")
        if folded and self.pp == 1:
            rule = f"it folds a pipeline, and {at}.pp 1 is none"
            remedy = f"auto, or {at}.pp to 2 or more"
            yield Problem(field=f"{at}.schedule", value=self.schedule, rule=rule, remedy=remedy)
        if self.paired_ends and self.pp > 1:
            rule = f"with {at}.pp {self.pp}, the ends of a step wait for messages, not for experts alone"
            yield Problem(field=f"{at}.paired_ends", value=True, rule=rule, remedy=f"False, or {at}.pp to 1")
        if self.late_weights and not (self.delay_weights or folded):
            rule = f"without {at}.delay_weights, weight gradients do not wait"
            needed = f"{at}.delay_weights" if self.overlap else f"{at}.overlap and {at}.delay_weights"
            yield Problem(field=f"{at}.late_weights", value=True, rule=rule, remedy=f"{needed} as well")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is chosen about a run."""

    model: Model
    train: Train
    data: Data = Data()
    optim: Optim = Optim()
    mesh: Mesh = Mesh()

    def problems(self) -> Iterator[Problem]:
        """What is wrong with each part by itself, where every value has the type of its field."""
        for field in dataclasses.fields(self):
            yield from getattr(self, field.name).problems(field.name)


def type_problems(run: Run) -> Iterator[Problem]:
    """Values that are not what their fields are declared as; Python itself does not look."""
    yield from _type_problems(Run, run, "")


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields. Working them out takes longer than everything that is checked."""
    return types.MappingProxyType(typing.get_type_hints(kind))


def _type_problems(kind: Any, value: Any, at: str) -> Iterator[Problem]:
    if dataclasses.is_dataclass(kind) and isinstance(value, typing.cast(type, kind)):
        for name, hint in _hints(typing.cast(type, kind)).items():
            yield from _type_problems(hint, getattr(value, name), f"{at}.{name}" if at else name)
        return
    arms = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    inner = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
    if inner is not None and isinstance(value, typing.cast(type, inner)):
        yield from _type_problems(inner, value, at)
    elif not any(_fits(arm, value) for arm in arms):
        wanted = " or ".join(_named(arm) for arm in arms)
        yield Problem(field=at, value=value, rule=f"must be {wanted}", remedy=wanted)


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        arms = typing.get_args(kind)
        if not isinstance(value, tuple):
            return False
        kinds = [arms[0]] * len(value) if arms[-1] is Ellipsis else arms
        return len(kinds) == len(value) and all(_fits(k, v) for k, v in zip(kinds, value, strict=True))
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _named(kind: Any) -> str:
    """A type as a person calls it."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(word) for word in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a tuple of {_named(typing.get_args(kind)[0])}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    return "None" if kind is types.NoneType else words.get(kind, getattr(kind, "__name__", str(kind)))


# ------------------------------------------------------------------------------------------------ JSON


def flatten(value: Any, at: str = "") -> dict[str, Any]:
    """Every field of a run by its dotted name, as on the command line."""
    if not dataclasses.is_dataclass(value):
        return {at: value}
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        flat |= flatten(getattr(value, field.name), f"{at}.{field.name}" if at else field.name)
    return flat


def difference(before: Run, after: Run) -> dict[str, tuple[Any, Any]]:
    """The fields in which two runs differ, with both values; where one of them has fields of its own, and the
    other is None, that it is `set`."""
    old, new = flatten(before), flatten(after)

    def value(fields: Mapping[str, Any], name: str) -> Any:
        inner = any(field.startswith(f"{name}.") for field in fields)
        return "set" if inner else fields.get(name)

    return {
        name: (value(old, name), value(new, name))
        for name in {**old, **new}
        if value(old, name) != value(new, name) or (name in old) != (name in new)
    }


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain JSON values."""
    return dataclasses.asdict(run)


def from_json(data: Any) -> Run:
    """The run that `to_json` wrote, now or by an earlier braid: a field that came later has its default, with
    which runs do as they did without it. One that is unknown or of another type, or that cannot be missing, is
    an error."""
    run = _read(Run, data, "run")
    assert isinstance(run, Run)
    return run


def model_from_json(data: Any) -> Model:
    """The `model` of what `to_json` wrote, by the rules of `from_json`, whatever else the run says."""
    model = _read(Model, data, "run.model")
    assert isinstance(model, Model)
    return model


def _read(kind: Any, data: Any, at: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arm for arm in typing.get_args(kind) if arm is not types.NoneType)
        return None if data is None else _read(inner, data, at)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, at)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), data, at)
    if origin is Literal:
        if data not in typing.get_args(kind):
            raise ConfigError(f"{at} = {data!r}: must be one of {', '.join(typing.get_args(kind))}")
        return data
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise ConfigError(f"{at} = {data!r}: must be of type {kind.__name__}")
    return data


def _read_dataclass(kind: Any, data: Any, at: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{at} = {data!r}: must be an object with the fields of {kind.__name__}")
    hints = _hints(kind)
    for name in data:
        if name not in hints:
            raise ConfigError(f"{at}.{name} is not a field{validators.nearest(name, hints)}")
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in data:
            raise ConfigError(f"{at}.{field.name} is missing")
    return kind(**{name: _read(hints[name], value, f"{at}.{name}") for name, value in data.items()})


def _read_tuple(arms: tuple[Any, ...], data: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise ConfigError(f"{at} = {data!r}: must be a list")
    kinds = [arms[0]] * len(data) if arms[-1] is Ellipsis else list(arms)
    if len(kinds) != len(data):
        raise ConfigError(f"{at} = {data!r}: must have {len(kinds)} values")
    return tuple(
        _read(kind, item, f"{at}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
    )
