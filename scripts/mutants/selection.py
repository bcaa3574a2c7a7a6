"""Which tests a mutant faces, and in which order.

First those of its own package, then `tests/topology` and `tests/engine`, as `make test` selects them; the first
failure ends it. Files that look as if they were about the mutated code come first: that only saves time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scripts.mutants.mutant import SOURCES, Mutant

MARKERS = "not long and not exhaustive"
"""What `make test` runs."""
SHARED = ("tests/topology", "tests/engine")
"""What every mutant faces after the tests of its package."""
OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "__init__": ("tests/test_api.py",),
        "__main__": ("tests/test_main.py", "tests/faults/test_stopping.py"),
        "architecture": ("tests/test_arch*.py", "tests/planning/test_plan.py"),
        "choices": (
            "tests/test_config.py",
            "tests/planning/test_plan.py",
            "tests/kernels/test_kernel_settings.py",
        ),
        "config": ("tests/test_config.py", "tests/planning/test_plan.py"),
        "encoders": ("tests/model/test_encoder.py",),
        "lora": ("tests/train/test_lora.py", "tests/topology/test_lora.py"),
        "optimizer": ("tests/test_config.py", "tests/optim/test_*.py"),
        "patch_grid": ("tests/model/test_radio.py", "tests/nn/test_position_table.py"),
        "errors": (
            "tests/test_errors.py",
            "tests/planning/test_plan.py",
            "tests/cli/test_commands.py",
            "tests/train/test_state.py",
            "tests/checkpoint/test_round_trip.py",
            "tests/data/test_shards.py",
        ),
        "validators": (
            "tests/planning/test_plan.py",
            "tests/test_config.py",
            "tests/planning/test_divisibility.py",
            "tests/test_arch*.py",
        ),
        "yarn": ("tests/test_arch*.py", "tests/nn/test_latent_attention.py"),
    }
)
"""The tests of packages that have none under their own name, and of those whose `problems` are looked at by way
of a plan."""


class Also(NamedTuple):
    """Tests of another package that are about some code."""

    pattern: str
    """Files, relative to `src/braid`; after `::` the qualified name of a function."""
    tests: str
    why: str


ALSO: tuple[Also, ...] = (
    Also(
        "*::*cost*",
        "tests/planning/estimate/test_*.py",
        "what a layer keeps and sends is compared with what it does",
    ),
    Also("nn/cost.py", "tests/planning/estimate/test_*.py", "the same"),
    Also("kernels/activation_bytes.py", "tests/planning/estimate/test_*.py", "the same"),
    Also("kernels/*/activation_bytes.py", "tests/planning/estimate/test_*.py", "the same"),
    Also("cli/convert.py", "tests/interchange/test_*.py", "conversions are tested by way of the commands"),
    Also("train/*porting.py", "tests/interchange/test_*.py", "the same"),
    Also("train/*porting.py", "tests/cli/test_convert*.py", "what it refuses, the command says"),
    Also(
        "model/language.py::*flops*", "tests/nn/test_work.py", "a rank's operations are compared with its work"
    ),
    Also("engine/fsdp2.py::*unreduced*", "tests/train/test_nonfinite.py", "who asks for them is there"),
    Also("data/prompts.py", "tests/train/test_*prompts.py", "prompts are made of what a run reads"),
    Also("nn/patch_embedding.py", "tests/model/test_encoder.py", "what encoders are made of is tested there"),
    Also("nn/position_table.py", "tests/model/test_encoder.py", "the same"),
    Also("planning/plan.py", "tests/schedule/test_plan*.py", "schedules of whole runs are looked at there"),
    Also("cli/prove.py", "tests/prove/test_proof.py", "the command is tested with what it does"),
    Also("cli/train.py", "tests/launch/test_worker_pool.py", "so are launchers and their workers"),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Tests that run in one process."""

    name: str
    files: tuple[str, ...]
    """From the root of the repository, in the order in which they run."""


def stages(mutant: Mutant, root: Path, seconds: Mapping[str, float]) -> tuple[Stage, ...]:
    """What a mutant faces, one stage after the other. `root` has the tests; `seconds` is how long files of them
    take, as far as that is known."""
    own = own_files(root, mutant)
    shared = [file for folder in SHARED for file in _found(root, f"{folder}/test_*.py") if file not in own]
    return tuple(
        Stage(name=name, files=_ordered(files, mutant, root, seconds))
        for name, files in (("own", own), ("shared", shared))
        if files
    )


def elsewhere(mutant: Mutant, root: Path, seconds: Mapping[str, float]) -> Stage:
    """All other tests: a mutant that only these catch is missed, but not by everybody."""
    faced = {file for stage in stages(mutant, root, seconds) for file in stage.files}
    # These look at the text of the sources, and would notice any change.
    faced |= {"tests/test_house.py", "tests/test_mutants.py", "tests/test_setup.py"}
    every = [*_found(root, "tests/test_*.py"), *_found(root, "tests/*/**/test_*.py")]
    others = [file for file in every if file not in faced]
    return Stage(name="elsewhere", files=_ordered(others, mutant, root, seconds))


def own_files(root: Path, mutant: Mutant) -> list[str]:
    """The test files of the mutant's package."""
    package = mutant.package
    patterns = OWN.get(package, (f"tests/{package}/**/test_*.py", f"tests/test_{package}*.py"))
    found = [file for pattern in patterns for file in _found(root, pattern)]
    for also in ALSO:
        files, _, functions = also.pattern.partition("::")
        if fnmatch(mutant.file, files) and (not functions or fnmatch(mutant.function, functions)):
            found += [file for file in _found(root, also.tests) if file not in found]
    return found


def _found(root: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))


def _ordered(files: Sequence[str], mutant: Mutant, root: Path, seconds: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(
        sorted(files, key=lambda file: (-_nearness(root / file, mutant), seconds.get(file, 0.0), file))
    )


def _nearness(test: Path, mutant: Mutant) -> int:
    """How much a test file looks as if it were about a mutant: by its name, and by what it mentions."""
    module = Path(mutant.file).with_suffix("")
    words = [word for word in module.parts if word not in ("__init__", mutant.package)]
    name, text = test.stem, _text(test)
    score = 4 * sum(word.removesuffix("s") in name for word in words)
    imported = ".".join(("braid", *(part for part in module.parts if part != "__init__")))
    score += 2 * (imported in text)
    functions = [part for part in mutant.function.split(".") if len(part) > 3 and not part.startswith("_")]
    return score + 3 * sum(bool(re.search(rf"\b{part}\b", text)) for part in functions)


@cache
def _text(test: Path) -> str:
    return test.read_text()


def function_at(root: Path, file: str, line: int) -> str:
    """The qualified name of the innermost function or class around a line; empty outside of all."""
    found: list[str] = []

    def look(nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if node.lineno <= line <= (node.end_lineno or 0):
                found.append(node.name)
                look(node.body)

    look(_tree(root / SOURCES / file).body)
    return ".".join(found)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())
