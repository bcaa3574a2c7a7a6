"""Soak: train for hours with a random fault every now and then, and compare with a run without faults.

    python -m scripts.soak --minutes 60 --every 60 --out soak.json
    python -m scripts.soak --faults 20 --kinds kill --launcher torchrun
    python -m scripts.soak --minutes 12 --every 30 --min-world 2

A small model trains on `--world` CPU ranks under braid's launcher or torchrun, which restart it. The faults:

    kill    kill -9 of a random rank
    stop    SIGSTOP of a random rank, until the watchdog has ended it
    slow    a random rank is stopped and continued every tenth of a second, for five seconds
    flip    a random bit of the newest checkpoint flips; then a rank is killed, so that it is read
    full    the disk is full for five seconds
    denied  writing to the folder of checkpoints fails with EACCES for five seconds
    gone    a random rank is killed and its slot out of service, until the run goes on with fewer ranks

They come in rounds: every kind once, in an order drawn from the seed, then every kind again. `full` needs root:
the run then has a small tmpfs of its own. `gone` needs `--min-world`.
At the end the run is asked to stop, and saves. A run without faults then trains to the same step, and losses
and weights must be equal to the bit. With `--min-world` all is computed in float64, the run without faults has
one process, and each loss and tensor must agree with it to 1e-10.
"""

from __future__ import annotations

import argparse
import ctypes
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

KINDS = ("kill", "stop", "slow", "flip", "full", "denied", "gone")
BOUND = 1e-10
"""Of relative differences in float64."""
STALL_S = 20
"""The watchdog's timeout: a rank that is stopped is found after that."""
SHORT_S = 5.0
"""How long a fault lasts that passes by itself."""
PATIENCE_S = 600.0
"""A run that does no new step for so long has not survived."""
BEYOND = 3
"""Steps after which a run is past a fault: some may be logged before all ranks know of it."""
DISK = "64m"
DROP_CAPABILITY, DAC_OVERRIDE = 24, 1
"""Of prctl: what root may do beyond a file's permissions."""
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

PACED = """
import time

from braid.train import loop

def paced() -> Run:
    '''The same, and every step begins with a pause: an hour has few steps, and needs few processors.'''
    begin_step = loop.begin_step

    def begin_late(*words, **options):
        time.sleep({pace})
        return begin_step(*words, **options)

    loop.begin_step = begin_late
    return soak()
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

    def __init__(self, folder: Path, corpus: Path, given: argparse.Namespace) -> None:
        """The run is in a folder of `folder`, which has the rest. `given` are the arguments of the command."""
        self.folder, self.disk, self.out = folder, folder / "run", folder / "run" / "out"
        self.options = ["--data.sources", str(corpus), "--device", "cpu"]
        self.world, self.min_world, self.launcher = given.world, given.min_world, given.launcher
        if self.min_world is not None:
            self.options += ["--train.dtype", "fp64"]
        self.run: subprocess.Popen[bytes] | None = None
        recipe = RECIPE.format(forever=FOREVER, stall=STALL_S) + PACED.format(pace=given.pace)
        (folder / "soak.py").write_text(recipe)

    def words(self, recipe: str, out: Path) -> list[str]:
        return ["train", f"{self.folder}/soak.py:{recipe}", *self.options, "--out", str(out)]

    def command(self) -> list[str]:
        words = self.words("paced", self.out)
        if self.launcher == "braid":
            words += ["--world", str(self.world), "--restarts", "100000"]
            words += [] if self.min_world is None else ["--min-world", str(self.min_world)]
            return [sys.executable, "-m", "braid", *words]
        agent = ["--standalone", "--nproc-per-node", str(self.world), "--max-restarts", "100000"]
        agent += ["--monitor-interval", "0.5"]
        return [sys.executable, "-m", "torch.distributed.run", *agent, "-m", "braid", *words]

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def start(self) -> subprocess.Popen[bytes]:
        """Start to train."""
        log = (self.folder / "log").open("wb")
        self.run = subprocess.Popen(
            self.command(), stdout=log, stderr=log, env=environment(), preexec_fn=obey_permissions
        )
        return self.run

    def await_step(self, step: int) -> None:
        """Wait until a step is done."""
        assert self.run is not None, "the run was started"
        end = time.monotonic() + PATIENCE_S
        while self.step < step:
            if self.run.poll() is not None or time.monotonic() > end:
                tail = (self.folder / "log").read_text(errors="replace")[-4000:]
                raise SystemExit(f"the run did not get to step {step}; exit code {self.run.poll()}\n{tail}")
            time.sleep(0.1)

    def workers(self, variable: str = "RANK") -> dict[int, int]:
        """Process ids by rank, or by slot, which is `LOCAL_RANK`. Waits until there are some."""
        found = dict[int, int]()
        while not found:
            found = self._workers(variable)
        return found

    def _workers(self, variable: str) -> dict[int, int]:
        assert self.run is not None, "the run was started"
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError, KeyError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "environ").read_bytes().split(b"\0")
                values = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
                if parent == self.run.pid:
                    found[int(values[variable])] = int(entry.name)
        return found

    def checkpoints(self) -> list[Path]:
        return sorted(path for path in (self.out / "checkpoints").glob("step-*") if path.name[5:].isdecimal())


# ------------------------------------------------------------------------------------------- faults


def kill(soak: Soak, chance: random.Random) -> None:
    _signal(soak, chance, signal.SIGKILL)


def stop(soak: Soak, chance: random.Random) -> None:
    _signal(soak, chance, signal.SIGSTOP)


def slow(soak: Soak, chance: random.Random) -> None:
    workers = soak.workers()
    chosen, end = chance.choice(sorted(workers)), time.monotonic() + SHORT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(workers[chosen], number)
                time.sleep(0.1)


def flip(soak: Soak, chance: random.Random) -> None:
    parts = sorted(soak.checkpoints()[-1].glob("part-*"))
    part = chance.choice(parts)
    with part.open("r+b") as file:
        place = chance.randrange(part.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    kill(soak, chance)


def full(soak: Soak, chance: random.Random) -> None:
    filler = soak.disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    time.sleep(SHORT_S)
    filler.unlink()


def denied(soak: Soak, chance: random.Random) -> None:
    """Nothing can be created, renamed or deleted in the folder of checkpoints: EACCES."""
    folder = soak.out / "checkpoints"
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        time.sleep(SHORT_S)
    finally:
        folder.chmod(mode)


def gone(soak: Soak, chance: random.Random) -> None:
    """The run goes on with fewer ranks; then the slot returns."""
    slots, listed, step = soak.workers("LOCAL_RANK"), soak.out / "out-of-service", soak.step
    slot = chance.choice(sorted(slots))
    listed.write_text(f"{slot}\n")
    with suppress(ProcessLookupError):
        os.kill(slots[slot], signal.SIGKILL)
    soak.await_step(step + BEYOND)
    listed.unlink()


FAULTS: dict[str, Callable[[Soak, random.Random], None]] = {
    each.__name__: each for each in (kill, stop, slow, flip, full, denied, gone)
}


def _signal(soak: Soak, chance: random.Random, number: signal.Signals) -> None:
    workers = soak.workers()
    with suppress(ProcessLookupError):
        os.kill(workers[chance.choice(sorted(workers))], number)


# -------------------------------------------------------------------------------------------- driving


def rounds(kinds: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Kinds of faults without end: each once in every round, in random order."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def survive(
    soak: Soak, kinds: Sequence[str], chance: random.Random, until: Callable[[int], bool], every: float
) -> Iterator[Fault]:
    """Train with faults until it is enough, by the number of faults; then have the run save and stop. Yields
    each fault once the run is past it."""
    run = soak.start()
    try:
        soak.await_step(12)
        drawn, count = rounds(kinds, chance), 0
        while not until(count):
            time.sleep(chance.uniform(0.2, 1.8) * every)
            kind, step, begun = next(drawn), soak.step, time.monotonic()
            FAULTS[kind](soak, chance)
            soak.await_step(max(step, soak.step) + BEYOND)
            count += 1
            yield Fault(kind=kind, step=step, recovered_s=round(time.monotonic() - begun, 1))
        run.terminate()
        run.wait(PATIENCE_S)
    finally:
        run.kill()
        run.wait()


def obey_permissions() -> None:
    """For a process that is about to start: permissions bind it as other users, even if it is root."""
    ctypes.CDLL(None).prctl(DROP_CAPABILITY, DAC_OVERRIDE, 0, 0, 0)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def differences(soak: Soak) -> list[str]:
    """What differs between the run and one to the same step without faults."""
    last, plain = soak.checkpoints()[-1], soak.folder / "plain"
    step = int(last.name[5:])
    steps = ["--train.steps", str(step), "--train.keep", "1"]
    world = [] if soak.min_world is not None else ["--world", str(soak.world)]
    command = [sys.executable, "-m", "braid", *soak.words("soak", plain), *steps, *world]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    wanted, other = dict(_losses(plain)), plain / "checkpoints" / last.name
    losses = [each for each in _losses(soak.out) if each[0] <= step]
    if step > len(losses):
        print(f"{step - len(losses)} of {step} steps are not in metrics.jsonl: the disk was full", flush=True)
    plain_losses = [(each, wanted[each]) for each, _ in losses]
    if soak.min_world is not None:
        return _beyond_bound(losses, plain_losses, last, other)
    found = ["losses"] if losses != plain_losses else []
    for part in sorted(other.glob("part-*")):
        if part.read_bytes() != (last / part.name).read_bytes():
            found.append(part.name)
    return found


def _beyond_bound(
    losses: list[tuple[int, float]], plain_losses: list[tuple[int, float]], last: Path, plain: Path
) -> list[str]:
    """Steps and tensors that differ by more than rounding in float64."""
    from braid.checkpoint import LazyCheckpoint  # loads torch

    found = [] if [step for step, _ in losses] == [step for step, _ in plain_losses] else ["steps"]
    apart = {
        f"loss of step {step}": abs(loss - other) / other
        for (step, loss), (_, other) in zip(losses, plain_losses, strict=False)
    }
    stored, wanted = LazyCheckpoint(last), LazyCheckpoint(plain)
    found += sorted(stored.keys() ^ wanted.keys())
    for name in stored.keys() & wanted.keys():
        difference = (stored[name].double() - wanted[name].double()).norm()
        apart[name] = (difference / wanted[name].double().norm().clamp(min=1e-30)).item()
    worst = max(apart, key=apart.__getitem__)
    print(f"furthest apart: {worst}, by {apart[worst]:.1e}", flush=True)
    return found + [name for name, each in apart.items() if not each <= BOUND]


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
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that every step waits at its begin")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="all that are possible, by default")
    parser.add_argument("--launcher", choices=("braid", "torchrun"), default="braid")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--min-world", type=int, help="go on with as few ranks as this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON with every fault; the run's output goes beside it")
    given = parser.parse_args()
    if given.min_world is None and "gone" in (given.kinds or ()):
        parser.error("--kinds gone needs --min-world")
    if given.min_world is not None and given.launcher == "torchrun":
        parser.error("--min-world needs --launcher braid: torchrun starts all its workers again")
    given.kinds = given.kinds or [kind for kind in KINDS if kind != "gone" or given.min_world is not None]
    print(f"seed {given.seed}, faults in rounds of {', '.join(given.kinds)}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run ends too, and its disk goes
    end = time.monotonic() + 60 * given.minutes

    def enough(count: int) -> bool:
        return time.monotonic() >= end if given.faults is None else count >= given.faults

    faults: list[Fault] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        run = folder / "run"
        run.mkdir()
        stack.enter_context(own_disk(run, "full" in given.kinds))
        soak = Soak(folder, make_corpus(folder), given)
        for fault in survive(soak, given.kinds, random.Random(given.seed), enough, given.every):
            print(
                f"{fault.kind:7} at step {fault.step:6}  past it after {fault.recovered_s:6.1f} s", flush=True
            )
            faults.append(fault)
        different, steps = differences(soak), soak.step
        if given.out is not None:
            shutil.copy(folder / "log", given.out.with_suffix(".log"))
    for kind in given.kinds:
        times = sorted(each.recovered_s for each in faults if each.kind == kind)
        if times:
            middle, longest = times[len(times) // 2], times[-1]
            print(f"{kind:7} {len(times):4} survived, median {middle:.1f} s, longest {longest:.1f} s")
    equal = "equal to the bit" if given.min_world is None else f"within {BOUND:g} of one process"
    same = "different: " + ", ".join(different) if different else equal
    print(f"{len(faults)} faults in {steps} steps on {given.world} ranks; losses and weights {same}")
    if given.out is not None:
        record = {"faults": [asdict(each) for each in faults], "steps": steps, "different": different}
        given.out.write_text(
            json.dumps({**record, "arguments": {**vars(given), "out": str(given.out)}}, indent=1)
        )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
