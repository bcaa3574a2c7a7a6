"""What the checkpoint tests share: tensors of every dtype, bit comparison, damage, forged manifests."""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from braid.checkpoint import Piece

ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of random bytes, so that NaN patterns and denormals occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes; unlike torch.equal, also where there are NaNs."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(flat_a, flat_b)


def all_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def mixed_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every dtype, with a scalar and an empty tensor, and shapes that divide nothing."""
    tensors = {
        f"layer.{str(dtype).removeprefix('torch.')}": random_bits((5, 7), dtype, seed + i)
        for i, dtype in enumerate(ALL_DTYPES)
    }
    tensors["step"] = torch.tensor(1.5 + seed)
    tensors["nothing"] = torch.empty(0, 3)
    return tensors


def whole(tensors: dict[str, Tensor]) -> list[Piece]:
    return [Piece.whole(name, tensor) for name, tensor in tensors.items()]


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def sign(body: bytes) -> bytes:
    """A manifest file with the right checksum over any body, as a forger would make it."""
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def manifest_document(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def forge_manifest(path: Path, document: dict) -> None:
    body = json.dumps({key: value for key, value in document.items() if key != "sha256"}).removeprefix("{")
    (path / "manifest.json").write_bytes(sign(body.encode()))
