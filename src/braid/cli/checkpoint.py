"""`braid checkpoint verify`, `braid checkpoint inspect`: whether checkpoints are whole, and what is in one."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braid.cli.args import parse_options, split_positional, wants_help
from braid.cli.plan_tables import size_text
from braid.cli.progress import bar
from braid.console import table
from braid.errors import CheckpointError, ConfigError, ExitCode
from braid.validators import nearest

HELP = """usage: braid checkpoint verify PATH [--json]
       braid checkpoint inspect PATH [--tensors] [--json]

PATH is a run or a checkpoint.

  verify   read every byte and compare checksums, of all checkpoints of a run; exit code 4 if any is damaged
  inspect  print step, counters, model, bytes and topology of a checkpoint, or of the newest one of a run

Run `braid checkpoint verify --help` or `braid checkpoint inspect --help` for the options."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every byte of a checkpoint, or of all those of a run, and compare checksums."""

    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Print what is in a checkpoint, from its manifest alone."""

    tensors: bool = False
    """List the tensors."""
    json: bool = False
    """Print the same as JSON."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result for one checkpoint."""

    path: str
    bytes: int
    """Of its parts; 0 if its manifest cannot be read."""
    tensors: int
    seconds: float
    faults: tuple[str, ...]
    """What is wrong, by file and tensor."""

    def __str__(self) -> str:
        if self.faults:
            return "\n  ".join([f"{self.path} is damaged", *self.faults])
        rate = size_text(self.bytes / max(self.seconds, 1e-9))
        return f"{self.path}: {self.tensors:,} tensors, {size_text(self.bytes)}, all valid ({rate}/s)"


def checkpoint(args: list[str]) -> int:
    if wants_help(args):
        print(HELP)
        return ExitCode.OK
    actions = {"verify": _verify, "inspect": _inspect}
    if not args:
        raise ConfigError("`braid checkpoint` needs verify or inspect: braid checkpoint verify PATH")
    if args[0] not in actions:
        given = f"{args[0]!r}{nearest(args[0], actions)}"
        raise ConfigError(f"`braid checkpoint` takes verify or inspect, got {given}")
    return actions[args[0]](args[1:])


def _verify(args: list[str]) -> int:
    if wants_help(args):
        args = ["PATH", "--help"]
    path, rest = split_positional(args, "checkpoint verify", "PATH")
    opts = parse_options(VerifyOptions, rest, f"braid checkpoint verify {path}")
    from braid.train.inspecting import checkpoints_of

    found = []
    for each in checkpoints_of(Path(path)):
        verified = _verified(each)
        found.append(verified)
        if not opts.json:
            print(verified, file=sys.stderr if verified.faults else sys.stdout, flush=True)
    if opts.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    return ExitCode.CHECKPOINT if any(each.faults for each in found) else ExitCode.OK


def _verified(path: Path) -> Verified:
    from braid.checkpoint import find_faults, read_manifest
    from braid.checkpoint.manifest import MANIFEST_NAME

    began = time.perf_counter()
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        faults = tuple(line.strip() for line in str(error).splitlines())
        return Verified(path=str(path), bytes=0, tensors=0, seconds=0.0, faults=faults)
    with bar(f"verifying {path.name}") as progress:
        faults = tuple(find_faults(path, manifest, progress))
    if re.fullmatch(r"step-\d+", path.name) and int(path.name[5:]) != manifest.step:
        faults = (*faults, f"{MANIFEST_NAME}: is of step {manifest.step}")
    return Verified(
        path=str(path),
        bytes=sum(part.size for part in manifest.parts.values()),
        tensors=len(manifest.tensors),
        seconds=time.perf_counter() - began,
        faults=faults,
    )


def _inspect(args: list[str]) -> int:
    if wants_help(args):
        args = ["PATH", "--help"]
    path, rest = split_positional(args, "checkpoint inspect", "PATH")
    opts = parse_options(InspectOptions, rest, f"braid checkpoint inspect {path}")
    from braid.train.inspecting import checkpoints_of, summary, tensors_of

    newest = checkpoints_of(Path(path))[0]
    found = summary(newest)
    listed = tensors_of(newest) if opts.tensors else {}
    if opts.json:
        print(json.dumps({**found, **({"tensors": listed} if opts.tensors else {})}, indent=2))
        return ExitCode.OK
    print(table(_rows(found)))
    if listed:
        width = max(map(len, listed))
        print()
        for name, each in listed.items():
            print(f"{name:<{width}}  {each['dtype']:<8}  {each['shape']}")
    return ExitCode.OK


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A summary as lines."""
    rows = [("checkpoint", found["path"]), ("step", f"{found['step']:,}")]
    rows += [(name.replace("_", " "), f"{count:,}") for name, count in found["counters"].items()]
    rows += [(name, text) for name, text in found["models"].items()]
    rows += [("parameters", f"{found['parameters']:,}")]
    if found["mesh"]:
        rows += [("saved on", ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items()))]
    sizes = list(found["parts"].values())
    rows += [("files", f"{len(sizes)}, {size_text(sum(sizes))}")]
    rows += [(f"  {kind}", size_text(size)) for kind, size in found["bytes"].items()]
    return [*rows, ("braid", found["braid"] or "unknown")]
