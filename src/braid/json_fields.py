"""Dataclasses from JSON values: read by the types of their fields, with every problem at once."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from braid import validators

JsonPath = tuple[str | int, ...]
"""Where a value is: the keys and list indices that lead to it."""


@dataclass(frozen=True, kw_only=True)
class JsonProblem:
    """A value that is no value of its field, an unknown field, or a missing one."""

    path: JsonPath
    text: str
    """The name of the field, and what is wrong."""

    def __str__(self) -> str:
        return self.text


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """The field types of a dataclass; cached, because `get_type_hints` dominates the time of validation."""
    return types.MappingProxyType(typing.get_type_hints(kind))


def read(kind: Any, data: Any, at: str) -> tuple[Any, list[JsonProblem]]:
    """A value of type `kind`, whose name is `at`, from a JSON value, and all problems. With problems, the value
    is None."""
    reader = _Reader()
    value = reader.read(kind, data, at, ())
    return (None if reader.problems else value), reader.problems


class _Reader:
    """Collects problems: what it returns in place of a wrong value is never used."""

    def __init__(self) -> None:
        self.problems: list[JsonProblem] = []

    def read(self, kind: Any, data: Any, at: str, path: JsonPath) -> Any:
        origin = typing.get_origin(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(typing.get_args(kind), data, at, path)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, data, at, path)
        if origin is tuple:
            return self._tuple(typing.get_args(kind), data, at, path)
        if origin is Mapping:
            if not isinstance(data, dict):
                return self._wrong(path, f"{at} = {data!r}: must be an object")
            of = typing.get_args(kind)[1]
            return {name: self.read(of, each, f"{at}[{name}]", (*path, name)) for name, each in data.items()}
        if origin is Literal:
            if data not in typing.get_args(kind):
                near = validators.nearest(data, typing.get_args(kind)) if isinstance(data, str) else ""
                choices = ", ".join(typing.get_args(kind))
                return self._wrong(path, f"{at} = {data!r}: must be one of {choices}{near}")
            return data
        if kind is float and type(data) is int:
            try:
                return float(data)
            except OverflowError:
                return self._wrong(
                    path, f"{at}: a whole number of {len(str(abs(data)))} digits is too large for a float"
                )
        if type(data) is not kind:
            return self._wrong(path, f"{at} = {data!r}: must be of type {kind.__name__}")
        return data

    def _union(self, arms: tuple[Any, ...], data: Any, at: str, path: JsonPath) -> Any:
        """A word where the union has words, else a value of its other arm."""
        words = [word for arm in arms if typing.get_origin(arm) is Literal for word in typing.get_args(arm)]
        rest = [arm for arm in arms if arm is not types.NoneType and typing.get_origin(arm) is not Literal]
        if (data is None and types.NoneType in arms) or (isinstance(data, str) and data in words):
            return data
        if words and isinstance(data, str) and rest:
            near = validators.nearest(data, words)
            known = ", ".join(words)
            return self._wrong(path, f"{at} = {data!r}: must be a {rest[0].__name__} or one of {known}{near}")
        return self.read(rest[0] if rest else Literal[*words], data, at, path)

    def _wrong(self, path: JsonPath, text: str) -> None:
        self.problems.append(JsonProblem(path=path, text=text))

    def _dataclass(self, kind: Any, data: Any, at: str, path: JsonPath) -> Any:
        if not isinstance(data, dict):
            return self._wrong(path, f"{at} = {data!r}: must be an object with the fields of {kind.__name__}")
        hints = field_types(kind)
        values = {}
        for name, value in data.items():
            if name in hints:
                values[name] = self.read(hints[name], value, f"{at}.{name}", (*path, name))
            else:
                near = validators.nearest(name, hints)
                self._wrong((*path, name), f"{at}.{name} is not a known field{near}")
        for field in dataclasses.fields(kind):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in data:
                self._wrong(path, f"{at}.{field.name} is missing")
        return None if self.problems else kind(**values)

    def _tuple(self, arms: tuple[Any, ...], data: Any, at: str, path: JsonPath) -> Any:
        if not isinstance(data, (list, tuple)):
            return self._wrong(path, f"{at} = {data!r}: must be a list")
        kinds = [arms[0]] * len(data) if arms[-1] is Ellipsis else list(arms)
        if len(kinds) != len(data):
            return self._wrong(path, f"{at} = {data!r}: must have {len(kinds)} values")
        return tuple(
            self.read(kind, item, f"{at}[{place}]", (*path, place))
            for place, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )
