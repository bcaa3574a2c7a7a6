"""Whole training steps on packed rows beside whole rows, on one GPU: does a new mix of documents cost time?

    python -m benchmarks.packed_gpu

    library   rows packed with the files of Python's standard library, as a run does that names no data
    short     documents of 16 to some 9,000 bytes, 1,500 in the mean: every row holds several, of new lengths
    whole     one document that fills every row

Each shape trains 14 steps on each corpus. The first four warm up; `slowest` is the slowest of the others over
their median, `packed` the median of packed steps over that of whole rows.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from braid.architecture import Attention, Mlp, Model, Moe
from braid.cli import main as braid
from braid.config import Data, Optim, Run, Train
from braid.data import ByteTokenizer, build

STEPS, WARM_UP = 14, 4


def llama() -> Run:
    """16 layers of a plain transformer."""
    attention = Attention(heads=16, kv_heads=8, head_dim=128)
    return _run(Model(pattern="[*-]" * 16, attention=attention, mlp=Mlp(ffn=8192), **_WIDTH))


def qwen3moe() -> Run:
    """8 layers with 64 experts."""
    attention = Attention(heads=16, kv_heads=4, head_dim=128, qk_norm=True)
    moe = Moe(experts=64, top_k=8, ffn=768, aux_loss=0.0)
    return _run(Model(pattern="[*E]" * 8, norm_eps=1e-6, attention=attention, moe=moe, **_WIDTH))


_WIDTH: Any = {"hidden": 2048, "vocab": 32000, "tied": False}


def _run(model: Model) -> Run:
    return Run(
        model=model,
        data=Data(sequence_tokens=4096),
        optim=Optim(lr=1e-4),
        train=Train(
            steps=STEPS,
            batch_samples=4,
            micro_batches=1,
            dtype="bf16",
            eval_samples=0,
            log_every=1,
            save_every=0,
        ),
    )


def make_corpora(root: Path) -> dict[str, tuple[str, ...]]:
    """The options that choose each corpus."""
    lengths, left = random.Random(0), 1 << 21
    for name in ("short", "whole"):
        (root / name).mkdir()
    number = 0
    while left > 0:
        length = 16 + int(lengths.expovariate(1 / 1500))
        (root / "short" / f"{number:05}.txt").write_text("".join(lengths.choices("abcdefgh \n", k=length)))
        left, number = left - length, number + 1
    (root / "whole" / "all.txt").write_text("".join(lengths.choices("abcdefgh \n", k=1 << 21)))
    built = {
        name: build(root / name, root / f"{name}-tokens", ByteTokenizer()).output for name in ("short", "whole")
    }
    return {"library": ()} | {name: ("--data.sources", str(path)) for name, path in built.items()}


def step_seconds(shape: str, folder: Path, options: tuple[str, ...]) -> list[float]:
    """Of every step, as the run's own metrics have them."""
    code = braid(["train", f"{__file__}:{shape}", "--out", str(folder), "--device", "cuda", *options])
    assert code == 0, f"braid train ended with {code}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [4 * 4096 / line["tokens_per_s"] for line in lines]


def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        corpora = make_corpora(Path(root))
        for shape in ("llama", "qwen3moe"):
            seconds = {
                name: step_seconds(shape, Path(root) / f"{shape}-{name}", o) for name, o in corpora.items()
            }
            steady = {name: each[WARM_UP:] for name, each in seconds.items()}
            median = {name: statistics.median(each) for name, each in steady.items()}
            figures[shape] = {
                name: {
                    "median_ms": round(1e3 * median[name], 1),
                    "slowest": round(max(steady[name]) / median[name], 3),
                    "packed": round(median[name] / median["whole"], 3),
                    "steps_ms": [round(1e3 * each, 1) for each in seconds[name]],
                }
                for name in corpora
            }
    return figures


if __name__ == "__main__":
    machine.needs_gpu()
    origin = machine.describe()
    figures = measure()
    print(json.dumps(figures, indent=1))
    machine.write("packed_gpu", figures, origin)
