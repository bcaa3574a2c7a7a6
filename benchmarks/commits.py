"""Whole training steps of two source trees in turn: is this one slower than that one?

    python -m benchmarks.commits OTHER/src                 the shapes below, on a GPU
    python -m benchmarks.commits OTHER/src --device cpu    the recipe `tiny`, on one rank and on four

Each tree runs in processes of its own, first one, then the other, again and again, so that a machine that slows
down slows down both. A GPU trains rows of one document. `ratio` is the median step of this tree over that of
the other one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP, STEPS, ROUNDS = 3, 10, 2
"""On a GPU: steps that do not count, steps that do, and how often each tree has its turn."""
CPU_STEPS, CPU_PAIRS = 9, 10
CPU_RUNS = MappingProxyType({"tiny": ("--world", "1"), "tiny on 4, shard all": ("--world", "4")})


def shape(name: str) -> Any:
    """A run by its name; imported here, from whichever tree is measured."""
    from braid.architecture import Attention, DeltaNet, Mamba2, Mlp, Model, Moe
    from braid.config import Data, Optim, Run, Train

    plain = Attention(heads=16, kv_heads=8, head_dim=128)
    no_positions = Attention(heads=16, kv_heads=8, head_dim=128, positions="none")
    normed = Attention(heads=16, kv_heads=4, head_dim=128, qk_norm=True)
    gated = Attention(heads=16, kv_heads=2, head_dim=256, rope_fraction=0.25, qk_norm=True, gate=True)
    mamba = Mamba2(heads=64, head_dim=64, state=128, groups=8)
    delta = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    squared = Mlp(ffn=8192, activation="relu2")
    next_moe = Moe(experts=64, top_k=8, ffn=512, shared_ffn=512, shared_gate=True)
    moe = Moe(experts=64, top_k=8, ffn=768, aux_loss=0.0)
    hybrid = {"pattern": "M-M*M-M-", "attention": no_positions, "mamba2": mamba, "mlp": squared}
    mixed = {"pattern": "[GE][GE][GE][*E]", "attention": gated, "delta_net": delta, "moe": next_moe}
    wide = Attention(heads=32, kv_heads=8, head_dim=128)
    models: dict[str, tuple[dict[str, Any], int]] = {
        "llama": ({"pattern": "[*-]" * 16, "attention": plain, "mlp": Mlp(ffn=8192)}, 4),
        "qwen3moe": ({"pattern": "[*E]" * 8, "attention": normed, "moe": moe}, 4),
        "nemotronh": (hybrid, 1),
        "nemotronh16k": (hybrid, 4),
        "qwen3next": (mixed, 1),
        "qwen3next16k": (mixed, 4),
        "llama4096": ({"pattern": "[*-]" * 8, "hidden": 4096, "attention": wide, "mlp": Mlp(ffn=14336)}, 4),
    }
    fields, samples = models[name]
    return Run(
        model=Model(**{"hidden": 2048, "vocab": 32000, "tied": False, **fields}),
        data=Data(sequence_tokens=4096),
        optim=Optim(lr=1e-4),
        train=Train(steps=100, batch_samples=samples, dtype="bf16", eval_samples=0),
    )


SHAPES = ("llama", "qwen3moe", "nemotronh", "nemotronh16k", "qwen3next", "qwen3next16k", "llama4096")


def home(*names: str) -> Any:
    """A module that has moved: the first of these names that the tree has."""
    for name in names:
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise ModuleNotFoundError(" or ".join(names))


def child(name: str) -> None:
    """Print the milliseconds of every step of a shape."""
    groups = home("braid.distributed.collectives", "braid.collectives").Groups()
    plan = home("braid.planning.plan", "braid.plan").plan
    make_state = home("braid.train.build", "braid.train.building").make_state
    pipeline = home("braid.train.data_pipeline", "braid.train.feed")
    # Older trees call it `open_feed`.
    open_data = pipeline.open_data_pipeline if hasattr(pipeline, "open_data_pipeline") else pipeline.open_feed
    states, step = home("braid.train.state"), home("braid.train.step")
    devices = home("braid.train.device")
    run = shape(name)
    device = devices.choose_device("cuda")
    devices.set_arithmetic(deterministic=False)
    state = make_state(plan(run, 1), device, groups)
    states.initialize(state, run)
    with tempfile.TemporaryDirectory() as folder:
        data, seconds = open_data(whole_rows(run, Path(folder)), Path(folder)), []
        for _ in range(WARM_UP + STEPS):
            started = time.perf_counter()
            step.train_step(state, run, data.train, 1e-4)
            device.synchronize()
            seconds.append(1e3 * (time.perf_counter() - started))
    print(json.dumps(seconds))


def whole_rows(run: Any, folder: Path) -> Any:
    """The run on one document that fills every row."""
    import random
    from dataclasses import replace

    from braid.data import ByteTokenizer, build

    (folder / "text").mkdir()
    letters = random.Random(0).choices("abcdefgh \n", k=1 << 20)
    (folder / "text" / "all.txt").write_text("".join(letters))
    built = build(folder / "text", folder / "tokens", ByteTokenizer()).output
    return replace(run, data=replace(run.data, sources=(str(built),)))


def step_ms(tree: Path, name: str) -> list[float]:
    """Steps that count, of a tree."""
    answer = _run(tree, [sys.executable, str(Path(__file__).resolve()), "--child", name])
    return [float(each) for each in json.loads(answer.splitlines()[-1])][WARM_UP:]


def tiny_ms(tree: Path, words: tuple[str, ...]) -> list[float]:
    with tempfile.TemporaryDirectory() as out:
        steps = ["--train.steps", str(CPU_STEPS), "--optim.warmup-steps", "1", "--train.eval-samples", "0"]
        _run(tree, [sys.executable, "-m", "braid", "train", "tiny", "--out", out, *words, *steps])
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [1e3 / line["tokens_per_s"] for line in lines[WARM_UP:]]


def _run(tree: Path, command: list[str]) -> str:
    path = [str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def compare(other: Path, device: str, only: list[str]) -> dict[str, Any]:
    trees: Mapping[str, Path] = {"other": other, "this": ROOT / "src"}
    figures: dict[str, Any] = {}
    unit = "ms" if device == "cuda" else "ms_per_token"
    for name in [each for each in (SHAPES if device == "cuda" else CPU_RUNS) if not only or each in only]:
        times: dict[str, list[float]] = {which: [] for which in trees}
        ratios = []
        for number in range(ROUNDS if device == "cuda" else CPU_PAIRS):
            order = ["other", "this"] if number % 2 == 0 else ["this", "other"]
            found = {}
            for which in order:
                tree = trees[which]
                found[which] = step_ms(tree, name) if device == "cuda" else tiny_ms(tree, CPU_RUNS[name])
                times[which] += found[which]
            ratios.append(statistics.median(found["this"]) / statistics.median(found["other"]))
        medians = {which: statistics.median(each) for which, each in times.items()}
        figures[name] = {
            f"this_{unit}": round(medians["this"], 3),
            f"other_{unit}": round(medians["other"], 3),
            "ratio": round(medians["this"] / medians["other"], 4),
            "ratio_of_pairs": round(statistics.median(ratios), 4),
        }
        print(name, json.dumps(figures[name]), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--child", default="")
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    if given.other is None or not (given.other / "braid").is_dir():
        parser.error("the other tree's src folder, which holds braid/, comes first")
    from benchmarks import machine

    if given.device == "cuda":
        machine.needs_gpu()
    origin = machine.describe()
    machine.write(f"commits_{given.device}", compare(given.other, given.device, given.only), origin)


if __name__ == "__main__":
    main()
