"""Settings: a config.json while it is read.

Whoever reads takes settings by name and says which values it can express. Everything else is remembered as a
reason to refuse the file: values that braid has no place for, and settings that nobody took, because one that
is overlooked may change what the model computes. All reasons are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from braid.errors import ConfigError

HARMLESS = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "max_position_embeddings",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Settings that do not change what a model computes from tokens to logits."""


class Missing:
    """Stands for the default of a setting that has none."""


MISSING = Missing()


class Settings:
    """The settings of one file, and the reasons to refuse it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken = set(HARMLESS)
        self._reasons: list[str] = []

    def integer(self, name: str, default: int | Missing = MISSING) -> int:
        value = self._take(name, default, int)
        return value if type(value) is int else 1

    def number(self, name: str, default: float | Missing = MISSING) -> float:
        value = self._take(name, default, int, float)
        return float(value) if type(value) in (int, float) else 1.0

    def flag(self, name: str, default: bool) -> bool:
        return self._take(name, default, bool) is True

    def maybe_integer(self, name: str, default: int | None = None) -> int | None:
        value = self._take(name, default, int, type(None))
        return value if type(value) is int else None

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty where it is absent or null."""
        value = self._take(name, None, dict, type(None))
        return value if isinstance(value, dict) else {}

    def names(self, name: str) -> list[str] | None:
        """A list of words, or None where it is absent or null."""
        value = self._take(name, None, list, type(None))
        return [str(word) for word in value] if isinstance(value, list) else None

    def integers(self, name: str) -> list[int]:
        """A list of numbers; empty where it is absent or null."""
        value = self._take(name, None, list, type(None))
        return [number for number in value if type(number) is int] if isinstance(value, list) else []

    def pair(self, name: str, default: tuple[float, float]) -> list[Any]:
        """A list of two values."""
        value = self._take(name, list(default), list)
        if isinstance(value, list) and len(value) != 2:
            self.refuse(name, value, "must have two entries")
        return value if isinstance(value, list) and len(value) == 2 else list(default)

    def maybe_text(self, name: str) -> str | None:
        value = self._take(name, None, str, type(None))
        return value if isinstance(value, str) else None

    def only(self, name: str, *allowed: Any, default: Any) -> Any:
        """A setting of which braid has some values; the first of them stands in for any other."""
        self._taken.add(name)
        value = self._values.get(name, default)
        if value in allowed:
            return value
        self.refuse(name, value, f"braid has {' or '.join(map(repr, allowed))}")
        return allowed[0]

    def unused(self, *names: str) -> None:
        """Settings that say nothing about this model."""
        self._taken.update(names)

    def refuse(self, name: str, value: Any, rule: str) -> None:
        self._reasons.append(f"{name} = {value!r}: {rule}")

    def close(self, family: str) -> None:
        """Raise what was found, if anything, with the settings that nobody took."""
        left = sorted(self._values.keys() - self._taken)
        unknown = [f"{name} = {self._values[name]!r}: not a setting that braid knows here" for name in left]
        reasons = self._reasons + unknown
        if reasons:
            count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
            lines = [f"this {family} config.json cannot be expressed: {count}", *reasons]
            raise ConfigError("\n  ".join(lines))

    def _take(self, name: str, default: Any, *kinds: type) -> Any:
        self._taken.add(name)
        value = self._values.get(name, default)
        if isinstance(value, Missing):
            self.refuse(name, None, "must be given")
        elif type(value) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            self.refuse(name, value, f"must be of type {wanted}")
        else:
            return value
        return None
