"""Surgery on load: rules by which a new model begins from the weights of another one.

A rule is a pure function from the names and shapes of two models to the origin of each tensor of the new one: a
stored tensor, a box of one, computed values, or fresh from the seed. Rules are applied in the order of
`RULES`, whatever order they are given in. Nothing in this module needs torch; `state.load_origins` reads what
it plans, each rank its own part. docs/init.md describes the rules.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from braid.architecture import HyperConnections, Model, Trunk
from braid.errors import CheckpointError, ConfigError, first_of
from braid.model.names import MODULES, layer_name, layers_by_name, renamed, split_layer, split_module
from braid.pattern import Layer, Layout, parse

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of whole tensors, by canonical name."""

FRESH_BLOCK = "-"
"""In the argument of `blocks`: a block that the checkpoint does not have."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule as it is given: `untie`, `fresh:GLOB`."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


# --------------------------------------------------------------------------------------------- origins


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Drawn from the run's seed."""

    def __str__(self) -> str:
        return "fresh"


@dataclass(frozen=True, kw_only=True)
class Values:
    """Computed by a rule; one number stands for every entry."""

    numbers: tuple[float, ...]

    def __str__(self) -> str:
        shown = sorted(set(self.numbers))
        few = ", ".join(f"{number:.6g}" for number in shown[:4])
        return f"values {few}" + (", ..." if len(shown) > 4 else "")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stored tensor, or a box of it, which fills the beginning of the new one in every dim."""

    name: str
    offset: Shape | None = None
    """Where the box begins in the stored tensor; None for the beginning."""
    shape: Shape | None = None
    """Shape of the box; None for all of the stored tensor."""
    rest: Literal["fresh", "zeros"] = "fresh"
    """What the rest of the new tensor begins as."""

    def box(self, stored: Shapes) -> tuple[Shape, Shape]:
        """Offset and shape of the box."""
        shape = stored[self.name] if self.shape is None else self.shape
        return (0,) * len(shape) if self.offset is None else self.offset, shape

    def __str__(self) -> str:
        if self.shape is None:
            return self.name
        offset = (0,) * len(self.shape) if self.offset is None else self.offset
        spans = ", ".join(f"{start}:{start + size}" for start, size in zip(offset, self.shape, strict=True))
        return f"{self.name}[{spans}], rest {self.rest}"


FRESH = Fresh()
Origin = Fresh | Values | Stored


@dataclass(frozen=True, kw_only=True)
class InitPlan:
    """Where every tensor of a new model comes from."""

    origins: Mapping[str, Origin]
    """By canonical name of the new model."""
    dropped: frozenset[str] = frozenset()
    """Stored tensors that rules leave out."""
    notes: tuple[str, ...] = ()
    """Where rules change what the model computes."""

    def with_origins(
        self, origins: Mapping[str, Origin], dropped: frozenset[str] = frozenset(), notes: Sequence[str] = ()
    ) -> InitPlan:
        return InitPlan(
            origins={**self.origins, **origins},
            dropped=self.dropped | dropped,
            notes=(*self.notes, *notes),
        )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The model of a checkpoint and the one that starts from it. Tensors are those of all modules; `saved` and
    `chosen` are the language models."""

    saved: Model
    chosen: Model
    stored: Shapes
    wanted: Shapes
    rules: Sequence[Rule] = field(default=())
    modules: Mapping[str, tuple[Trunk, Trunk]] = field(default_factory=dict)
    """Modules that both have, with the settings of the checkpoint and those of the run."""

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return parse(self.saved.pattern), parse(self.chosen.pattern)

    @property
    def loaded(self) -> dict[str, tuple[Trunk, Trunk]]:
        """The same without modules that rules start afresh as a whole."""
        globs = [rule.argument for rule in self.rules if rule.name == "fresh"]
        afresh = {name for glob in globs for name in fnmatch.filter(self.wanted, glob)}
        kept = {split_module(name)[0] for name in self.wanted.keys() - afresh}
        return {name: models for name, models in self.modules.items() if f"{MODULES}{name}." in kept}

    def has(self, name: str) -> bool:
        return any(rule.name == name for rule in self.rules)


def plan_init(transfer: Transfer) -> InitPlan:
    """The origin of every tensor of the new model, by layer: brackets of the two patterns may differ."""
    sources = {"": _layer_sources(*transfer.layouts)}
    for module, models in transfer.modules.items():
        saved, chosen = (parse(model.pattern) for model in models)
        sources[f"{MODULES}{module}."] = _layer_sources(saved, chosen)
    origins = {}
    for name in transfer.wanted:
        prefix, own = split_module(name)
        origins[name] = Stored(name=prefix + renamed(own, sources.get(prefix, {})))
    planned = with_fresh_modules(InitPlan(origins=origins), transfer.stored)
    for name, apply in RULES.items():
        for rule in transfer.rules:
            if rule.name == name:
                before, planned = planned, apply(rule, transfer, planned)
                if planned == before and name in NO_EFFECT:
                    raise ConfigError(f"--init-rules {rule}: changes nothing: {NO_EFFECT[name]}; leave it out")
    return planned


def _layer_sources(saved: Layout, chosen: Layout) -> dict[str, str]:
    """For every layer of a new model, its name in the old one."""
    before = {_place(layer): layer for layer in _layers(saved)}
    return {
        # The name that the new layer would have in the old block: a kind that is not there shows as missing.
        layer_name(layer): layer_name(replace(layer, block=before[_place(layer)].block))
        for layer in _layers(chosen)
        if _place(layer) in before
    }


def with_fresh_modules(planned: InitPlan, stored: Shapes) -> InitPlan:
    """The plan, but modules of which nothing is stored are drawn from the seed; a note names each."""
    held = {"", *(split_module(name)[0] for name in stored)}
    modules = {name: split_module(name)[0] for name in planned.origins}
    absent = sorted(set(modules.values()) - held)
    notes = [f"{each.removesuffix('.')} starts fresh: the checkpoint has no such module" for each in absent]
    return planned.with_origins({name: FRESH for name, each in modules.items() if each in absent}, notes=notes)


def plan_by_name(wanted: Shapes) -> InitPlan:
    """Every tensor from the stored one of its name, for a checkpoint without settings."""
    return InitPlan(origins={name: Stored(name=name) for name in wanted})


def check_plan(
    source: str, planned: InitPlan, stored: Shapes, wanted: Shapes, *, hints: Sequence[str] = ()
) -> None:
    """Raise one error with every tensor that the checkpoint lacks, or that the plan has no use for, or whose
    shape differs: the first ones of each kind, and the number of further ones. `hints` end the message."""
    used = {origin.name for origin in planned.origins.values() if isinstance(origin, Stored)}
    extra = [f"extra    {name}" for name in sorted(stored.keys() - used - planned.dropped)]
    missing, shapes = [], []
    for name, origin in sorted(planned.origins.items()):
        if not isinstance(origin, Stored):
            continue
        if origin.name not in stored or origin.name in planned.dropped:
            missing.append(f"missing  {name}" + ("" if origin.name == name else f", from {origin.name}"))
            continue
        if _differs(name, planned, stored, wanted):
            has, wants = stored[origin.name], wanted[name]
            shapes.append(f"shape    {name}: has {list(has)}, wanted {list(wants)}")
    if count := len(missing) + len(extra) + len(shapes):
        lines = [line for kind in (missing, extra, shapes) for line in first_of(kind)]
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        raise CheckpointError("\n  ".join([f"{source} and the model differ in {tensors}", *lines, *hints]))


def _differs(name: str, planned: InitPlan, stored: Shapes, wanted: Shapes) -> bool:
    """Whether a tensor of the new model comes from one that is missing, dropped, or of another shape."""
    origin = planned.origins[name]
    if not isinstance(origin, Stored):
        return False
    if origin.name not in stored or origin.name in planned.dropped:
        return True
    has, wants = stored[origin.name], wanted[name]
    offset, shape = origin.box(stored)
    fits = origin.shape is not None and len(has) == len(shape) == len(wants)
    fits = fits and all(o + s <= h for o, s, h in zip(offset, shape, has, strict=True))
    fits = fits and all(s <= w for s, w in zip(shape, wants, strict=True))
    return not fits and has != wants


def accepting_rules(planned: InitPlan, stored: Shapes, wanted: Shapes) -> list[str]:
    """Rules that accept what `check_plan` rejects: missing tensors and those of another shape are fresh, extra
    ones are dropped. Numbers of blocks and experts are a * where that matches nothing else, and so is all of a
    module."""
    differing = {name for name in planned.origins if _differs(name, planned, stored, wanted)}
    replaced = {o.name for name in differing if isinstance(o := planned.origins[name], Stored)}
    used = {origin.name for origin in planned.origins.values() if isinstance(origin, Stored)}
    extra = stored.keys() - used - planned.dropped - replaced
    return [f"fresh:{glob}" for glob in _globs(differing, wanted)] + [
        f"drop:{glob}" for glob in _globs(extra, stored)
    ]


def _globs(names: Set[str], every: Shapes) -> list[str]:
    """Globs that match these names and no others."""
    found: dict[str, None] = {}
    for name in sorted(names):
        module, own = split_module(name)
        wider = [f"{module}*", f"{module}{own.partition('.')[0]}.*"] if module else []
        wider.append(re.sub(r"\.\d+(?=\.)", ".*", name))
        found[next((glob for glob in wider if set(fnmatch.filter(every, glob)) <= names), name)] = None
    return list(found)


# ----------------------------------------------------------------------------------------------- rules


def _blocks(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Each block of the new model from the given block of the checkpoint, or fresh."""
    given = block_sources(rule)
    origins: dict[str, Origin] = {}
    for name in transfer.wanted:
        block, rest = _split_block(name)
        if block is not None and block < len(given):
            source = given[block]
            origins[name] = FRESH if source is None else Stored(name=f"blocks.{source}.{rest}")
    left_out = {
        name for name in transfer.stored if (at := _split_block(name)[0]) is not None and at not in given
    }
    return planned.with_origins(origins, frozenset(left_out))


def _mtp(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Depths that only one of the models has: fresh, or left out. If their layers differ, all of them."""
    saved, chosen = transfer.layouts
    common = min(len(saved.mtp), len(chosen.mtp))
    if common and str(saved.mtp[0]) != str(chosen.mtp[0]):
        common = 0
    origins = {
        name: FRESH for name in transfer.wanted if (depth := _depth(name)) is not None and depth >= common
    }
    surplus = {name for name in transfer.stored if (depth := _depth(name)) is not None and depth >= common}
    return planned.with_origins(origins, frozenset(surplus))


def _upcycle(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Experts that are copies of a dense MLP, and a fresh router (sparse upcycling, arXiv 2212.05055). A shared
    expert writes nothing at first."""
    moe, origins = transfer.chosen.moe, dict[str, Origin]()
    for name, origin in planned.origins.items():
        layer, part = split_layer(origin.name) if isinstance(origin, Stored) else ("", "")
        dense = layer.removesuffix("moe") + "mlp"
        if not layer.endswith(".moe") or f"{dense}.down.weight" not in transfer.stored:
            continue
        expert = re.fullmatch(r"experts\.\d+\.(.+)", part)
        if expert is not None:
            source = f"{dense}.{expert[1]}"
            origins[name] = Stored(name=source) if source in transfer.stored else FRESH
        elif part.startswith(("norm.", "connection.")):
            origins[name] = Stored(name=f"{dense}.{part}")
        else:
            origins[name] = Values(numbers=(0.0,)) if part.startswith("shared.down.") else FRESH
    notes = []
    if origins and moe is not None and not (moe.normalize_top_k or moe.softmax_after_top_k):
        notes.append("upcycle: model.moe.normalize_top_k is False, so the function of upcycled layers changes")
    if origins and moe is not None and moe.scale != 1.0:
        notes.append(f"upcycle: model.moe.scale is {moe.scale}, so the function of upcycled layers changes")
    return planned.with_origins(origins, notes=notes)


def _hyper(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Connections that leave the function of a plain residual stream as it is; see `connection_bias`."""
    hyper, hidden, layout = transfer.chosen.hyper, transfer.chosen.hidden, transfer.layouts[1]
    if hyper is None or transfer.saved.hyper is not None:
        return planned
    layers, origins = layers_by_name(layout), dict[str, Origin]()
    for name in transfer.wanted:
        layer, part = split_layer(name)
        if name.startswith(MODULES):
            continue
        if part.endswith(("connection.alpha", "exit.alpha")):
            origins[name] = Values(numbers=(0.0,))
        elif part == "connection.bias":
            origins[name] = Values(numbers=connection_bias(hyper, layers[layer].number - 1))
        elif part.endswith("exit.bias"):
            depth = len((layout if part == "exit.bias" else layout.mtp[0]).layers)
            origins[name] = Values(numbers=(_read_bias(hyper, depth),))
        elif part.endswith(("connection.weight", "exit.weight")):
            origins[name] = FRESH
        elif split := re.fullmatch(r"(mtp\.\d+)\.(embedding|hidden)_projection\.weight", name):
            # A plain depth has one projection of both: embedding, then hidden state.
            box = (0, 0 if split[2] == "embedding" else hidden)
            origins[name] = Stored(name=f"{split[1]}.projection.weight", offset=box, shape=(hidden, hidden))
    notes = []
    if hyper.exit == "mean":
        notes.append("hyper: the mean of the streams preserves the function up to the eps of the final norm")
    if layout.mtp:
        notes.append("hyper: MTP depths read the streams before the final norm, so their function changes")
    return planned.with_origins(origins, notes=notes)


def connection_bias(hyper: HyperConnections, layer: int) -> tuple[float, ...]:
    """The bias of pre, post and res with which, at alpha 0, the streams carry a plain residual stream exactly.

    Column sums of the mixing matrix are q = 1 - O(eps), not 1, so before layer l (from 0) a stream is q^l
    times the plain one. The layer reads their sum times q^-l / streams, and writes its output times q^(l + 1).
    """
    pre, post = _read_bias(hyper, layer), _logit(1 / _stretch(hyper, layer + 1) / 2)
    return (*[pre] * hyper.streams, *[post] * hyper.streams, *[0.0] * hyper.streams**2)


def _read_bias(hyper: HyperConnections, layers: int) -> float:
    """The bias with which a weighted sum of the streams after so many layers is the plain stream."""
    return _logit(_stretch(hyper, layers) / hyper.streams - hyper.eps)


def _stretch(hyper: HyperConnections, layers: int) -> float:
    """q^-layers, where q is the column sum of a uniform mixing matrix after the Sinkhorn iterations."""
    streams, eps = hyper.streams, hyper.eps
    entry = 1 / streams + eps
    # Columns, then rows and columns in turn: every entry of the matrix stays equal.
    for _ in range(2 * hyper.sinkhorn_steps - 1):
        entry /= streams * entry + eps
    return float((streams * entry) ** -layers)


def _logit(value: float) -> float:
    """The inverse of the sigmoid."""
    if not 0 < value < 1:
        raise CheckpointError(
            "hyper: with these streams and eps no initial values preserve the function: "
            "set model.hyper.streams to 2 or more, and model.hyper.eps near 1e-6"
        )
    return math.log(value) - math.log1p(-value)


def _untie(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """A head that begins as a copy of the embedding."""
    if "head.weight" not in transfer.wanted or "head.weight" in transfer.stored:
        return planned
    return planned.with_origins({"head.weight": Stored(name="embedding.weight")})


def _vocab(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """More rows of embedding and head: fresh, or zeros."""
    origins: dict[str, Origin] = {}
    for name in ("embedding.weight", "head.weight"):
        origin = planned.origins.get(name)
        if isinstance(origin, Stored) and origin.name in transfer.stored:
            shape = transfer.stored[origin.name]
            if shape[0] < transfer.wanted[name][0]:
                rest: Literal["fresh", "zeros"] = "zeros" if rule.argument == "zeros" else "fresh"
                origins[name] = Stored(name=origin.name, shape=shape, rest=rest)
    return planned.with_origins(origins)


def _drop(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Stored tensors that are left out."""
    return planned.with_origins({}, frozenset(_matching(rule, transfer.stored, "of the checkpoint")))


def _fresh(rule: Rule, transfer: Transfer, planned: InitPlan) -> InitPlan:
    """Tensors that are drawn from the seed. Of a module that is wholly so, nothing stored is used."""
    names = _matching(rule, transfer.wanted, "of the model")
    replaced = {origin.name for name in names if isinstance(origin := planned.origins[name], Stored)}
    kept = {
        origin.name
        for name, origin in planned.origins.items()
        if isinstance(origin, Stored) and name not in names
    }
    begun = planned.with_origins(dict.fromkeys(names, FRESH), frozenset(replaced - kept))
    loaded = {split_module(name)[0] for name, origin in begun.origins.items() if origin != FRESH}
    afresh = {module for name in names if (module := split_module(name)[0]) and module not in loaded}
    unused = frozenset(name for name in transfer.stored if split_module(name)[0] in afresh)
    return begun.with_origins({}, unused)


RULES: Mapping[str, Callable[[Rule, Transfer, InitPlan], InitPlan]] = MappingProxyType(
    {
        "blocks": _blocks,
        "mtp": _mtp,
        "upcycle": _upcycle,
        "hyper": _hyper,
        "untie": _untie,
        "vocab": _vocab,
        "drop": _drop,
        "fresh": _fresh,
    }
)
"""By name, in the order in which they are applied."""

NO_EFFECT = MappingProxyType(
    {
        "mtp": "the run and the checkpoint have the same MTP depths",
        "upcycle": "no layer of the run is E where the checkpoint has -",
        "hyper": "it is for a run with model.hyper and a checkpoint without",
        "untie": "it is for a run with model.tied False and a checkpoint without a head",
        "vocab": "model.vocab of the run is not above that of the checkpoint",
    }
)
"""Why a rule may change nothing, which then is an error. The other rules name what they change."""
REPEATABLE = ("drop", "fresh")


# --------------------------------------------------------------------------------------------- parsing


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """Rules from their texts, or one error that lists everything wrong with them."""
    problems = [problem for text in texts for problem in _rule_problems(text)]
    names = [text.partition(":")[0] for text in texts]
    twice = sorted({name for name in names if names.count(name) > 1 and name not in REPEATABLE})
    problems += [f"--init-rules {name}: is given {names.count(name)} times; keep one of them" for name in twice]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(
        Rule(name=name, argument=argument) for name, _, argument in (text.partition(":") for text in texts)
    )


def _rule_problems(text: str) -> Iterator[str]:
    name, _, argument = text.partition(":")
    match name:
        case "fresh" | "drop":
            if not argument:
                yield f"--init-rules {text}: needs names, for example {name}:'mtp.*' or {name}:head.weight"
        case "blocks":
            if not re.fullmatch(r"(\d+|-)(,(\d+|-))*", argument):
                yield (
                    f"--init-rules {text}: needs one block of the checkpoint for each block of the model, "
                    f"counted from 0, or {FRESH_BLOCK} for a fresh one: for example blocks:0,1,-,2"
                )
        case "vocab":
            if argument not in ("", "fresh", "zeros"):
                yield f"--init-rules {text}: new rows are fresh or zeros: vocab or vocab:zeros"
        case "mtp" | "upcycle" | "hyper" | "untie":
            if argument:
                yield f"--init-rules {text}: {name} takes no argument: {name}"
        case _:
            yield f"--init-rules {text}: there is no such rule: the rules are {', '.join(RULES)}"


def block_sources(rule: Rule) -> list[int | None]:
    """The argument of `blocks`."""
    return [None if each == FRESH_BLOCK else int(each) for each in rule.argument.split(",")]


# ------------------------------------------------------------------------------------- names of tensors


def _layers(layout: Layout) -> list[Layer]:
    return list(layers_by_name(layout).values())


def _place(layer: Layer) -> tuple[int | None, int]:
    """What identifies a layer whatever its brackets: the MTP depth, and the number within it."""
    return layer.depth, layer.number


def _split_block(name: str) -> tuple[int | None, str]:
    """The block of the main stack that a tensor belongs to, and the rest of its name."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return (None, name) if found is None else (int(found[1]), found[2])


def _depth(name: str) -> int:
    """The MTP depth of a tensor, -1 for the main model."""
    found = re.match(r"mtp\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _matching(rule: Rule, names: Shapes, whose: str) -> list[str]:
    found = fnmatch.filter(names, rule.argument)
    if not found:
        raise ConfigError(
            f"--init-rules {rule}: no tensor {whose} has such a name; --init-plan prints the names"
        )
    return found
