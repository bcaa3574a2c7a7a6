"""How long a step waits for its images, without and with prefetching: `python -m benchmarks.item_prefetch`.

Photos of 1,024 x 768 pixels (JPEG), one in each of the 8 samples of a step, are decoded and resized to 12 x 16
patches for a small encoder beside a small language model, on the CPU. What is timed is `read_items`: the part
of a step in which it can do nothing else. Both ways train the same steps, in turn, so that a busy machine slows
both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import machine
from braid.architecture import Attention, Mlp
from braid.config import Module, Run
from braid.data import ByteTokenizer, build
from braid.encoders import Encoder, Pixels, Projector
from braid.planning.plan import plan
from braid.recipes import load
from braid.train.items import read_items
from braid.train.trainer import Trainer

STEPS = 12
SAMPLES = 8
HEIGHT, WIDTH = 768, 1024


def photos(folder: Path) -> Path:
    """Smooth pictures with noise, about as large as photos are, and a line of text for each."""
    from PIL import Image

    chosen = np.random.default_rng(0)
    rows = []
    folder.mkdir()
    for number in range(16):
        coarse = Image.fromarray(chosen.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + chosen.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.jpg", quality=90)
    for number in range(16 * SAMPLES):
        rows.append(f'{{"content": [{{"image": "{number % 16}.jpg"}}, {{"text": "{"photo " * 12}"}}]}}')
    (folder / "rows.jsonl").write_text("\n".join(rows))
    build(folder / "rows.jsonl", folder / "data", ByteTokenizer())
    return folder / "data"


def run_on(source: Path) -> Run:
    run = load("tiny")
    pixels = Pixels(patch=16)
    encoder = Encoder(
        pattern="[*-][*-]",
        hidden=64,
        input=pixels.input,
        pixels=pixels,
        group=4,
        attention=Attention(heads=4, kv_heads=4, head_dim=16, positions="none"),
        mlp=Mlp(ffn=128, activation="gelu"),
        projector=Projector(width=run.model.hidden),
    )
    vision = Module(model=encoder, token=257, most_items=1, most_patches=192, items="image")
    return replace(
        run,
        model=replace(run.model, vocab=258),
        modules={"vision": vision},
        data=replace(run.data, sources=(str(source),), sequence_tokens=128, packing="documents"),
        optim=replace(run.optim, warmup_steps=1),
        train=replace(run.train, steps=STEPS, batch_samples=SAMPLES, micro_batches=2, eval_every=0),
    )


def measure() -> dict[str, Any]:
    """Medians of steps 2 to 12, in ms."""
    waits: list[float] = []

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        items = read_items(*given, **named)
        waits.append(time.perf_counter() - started)
        return items

    figures: dict[str, dict[str, list[float]]] = {
        way: {"waits": [], "steps": []} for way in ("without", "with")
    }
    with tempfile.TemporaryDirectory() as folder, patch("braid.train.step.read_items", timed):
        run = run_on(photos(Path(folder) / "photos"))
        trainers = {
            way: Trainer(plan(run, 1), out=Path(folder) / way, device="cpu", quiet=True) for way in figures
        }
        trainers["without"]._get_loop().prefetch = None
        for _ in range(STEPS):
            for way, trainer in trainers.items():
                started = time.perf_counter()
                trainer.step()
                figures[way]["steps"].append(time.perf_counter() - started)
                figures[way]["waits"].append(waits[-1])
        for trainer in trainers.values():
            trainer.close()
    return {
        f"{way} prefetching": {
            f"{name}_ms": round(1e3 * statistics.median(values[1:]), 1) for name, values in each.items()
        }
        for way, each in figures.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    figures = measure()
    for way, each in figures.items():
        print(f"{way}: a step waits {each['waits_ms']} ms for its images, and takes {each['steps_ms']} ms")
    machine.write("item_prefetch", figures, machine.describe())


if __name__ == "__main__":
    main()
