"""What saving costs: the stall of the loop, training beside the writer, memory, throughput.

    python -m benchmarks.saving [--folders /tmp /dev/shm] [--layers 14] [--tokens 64] [--saves 3]

The state is that of a model of `--layers` blocks of 1024 channels, about 2 GiB with 14, on a GPU if there is
one. In each folder, in one process: plain copies in memory of as many bytes, into host memory that was touched
before and is pinned for a GPU; steps without saving; asynchronous saves, with steps beside them until they have
ended; synchronous saves; loads; at last plain copies of the files, with fsync, and plain reads of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import machine
from braid import plan
from braid.architecture import Attention, Mlp, Model
from braid.checkpoint import latest
from braid.config import Data, Run, Train
from braid.data import ByteTokenizer, build
from braid.train import state as states
from braid.train.async_saving import HostBuffer, buffer_bytes
from braid.train.trainer import Trainer

GIB = 2**30


def run_of(corpus: Path, layers: int, tokens: int) -> Run:
    model = Model(
        pattern="[*-]" * layers,
        hidden=1024,
        vocab=257,
        attention=Attention(heads=8, kv_heads=8, head_dim=128),
        mlp=Mlp(ffn=2816),
    )
    on_gpu = torch.cuda.is_available()
    return Run(
        model=model,
        data=Data(sources=(str(corpus),), sequence_tokens=tokens),
        train=Train(
            steps=10**6,
            batch_samples=8 if on_gpu else 1,
            dtype="bf16" if on_gpu else "fp32",
            eval_samples=0,
            save_every=10**6,
            keep=1,
        ),
    )


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def step_seconds(trainer: Trainer, steps: int) -> list[float]:
    return [seconds(trainer.step) for _ in range(steps)]


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plain_copies(storages: list[torch.Tensor], device: torch.device) -> list[float]:
    """Seconds of copies of the state, into memory as that of the saver."""
    buffer = HostBuffer(buffer_bytes(storages), device)

    def copy() -> None:
        buffer.copy(storages)
        buffer.wait()

    try:
        return [seconds(copy) for _ in range(5)]
    finally:
        buffer.close()


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a folder as a writer would: 64 MiB at a time, then fsync."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            while block := read.read(64 * 2**20):
                write.write(block)
            write.flush()
            os.fsync(write.fileno())


def read_files(source: Path) -> None:
    for path in source.iterdir():
        with path.open("rb") as read:
            while read.read(64 * 2**20):
                pass


@contextmanager
def training(run: Run, out: Path) -> Iterator[Trainer]:
    with Trainer(plan(run, world=1), out=out, quiet=True) as trainer:
        yield trainer


def measure(run: Run, out: Path, saves: int) -> dict[str, Any]:
    with training(run, out) as trainer:
        device = trainer.device.torch
        captured = states.capture(trainer.state, run, trainer.data.train, trainer.data.tokenizer)
        storages, size = captured.storages(), sum(each.nbytes for each in captured.storages())
        copies = plain_copies(storages, device)
        loop = trainer._get_loop()
        step_seconds(trainer, 3)
        before = peak_bytes()
        alone, stalls, beside, writing = step_seconds(trainer, 8), [], list[float](), []
        saver = loop.saver
        assert saver is not None, "there is room for copies"
        for _ in range(saves):
            stalls.append(seconds(lambda: loop.save(must=False)))
            began = time.perf_counter()
            while not saver.ended:
                beside += step_seconds(trainer, 1)
            writing.append(time.perf_counter() - began)
            saver.result()
        alone += step_seconds(trainer, 8)
        grown = peak_bytes() - before
        synchronous = [seconds(lambda: loop.save(must=True)) for _ in range(2)]
        path = latest(out / "checkpoints").path
        assert path is not None
        load = [seconds(lambda: states.load(path, trainer.state)) for _ in range(2)]
        plain_write = []
        for _ in range(2):
            plain_write.append(seconds(partial(copy_files, path, out / "copy")))
            shutil.rmtree(out / "copy")
        plain_read = [seconds(lambda: read_files(path)) for _ in range(2)]
    rate = lambda times: round(size / GIB / min(times), 2)  # noqa: E731
    return {
        "gib": round(size / GIB, 3),
        "plain_copy_s": [round(each, 4) for each in copies],
        "stall_s": [round(each, 4) for each in stalls],
        "stall_of_plain_copy": round(median(stalls) / median(copies), 3),
        "step_alone_s": round(median(alone), 4),
        "step_beside_writer_s": round(median(beside), 4),
        "slower_beside_writer": round(median(beside) / median(alone) - 1, 3),
        "writing_s": [round(each, 2) for each in writing],
        "grown_beyond_copies_mib": round(grown / 2**20),
        "gib_per_s": {
            "asynchronous_save": rate(writing),
            "synchronous_save": rate(synchronous),
            "load": rate(load),
            "plain_copy_of_files": rate(plain_write),
            "plain_read_of_files": rate(plain_read),
        },
    }


def corpus_in(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    (texts / "0.txt").write_text("to be or not to be, that is the question. " * 20_000)
    return build(texts, folder / "corpus", ByteTokenizer(), validation=0.0).output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    parser.add_argument("--folders", nargs="+", type=Path, default=folders)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=2048 if torch.cuda.is_available() else 64)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--name", default="saving", help="of the file in results/")
    options = parser.parse_args()
    origin, figures = machine.describe(), dict[str, Any]()
    for folder in options.folders:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            run = run_of(corpus_in(Path(work)), options.layers, options.tokens)
            figures[str(folder)] = measure(run, Path(work) / "out", options.saves)
        print(f"{folder}  {json.dumps(figures[str(folder)])}", flush=True)
    print(f"written to {machine.write(options.name, figures, origin)}")


if __name__ == "__main__":
    main()
