"""The rules of the house: who may import whom, and how large things may grow.

The floors come from the picture in docs/architecture.md, so that the picture cannot drift from the code.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "braid"
PYTHON_FILES = sorted(
    path
    for folder in ("src", "tests", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
LOADED_ON_LOWER_FLOORS = {"torch", "numpy", "triton", "braid"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}


def rooms() -> list[tuple[int, str]]:
    """(floor, room) in the order of the picture."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = re.search(r"```house\n(.*?)```", text, re.DOTALL).group(1)
    lines = [line.split()[:2] for line in picture.strip().splitlines()]
    return [(int(floor), name.removesuffix(".py").removesuffix("/")) for floor, name in lines]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, *, at_load: bool) -> set[str]:
    """Absolute module names that a file imports: when it is loaded, or anywhere in it."""
    tree = ast.parse(path.read_text())
    nodes = _nodes_at_load(tree) if at_load else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _nodes_at_load(node: ast.AST):
    """All nodes that run when the module is loaded: not the bodies of functions, not `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _nodes_at_load(child)


def source_files(room: str) -> list[Path]:
    single = PACKAGE / f"{room}.py"
    return [single] if single.is_file() else sorted((PACKAGE / room).rglob("*.py"))


def test_every_room_is_in_the_picture_and_every_line_of_it_is_a_room():
    drawn = {room for _, room in rooms()}
    built = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert drawn == built


def test_floors_ascend_in_the_picture():
    floors = [floor for floor, _ in rooms()]
    assert floors == sorted(floors)


@pytest.mark.parametrize("room", [room for _, room in rooms()])
def test_no_room_imports_upwards(room):
    order = [name for _, name in rooms()]
    below = set(order[: order.index(room) + 1])
    for path in source_files(room):
        used = {name.split(".")[1] for name in imported(path, at_load=False) if name.startswith("braid.")}
        upwards = (used & set(order)) - below
        assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}, which stand above {room}"


@pytest.mark.parametrize("room", [room for floor, room in rooms() if floor <= 3])
def test_lower_floors_load_nothing_but_torch_numpy_and_triton(room):
    for path in source_files(room):
        top = {name.split(".")[0] for name in imported(path, at_load=True)}
        foreign = top - LOADED_ON_LOWER_FLOORS - sys.stdlib_module_names
        assert not foreign, f"{path.relative_to(ROOT)} loads {sorted(foreign)}; import it where it is used"


@pytest.mark.parametrize("module", [f"braid.{room}" for floor, room in rooms() if floor == 0])
def test_floor_0_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small_and_share_no_state(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 600, "over 600 lines"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 80, f"line {node.lineno}: {node.name} has {lines} lines"
    if path.is_relative_to(PACKAGE):
        for node in tree.body:
            assert not _is_mutable_constant(node), f"line {node.lineno}: mutable state of the module"


def _is_mutable_constant(node: ast.stmt) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
        return False
    if ast.unparse(node).startswith("__all__ = "):
        return False
    value = node.value
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, MUTABLE)


@pytest.mark.parametrize("code", ["X = []", "X: dict = {}", "X = set()", "X = collections.defaultdict(list)"])
def test_the_check_for_module_state_can_fail(code):
    assert _is_mutable_constant(ast.parse(code).body[0])
