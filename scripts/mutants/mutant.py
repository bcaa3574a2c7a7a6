"""Faults as data: a change of one place in one source file."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SOURCES = Path("src/braid")
"""Where faults are planted, from the root of the repository."""

Kind = Literal[
    "accepted input",
    "comparison",
    "deadlock",
    "dropped term",
    "ignored mask",
    "lost data",
    "missing scale",
    "off by one",
    "stale cache",
    "swapped",
    "wrong axis",
    "wrong estimate",
    "wrong group",
]
"""What sort of fault one written by hand is."""


class StaleFaultError(ValueError):
    """A fault whose place in the sources is gone, or is no longer the only one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that somebody thought of."""

    name: str
    """What goes wrong, in a few words with hyphens; no other fault has it."""
    file: str
    """Relative to `src/braid`."""
    old: str
    """Text that the file has exactly once."""
    new: str
    kind: Kind
    why: str
    """What a user would suffer."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault, ready to be planted."""

    name: str
    """No other mutant of the same sources has it."""
    file: str
    """Relative to `src/braid`."""
    start: int
    end: int
    """The bytes of the file that are replaced."""
    line: int
    old: str
    new: str
    kind: str
    """The kind of a fault, or the operator that drew it."""
    why: str = ""
    function: str = ""
    """The qualified name of the function that it is in; empty for code of the module."""
    drawn: bool = False

    @property
    def package(self) -> str:
        return package_of(self.file)

    @property
    def place(self) -> str:
        return f"{SOURCES / self.file}:{self.line}"

    def applied(self, source: bytes) -> bytes:
        """The file with the fault in it."""
        assert source[self.start : self.end].decode() == self.old, f"{self.name} was made for another source"
        return source[: self.start] + self.new.encode() + source[self.end :]

    def difference(self, source: bytes) -> list[str]:
        """What changes in the file, as lines of a diff."""
        old, new = source.decode().splitlines(), self.applied(source).decode().splitlines()
        lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
        return [f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-"]


def package_of(file: str) -> str:
    """The package that a source file belongs to: its folder, or itself where it stands alone."""
    return Path(file).parts[0].removesuffix(".py")


def planted(fault: Fault, root: Path) -> Mutant:
    """A fault as a mutant of the sources under `root`."""
    path = root / SOURCES / fault.file
    source = path.read_bytes() if path.is_file() else b""
    old = fault.old.encode()
    if (count := source.count(old)) != 1:
        found = f"has it {count} times" if source else "is missing"
        raise StaleFaultError(f"{fault.name}: {SOURCES / fault.file} {found}\n  {fault.old.strip()}")
    start = source.index(old)
    return Mutant(
        name=fault.name,
        file=fault.file,
        start=start,
        end=start + len(old),
        line=source.count(b"\n", 0, start) + 1,
        old=fault.old,
        new=fault.new,
        kind=fault.kind,
        why=fault.why,
    )
