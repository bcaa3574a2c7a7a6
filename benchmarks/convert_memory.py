"""Peak memory of `braid import` and `braid export`: it must not depend on the depth of the model.

    python -m benchmarks.convert_memory --work FOLDER [--layers 6 12] [--experts 128] [--worlds 1 2] [--sparse]
                                        [--result convert_memory]

Writes Qwen3-30B-A3B's layout, cut to some numbers of layers and experts, as random bfloat16 in safetensors
files of 4 GB (1 GB with fewer experts, so that several processes have files to write), then imports and exports
it, each in a process of its own. FOLDER needs twice the size of the model as free disk (2 × 15 GiB for 12
layers) and is emptied. With --sparse, weights are zeros in files with holes, which are there at once: peaks are
the same. Exports read the checkpoint itself, because those of a run are verified first.
Measures, all in bytes:

    rss     the largest resident set of any process (`ru_maxrss`), with pages of files that are mapped
    tree    the largest sum of resident sets over all processes of the command, sampled; what processes share
            counts once for each
    anon    the largest sum of `RssAnon` over all processes, sampled: memory that the kernel cannot drop
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from benchmarks import machine
from braid.checkpoint.parts import lay_out
from braid.interchange.convert import Lazy
from braid.interchange.export import hub_folder
from braid.interchange.files import MODEL, FolderPlan, plan_folder, write_folder
from braid.interchange.hub import read_config
from braid.interchange.trained import targets

CONFIG = machine.ROOT / "tests" / "interchange" / "published" / "qwen3_moe" / "Qwen3-30B-A3B.json"
EXPERTS = 128
"""Of Qwen3-30B-A3B."""
SHARD_BYTES = 4 * 10**9
SAMPLE_SECONDS = 0.01
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One command."""

    rss: int
    tree: int
    anon: int
    seconds: float
    rate: float
    """Bytes of tensors per second."""


def write_model(folder: Path, layers: int, experts: int = EXPERTS, *, sparse: bool = False) -> int:
    """A folder of the hub with random weights, written one tensor at a time; returns bytes of tensors."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers, "num_experts": experts}
    shape = read_config(config).shape
    seed = torch.Generator().manual_seed(0)
    pool = torch.empty(2**26, dtype=torch.bfloat16).normal_(std=0.02, generator=seed)
    outlines = {
        name: torch.empty(target.shape, dtype=torch.bfloat16, device="meta")
        for name, target in targets(shape, torch.bfloat16).items()
    }
    numbered = enumerate(outlines.items())
    tensors = Lazy({name: partial(_random, pool, place, each) for place, (name, each) in numbered})
    plan = hub_folder(shape, tensors, folder, model_type="qwen3_moe", outlines=outlines)
    shard_bytes = SHARD_BYTES if experts == EXPERTS else SHARD_BYTES // 4
    parts: dict[str, Any] = {"outlines": plan.outlines[MODEL], "shard_bytes": shard_bytes}
    planned = plan_folder(folder, config, plan.tensors[MODEL], **parts)
    if sparse:
        _write_holes(planned)
    else:
        write_folder(planned)
    return sum(plan.sizes.values())


def _write_holes(plan: FolderPlan) -> None:
    """The same files, with headers alone."""
    plan.begin()
    for file, names in plan.files[MODEL].items():
        layout = lay_out({name: plan.outlines[MODEL][name] for name in names})
        with open(plan.folder / file, "xb") as stream:
            stream.write(layout.header)
            stream.truncate(layout.size)
    plan.finish()


def _random(pool: Tensor, place: int, outline: Tensor) -> Tensor:
    """A tensor of random numbers from the pool, which begins elsewhere for every tensor."""
    count, start = outline.numel(), place * 99_991 % (pool.numel() // 2)
    half = pool[start : start + pool.numel() // 2]
    return half.repeat(-(-count // half.numel()))[:count].view(outline.shape)


def measure(words: Sequence[str], size: int) -> Measured:
    """Run `braid` and watch its memory and that of its children."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "braid", *words])
    tree = anon = 0
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        seen = [_memory(pid) for pid in _family(process.pid)]
        tree, anon = max(tree, sum(rss for rss, _ in seen)), max(anon, sum(own for _, own in seen))
        time.sleep(SAMPLE_SECONDS)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"braid {' '.join(words)}: exit code {process.returncode}")
    seconds = time.monotonic() - began
    rss = usage.ru_maxrss * 1024  # of the command and of its children, whichever is the largest
    rate = round(size / seconds)
    return Measured(rss=rss, tree=max(tree, rss), anon=anon, seconds=round(seconds, 1), rate=rate)


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and the anonymous ones among them; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return int(fields.get("VmRSS", 0)) * 1024, int(fields.get("RssAnon", 0)) * 1024


def measure_layers(
    work: Path, layers: int, experts: int, worlds: Sequence[int], *, sparse: bool
) -> dict[str, Any]:
    """Import and export a model with this many layers and experts, in each number of processes."""
    folder, run, out = work / "folder", work / "run", work / "out"
    size = write_model(folder, layers, experts, sparse=sparse)
    figures: dict[str, Any] = {"bytes": size}
    for world in worlds:
        shutil.rmtree(run, ignore_errors=True)
        words = ["import", str(folder), "--out", str(run), "--world", str(world)]
        figures[f"import, world {world}"] = asdict(measure(words, size))
    shutil.rmtree(folder)
    for world in worlds:
        words = ["export", str(run / "checkpoints" / "step-00000000"), "--out", str(out), "--world", str(world)]
        figures[f"export, world {world}"] = asdict(measure(words, size))
        shutil.rmtree(out)
    shutil.rmtree(run)
    return figures


def spread(figures: dict[int, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For every command, by how much the largest peak exceeds the smallest, over numbers of layers."""
    every = list(figures.values())

    def excess(name: str, kind: str) -> float:
        peaks = [each[name][kind] for each in every]
        return round(max(peaks) / min(peaks) - 1, 4)

    kinds, names = ("rss", "tree", "anon"), [name for name in every[0] if name != "bytes"]
    return {name: {kind: excess(name, kind) for kind in kinds} for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--result", default="convert_memory", help="name of the file in benchmarks/results")
    args = parser.parse_args()
    origin = machine.describe() | {"safetensors": safetensors.__version__}
    args.work.mkdir(parents=True, exist_ok=True)
    figures = {}
    for layers in args.layers:
        figures[layers] = measure_layers(args.work, layers, args.experts, args.worlds, sparse=args.sparse)
        for name, measured in figures[layers].items():
            if name != "bytes":
                peaks = "  ".join(f"{kind} {measured[kind] / GIB:.2f}" for kind in ("rss", "tree", "anon"))
                print(f"{layers} layers  {name}  {peaks} GiB  {measured['rate'] / GIB:.2f} GiB/s", flush=True)
    print(json.dumps(spread(figures), indent=2))
    named = {str(layers): each for layers, each in figures.items()}
    kind = {"weights": "zeros" if args.sparse else "random", "experts": args.experts}
    print(machine.write(args.result, {**kind, "layers": named, "spread": spread(figures)}, origin))


if __name__ == "__main__":
    main()
