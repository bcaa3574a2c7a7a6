"""Quantised checkpoints: fp8 with block scales, or MXFP4, widened to bfloat16 one tensor or expert at a time.

    fp8      w[i, j] = q[i, j] · s[i / a, j / b], with q in e4m3, `NAME_scale_inv` for s and blocks of a × b
             (DeepSeek-V3, R1, Kimi-K2 and Qwen3-FP8: 128 × 128)
    mxfp4    32 weights in a row share an exponent (OCP Microscaling Formats v1.0): `NAME_blocks` holds two fp4
             values to a byte, the low half first, `NAME_scales` the exponents plus 127 (gpt-oss). Rows are
             output channels; `NAME`, as transformers stores it unquantised, is [experts, inputs, outputs]

Other methods are refused, MLX's among them: such a checkpoint has to be saved in bfloat16 first, by the library
that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.errors import CheckpointError
from braid.interchange.settings import Settings
from braid.interchange.sliced import Index, Sliceable, SlicedTensors

WIDENED = torch.bfloat16
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each e2m1 code."""


DEQUANTISE = MappingProxyType(
    {
        "compressed-tensors": "by transformers and compressed-tensors: load it with quantization_config="
        "CompressedTensorsConfig(dequantize=True), then save_pretrained",
        "bitsandbytes": "by transformers and bitsandbytes: model.dequantize(), then save_pretrained",
    }
)
"""How checkpoints of a method that braid does not read are widened."""


class Outlined(Protocol):
    """Tensors by name, of which shapes and dtypes are known without reading them: `files.SafetensorsFolder`."""

    def __getitem__(self, name: str, /) -> Tensor: ...
    def opened(self, name: str) -> Sliceable: ...
    def outlines(self) -> Mapping[str, Tensor]: ...


class Quantization(Protocol):
    """How the tensors of a quantised checkpoint become weights."""

    def parts(self, names: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """The quantised weights among stored tensors, and the tensors that each is computed from."""

    def outline(self, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
        """The shape of a weight, from shapes."""

    def stacked(self, parts: tuple[Tensor, ...]) -> int:
        """The number of leading dims, from shapes, at whose places a weight and all its parts lie alike."""

    def widen(self, parts: tuple[Tensor, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Fp8Blocks:
    """A scale for every block of a matrix."""

    block: tuple[int, int]

    def parts(self, names: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        scaled = {name.removesuffix("_scale_inv"): name for name in names if name.endswith("_scale_inv")}
        return {name: (name, scale) for name, scale in scaled.items() if name in names}

    def outline(self, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
        weight, scale = parts
        blocks = tuple(-(-size // block) for size, block in zip(weight.shape, self.block, strict=False))
        if weight.dim() != 2 or tuple(scale.shape) != blocks:
            sides = " x ".join(map(str, self.block))
            raise CheckpointError(
                f"is {list(weight.shape)} with scales {list(scale.shape)}, which are not its blocks of {sides}"
            )
        return tuple(weight.shape)

    def stacked(self, parts: tuple[Tensor, ...]) -> int:
        return 0

    def widen(self, parts: tuple[Tensor, ...]) -> Tensor:
        weight, scale = parts
        rows, columns = self.outline(parts)
        high, wide = self.block
        every = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return weight.float().mul_(every).to(WIDENED)


@dataclass(frozen=True)
class Mxfp4:
    """An exponent for every 32 values of a row. Stored with the dims [..., outputs, groups, 16 bytes]."""

    def parts(self, names: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        stems = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
        return {stem: (f"{stem}_blocks", f"{stem}_scales") for stem in stems if f"{stem}_scales" in names}

    def outline(self, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
        blocks, scales = parts
        if blocks.dim() < 3 or blocks.shape[:-1] != scales.shape:
            raise CheckpointError(f"has blocks {list(blocks.shape)} with scales {list(scales.shape)}")
        *outer, outputs, groups, packed = blocks.shape
        return (*outer, groups * packed * 2, outputs)

    def stacked(self, parts: tuple[Tensor, ...]) -> int:
        return parts[0].dim() - 3

    def widen(self, parts: tuple[Tensor, ...]) -> Tensor:
        blocks, scales = parts
        values = torch.tensor(FP4, dtype=WIDENED)
        # Indexing needs int32 or int64: a lookup of half a tensor at a time keeps that copy small.
        pair = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], -1).flatten(-2)
        return torch.ldexp(pair, scales.int().sub_(127).unsqueeze(-1)).flatten(-2).transpose(-1, -2)


def read_quantization(settings: Settings) -> Quantization | None:
    """What config.json says about quantisation; None where weights are stored as they are."""
    given = settings.table("quantization_config")
    method, block = given.get("quant_method"), given.get("weight_block_size")
    if packed := settings.table("quantization"):
        rule = "braid reads no weights that MLX has packed; import the model's own repository instead"
        settings.refuse("quantization", packed, rule)
    if not given:
        return None
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and (sides := _block(block)) and given.get("fmt", "e4m3") == "e4m3":
        return Fp8Blocks(sides)
    how = DEQUANTISE.get(str(method), "by the library that wrote it")
    settings.refuse(
        "quantization_config.quant_method",
        method,
        f"braid reads fp8 (e4m3 with weight_block_size) and mxfp4; save the model in bfloat16, {how}; remove "
        "quantization_config from the new config.json if it is still there, and import that folder",
    )
    return None


def _block(sides: Any) -> tuple[int, int] | None:
    whole = isinstance(sides, list) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides)
    return (sides[0], sides[1]) if whole else None


@dataclass(frozen=True)
class _Quantised:
    """A quantised weight, to be read in part."""

    shape: torch.Size
    read: Callable[[Index], Tensor]

    def __getitem__(self, index: Index) -> Tensor:
        return self.read(index)


class Dequantized(SlicedTensors):
    """The weights of a quantised checkpoint under their own names, each widened when it is read."""

    def __init__(self, stored: Outlined, quantization: Quantization) -> None:
        self._stored, self._quantization = stored, quantization
        outlines = stored.outlines()
        self._parts = quantization.parts(outlines)
        self._recent: dict[tuple[object, ...], Tensor] = {}
        used = {part for parts in self._parts.values() for part in parts}
        self._names = [*(name for name in outlines if name not in used), *self._parts]
        self._outlines = {name: outlines[name] for name in self._names if name not in self._parts}
        self._stacked: dict[str, int] = {}
        for name, parts in self._parts.items():
            of_parts = tuple(outlines[part] for part in parts)
            try:
                shape = quantization.outline(of_parts)
            except CheckpointError as error:
                raise CheckpointError(f"{name} {error}") from error
            self._outlines[name] = torch.empty(shape, dtype=WIDENED, device="meta")
            self._stacked[name] = quantization.stacked(of_parts)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._stored[name]
        return self._quantization.widen(tuple(self._stored[part] for part in self._parts[name]))

    def opened(self, name: str) -> Sliceable:
        if name not in self._parts:
            return self._stored.opened(name)
        return _Quantised(self._outlines[name].shape, partial(self._widened, name))

    def _widened(self, name: str, index: Index) -> Tensor:
        """A part of a weight. Of a stack, only the wanted entries are read and widened. They are kept until
        others are wanted, because gate and up of an expert lie in one."""
        stacked = self._stacked[name]
        outer, inner = index[:stacked], index[stacked:]
        key = (name, *((each.start, each.stop) for each in outer))
        if key not in self._recent:
            self._recent.clear()
            parts = (self._stored.opened(part) for part in self._parts[name])
            self._recent[key] = self._quantization.widen(tuple(part[outer] for part in parts))
        return self._recent[key][(*[slice(None)] * len(outer), *inner)]

    def outlines(self) -> dict[str, Tensor]:
        return dict(self._outlines)

    def __contains__(self, name: object) -> bool:
        return name in self._outlines

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
