"""Run configuration: `Run` and its parts (data, optimizer, training, mesh), validation, JSON, and diffs.

The configuration holds independent settings only. Derived values are computed by `braid.plan`, after all
overrides are applied, so they cannot become stale. A recipe is a function that returns a `Run`; every field is
also a command-line option, and the docstring below it is its help text. tyro keeps the line breaks of these
docstrings, so each is a single line.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from braid import json_fields, lora, validators
from braid.architecture import Model
from braid.choices import (
    AUTO,
    MADE_UP,
    DispatcherName,
    Dtype,
    Graphs,
    Offload,
    Recompute,
    SpikePolicy,
    Strategy,
    kernel_modes,
    recomputed,
)
from braid.encoders import Encoder
from braid.errors import ConfigError, Problem
from braid.json_fields import JsonProblem, field_types
from braid.lora import Lora as Lora
from braid.optimizer import Optim as Optim
from braid.precision import precision_of
from braid.schedule import offload_times

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and validation data."""

    sources: tuple[str, ...] = ()
    """Folders from `braid data build`, or Megatron .bin/.idx prefixes. Empty: the corpus below."""
    corpus: Literal["python", "digits"] = "python"
    """Without sources: Python's standard library, or strips of handwritten digits (scikit-learn, Pillow)."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each source. Empty: proportional to tokens."""
    validation: tuple[str, ...] = ()
    """Validation sources. Empty: the validation split of each source, if it has one."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json (package tokenizers). Must match that of the sources."""
    sequence_tokens: int = 512
    """Sequence length in tokens."""
    packing: Literal["concatenate", "documents"] = "concatenate"
    """concatenate: join documents and split into sequences. documents: whole, padded (fine-tuning)."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.sequence_tokens", self.sequence_tokens, 1)
        if self.weights and len(self.weights) != len(self.sources):
            yield Problem(
                field=f"{at}.weights",
                value=self.weights,
                rule=f"must have one weight for each of the {len(self.sources)} in {at}.sources",
                remedy=f"{len(self.sources)} weights, or none",
            )
        for place, weight in enumerate(self.weights):
            yield from validators.above(f"{at}.weights[{place}]", weight, 0)


MAX_INT = 2**63
MAX_SPIKE_WINDOW = 10_000

MAX_STALL_TIMEOUT_S = 1_000_000
"""Eleven days. A larger value is a mistake: 0 turns the watchdog off."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Steps, batch size, precision, recompute, evaluation and checkpointing."""

    steps: int
    """Optimizer steps."""
    batch_samples: int
    """Global batch size: samples per step, over all ranks and micro-batches."""
    micro_batches: int = 1
    """Micro-batches per step (gradient accumulation), independent of the parallel layout."""
    seed: int = 0
    """Seed of weight initialization, data order and dropout."""
    dtype: Dtype = "fp32"
    """Compute dtype. bf16 keeps fp32 main parameters and optimizer state."""
    recompute: tuple[Recompute, ...] = ()
    """Activation checkpointing: regions to recompute in backward. Does not change results."""
    recompute_span: int = 0
    """Recompute of hyper-connections: blocks between saved residual streams; 0 minimizes memory."""
    offload: float | Literal["auto"] = 0.0
    """Offload: share of the blocks, 0 to 1, whose activations wait in host memory; auto: what costs no time."""
    offload_regions: tuple[Offload, ...] = ()
    """Offload of these blocks only what recompute of these regions would drop; empty for all that they save."""
    offload_times: tuple[str, ...] = ()
    """Microseconds that place its copies: `[*E]=FORWARD,BACKWARD,OUT,BACK`; empty: those of a known device."""
    kernels: tuple[str, ...] = ("auto",)
    """Kernels: `auto`, `reference` (plain PyTorch) or `fused` (an error if there is none), for all ops or one:
    `auto ssd=reference`."""
    precision: tuple[str, ...] = ()
    """fp8 products: `fp8_block`, `fp8_row` or `mxfp8`; also by kind (docs/precision.md)."""
    graphs: Graphs = "none"
    """CUDA graphs: `step` captures forward and backward of micro-batches, where the host decides nothing."""
    lora: Lora = Lora()
    """Train adapters of low rank beside frozen weights (docs/lora.md)."""
    deterministic: bool = False
    """Use only deterministic kernels. CPU runs are always deterministic."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_samples: int = 64
    """Samples per evaluation; 0 disables evaluation."""
    exact_match: bool = False
    """Report how many answers of validation documents greedy decoding gets exactly right (fine-tuning)."""
    log_every: int = 10
    """Steps between progress lines. metrics.jsonl records every step."""
    sample_every: int = 0
    """Steps between samples of generated text, which go to samples.jsonl; 0 disables them."""
    sample_tokens: int = 64
    """Tokens of a sample."""
    sample_prompts: tuple[str, ...] = ()
    """What samples begin with. Empty: a prompt of the data."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only at the end. An interrupted run saves one as well."""
    keep: int = 2
    """Number of checkpoints to keep."""
    async_save: bool = True
    """Write checkpoints beside training, from a copy in host memory; the last one of a run, synchronously."""
    memory_save_every: int = 0
    """Steps between checkpoints in memory, each replicated on another machine, for restarts; 0: none."""
    max_skipped: int = 5
    """Consecutive steps that may be skipped for a non-finite loss or gradient before the run fails."""
    check_copies_every: int = 100
    """Steps between checks that ranks which hold the same weights agree on them to the bit; 0 disables."""
    spikes: SpikePolicy = "warn"
    """Steps whose gradient norm or loss is spike_sigma above those before: ignore, warn, or skip the update."""
    spike_sigma: float = 6.0
    """Standard deviations above the mean of the last spike_window steps that make a spike."""
    spike_window: int = 128
    """Steps that a spike is compared with. There are no spikes before half of them are done."""
    stall_timeout_s: float = 600.0
    """Watchdog: abort the run if a rank makes no progress for this many seconds; 0 disables."""

    @property
    def offload_share(self) -> float:
        """`offload`; 0 as long as no device has decided."""
        return 0.0 if self.offload == AUTO else self.offload

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.seed(f"{at}.seed", self.seed)
        yield from self.lora.problems(f"{at}.lora")
        positive = ("steps", "batch_samples", "micro_batches", "log_every", "sample_tokens", "keep")
        every = ("eval_every", "save_every", "memory_save_every", "sample_every", "check_copies_every")
        non_negative = ("recompute_span", "eval_samples", "max_skipped", *every)
        for low, names in ((1, positive), (0, non_negative)):
            for name in names:
                yield from validators.at_least(f"{at}.{name}", typing.cast(float, getattr(self, name)), low)
        yield from validators.above(f"{at}.spike_sigma", self.spike_sigma, 0)
        if not 0 <= self.offload_share <= 1:
            rule = "must be a share of the blocks of each stage, from 0 to 1"
            yield Problem(
                field=f"{at}.offload", value=self.offload, rule=rule, remedy="0.25, auto, or 0 for none"
            )
        both = [name for name in self.offload_regions if name in recomputed(self.recompute)]
        whole = not {"block", "full"}.isdisjoint(self.recompute)
        if both or (whole and self.offload_regions):
            rule = f"what is recomputed is not offloaded: train.recompute has {' '.join(self.recompute)}"
            remedy = "regions that are not recomputed, or none, to offload what recompute leaves"
            yield Problem(field=f"{at}.offload_regions", value=self.offload_regions, rule=rule, remedy=remedy)
        elif self.offload_regions and not self.offload:
            rule = "needs train.offload, the share of the blocks whose regions are offloaded"
            remedy = "train.offload 1 for all blocks, or no regions"
            yield Problem(field=f"{at}.offload_regions", value=self.offload_regions, rule=rule, remedy=remedy)
        try:
            offload_times.parsed(self.offload_times)
        except ValueError as error:
            rule, remedy = str(error), "the words of `braid plan --cluster NAME`, or none"
            yield Problem(field=f"{at}.offload_times", value=self.offload_times, rule=rule, remedy=remedy)
        if not 2 <= self.spike_window <= MAX_SPIKE_WINDOW:
            yield Problem(
                field=f"{at}.spike_window",
                value=self.spike_window,
                rule=f"must be from 2 to {MAX_SPIKE_WINDOW:,} steps, all of which a checkpoint stores",
                remedy="128, or train.spikes off",
            )
        for setting in self.kernels:
            try:
                kernel_modes([setting])
            except ValueError as error:
                yield Problem(field=f"{at}.kernels", value=setting, rule=str(error), remedy="auto")
        for setting in self.precision:
            try:
                precision_of([setting])
            except ValueError as error:
                yield Problem(field=f"{at}.precision", value=setting, rule=str(error), remedy="fp8_block")
        if self.stall_timeout_s != 0 and not 1 <= self.stall_timeout_s <= MAX_STALL_TIMEOUT_S:
            yield Problem(
                field=f"{at}.stall_timeout_s",
                value=self.stall_timeout_s,
                rule=f"must be from 1 to {MAX_STALL_TIMEOUT_S:,} seconds, and longer than the longest op",
                remedy="600, or 0 to disable the watchdog",
            )
        yield from validators.multiple_of(
            f"{at}.batch_samples", self.batch_samples, self.micro_batches, f"{at}.micro_batches"
        )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Parallel layout. dp is the number of ranks / (tp x cp x pp). The layout does not change results."""

    tp: int = 1
    """Tensor-parallel size, with sequence parallelism between layers."""
    cp: int = 1
    """Context-parallel size: ranks that split each sequence."""
    pp: int = 1
    """Pipeline-parallel size."""
    ep: int = 1
    """Expert-parallel size; ep x etp divides the ranks of a pipeline stage (tp x cp x dp)."""
    etp: int = 1
    """Expert-tensor-parallel size: ranks that split the ffn channels of each expert."""
    shard: Strategy = "all"
    """What data parallelism shards: optimizer state (ZeRO-1), + gradients (ZeRO-2), all (ZeRO-3, FSDP)."""
    replicate: int = 1
    """Hybrid sharding (HSDP): number of replicas; weights are sharded within each replica."""
    dispatcher: DispatcherName = "auto"
    """Collective that sends tokens to experts on other ranks."""
    schedule: Literal["auto", "dual_pipe_v"] = "auto"
    """Pipeline schedule. auto: 1F1B, or interleaved 1F1B with several segments per rank. Or DualPipeV."""
    overlap: bool = False
    """Overlap the all-to-all of one micro-batch with compute of another; keeps one more micro-batch live."""
    delay_weights: bool = False
    """With overlap: delay weight gradients to hide communication behind them (always with dual_pipe_v)."""
    # In simulation this hides more communication where transfers take about as long as compute and experts
    # longer than mixers, and less or nothing elsewhere; on a GPU the step time changed by 1 % either way.
    late_weights: bool = False
    """With delay_weights: run most of the expert weight gradients one block later; uses more memory."""
    paired_ends: bool = False
    """With overlap, pp 1: pair the first two forwards and last two backwards; one more micro-batch live."""
    early_release: bool = False
    """With overlap: run mixer backwards before expert forwards; frees memory earlier, hides less."""
    ranks: tuple[int, int] | None = None
    """The ranks of the job that hold the model: the first, and how many. None: all of them."""

    def problems(self, at: str) -> Iterator[Problem]:
        for name in ("tp", "cp", "pp", "ep", "etp", "replicate"):
            yield from validators.at_least(f"{at}.{name}", typing.cast(int, getattr(self, name)), 1)
        if self.ranks is not None:
            first, count = self.ranks
            yield from validators.at_least(f"{at}.ranks[0]", first, 0)
            yield from validators.at_least(f"{at}.ranks[1]", count, 1)
        dual_pipe_v = self.schedule == "dual_pipe_v"
        for name, wrong in (
            ("delay_weights", self.delay_weights and not (self.overlap or dual_pipe_v)),
            ("early_release", self.early_release and not self.overlap),
            ("paired_ends", self.paired_ends and not self.overlap),
        ):
            if wrong:
                rule = f"needs {at}.overlap, whose schedule consists of phases that can be reordered"
                yield Problem(field=f"{at}.{name}", value=True, rule=rule, remedy=f"{at}.overlap as well")
        if dual_pipe_v and self.pp == 1:
            rule = f"is a pipeline schedule, but {at}.pp is 1"
            remedy = f"auto, or {at}.pp to 2 or more"
            yield Problem(field=f"{at}.schedule", value=self.schedule, rule=rule, remedy=remedy)
        if self.paired_ends and self.pp > 1:
            rule = f"applies only without a pipeline, but {at}.pp is {self.pp}"
            yield Problem(field=f"{at}.paired_ends", value=True, rule=rule, remedy=f"False, or {at}.pp to 1")
        if self.late_weights and not (self.delay_weights or dual_pipe_v):
            rule = f"needs {at}.delay_weights"
            needed = f"{at}.delay_weights" if self.overlap else f"{at}.overlap and {at}.delay_weights"
            yield Problem(field=f"{at}.late_weights", value=True, rule=rule, remedy=f"{needed} as well")


ITEMS = ("image", *MADE_UP)
"""Where the items of a module may come from."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """An encoder on a grid of its own, whose rows take the places of placeholder tokens in the text."""

    model: Encoder
    """Its layers and projector."""
    token: int
    """The id of its placeholders. A text has one for every row of an item."""
    most_items: int = 1
    """Most items in a sample. A sample with more is an error."""
    most_patches: int
    """Most patches in a sample, over all its items: what memory is planned for."""
    items: str = ""
    """Where items come from: `image` of the data; `synthetic` or `tones`, which are made up. Empty: none."""
    mesh: Mesh = Mesh()
    """Parallel layout; `ranks` may be those of the language model, others, or some of them."""
    trained: tuple[str, ...] = ("*",)
    """What is trained: globs over the canonical tensor names of the module, such as `projector.*`."""
    lr_share: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Learning rates as shares of optim.lr, by the first glob that matches a tensor; 1 for all others."""
    ahead: int = 0
    """Most micro-batches ahead of the language model on shared ranks; 0: twice as many as are in flight."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from self.model.problems(f"{at}.model")
        yield from self.mesh.problems(f"{at}.mesh")
        for name, low in (("token", 0), ("most_items", 1), ("most_patches", 1), ("ahead", 0)):
            yield from validators.at_least(f"{at}.{name}", typing.cast(int, getattr(self, name)), low)
        for glob, share in self.lr_share.items():
            yield from validators.above(f"{at}.lr_share[{glob}]", share, 0)
        if self.items not in ("", *ITEMS):
            rule = "items are images of the data, or made up from the text"
            remedy = f"{', '.join(ITEMS[:-1])} or {ITEMS[-1]}"
            yield Problem(field=f"{at}.items", value=self.items, rule=rule, remedy=remedy)
        if self.items == "image" and self.model.pixels is None:
            rule = f"{at}.model.pixels says how images become patches, and there are none"
            yield Problem(field=f"{at}.items", value=self.items, rule=rule, remedy=f"{at}.model.pixels as well")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The complete configuration of a training run."""

    model: Model
    train: Train
    data: Data = Data()
    optim: Optim = Optim()
    mesh: Mesh = Mesh()
    trained: tuple[str, ...] = ("*",)
    """What is trained: globs over canonical tensor names, such as `blocks.3.* head.*`. The rest is frozen."""
    lr_share: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Learning rates as shares of optim.lr, by the first glob that matches a tensor; 1 for all others."""
    modules: Mapping[str, Module] = dataclasses.field(default_factory=dict, hash=False)
    """Encoders by name. `model` and `mesh` are those of the language model, which reads them."""

    @property
    def learned(self) -> tuple[str, ...]:
        """Globs of what is trained of the language model: adapters alone, with LoRA."""
        return lora.GLOBS if self.train.lora.rank else self.trained

    def problems(self) -> Iterator[Problem]:
        """Problems of each part by itself. Assumes that every value has the type of its field."""
        for name in ("model", "train", "data", "optim", "mesh"):
            yield from getattr(self, name).problems(name)
        for glob, share in self.lr_share.items():
            yield from validators.above(f"lr_share[{glob}]", share, 0)
        for name, module in self.modules.items():
            yield from module.problems(f"modules.{name}")
        if self.train.lora.rank and self.trained != ("*",):
            rule = "with train.lora the adapters are trained and nothing else of the language model"
            yield Problem(field="trained", value=self.trained, rule=rule, remedy="trained to *")
        if self.train.lora.rank and self.train.precision:
            rule = "adapters are not combined with products in low precision"
            remedy = "train.precision to nothing, or train.lora.rank to 0"
            yield Problem(field="train.precision", value=self.train.precision, rule=rule, remedy=remedy)
        if self.train.exact_match and self.data.packing != "documents":
            rule = "answers are those of whole documents, and data.packing is concatenate"
            yield Problem(field="train.exact_match", value=True, rule=rule, remedy="data.packing to documents")
        for name in [name for name, module in self.modules.items() if module.items == "image"][1:]:
            rule = "the images of the data are those of one module, and another has them already"
            yield Problem(field=f"modules.{name}.items", value="image", rule=rule, remedy="nothing")


def type_problems(run: Run) -> Iterator[Problem]:
    """Values whose type differs from the annotation of their field, which Python does not check."""
    yield from _type_problems(Run, run, "")


def _type_problems(kind: Any, value: Any, at: str) -> Iterator[Problem]:
    arms, part = _arms(kind)
    if part is not None and isinstance(value, part):
        for name, hint in field_types(part).items():
            yield from _type_problems(hint, getattr(value, name), f"{at}.{name}" if at else name)
    elif (origin := _origin(kind))[0] is Mapping and isinstance(value, Mapping):
        for name, each in value.items():
            yield from _type_problems(str, name, f"{at} key")
            yield from _type_problems(origin[1][1], each, _entry(at, name, each))
    elif type(value) is int and abs(value) >= MAX_INT and int in arms:
        rule = "must be a whole number of 64 bits"
        yield Problem(field=at, value=value, rule=rule, remedy="a smaller one")
    elif not any(_fits(arm, value) for arm in arms):
        expected = " or ".join(_type_name(arm) for arm in arms)
        yield Problem(field=at, value=value, rule=f"must be {expected}", remedy=expected)


@functools.cache
def _arms(kind: Any) -> tuple[tuple[Any, ...], type | None]:
    """The alternatives of a field type, and the one among them that is a dataclass."""
    arms = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    part = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
    return arms, typing.cast(type | None, part)


@functools.cache
def _origin(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _fits(kind: Any, value: Any) -> bool:
    origin, arms = _origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in arms
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [arms[0]] * len(value) if arms[-1] is Ellipsis else arms
        return len(kinds) == len(value) and all(_fits(k, v) for k, v in zip(kinds, value, strict=True))
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    arms = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arms)
    if typing.get_origin(kind) is tuple:
        if typing.get_origin(arms[0]) is Literal:
            return "a tuple of any of " + ", ".join(repr(choice) for choice in typing.get_args(arms[0]))
        count = "" if arms[-1] is Ellipsis else f"{len(arms)} "
        plurals = {int: "integers", float: "numbers", str: "strings"}
        return f"a tuple of {count}{plurals[arms[0]]}"
    if typing.get_origin(kind) is Mapping:
        values = {float: "numbers"}.get(arms[1], _type_name(arms[1]))
        return f"a mapping of names to {values}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
    return "None" if kind is types.NoneType else names.get(kind, getattr(kind, "__name__", str(kind)))


# ------------------------------------------------------------------------------------------------ JSON


def flatten(value: Any, at: str = "") -> dict[str, Any]:
    """Every field of a run by its dotted name, every number in a mapping by its key in brackets."""
    if isinstance(value, Mapping):
        return {
            name: each
            for key, part in value.items()
            for name, each in flatten(part, _entry(at, key, part)).items()
        }
    if not dataclasses.is_dataclass(value):
        return {at: value}
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        flat |= flatten(getattr(value, field.name), f"{at}.{field.name}" if at else field.name)
    return flat


def _entry(at: str, key: str, value: Any) -> str:
    """The name of an entry of a mapping: of a part with fields as on the command line, else in brackets, as its
    key may have dots."""
    return f"{at}.{key}" if dataclasses.is_dataclass(value) else f"{at}[{key}]"


def difference(before: Run, after: Run) -> dict[str, tuple[Any, Any]]:
    """The fields in which two runs differ, with both values. An optional part that only one of the runs has is
    listed as None and `set`."""
    old, new = flatten(before), flatten(after)

    def value(fields: Mapping[str, Any], name: str) -> Any:
        has_subfields = any(field.startswith(f"{name}.") for field in fields)
        return "set" if has_subfields else fields.get(name)

    return {
        name: (value(old, name), value(new, name))
        for name in {**old, **new}
        if value(old, name) != value(new, name) or (name in old) != (name in new)
    }


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain JSON values."""
    return {**dataclasses.asdict(run), "lr_share": dict(run.lr_share)}


def from_json(data: Any) -> Run:
    """The inverse of `to_json`, also for files of earlier versions: fields added since get their defaults,
    which preserve the old behaviour. Raises a `ConfigError` for an unknown field, a wrong type, or a missing
    required field, with all problems."""
    return _read(Run, _with_named_norms(data), "run")


def json_problems(data: Any) -> list[JsonProblem]:
    """What `from_json` would refuse."""
    return json_fields.read(Run, _with_named_norms(data), "run")[1]


def _read(kind: type[Part], data: Any, at: str) -> Part:
    value, problems = json_fields.read(kind, data, at)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    assert isinstance(value, kind)
    return value


def _with_named_norms(data: Any) -> Any:
    """The norm of a projector was once True or False: the norm of its encoder, or none."""
    match data:
        case {"modules": {} as modules}:
            return {**data, "modules": {name: _named_norm(module) for name, module in modules.items()}}
        case _:
            return data


def _named_norm(module: Any) -> Any:
    match module:
        case {"model": {"projector": {"norm": bool() as normed} as projector} as model}:
            named = {"norm": model.get("norm", "rms"), "norm_eps": model.get("norm_eps", 1e-5)}
            projector = projector | (named if normed else {"norm": "none"})
            return {**module, "model": {**model, "projector": projector}}
        case _:
            return module


def model_from_json(data: Any) -> Model:
    """The `model` field of a run's JSON, read like `from_json`; other fields are not validated."""
    return _read(Model, data, "run.model")


def encoder_from_json(data: Any, name: str) -> Encoder:
    """The same of a module."""
    return _read(Encoder, data, f"run.modules[{name}].model")
