"""Low precision by kind of product: the settings of `train.precision` as formats.

    fp8_block                               everything below in this format
    fp8_block experts=bf16                  dense layers only
    mxfp8 dense.weight_grad=bf16            one product of a kind
    fp8_block experts.down.input_grad=bf16  one product of a kind's last layer
    fp8_block ends                          also in the first and the last block

A setting is a format for everything, `kind=format` or `kind.product=format`; later ones win. `bf16` is no
format: the product runs in `train.dtype`. Head, router, norms, scalars of state-space layers, hyper-connections
and biases are in no kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

FormatName = Literal["fp8_block", "fp8_row", "mxfp8"]

FORMAT_NAMES: tuple[FormatName, ...] = ("fp8_block", "fp8_row", "mxfp8")
BLOCK_TOKENS: Mapping[FormatName, int | None] = MappingProxyType(
    {"fp8_block": 128, "fp8_row": None, "mxfp8": 32}
)
"""Tokens that share a scale in a weight gradient; None: those of a whole sequence."""
PLAIN = "bf16"
"""The setting of what is not quantised."""
FASTEST = "fp8"
"""The setting that leaves the rest to the machine (`timing.fastest`)."""
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"dense": ("dense",), "experts": ("experts", "experts_down"), "experts.down": ("experts_down",)}
)
"""What settings may name: the fields of `Precision` that they are for."""
ENDS = "ends"
"""The setting that includes the first and the last block."""

NOT_PICKED = "`braid train` picks what pays on its GPU, and `braid plan --cluster` for that of a cluster"
"""Why a run with the word `fp8` itself is not quantised, as a clause after `because`."""


@dataclass(frozen=True, kw_only=True)
class ProductFormats:
    """The formats of the three products of a layer; None: not quantised."""

    forward: FormatName | None = None
    input_grad: FormatName | None = None
    weight_grad: FormatName | None = None

    @property
    def quantised(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats by kind of product."""

    dense: ProductFormats = ProductFormats()
    """Projections of mixers, MLPs, shared experts, and those around a MoE layer's latent."""
    experts: ProductFormats = ProductFormats()
    """Of routed experts, the projections into the ffn."""
    experts_down: ProductFormats = ProductFormats()
    """Of routed experts, the projection out of it."""
    ends: bool = False
    """Whether the first and the last block are quantised too."""

    @property
    def quantised(self) -> bool:
        return any(each.quantised for each in (self.dense, self.experts, self.experts_down))

    def quantises(self, block: int, blocks: int) -> bool:
        """Whether layers of a block are."""
        return self.quantised and (self.ends or 0 < block < blocks - 1)


def precision_of(settings: Iterable[str]) -> Precision:
    """What the settings ask for. Raises `ValueError` with what is wrong about one."""
    precision = Precision()
    for setting in settings:
        if setting == ENDS:
            precision = replace(precision, ends=True)
            continue
        name, equals, value = setting.partition("=")
        wanted = value if equals else name
        kind, product = (name, "") if name in KINDS else _split(name)
        if wanted not in (*FORMAT_NAMES, PLAIN) and not (wanted == FASTEST and not equals):
            raise ValueError(_how(f"{wanted!r} is no format"))
        if equals and kind not in KINDS:
            raise ValueError(_how(f"{kind!r} is no kind of product"))
        if equals and product and product not in {each.name for each in fields(ProductFormats)}:
            raise ValueError(_how(f"{product!r} is no product"))
        found = next((each for each in FORMAT_NAMES if each == wanted), None)
        for layers in KINDS[kind] if equals else ("dense", *KINDS["experts"]):
            formats: ProductFormats = getattr(precision, layers)
            new = replace(formats, **{product: found}) if equals and product else _everything(layers, found)
            precision = replace(precision, **{layers: new})  # type: ignore[arg-type]
    return precision


def _split(name: str) -> tuple[str, str]:
    """A kind and a product."""
    kind, _, product = name.rpartition(".")
    return (kind, product) if kind in KINDS else tuple(name.partition(".")[::2])  # type: ignore[return-value]


def _everything(layers: str, found: FormatName | None) -> ProductFormats:
    """A format for some layers. Weight gradients that the topology could change stay as they are: rows of
    experts come from all ranks, and a block of `fp8_row` would be as long as a sequence."""
    weight_grad = None if layers in KINDS["experts"] or found == "fp8_row" else found
    return ProductFormats(forward=found, input_grad=found, weight_grad=weight_grad)


def _how(wrong: str) -> str:
    names = ", ".join(FORMAT_NAMES)
    return (
        f"{wrong}: must be {PLAIN}, {FASTEST} or one of {names}, for all products or as dense=, experts= or "
        f"dense.weight_grad= (forward, input_grad, weight_grad), experts.down= for their last layer, or the "
        f"word {ENDS}"
    )


def described(settings: Iterable[str]) -> list[str]:
    """What a run with these settings quantises, a line for each kind; nothing if it has none."""
    settings = tuple(settings)
    if not settings:
        return []
    precision = precision_of(settings)
    if not precision.quantised:
        return [f"not quantised, because {NOT_PICKED}" if FASTEST in settings else "not quantised"]
    lines = [f"{name}: {_listed(getattr(precision, name))}" for name in ("dense", "experts")]
    if precision.experts_down != precision.experts:
        lines.append(f"experts.down: {_listed(precision.experts_down)}")
    blocks = "all blocks" if precision.ends else "all blocks but the first and the last"
    return [*lines, f"in {blocks}; emulated, which is slower than bf16, but for fp8_block on Hopper"]


def _listed(formats: ProductFormats) -> str:
    return ", ".join(f"{each.name} {getattr(formats, each.name) or PLAIN}" for each in fields(formats))
