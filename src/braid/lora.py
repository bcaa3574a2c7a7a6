"""LoRA configuration: adapters beside frozen linear layers (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from braid import validators
from braid.errors import Problem

DOWN, UP = "lora_a", "lora_b"
"""The last words of the canonical names of adapters: `blocks.3.attention.q.lora_a`."""

GLOBS = (f"*.{DOWN}", f"*.{UP}")
"""What a LoRA run trains."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters. The weights of the model are frozen."""

    rank: int = 0
    """Rank of the adapters; 0: no LoRA."""
    alpha: float = 16.0
    """Adapters are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*.attention.*", "*.mamba2.*", "*.delta_net.*", "*.mlp.*", "*.shared.*")
    """Globs over canonical names of projections without `.weight`, such as `*.attention.q`; `*.experts.*` are
    those of routed experts."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.at_least(f"{at}.rank", self.rank, 0)
        if self.rank:
            yield from validators.above(f"{at}.alpha", self.alpha, 0)
