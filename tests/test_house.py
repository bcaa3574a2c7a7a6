"""The rules of the house: who may import whom, and how large things may grow.

The floors come from the picture in docs/architecture.md, so that the picture cannot drift from the code. Each
rule is one test over all files; it lists everything that breaks the rule, a line each.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "braid"
MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 80
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
    picture = re.search(r"```packages\n(.*?)```", text, re.DOTALL).group(1)
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
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
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


def test_no_room_imports_upwards():
    order = [name for _, name in rooms()]
    findings = []
    for floor, room in enumerate(order):
        above = set(order[floor + 1 :])
        for path in source_files(room):
            used = {name.split(".")[1] for name in imported(path, at_load=False) if name.startswith("braid.")}
            if upwards := used & above:
                findings.append(f"{path.relative_to(ROOT)} imports {sorted(upwards)}, which stand above {room}")
    assert not findings, listed(findings)


def test_no_import_is_relative():
    findings = [
        f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not findings, listed(findings)


def test_lower_floors_load_nothing_but_torch_numpy_and_triton():
    findings = []
    for path in (path for floor, room in rooms() if floor <= 3 for path in source_files(room)):
        top = {name.split(".")[0] for name in imported(path, at_load=True)}
        if foreign := top - LOADED_ON_LOWER_FLOORS - sys.stdlib_module_names:
            findings.append(f"{path.relative_to(ROOT)} loads {sorted(foreign)}; import it where it is used")
    assert not findings, listed(findings)


def test_floor_0_does_not_load_torch():
    findings = []
    for module in (f"braid.{room}" for floor, room in rooms() if floor == 0):
        code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
        if subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode:
            findings.append(f"{module} loads torch or numpy, or cannot be loaded")
    assert not findings, listed(findings)


def test_planning_loads_neither_fsdp_nor_the_compiler():
    """They take as long to load as all of torch besides, and a plan needs nothing of them."""
    heavy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy")
    planning = "braid.cli.plan, braid.planning.estimate, braid.timing.advice, braid.timing.search.search"
    code = f"import sys, {planning}; print(*(name for name in {heavy} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not ran.stdout.split()


def test_files_and_functions_stay_small_and_share_no_state():
    findings = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in PYTHON_FILES
        for finding in faults(path.read_text(), of_the_package=path.is_relative_to(PACKAGE))
    ]
    assert not findings, listed(findings)


def listed(findings: list[str]) -> str:
    """All findings, a line each."""
    return "\n".join([f"{len(findings)} found:", *findings])


def faults(text: str, *, of_the_package: bool) -> Iterator[str]:
    """What is too large in a file, and what it shares, as `line: what`."""
    tree, lines = ast.parse(text), text.count("\n")
    if lines > MOST_LINES:
        yield f"{lines}: over {MOST_LINES} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{node.lineno}: {node.name} has {lines} lines, over {MOST_LINES_OF_A_FUNCTION}"
    for node in tree.body if of_the_package else ():
        if _is_mutable_constant(node):
            yield f"{node.lineno}: mutable state of the module"


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


def test_every_fault_of_a_file_is_found():
    text = "X = []\n\n\ndef f():\n    global X\n" + "    pass\n" * 600
    assert list(faults(text, of_the_package=True)) == [
        "605: over 600 lines",
        "4: f has 602 lines, over 80",
        "5: global",
        "1: mutable state of the module",
    ]
    assert len(list(faults(text, of_the_package=False))) == 3


def test_where_things_are_is_true():
    """Every `file.py:name` and `file.py` in the section is there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("## Where is") : text.index("## Glossary")]
    places = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", section)
    assert len(places) > 20
    wrong = [f"{file}:{name}" for file, name in places if not _is_there(ROOT / "src" / "braid" / file, name)]
    assert wrong == []


def _is_there(file: Path, name: str) -> bool:
    if not file.is_file():
        return False
    body = ast.parse(file.read_text()).body
    for part in name.split(".") if name else ():
        found = [node for node in body if part in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
