"""Calibration of a device: measured seconds of products, kernels and memory traffic, as data in a JSON file.

`seconds` turns a piece of work into seconds on the device. Nothing falls back to the peak: a kernel that was
not measured has no seconds, and `missing` lists it. Braid ships files for some devices (`shipped`); `braid
calibrate` writes one for the GPU at hand (`measured`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, Literal, get_args

from braid.errors import ConfigError, DataError
from braid.nn.work import Kernel, Moved, Pass, Piece, Product, Work
from braid.timing.files import is_number, json_object, raise_problems, read_text, shown
from braid.timing.interpolation import Point, along, between, within
from braid.validators import nearest

Source = Literal["shipped", "measured"]
Component = Literal["products", "attention", "scans", "memory"]
"""What seconds on a device are spent on."""
Key = tuple[tuple[str, int | str], ...]

NEAR = 2.0
"""Sizes in a kernel's key, such as a head dim, may be so many times those that were measured, or a part of
them; further ones were not measured. Small numbers are choices, and must be equal."""
CHOICE = 8
TOKENS = "tokens"
"""The size in a key that is interpolated: the length of sequences, or their window."""
SCANS = frozenset({"ssd", "delta_rule", "causal_conv"})
ONE_PASS = frozenset({"quantise"})
"""Kernels that take as long in any pass: measured as forward ones."""
TABULATED = frozenset({"", "fp8_block"})
"""Formats that products may have been measured in."""
FORMAT = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
HOST_LINK = frozenset({"to_host", "to_device"})


@dataclass(frozen=True, kw_only=True)
class ProductTable:
    """Seconds of the products of a pass over a grid."""

    pass_: Pass
    groups: int
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of all grid points; k varies fastest."""
    format: str = ""
    """What factors are quantised to; nothing for bfloat16."""

    def at(self, m: int, n: int, k: int) -> float:
        return within((self.m, self.n, self.k), self.seconds, (m, n, k))


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Seconds of a kernel by size."""

    name: str
    key: Key
    pass_: Pass
    by: Literal["flops", "bytes"]
    """What sizes are."""
    points: tuple[Point, ...]

    @property
    def tokens(self) -> int:
        """The length of sequences, if its speed depends on that; else 1."""
        return _tokens(self.key)

    def at(self, kernel: Kernel) -> float:
        return along(self.points, kernel.flops if self.by == "flops" else kernel.bytes)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a device takes for pieces of work. Seconds are those of a device that does nothing else."""

    device: str
    """Its name in clusters: `h200`."""
    name: str
    """Its name in full."""
    source: Source
    when: str
    versions: Mapping[str, str] = field(default_factory=dict)
    peak_flops: float
    """Of dense bfloat16 products, per second."""
    peak_bandwidth: float
    """Of its memory, bytes per second."""
    memory_bytes: int
    products: tuple[ProductTable, ...]
    kernels: tuple[KernelTable, ...]
    bandwidth: tuple[Point, ...]
    """Bytes read and written by an elementwise kernel, and its seconds."""
    launch_seconds: float
    """What the host takes to start a kernel."""
    op_seconds: float = 3e-4
    """What the host takes for an op of a schedule besides its kernels, measured beside an H200."""
    step_seconds: float = 0.02
    """What the host takes for a step besides its ops: data, gradient norm, optimizer."""
    optimizer: float
    """Bytes per second of gradient norm and AdamW: 34 bytes of a parameter with a narrow copy, else 32."""
    sustained: float
    """Measured seconds of whole steps over those that the tables predict. `seconds` does not include it."""
    contention: Mapping[str, float] = field(default_factory=dict)
    """How many times longer computation takes while a link of this class (node, network) is in use."""
    host_link: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second between its memory and page-locked host memory, `to_host` and `to_device`; empty if
    nobody has measured it."""
    collectives: Mapping[str, Mapping[int, tuple[Point, ...]]] = field(default_factory=dict)
    """Seconds within a node, by op, ranks and bytes of the whole buffer; see `timing.links`."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Relative error by class: that of held-out measurements, or an estimate for shipped files."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each table comes from."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, with the reason."""

    @cached_property
    def _products(self) -> Mapping[str, tuple[ProductTable, ...]]:
        by_groups = sorted(self.products, key=lambda table: table.groups)
        return {pass_: tuple(t for t in by_groups if t.pass_ == pass_) for pass_ in get_args(Pass)}

    @cached_property
    def _kernels(self) -> Mapping[tuple[str, str], tuple[KernelTable, ...]]:
        names = {(table.name, table.pass_) for table in self.kernels}
        return {pair: tuple(t for t in self.kernels if (t.name, t.pass_) == pair) for pair in names}

    def kernel_tables(self, kernel: Kernel, pass_: Pass) -> tuple[KernelTable, ...]:
        """The tables with the nearest key, by length of sequences if it has one; empty if none is near."""
        tables = self._kernels.get((kernel.name, "forward" if kernel.name in ONE_PASS else pass_), ())
        distances = [
            (distance, table) for table in tables if (distance := _distance(kernel.key, table.key)) is not None
        ]
        least = min((distance for distance, _ in distances), default=0.0)
        found = [table for distance, table in distances if distance == least]
        return tuple(sorted(found, key=lambda table: table.tokens))

    def product_tables(self, product: Product, pass_: Pass) -> tuple[ProductTable, ...]:
        """Those of plain products, or those of grouped ones by number of groups, in the product's format."""
        grouped, form = product.groups > 1, product.format
        return tuple(t for t in self._products[pass_] if (t.groups > 1, t.format) == (grouped, form))


# ----------------------------------------------------------------------------------------- seconds


def seconds(piece: Piece, pass_: Pass, calibration: Calibration) -> float:
    """The seconds of a piece on an idle device; times `sustained`, those in a long run. Raises for a piece
    that `missing` lists."""
    what = piece.what
    if (reason := _missing(what, pass_, calibration)) is not None:
        raise ConfigError(reason)
    if isinstance(what, Product):
        return _product_seconds(what, pass_, calibration)
    if isinstance(what, Moved):
        return max(along(calibration.bandwidth, what.bytes), what.bytes / calibration.peak_bandwidth)
    tables = calibration.kernel_tables(what, pass_)
    measured = between([(table.tokens, table.at(what)) for table in tables], _tokens(what.key))
    return max(measured, what.flops / calibration.peak_flops if tables[0].by == "flops" else 0.0)


def _product_seconds(product: Product, pass_: Pass, calibration: Calibration) -> float:
    """By its sizes; never faster than the peak, nor than memory delivers its factors."""
    sizes = (product.m, product.n, product.k)
    tables = calibration.product_tables(product, pass_)
    points = [(table.groups, table.at(*sizes)) for table in tables]
    measured = along(points, product.groups) if product.groups > 1 else points[0][1]
    operations = 2 * product.m * product.n * product.k * product.groups
    # Tensor cores multiply twice as many factors of a byte.
    return max(measured, operations / (calibration.peak_flops * (2 if product.format else 1)))


def component(piece: Piece) -> Component:
    """What the seconds of a piece are spent on."""
    if isinstance(piece.what, Product):
        return "products"
    if isinstance(piece.what, Moved):
        return "memory"
    if piece.what.name == "attention":
        return "attention"
    return "scans" if piece.what.name in SCANS else "memory"


def spread_class(piece: Piece) -> str:
    """Whose spread a piece has: `products`, `grouped products`, `memory`, or the name of its kernel."""
    match piece.what:
        case Product(groups=groups):
            return "products" if groups == 1 else "grouped products"
        case Moved():
            return "memory"
        case Kernel(name=name):
            return name


def missing(work: Work, calibration: Calibration) -> list[str]:
    """What the calibration has no seconds for, each once."""
    found = (
        _missing(piece.what, pass_, calibration) for pass_, pieces in _passes(work).items() for piece in pieces
    )
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def missing_link(calibration: Calibration) -> list[str]:
    """The same of copies to the host and back."""
    if calibration.host_link:
        return []
    return [
        f"{calibration.device}: no calibration for the link to the host, which train.offload uses: "
        "`braid calibrate` measures it"
    ]


def _passes(work: Work) -> Mapping[Pass, tuple[Piece, ...]]:
    return {"forward": work.forward, "backward": work.backward, "wgrad": work.wgrad}


def _missing(what: Product | Kernel | Moved, pass_: Pass, calibration: Calibration) -> str | None:
    device = calibration.device
    if isinstance(what, Product):
        kind = "grouped products" if what.groups > 1 else "products"
        kind += f" {'that are' if what.format == 'emulated' else 'in'} {what.format}" if what.format else ""
        found = calibration.product_tables(what, pass_)
        return None if found else f"{device}: no calibration for {kind}, {pass_}"
    if isinstance(what, Moved):
        return None if calibration.bandwidth else f"{device}: no calibration for memory traffic"
    if calibration.kernel_tables(what, pass_):
        return None
    tables = [table for table in calibration.kernels if table.name == what.name and table.pass_ == pass_]
    known = "; ".join(dict.fromkeys(_text(table.key) for table in tables))
    measured = f", only for {known}" if known else ""
    return f"{device}: no calibration for kernel {what.name} ({_text(what.key)}), {pass_}{measured}"


def _text(key: Key) -> str:
    """A key without lengths of sequences, of which any will do."""
    return " ".join(f"{name} {value}" for name, value in key if name != TOKENS)


def _distance(wanted: Key, measured: Key) -> float | None:
    """How many times larger or smaller the sizes of a key are, in logarithms, lengths of sequences aside; None
    if they are not comparable."""
    if [name for name, _ in wanted] != [name for name, _ in measured]:
        return None
    total = 0.0
    for (name, mine), (_, its) in zip(wanted, measured, strict=True):
        if mine == its or name == TOKENS:
            continue
        if isinstance(mine, str) or isinstance(its, str) or min(mine, its) < CHOICE:
            return None
        if max(mine, its) / min(mine, its) > NEAR:
            return None
        total += abs(log(mine / its))
    return total


def _tokens(key: Key) -> int:
    return next((int(size) for name, size in key if name == TOKENS), 1)


# -------------------------------------------------------------------------------------------- files

_TABLES = ("products", "kernels")


def to_json(calibration: Calibration) -> str:
    """One line per table."""
    lines = [f'"format": {FORMAT}']
    for each in fields(calibration):
        value = getattr(calibration, each.name)
        if each.name in _TABLES:
            rows = ",\n  ".join(json.dumps(_plain(table)) for table in value)
            lines.append(f'"{each.name}": [\n  {rows}\n]')
        else:
            lines.append(f'"{each.name}": {json.dumps(_plain(value))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: Any) -> Any:
    """As JSON has it: fractions of a second with four digits, more than a measurement has; sizes in full."""
    if isinstance(value, (ProductTable, KernelTable)):
        return {each.name.rstrip("_"): _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.4g}" if value < 1 else f"{value:.9g}")


def from_json(text: str, file: str = "calibration") -> Calibration:
    """The calibration that `to_json` wrote; `file` is its name in errors."""
    given = json_object(text, file, "a calibration")
    _check_format(given.pop("format", None), file)
    raise_problems([*_field_problems(given), *_number_problems(given)], file)
    read: dict[str, Any] = {}
    unread = []
    for name, value in given.items():
        try:
            read[name] = _read(name, value)
        except KeyError as error:
            unread.append(f"{name}: {error}: missing")
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            unread.append(f"{name}: {error}")
    raise_problems(unread, file)
    calibration = Calibration(**read)
    raise_problems(_problems(calibration), file)
    return calibration


def _check_format(given: object, file: str) -> None:
    if given == FORMAT and not isinstance(given, bool):
        return
    newer = is_number(given) and given > FORMAT  # type: ignore[operator]
    remedy = "a newer braid wrote it: update braid" if newer else "run `braid calibrate` again"
    raise DataError(f"{file}: format: must be {FORMAT}, not {shown(given)}; {remedy}")


def _field_problems(given: Mapping[str, Any]) -> Iterable[str]:
    known = {each.name for each in fields(Calibration)}
    required = {
        each.name for each in fields(Calibration) if each.default is MISSING and each.default_factory is MISSING
    }
    yield from (f"{name}: unknown field{nearest(name, known)}" for name in given if name not in known)
    yield from (f"{name}: missing" for name in sorted(required - set(given)))


_NUMBERS = (
    "peak_flops", "peak_bandwidth", "memory_bytes", "launch_seconds", "op_seconds", "step_seconds", "optimizer",
    "sustained",
)  # fmt: skip
_TEXTS = ("device", "name", "source", "when")


def _number_problems(given: Mapping[str, Any]) -> Iterable[str]:
    """Single values that are not of their type."""
    for name, value in given.items():
        if name in _NUMBERS and not is_number(value):
            yield f"{name}: {shown(value)} is not a number"
        elif name in _TEXTS and not (isinstance(value, str) and value):
            yield f"{name}: {shown(value)} is not a name"
        elif name in ("spread", "contention", "host_link"):
            if not isinstance(value, dict) or not all(map(is_number, value.values())):
                yield f"{name}: must be an object of numbers"
        elif name in ("versions", "sources", "skipped") and not (
            isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        ):
            yield f"{name}: must be an object of texts"


def _read(name: str, value: Any) -> Any:
    match name:
        case "products":
            return tuple(
                ProductTable(
                    pass_=each["pass"], groups=_whole(each["groups"]), m=_ints(each["m"]), n=_ints(each["n"]),
                    k=_ints(each["k"]), seconds=tuple(map(_number, each["seconds"])),
                    format=each.get("format", ""),
                )
                for each in value
            )  # fmt: skip
        case "kernels":
            return tuple(
                KernelTable(
                    name=each["name"], key=tuple((name, _size(size)) for name, size in each["key"]),
                    pass_=each["pass"], by=each["by"], points=_points(each["points"]),
                )
                for each in value
            )  # fmt: skip
        case "bandwidth":
            return _points(value)
        case "collectives":
            return {
                op: {int(ranks): _points(points) for ranks, points in tables.items()}
                for op, tables in value.items()
            }
        case "memory_bytes":
            return int(value)
        case _:
            return float(value) if name in _NUMBERS else value


def _number(value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def _whole(value: Any) -> int:
    if not is_number(value) or value != int(value):
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value)


def _size(value: Any) -> int | str:
    return value if isinstance(value, str) else _whole(value)


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_whole, values))


def _points(values: Iterable[Any]) -> tuple[Point, ...]:
    return tuple((_number(size), _number(seconds)) for size, seconds in values)


def _problems(calibration: Calibration) -> Iterable[str]:
    if calibration.source not in get_args(Source):
        yield f"source: {calibration.source!r} must be one of {', '.join(get_args(Source))}"
    for name in _NUMBERS:
        value, host = getattr(calibration, name), name in ("op_seconds", "step_seconds")
        if not (value > 0 or (host and value == 0)):
            yield f"{name}: must be positive, not {value}"
    for name, value in calibration.spread.items():
        if not 0 <= value < 10:
            yield f"spread.{name}: must be a relative error, from 0 to below 10, not {value}"
    for name, value in calibration.contention.items():
        if not 1 <= value < 100:
            yield f"contention.{name}: must be how many times longer it takes, from 1 to below 100, not {value}"
    if calibration.host_link and set(calibration.host_link) != HOST_LINK:
        yield f"host_link: must have {' and '.join(sorted(HOST_LINK))}, or be left out"
    for way, rate in calibration.host_link.items():
        if not rate > 0:
            yield f"host_link.{way}: must be positive, not {rate}"
    yield from _product_problems(calibration.products)
    yield from _kernel_problems(calibration.kernels)
    curves = {f"kernels[{index}].points": table.points for index, table in enumerate(calibration.kernels)}
    if calibration.bandwidth:
        curves["bandwidth"] = calibration.bandwidth
    for op, tables in calibration.collectives.items():
        if op not in COLLECTIVES:
            yield f"collectives.{op}: must be one of {', '.join(COLLECTIVES)}"
        for ranks, points in tables.items():
            if ranks < 2:
                yield f"collectives.{op}.{ranks}: must be of at least 2 ranks"
            curves[f"collectives.{op}.{ranks}"] = points
    for where, points in curves.items():
        if not points or not _ascends([size for size, _ in points]) or min(s for _, s in points) <= 0:
            yield f"{where}: sizes must be positive and ascend, with positive seconds"


def _product_problems(tables: Iterable[ProductTable]) -> Iterable[str]:
    for index, table in enumerate(tables):
        where = f"products[{index}]"
        if table.pass_ not in get_args(Pass):
            yield f"{where}.pass: {table.pass_!r} must be one of {', '.join(get_args(Pass))}"
        if table.format not in TABULATED:
            known = ", ".join(sorted(TABULATED - {""}))
            yield f"{where}.format: {table.format!r} must be one of {known}, or left out"
        if table.groups < 1:
            yield f"{where}.groups: must be positive, not {table.groups}"
        if len(table.seconds) != len(table.m) * len(table.n) * len(table.k):
            yield f"{where}.seconds: {len(table.seconds)} of {len(table.m)} x {len(table.n)} x {len(table.k)}"
        for axis in ("m", "n", "k"):
            if not _ascends(getattr(table, axis)):
                yield f"{where}.{axis}: sizes must be positive and ascend"
        if not table.seconds or min(table.seconds) <= 0:
            yield f"{where}.seconds: must be positive"


def _kernel_problems(tables: Iterable[KernelTable]) -> Iterable[str]:
    for index, table in enumerate(tables):
        where = f"kernels[{index}]"
        if table.pass_ not in get_args(Pass):
            yield f"{where}.pass: {table.pass_!r} must be one of {', '.join(get_args(Pass))}"
        if table.by not in ("flops", "bytes"):
            yield f"{where}.by: {table.by!r} must be flops or bytes"


def _ascends(sizes: Any) -> bool:
    return bool(sizes) and sizes[0] > 0 and all(a < b for a, b in pairwise(sizes))


def shipped() -> tuple[str, ...]:
    """Names of the devices that have a file in this package."""
    return names_in("devices")


def names_in(folder: str) -> tuple[str, ...]:
    found = (each.name for each in files(__package__).joinpath(folder).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def load(name: str) -> Calibration:
    """The calibration of a shipped device, or of a file."""
    if name.endswith(".json") or "/" in name:
        return load_file(Path(name))
    if name not in shipped():
        known = ", ".join(shipped())
        raise ConfigError(
            f"no calibration for device {name!r}{nearest(name, shipped())}: shipped ones are {known}; "
            "`braid calibrate --out FILE` writes one for the GPU at hand"
        )
    return from_json(files(__package__).joinpath(f"devices/{name}.json").read_text(), f"{name}.json")


def load_file(path: Path) -> Calibration:
    return from_json(read_text(path), str(path))
