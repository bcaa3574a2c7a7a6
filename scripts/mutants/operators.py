"""Mutation operators: from a node of a syntax tree to what may stand there instead.

Each takes a node and yields replacements as nodes; whoever asks replaces the text of the node by that of the
replacement. What is worth mutating at all is for `sites` to say.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = MappingProxyType(
    {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
    }
)
ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = MappingProxyType(
    {
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.Mod: ast.FloorDiv,
        ast.Pow: ast.Mult,
        ast.BitAnd: ast.BitOr,
        ast.BitOr: ast.BitAnd,
        ast.LShift: ast.RShift,
        ast.RShift: ast.LShift,
    }
)
FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "min": "max",
        "max": "min",
        "any": "all",
        "all": "any",
        "ceil": "floor",
        "floor": "ceil",
        "amax": "amin",
        "amin": "amax",
        "maximum": "minimum",
        "minimum": "maximum",
        "sum": "mean",
        "mean": "sum",
    }
)
"""What is called instead, whether as a function or as a method."""
COMMUTATIVE = frozenset(
    {
        "isinstance",
        "issubclass",
        "min",
        "max",
        "gcd",
        "lcm",
        "zip",
        "equal",
        "maximum",
        "minimum",
        "promote_types",
        "transpose",
        "cast",
        "partial",
        "getattr",
        "setattr",
        "hasattr",
        "Op",
        "super",
    }
)
"""Calls whose first two arguments are not exchanged: it would change nothing, or fail wherever it stands."""
NUMBERS = frozenset(
    {
        "start", "stop", "end", "first", "last", "rows", "cols", "columns", "tokens", "heads", "groups",
        "channels", "experts", "rank", "world", "size", "count", "step", "steps", "segment", "micro_batch",
        "micro_batches", "pp", "tp", "cp", "dp", "ep", "etp", "number", "length", "low", "high", "total",
        "whole",
    }
)  # fmt: skip
"""Names that usually hold a whole number."""
IDLE_KEYWORDS = frozenset(
    {"device", "strict", "non_blocking", "encoding", "indent", "errors", "name", "daemon", "prog", "help"}
)
"""Arguments that are not left out: on a CPU, or in a program that is right, the default does the same."""

Operator = Callable[[ast.AST], Iterator[ast.AST]]


def comparison(node: ast.AST) -> Iterator[ast.AST]:
    """`<` to `<=`, `==` to `!=`, `in` to `not in`."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[place] = COMPARISONS[type(operator)]()
            yield changed


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """`+` to `-`, `//` to `*`."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_sequence(node):
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed


def dropped_term(node: ast.AST) -> Iterator[ast.AST]:
    """One side of a sum, product or mask alone."""
    kept = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.BitAnd, ast.BitOr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, kept) and not _is_sequence(node):
        yield node.left
        if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
            yield node.right
    elif isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            rest = [value for other, value in enumerate(node.values) if other != place]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(op=node.op, values=rest)


def logic(node: ast.AST) -> Iterator[ast.AST]:
    """`and` to `or`, `not x` to `x`, a condition to its opposite."""
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(op=other, values=node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)


def constant(node: ast.AST) -> Iterator[ast.AST]:
    """A whole number, one more or one less: also an axis, a place, the end of a slice."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        if node.value > 0:
            yield ast.Constant(node.value - 1)


def called(node: ast.AST) -> Iterator[ast.AST]:
    """`min` to `max`, `any` to `all`, `sum` to `mean`."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if (known := name or method) not in FUNCTIONS:
            return
        if name in ("sum", "mean") or (method == "sum" and _counts(node)):
            return  # Python's own sum has no mean
        changed = copy.deepcopy(node)
        if isinstance(changed.func, ast.Name):
            changed.func.id = FUNCTIONS[str(known)]
        elif isinstance(changed.func, ast.Attribute):
            changed.func.attr = FUNCTIONS[str(known)]
        yield changed


def keyword(node: ast.AST) -> Iterator[ast.AST]:
    """A call without one of its keyword arguments; with two of them that have each other's value."""
    if not isinstance(node, ast.Call):
        return
    for place, given in enumerate(node.keywords):
        if given.arg is not None and given.arg not in IDLE_KEYWORDS and _may_miss_one(node):
            changed = copy.deepcopy(node)
            del changed.keywords[place]
            yield changed
    names = [given.arg for given in node.keywords]
    for one, other in (("split", "join"), ("dim", "axis"), ("send", "receive")):
        if one in names and other in names:
            changed = copy.deepcopy(node)
            first, second = names.index(one), names.index(other)
            changed.keywords[first].value, changed.keywords[second].value = (
                changed.keywords[second].value,
                changed.keywords[first].value,
            )
            yield changed


def argument(node: ast.AST) -> Iterator[ast.AST]:
    """Two neighbouring arguments of a call exchanged, where they look like things of one sort: two fields of
    one value, two numbers, two tensors whose names end in their dims."""
    if not isinstance(node, ast.Call) or _called(node) in COMMUTATIVE:
        return
    for place, (first, second) in enumerate(pairwise(node.args)):
        if _sort(first) and _sort(first) == _sort(second) and ast.dump(first) != ast.dump(second):
            changed = copy.deepcopy(node)
            changed.args[place : place + 2] = [second, first]
            yield changed


def _sort(node: ast.expr) -> str:
    """What sort of thing an argument is, as far as its text tells; empty where it does not."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value)
    if isinstance(node, ast.BinOp):
        return "number"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return "number"
    name = node.id if isinstance(node, ast.Name) else ""
    if name in NUMBERS:
        return "number"
    return "tensor" if re.fullmatch(r"\w+_[A-Za-z0-9]*[A-Z]", name) else ""


def statement(node: ast.AST) -> Iterator[ast.AST]:
    """Nothing, where something was called for what it does, or where something was changed."""
    acts = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
    leaves = isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Delete)
    if acts or leaves or (isinstance(node, ast.Assign) and (_changes(node) or _assigns_again(node))):
        yield ast.Pass()


def _is_sequence(node: ast.BinOp) -> bool:
    """Whether texts or lists are put together: other operators fail there, and text is for people."""
    texts = [side for side in (node.left, node.right) if isinstance(side, ast.Constant)]
    if any(isinstance(side.value, str) for side in texts):
        return True
    return any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right))


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _counts(node: ast.Call) -> bool:
    """Whether a sum counts what is true: a mean of that would fail for its dtype alone."""
    return isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Compare)


def _may_miss_one(node: ast.Call) -> bool:
    """Classes need their fields: a call of one that misses a field fails wherever it stands."""
    return not _called(node)[:1].isupper()


def _changes(node: ast.Assign) -> bool:
    """Whether a part of something is assigned to."""
    return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)


def _assigns_again(node: ast.Assign) -> bool:
    """Whether what is assigned is made of what the name held before."""
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
    return len(node.targets) == 1 and bool(names & read)


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "comparison": comparison,
        "arithmetic": arithmetic,
        "dropped term": dropped_term,
        "logic": logic,
        "constant": constant,
        "called": called,
        "keyword": keyword,
        "argument": argument,
        "statement": statement,
    }
)
