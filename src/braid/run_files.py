"""Runs from files: JSON, as `braid show RECIPE --json` prints it, or the same fields as YAML 1.2.

Plain scalars of YAML have the types of the core schema of YAML 1.2: `1e-5` is a number, `no`, `on` and
`2026-01-01` are strings. PyYAML alone would read YAML 1.1, where they are a string, two booleans and a date.
Nothing in a file is executed: a tag that is not of that schema is a problem, as is a key that is given twice.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from json import JSONDecoder
from pathlib import Path
from typing import Any

from braid.config import Run, from_json, json_problems
from braid.errors import ConfigError, how_to_install, reason
from braid.json_fields import JsonPath

SUFFIXES = (".json", ".yaml", ".yml")
MOST_NODES = 100_000
"""Values of a file. One with fewer characters may have more, by naming the same part again and again."""
MOST_DEPTH = 50
MOST_DIGITS = 100
CORE = "tag:yaml.org,2002:"
NULL = re.compile(r"(?:null|Null|NULL|~|)")
BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
INT = re.compile(r"[-+]?[0-9]+")
OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def is_run_file(name: str) -> bool:
    """Whether the name of a run is that of a file which holds it."""
    return Path(name).suffix.lower() in SUFFIXES


def load_run(file: Path | str) -> Run:
    """The run in a file. Raises a `ConfigError` that lists every problem with its line."""
    file = Path(file)
    content = _content(file)
    wrong = [(content.lines.get(problem.path, 1), problem.text) for problem in json_problems(content.data)]
    if problems := sorted([*content.wrong, *wrong], key=lambda problem: problem[0]):
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = [f"{file}:{line}: {text.removeprefix('run.')}" for line, text in problems]
        raise ConfigError("\n".join([f"the run file has {count}", *listed]))
    return from_json(content.data)


def field_lines(file: Path) -> dict[str, int]:
    """The line of every field that a run file has, by names such as `optim.lr`."""
    return {".".join(map(str, path)): line for path, line in _content(file).lines.items() if path}


def _content(file: Path) -> _Content:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the run file {file}: {reason(error)}") from None
    if not text.strip():
        raise ConfigError(f"the run file {file} is empty: `braid show tiny --json` prints one")
    return _from_json_text(text, file) if file.suffix.lower() == ".json" else _from_yaml_text(text, file)


class _Content:
    """The values of a file, as of JSON, and the line of each."""

    def __init__(self) -> None:
        self.data: Any = None
        self.lines: dict[JsonPath, int] = {}
        self.wrong: list[tuple[int, str]] = []
        """What is wrong with the file itself: line and text."""


def _too_deep(file: Path) -> ConfigError:
    rule = f"more than {MOST_NODES:,} values or {MOST_DEPTH} levels"
    return ConfigError(f"{file} is no run file: it has {rule}; give what `braid show RECIPE --json` prints")


# ------------------------------------------------------------------------------------------------ JSON


def _from_json_text(text: str, file: Path) -> _Content:
    try:
        content = _Content()
        content.data = json.loads(text)
        _JsonLines(text, content).walk(0, ())
        return content
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: is not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{file}: is not JSON that can be read: {error}") from None


class _JsonLines:
    """Finds the line of every value of a text that is known to be JSON."""

    def __init__(self, text: str, content: _Content) -> None:
        self._text, self._content = text, content
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def walk(self, at: int, path: JsonPath) -> int:
        """Notes the values from `at` on, and returns where they end."""
        at = self._skip(at)
        self._content.lines.setdefault(path, self._line(at))
        first = self._text[at]
        if first == "{":
            return self._object(self._skip(at + 1), path)
        if first == "[":
            return self._list(self._skip(at + 1), path)
        if first == '"':
            return self._string(at)[1]
        found = re.compile(r"[^\s,\]}]+").match(self._text, at)
        assert found is not None, "json has read it"
        return found.end()

    def _object(self, at: int, path: JsonPath) -> int:
        keys: set[str] = set()
        while self._text[at] != "}":
            line = self._line(at)
            key, at = self._string(at)
            if key in keys:
                self._content.wrong.append((line, f"{key!r} is given twice: keep one of them"))
            keys.add(key)
            self._content.lines[(*path, key)] = line
            at = self._skip(self.walk(self._skip(at) + 1, (*path, key)))  # behind the colon
            at = self._skip(at + 1) if self._text[at] == "," else at
        return at + 1

    def _list(self, at: int, path: JsonPath) -> int:
        place = 0
        while self._text[at] != "]":
            at = self._skip(self.walk(at, (*path, place)))
            at = self._skip(at + 1) if self._text[at] == "," else at
            place += 1
        return at + 1

    def _string(self, at: int) -> tuple[str, int]:
        text, end = JSONDecoder().raw_decode(self._text, at)
        return str(text), end

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in " \t\r\n":
            at += 1
        return at

    def _line(self, at: int) -> int:
        return bisect_right(self._ends, at - 1) + 1


# ------------------------------------------------------------------------------------------------ YAML


def _from_yaml_text(text: str, file: Path) -> _Content:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{file}: a run in YAML needs the package pyyaml, which is missing: "
            f"run `{how_to_install('pyyaml')}`, or give the run as JSON"
        ) from None

    class CoreLoader(yaml.BaseLoader):
        """Composes nodes, and constructs nothing from them."""

        def resolve(self, kind: type, value: Any, implicit: Any) -> str:
            """The tag of a node that has none in the text."""
            if kind is yaml.ScalarNode:
                return f"{CORE}{_core_type(value) if implicit[0] else 'str'}"
            return f"{CORE}{'map' if kind is yaml.MappingNode else 'seq'}"

    try:
        node = yaml.compose(text, Loader=CoreLoader)
        content = _Content()
        content.data = None if node is None else _YamlValues(content, file).read(node, ())
        return content
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        why = error.problem or error.context or "it cannot be read"
        raise ConfigError(f"{file}:{line}: is not YAML: {why}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: is not YAML: {error}") from None
    except RecursionError:
        raise _too_deep(file) from None


def _core_type(text: str) -> str:
    """The type of a plain scalar in the core schema of YAML 1.2."""
    for name, rule in (("null", NULL), ("bool", BOOL), ("int", INT), ("int", OCTAL_OR_HEX), ("float", FLOAT)):
        if rule.fullmatch(text):
            return name
    return "str"


class _YamlValues:
    """Values of composed nodes."""

    def __init__(self, content: _Content, file: Path) -> None:
        self._content, self._file = content, file
        self._nodes = 0

    def read(self, node: Any, path: JsonPath) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES or len(path) > MOST_DEPTH:
            raise _too_deep(self._file)
        self._content.lines.setdefault(path, node.start_mark.line + 1)
        kind = node.tag.removeprefix(CORE) if node.tag.startswith(CORE) else None
        match kind, node.value:
            case "map", list(pairs) if node.id == "mapping":
                return self._mapping(pairs, path)
            case "seq", list(items) if node.id == "sequence":
                return [self.read(item, (*path, place)) for place, item in enumerate(items)]
            case "null" | "bool" | "int" | "float" | "str", str(text):
                return self._scalar(kind, text, node)
        self._wrong(node, f"has the tag {node.tag}: a run has plain values only")
        return None

    def _mapping(self, pairs: list[tuple[Any, Any]], path: JsonPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key.tag != f"{CORE}str":
                self._wrong(key, "has a key that is no string: put it in quotes")
                continue
            if key.value in values:
                self._wrong(key, f"{key.value!r} is given twice: keep one of them")
            self._content.lines[(*path, key.value)] = key.start_mark.line + 1
            values[key.value] = self.read(value, (*path, key.value))
        return values

    def _scalar(self, kind: str, text: str, node: Any) -> Any:
        # A tag may be written out, as in `!!int x`.
        if kind != "str" and _core_type(text) not in ((kind, "int") if kind == "float" else (kind,)):
            self._wrong(node, f"{text!r} is no {kind}, which its tag says")
            return None
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" if len(text) > MOST_DIGITS:
                self._wrong(node, f"a number has {len(text)} digits, and may have {MOST_DIGITS}")
            case "int":
                return int(text, 0) if OCTAL_OR_HEX.fullmatch(text) else int(text)
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case _:
                return text
        return None

    def _wrong(self, node: Any, text: str) -> None:
        self._content.wrong.append((node.start_mark.line + 1, text))
