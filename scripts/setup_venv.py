"""Make or refresh .venv: `python3 scripts/setup_venv.py [extra ...]`. Standard library only.

Two ways:
- fresh: the Python at hand has no torch >= 2.11. Everything is installed, at the versions in constraints.txt.
- borrowed: it has one (a GPU machine). That torch, and whatever else is installed beside it, is seen from
  .venv as it is; only what is missing gets installed. Without a network braid is linked in and what stays
  missing is named.

A stamp inside .venv remembers what it was made from, so a second call takes milliseconds. Extras that are
asked for later are added to it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "made-from"
NEEDED_PYTHON = (3, 11)
NEEDED_TORCH = (2, 11)


def borrowable_torch() -> str | None:
    """The version of a torch >= 2.11 that this Python already has, or None."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return version if numbers >= NEEDED_TORCH else None


def fingerprint(torch: str | None) -> str:
    """Changes with everything that .venv is made from, except which extras are in it."""
    sources = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    sources += [Path(__file__).read_text(), sys.version, sys.prefix, str(ROOT), str(torch)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def installed_extras(made_from: str) -> set[str] | None:
    """The extras in a .venv that was made from the same things; None where there is no such .venv."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None
    return set(stamp["extras"]) if stamp["made_from"] == made_from else None


def constraints_without_installed() -> list[str]:
    """constraints.txt less the packages that the borrowed Python already has, whatever their version."""
    installed = {_plain(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if _plain(line.split("==")[0]) not in installed]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def make(torch: str | None) -> None:
    """Make .venv anew, empty but for what is borrowed."""
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    if torch is not None:
        # Where torch itself lies comes first: it may be a user's own folder.
        found = str(importlib.metadata.distribution("torch").locate_file(""))
        folders = dict.fromkeys([found, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        (site_packages() / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in folders))
        (VENV / "constraints.txt").write_text("\n".join(constraints_without_installed()) + "\n")


def install(extras: list[str], torch: str | None, *, fresh: bool) -> bool:
    """Install braid with these extras into .venv; False where only a part of it could be had."""
    constraints = ROOT / "constraints.txt" if torch is None else VENV / "constraints.txt"
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run([*pip, "--constraint", str(constraints), "--editable", target])
    if installed.returncode == 0:
        return True
    if torch is not None:
        link_without_network()
        return False
    if fresh:
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit("set-up: pip could not install what braid needs (its message is above); .venv was removed")
    sys.exit(f"set-up: pip could not add {', '.join(extras)} (its message is above); .venv is as it was")


def site_packages() -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"


def link_without_network() -> None:
    """The borrowed Python has the big packages: make braid importable and say what is missing."""
    (site_packages() / "braid.pth").write_text(f"{ROOT / 'src'}\n")
    command = VENV / "bin" / "braid"
    command.write_text(
        f"#!{VENV / 'bin' / 'python'}\nimport sys\n\nfrom braid.cli import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    needed = re.findall(r'^\s+"([a-z-]+)>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    missing = [name for name in needed if not _has(name)]
    if missing:
        sys.exit(f"set-up: nothing could be installed, and braid needs {', '.join(missing)}")
    print("set-up: nothing could be installed; braid is linked in, without the extras that were asked for")


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(extras: list[str]) -> None:
    if sys.version_info < NEEDED_PYTHON:
        given = ".".join(str(n) for n in sys.version_info[:3])
        sys.exit(f"set-up: braid needs Python 3.11 or newer, this is {given}; try `make PYTHON=python3.12 ...`")
    if Path(sys.prefix).resolve() == VENV:
        # Called with the Python of the very .venv: go on with the one that it was made from.
        base = sys._base_executable  # type: ignore[attr-defined]
        os.execv(base, [base, __file__, *extras])
    torch = borrowable_torch()
    made_from = fingerprint(torch)
    present = installed_extras(made_from)
    if present is not None and present.issuperset(extras):
        return
    if present is None:
        how = "everything in constraints.txt" if torch is None else f"torch {torch} is here and stays"
        print(f"set-up: making .venv with {sys.executable} ({how}); this takes a minute or two", flush=True)
        make(torch)
    wanted = sorted((present or set()).union(extras))
    if install(wanted, torch, fresh=present is None):
        STAMP.write_text(json.dumps({"made_from": made_from, "extras": wanted}))


if __name__ == "__main__":
    main(sys.argv[1:])
