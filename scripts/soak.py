"""Soak: train for hours with a random fault every now and then, and compare with a run without faults.

    python -m scripts.soak --minutes 60 --every 60 --out soak.json
    python -m scripts.soak --faults 20 --kinds kill --launcher torchrun

A small model trains on `--world` CPU ranks under braid's launcher or torchrun, which restart it. The faults:

    kill    kill -9 of a random rank
    stop    SIGSTOP of a random rank, until the watchdog has ended it
    slow    a random rank is stopped and continued every tenth of a second, for five seconds
    flip    a random bit of the newest checkpoint flips; then a rank is killed, so that it is read
    full    the disk is full for five seconds
    denied  nothing can be written to the folder of checkpoints for five seconds

`full` and `denied` need root: the run then has a small tmpfs of its own.
At the end the run is asked to stop, and saves. A run without faults then trains to the same step, and losses
and weights must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("kill", "stop", "slow", "flip", "full", "denied")
STALL_S = 20
"""The watchdog's timeout: a rank that is stopped is found after that."""
SHORT_S = 5.0
"""How long a fault lasts that passes by itself."""
PATIENCE_S = 600.0
"""A run that does no new step for so long has not survived."""
BEYOND = 3
"""Steps after which a run is past a fault: some may be logged before all ranks know of it."""
DISK = "64m"
FOREVER = 10**9

RECIPE = """
from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Optim, Run, Train

def soak() -> Run:
    '''A small model whose learning rate does not depend on the number of steps.'''
    return Run(
        model=Model(
            pattern="[*-]", hidden=16, vocab=257, dropout=0.1,
            attention=Attention(heads=2, kv_heads=2, head_dim=8), mlp=Mlp(ffn=32),
        ),
        data=Data(sequence_tokens=32),
        optim=Optim(warmup_steps=10, final_lr_share=1.0),
        train=Train(
            steps={forever}, batch_samples=8, save_every=5, keep=3, log_every=100, eval_every=0, eval_samples=4,
            stall_timeout_s={stall},
        ),
    )
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that was survived."""

    kind: str
    step: int
    """The last step before it."""
    recovered_s: float
    """Time until the run was `BEYOND` steps past that step."""


class Soak:
    """A training, and what happens to it."""

    def __init__(self, folder: Path, corpus: Path, world: int, launcher: str) -> None:
        self.folder, self.out = folder, folder / "out"
        self.words = ["train", f"{folder}/soak.py:soak", "--data.sources", str(corpus), "--device", "cpu"]
        self.world, self.launcher = world, launcher
        (folder / "soak.py").write_text(RECIPE.format(forever=FOREVER, stall=STALL_S))

    def command(self) -> list[str]:
        words = [*self.words, "--out", str(self.out)]
        if self.launcher == "braid":
            return [sys.executable, "-m", "braid", *words, "--world", str(self.world), "--restarts", "100000"]
        agent = ["--standalone", "--nproc-per-node", str(self.world), "--max-restarts", "100000"]
        agent += ["--monitor-interval", "0.5"]
        return [sys.executable, "-m", "torch.distributed.run", *agent, "-m", "braid", *words]

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def workers(self, launcher: int) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "environ").read_bytes().split(b"\0")
                ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
                if parent == launcher and ranks:
                    found[ranks[0]] = int(entry.name)
        return found

    def checkpoints(self) -> list[Path]:
        return sorted(path for path in (self.out / "checkpoints").glob("step-*") if path.name[5:].isdecimal())


# ------------------------------------------------------------------------------------------- faults


def kill(soak: Soak, launcher: int, chance: random.Random) -> None:
    _signal(soak, launcher, chance, signal.SIGKILL)


def stop(soak: Soak, launcher: int, chance: random.Random) -> None:
    _signal(soak, launcher, chance, signal.SIGSTOP)


def slow(soak: Soak, launcher: int, chance: random.Random) -> None:
    workers = soak.workers(launcher)
    chosen, end = chance.choice(sorted(workers)), time.monotonic() + SHORT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(workers[chosen], number)
                time.sleep(0.1)


def flip(soak: Soak, launcher: int, chance: random.Random) -> None:
    parts = sorted(soak.checkpoints()[-1].glob("part-*"))
    part = chance.choice(parts)
    with part.open("r+b") as file:
        place = chance.randrange(part.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    kill(soak, launcher, chance)


def full(soak: Soak, launcher: int, chance: random.Random) -> None:
    filler = soak.folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    time.sleep(SHORT_S)
    filler.unlink()


def denied(soak: Soak, launcher: int, chance: random.Random) -> None:
    """Nothing can be created, renamed or deleted in the folder of checkpoints. Permissions do not stop root."""
    folder = str(soak.out / "checkpoints")
    subprocess.run(["chattr", "+i", folder], check=True)
    try:
        time.sleep(SHORT_S)
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


FAULTS: dict[str, Callable[[Soak, int, random.Random], None]] = {
    each.__name__: each for each in (kill, stop, slow, flip, full, denied)
}


def _signal(soak: Soak, launcher: int, chance: random.Random, number: signal.Signals) -> None:
    workers = soak.workers(launcher)
    with suppress(ProcessLookupError):
        os.kill(workers[chance.choice(sorted(workers))], number)


# -------------------------------------------------------------------------------------------- driving


def survive(
    soak: Soak, kinds: Sequence[str], chance: random.Random, until: Callable[[int], bool], every: float
) -> Iterator[Fault]:
    """Train with faults until it is enough, by the number of faults; then have the run save and stop. Yields
    each fault once the run is past it."""
    log = (soak.folder / "log").open("wb")
    run = subprocess.Popen(soak.command(), stdout=log, stderr=log, env=environment())
    try:
        _await_step(soak, run, 12)
        count = 0
        while not until(count):
            time.sleep(chance.uniform(0.2, 1.8) * every)
            kind, step, begun = chance.choice(kinds), soak.step, time.monotonic()
            FAULTS[kind](soak, run.pid, chance)
            _await_step(soak, run, step + BEYOND)
            count += 1
            yield Fault(kind=kind, step=step, recovered_s=round(time.monotonic() - begun, 1))
        run.terminate()
        run.wait(PATIENCE_S)
    finally:
        run.kill()
        run.wait()


def _await_step(soak: Soak, run: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while soak.step < step:
        if run.poll() is not None or time.monotonic() > end:
            tail = (soak.folder / "log").read_text(errors="replace")[-4000:]
            raise SystemExit(f"the run did not get to step {step}; exit code {run.poll()}\n{tail}")
        time.sleep(0.1)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def differences(soak: Soak) -> list[str]:
    """What differs between the run and one to the same step without faults."""
    last, plain = soak.checkpoints()[-1], soak.folder / "plain"
    step = int(last.name[5:])
    words = [*soak.words, "--out", str(plain), "--train.steps", str(step), "--train.keep", "1"]
    command = [sys.executable, "-m", "braid", *words, "--world", str(soak.world)]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    found = []
    if _losses(soak.out)[:step] != _losses(plain):
        found.append("losses")
    for part in sorted((plain / "checkpoints" / last.name).glob("part-*")):
        if part.read_bytes() != (last / part.name).read_bytes():
            found.append(part.name)
    return found


def _losses(out: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@contextmanager
def own_disk(folder: Path, needed: bool) -> Iterator[None]:
    """A small tmpfs in the place of a folder, for faults that fill it."""
    if not needed:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_corpus(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(
            f"document {number}: " + "to be or not to be, " * (1 + number % 7)
        )
    words = ["data", "build", "--input", str(texts), "--output", str(folder / "corpus")]
    subprocess.run([sys.executable, "-m", "braid", *words], check=True, stdout=subprocess.DEVNULL)
    return folder / "corpus"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--faults", type=int, help="how many, instead of --minutes")
    parser.add_argument("--every", type=float, default=60.0, help="seconds of training between faults")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--launcher", choices=("braid", "torchrun"), default="braid")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON with every fault; the run's output goes beside it")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run ends too, and its disk goes
    end = time.monotonic() + 60 * given.minutes

    def enough(count: int) -> bool:
        return time.monotonic() >= end if given.faults is None else count >= given.faults

    faults: list[Fault] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        run = folder / "run"
        run.mkdir()
        stack.enter_context(own_disk(run, not {"full", "denied"}.isdisjoint(given.kinds)))
        soak = Soak(run, make_corpus(folder), given.world, given.launcher)
        for fault in survive(soak, given.kinds, random.Random(given.seed), enough, given.every):
            print(
                f"{fault.kind:7} at step {fault.step:6}  past it after {fault.recovered_s:6.1f} s", flush=True
            )
            faults.append(fault)
        different, steps = differences(soak), soak.step
        if given.out is not None:
            shutil.copy(run / "log", given.out.with_suffix(".log"))
    for kind in given.kinds:
        times = sorted(each.recovered_s for each in faults if each.kind == kind)
        if times:
            middle, longest = times[len(times) // 2], times[-1]
            print(f"{kind:7} {len(times):4} survived, median {middle:.1f} s, longest {longest:.1f} s")
    same = "different: " + ", ".join(different) if different else "equal to the bit"
    print(f"{len(faults)} faults in {steps} steps on {given.world} ranks; losses and weights {same}")
    if given.out is not None:
        record = {"faults": [asdict(each) for each in faults], "steps": steps, "different": different}
        given.out.write_text(
            json.dumps({**record, "arguments": {**vars(given), "out": str(given.out)}}, indent=1)
        )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
