"""Where mutants are drawn: every place of the sources but for what is listed here, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from scripts.mutants.mutant import SOURCES, Mutant
from scripts.mutants.operators import OPERATORS


class LeftOut(NamedTuple):
    """What nobody draws from, and why."""

    pattern: str
    """Files, relative to `src/braid`; after `::` the qualified name of a class or function in them."""
    why: str


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("*/device/*.py", "Triton kernels: a few tests interpret them, on samples; GPUs run the rest"),
    LeftOut("kernels/cuda.py", "loads CUDA kernels: needs a GPU"),
    LeftOut("kernels/launch.py", "launches compiled kernels: needs a GPU"),
    LeftOut("kernels/grouped_mlp/tuned_table.py", "which kernel is fastest on a GPU: any choice is right"),
    LeftOut("*/__main__.py", "one call"),
    LeftOut("cli/progress.py", "a bar for people who wait"),
    LeftOut("cli/grid.py::_family_rows", "how wide a table is"),
    LeftOut("cli/grid.py::_fitting", "how wide a table is"),
    LeftOut("schedule/draw.py", "a picture: a pixel to the left is as right"),
    LeftOut("console.py", "wording of what is shown"),
    LeftOut("train/gc_freeze.py", "when Python collects garbage: only time shows it"),
    LeftOut("recipes/hybrid.py", "choices for a GPU: others would be as right"),
    LeftOut("recipes/tiny.py", "choices: others would be as right"),
    LeftOut("recipes/published.py::_pretraining", "choices beside a published shape: others would be as right"),
    LeftOut("engine/streams.py::CudaStreams*", "needs a GPU"),
    LeftOut("engine/progress.py::Progress.behind", "how far a GPU is behind"),
    LeftOut("train/metrics.py::TensorBoard*", "a package that is not installed for tests"),
    LeftOut("train/metrics.py::Wandb*", "a package that is not installed for tests"),
    LeftOut("*::*.__str__", "wording"),
    LeftOut("*::*.__repr__", "wording"),
)
WORDING = frozenset(
    {"Problem", "warn", "say", "print", "_refuse", "refuse", "_print", "_warn", "escape", "filterwarnings"}
)
"""Calls whose arguments are text for people."""


class Site(NamedTuple):
    """A node that may be mutated."""

    node: ast.AST
    function: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, as bytes and as a tree."""

    file: str
    text: bytes
    tree: ast.Module

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins."""
        return [0, *accumulate(len(line) for line in self.text.splitlines(keepends=True))]


def read_sources(root: Path) -> list[Source]:
    """All files under `src/braid`."""
    found = []
    for path in sorted((root / SOURCES).rglob("*.py")):
        text = path.read_bytes()
        file = path.relative_to(root / SOURCES).as_posix()
        found.append(Source(file=file, text=text, tree=ast.parse(text)))
    return found


def candidates(sources: Sequence[Source]) -> Iterator[Mutant]:
    """Every mutant that can be drawn, in the order of the text."""
    needed = needed_keywords(sources)
    for source in sources:
        if _is_left_out(source.file):
            continue
        for site in _sites(source.tree, source.file):
            for name, operator in OPERATORS.items():
                for number, replacement in enumerate(operator(site.node)):
                    if not _misses(site.node, replacement, needed):
                        yield from _mutant(source, site, name, number, replacement)


def needed_keywords(sources: Sequence[Source]) -> dict[str, frozenset[str]]:
    """By the name of a function: the arguments without a default, of all functions of that name."""
    found: dict[str, frozenset[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                positional = [*given.posonlyargs, *given.args]
                needed = {each.arg for each in positional[: len(positional) - len(given.defaults)]}
                pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
                needed |= {each.arg for each, default in pairs if default is None}
                found[node.name] = found.get(node.name, frozenset()) | needed
    return found


def _misses(node: ast.AST, replacement: ast.AST, needed: Mapping[str, frozenset[str]]) -> bool:
    """Whether a call is left without an argument that it needs: it would fail wherever it stands."""
    if not isinstance(node, ast.Call) or not isinstance(replacement, ast.Call):
        return False
    before, after = ({given.arg for given in call.keywords} for call in (node, replacement))
    return not needed.get(_name(node.func), frozenset()).isdisjoint(before - after)


def _mutant(source: Source, site: Site, operator: str, number: int, replacement: ast.AST) -> Iterator[Mutant]:
    node, starts = site.node, source.starts
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    old, new = source.text[start:end].decode(), ast.unparse(ast.fix_missing_locations(replacement))
    if isinstance(replacement, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp | ast.IfExp):
        new = f"({new})"
    if new != old:
        yield Mutant(
            name=f"{source.file}:{node.lineno}:{node.col_offset}:{operator}:{number}",
            file=source.file,
            start=start,
            end=end,
            line=node.lineno,
            old=old,
            new=new,
            kind=operator,
            function=site.function,
            drawn=True,
        )


# ---------------------------------------------------------------------------------------- what is left out


def _is_left_out(file: str, function: str | None = None) -> bool:
    for each in LEFT_OUT:
        files, _, functions = each.pattern.partition("::")
        of_file = fnmatch(file, files)
        if of_file and (not functions if function is None else functions and fnmatch(function, functions)):
            return True
    return False


def _sites(tree: ast.Module, file: str) -> Iterator[Site]:
    """Nodes inside of functions: what a module or class says outside of them are names, types and choices."""
    for node in tree.body:
        yield from _in_definition(node, file, "")


def _in_definition(node: ast.AST, file: str, outside: str) -> Iterator[Site]:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return
    name = f"{outside}.{node.name}" if outside else node.name
    if _is_left_out(file, name):
        return
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            yield from _in_definition(each, file, name)
        return
    for place, statement in enumerate(node.body):
        if not (place == 0 and _is_docstring(statement)):
            yield from _in_code(statement, file, name)


def _in_code(node: ast.AST, file: str, function: str) -> Iterator[Site]:
    """A node and what is within, unless it is about types or GPUs, text for people, or our own invariants."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from _in_definition(node, file, function)
        return
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_docstring(node):
        return
    if isinstance(node, ast.expr | ast.stmt) and not _is_wording(node):
        yield Site(node, function)
    for child in _children(node):
        yield from _in_code(child, file, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise) or _is_wording(node):
        return  # a statement may be dropped as a whole; its arguments are text
    if isinstance(node, ast.If | ast.IfExp) and "cuda" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "cast"):
        yield node.args[-1 if _name(node.func) == "cast" else 0]
        return
    if isinstance(node, ast.AnnAssign):
        yield from [] if node.value is None else [node.value]
        return
    if isinstance(node, ast.match_case):
        yield from node.body if node.guard is None else [node.guard, *node.body]
        return
    if isinstance(node, ast.Lambda):
        yield node.body
        return
    yield from ast.iter_child_nodes(node)


def _is_wording(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in WORDING


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
