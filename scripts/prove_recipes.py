"""`braid prove` of every bundled recipe on three meshes: `python -m scripts.prove_recipes --out FILE`.

One case after the other, and a line of JSON for each. A case that the file has already is not run again, so
that the command may be interrupted and repeated. Exits with 1 if any case does not hold. All cases share one
process that has torch loaded, and so take less than the command by itself.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import braid.cli
from braid.config import Mesh
from braid.errors import ConfigError
from braid.prove.shrink import shrink
from braid.recipes import bundled, load

SAMPLES, MICRO_BATCHES = 256, 4


class Case(NamedTuple):
    recipe: str
    world: int
    mesh: Mesh

    @property
    def axes(self) -> dict[str, int]:
        """Those that are larger than 1."""
        return {axis: size for axis in ("tp", "cp", "pp") if (size := getattr(self.mesh, axis)) > 1}

    @property
    def legal(self) -> bool:
        """Some recipes have heads that some meshes cannot share, or modules on ranks of their own."""
        run = load(self.recipe, self.world)
        train = replace(run.train, batch_samples=SAMPLES, micro_batches=MICRO_BATCHES)
        mesh = replace(self.mesh, ranks=run.mesh.ranks)
        try:
            return shrink(replace(run, mesh=mesh, train=train), self.world) != []
        except ConfigError:
            return False

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        mesh = [word for axis, size in self.axes.items() for word in (f"--mesh.{axis}", str(size))]
        samples = ["--train.batch-samples", str(SAMPLES), "--train.micro-batches", str(MICRO_BATCHES)]
        return [self.recipe, "--world", str(self.world), *mesh, *samples]


MESHES = ((4, Mesh(tp=2)), (4, Mesh(pp=2)), (64, Mesh(tp=2, cp=2)))
INSTEAD = ((8, Mesh(tp=2, cp=2)), (64, Mesh(cp=2)))
"""For recipes that cannot have one of the three: the first that they can."""


def cases() -> list[Case]:
    """Three of each recipe."""
    every = []
    for recipe in bundled():
        instead = [case for mesh in INSTEAD if (case := Case(recipe, *mesh)).legal]
        every += [case if (case := Case(recipe, *mesh)).legal else instead[0] for mesh in MESHES]
    return every


def proved(case: Case) -> dict[str, Any]:
    """What `braid prove` says of a case, and what it took."""
    said, before, began = io.StringIO(), _cpu_seconds(), time.monotonic()
    with redirect_stdout(said):
        code = braid.cli.main(["prove", *case.words, "--json"])
    told: dict[str, Any] = {"recipe": case.recipe, "world": case.world, "mesh": case.axes, "exit": code}
    told["seconds"] = round(time.monotonic() - began, 1)
    told["cpu_seconds"] = round(_cpu_seconds() - before, 1)
    if not said.getvalue():
        return told | {"holds": False}
    runs = json.loads(said.getvalue())["runs"]
    checks = [(each["apart"], name, each["where"]) for run in runs for name, each in run["checks"].items()]
    worst, name, where = max(checks)
    told |= {"ranks": [run["world"] for run in runs], "pattern": [run["pattern"] for run in runs]}
    return told | {"holds": code == 0, "worst": worst, "worst_in": f"{name} {where}".strip()}


def _cpu_seconds() -> float:
    """Of this process, its children, such as the server of ranks, and theirs that have ended."""
    own = Path("/proc/self/task") / str(os.getpid())
    each = [own.parent.parent, *(Path("/proc") / pid for pid in (own / "children").read_text().split())]
    ticks = [sum(map(int, (at / "stat").read_text().rpartition(")")[2].split()[11:15])) for at in each]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="a file of JSON lines, continued if it is there"
    )
    out: Path = parser.parse_args().out
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = [(each["recipe"], each["world"], each["mesh"]) for each in known]
    for case in cases():
        if (case.recipe, case.world, case.axes) not in there:
            known.append(proved(case))
            with out.open("a") as file:
                print(json.dumps(known[-1]), file=file)
            print(json.dumps(known[-1]), flush=True)
    return 0 if all(each["holds"] for each in known) else 1


if __name__ == "__main__":
    sys.exit(main())
