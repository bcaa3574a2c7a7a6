"""A vision-language model on one GPU: a whole training step beside its modules, each measured alone.

    python -m benchmarks.vlm_step                  RADIO-H and an 8-layer hybrid Mamba-MoE, about four minutes
    python -m benchmarks.vlm_step --experts 128    all experts of each MoE layer, if they fit
    python -m benchmarks.vlm_step --tiny           the same on a CPU in seconds, to try the script

    whole      a step as `braid train` does it: images in, rows of the encoder in the text, one update of both
    language   the language model alone on the same rows of text: text ids where the images were, the same loss
    encoder    the encoder alone on the same images: forward, backward from a fixed gradient of its rows, the
               norm of its gradients and its update

`ratio` is the whole step over the sum of the two others: 1 if joining the modules costs nothing, at most 1.1.
Every part has a process of its own. Each hands a step over before it looks at the one before, as `braid train`
does, and reads its images on the host while the device still computes. Images have five sizes and are packed.

MFU counts the FLOPs that the modules themselves declare. `planned` is what `braid plan` says of the peak,
`memory` the allocator's, `slowest` the slowest step over the median one, `handover` what the host takes for a
step if the device is idle.

Shapes: S tokens of a span, N patches, I numbers of a patch, R rows of images, W channels of the language model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from benchmarks import machine
from braid import recipes
from braid.architecture import Attention, Mamba2, Mlp
from braid.config import Data, Module, Optim, Run, Train
from braid.data import Loader
from braid.data.batch import collate
from braid.data.items import Patches
from braid.data.source import DocumentSpan
from braid.distributed.collectives import ALONE
from braid.encoders import Encoder, PositionTable
from braid.kernels.host import AsyncHostCopy
from braid.model.context import MicroBatch
from braid.model.encoder import EncoderModel
from braid.model.multimodal import mask_placeholders
from braid.optim import gradients
from braid.planning.estimate import estimate
from braid.planning.plan import Plan, item_flops, plan, training_flops
from braid.recipes.vision import radio_h
from braid.topology.items import ItemTable
from braid.train import state as states
from braid.train.build import make_outside_state, make_state
from braid.train.counts import Counts
from braid.train.device import Device, choose_device, set_arithmetic
from braid.train.gc_freeze import frozen_gc
from braid.train.items import read_items
from braid.train.state import JobState
from braid.train.step import begin_step
from braid.train.step_work import EncoderStep

PARTS = ("whole", "language", "encoder")
WARM_UP, STEPS, HANDOVERS = 5, 20, 5
TINY_WARM_UP, TINY_STEPS = 1, 3
BAR = 1.1
"""A whole step takes at most so many times what its modules take alone."""
RATE = 1e-4
VISION = "vision"


class Case(NamedTuple):
    """What is trained on what."""

    run: Run
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of the images of a sample."""


def vlm(experts: int) -> Case:
    """RADIO-H with pixel shuffle and an MLP of squared ReLUs, before 8 layers of Nemotron-3-Nano's shape. Four
    rows of 4,096 tokens; 19,232 patches of 256 to 768 pixels a side, which make 4,808 of the tokens."""
    model = recipes.load("nemotron-nano-30b-a3b").model
    assert model.moe is not None
    model = replace(model, pattern="MEM*EMEM", moe=replace(model.moe, experts=experts), init_std=0.0173)
    grids = ((32, 32), (28, 42), (48, 32), (16, 16), (24, 34))
    train = Train(steps=100, batch_samples=4, dtype="bf16", eval_samples=0)
    run = Run(model=model, data=Data(sequence_tokens=4096), optim=Optim(lr=RATE), train=train)
    return with_images(run, radio_h(width=model.hidden), grids)


def tiny(experts: int) -> Case:
    """The same in small."""
    model = recipes.load("nemotron-nano-30b-a3b").model
    assert model.moe is not None
    moe = replace(model.moe, experts=experts, top_k=2, ffn=32, shared_ffn=64)
    model = replace(
        model, pattern="ME*E", hidden=64, vocab=512, moe=moe,
        attention=Attention(heads=4, kv_heads=2, head_dim=16, positions="none"),
        mamba2=Mamba2(heads=4, head_dim=32, state=16, groups=2),
    )  # fmt: skip
    radio = radio_h(width=model.hidden)
    encoder = replace(
        radio, pattern="[*-]" * 2, hidden=64, positions=PositionTable(rows=16, columns=16, jitter=True),
        attention=Attention(heads=4, kv_heads=4, head_dim=16, positions="none", bias=True),
        mlp=Mlp(ffn=128, activation="gelu_tanh", bias=True), projector=replace(radio.projector, ffn=256),
    )  # fmt: skip
    train = Train(steps=100, batch_samples=2, eval_samples=0)
    run = Run(model=model, data=Data(sequence_tokens=128), optim=Optim(lr=RATE), train=train)
    return with_images(run, encoder, ((4, 4), (8, 6), (2, 4)))


def with_images(run: Run, encoder: Encoder, grids: tuple[tuple[int, int], ...]) -> Case:
    vision = Module(
        model=encoder,
        token=run.model.vocab - 1,
        most_items=len(grids),
        most_patches=sum(rows * columns for rows, columns in grids),
    )
    return Case(replace(run, modules={VISION: vision}), grids)


# ------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """The images of every sample, of the sizes of the case, in an order that differs from sample to sample.
    Their patches are noise, drawn once: neither decoding nor drawing is measured."""

    encoder: Encoder
    grids: Sequence[tuple[int, int]]

    @property
    def input(self) -> int:
        return self.encoder.input

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "noise", "grids": list(self.grids)}

    def of(self, sample: int) -> list[tuple[int, int]]:
        turn = sample % len(self.grids)
        return [*self.grids[turn:], *self.grids[:turn]]

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(rows * columns for rows, columns in self.of(sample)) for sample in samples]

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        grids = [self.of(sample)[number] for sample, number in wanted]
        return Patches(torch.cat([self._noise[grid] for grid in grids]), grids)

    @cached_property
    def _noise(self) -> dict[tuple[int, int], torch.Tensor]:
        drawn = torch.Generator().manual_seed(0)
        return {grid: torch.randn(grid[0] * grid[1], self.input, generator=drawn) for grid in self.grids}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of text in the place of a `Loader`: each image of a sample begins a document of random text."""

    case: Case
    images: Images
    text_alone: bool = False
    """Text ids in the place of placeholders, without loss all the same. (One id in all these places would make
    the gradient of the embedding slower than a text does.)"""

    @property
    def items(self) -> dict[str, Images]:
        return {} if self.text_alone else {VISION: self.images}

    def batch(self, samples: Sequence[int]) -> MicroBatch:
        run, token = self.case.run, self.case.run.modules[VISION].token
        length = run.data.sequence_tokens
        batch = collate([self._span(sample) for sample in samples], samples, length)
        batch = mask_placeholders(batch, {VISION: token})
        if not self.text_alone:
            return batch
        drawn = torch.Generator().manual_seed(samples[0])
        text_BT = torch.randint(0, token, batch.tokens_BT.shape, generator=drawn)
        found_BT, labels_BT = batch.tokens_BT == token, batch.labels_BT
        tokens_BT = torch.where(found_BT, text_BT, batch.tokens_BT)
        return replace(
            batch, tokens_BT=tokens_BT, labels_BT=torch.where(labels_BT == token, text_BT, labels_BT)
        )

    def _span(self, sample: int) -> DocumentSpan:
        run, module = self.case.run, self.case.run.modules[VISION]
        tokens = run.data.sequence_tokens + 1
        ids_S = np.random.default_rng(sample).integers(0, module.token, tokens)
        starts_S = np.zeros(tokens, np.bool_)
        sizes = self.images.sizes([sample])[0]
        for number, patches in enumerate(sizes):
            start = number * tokens // len(sizes)
            starts_S[start] = True
            ids_S[start + 1 : start + 1 + module.model.rows(patches)] = module.token
        return DocumentSpan(ids_S=ids_S, loss_mask_S=np.ones(tokens, np.bool_), starts_S=starts_S)


# ------------------------------------------------------------------------------------------------ parts

Wait = Callable[[], object]
"""Waits for a step that was handed over."""


class Part(NamedTuple):
    """A part of the model that is ready to train."""

    begin: Callable[[], Wait]
    """Hands one step over."""
    flops: float
    """Of a step."""
    planned: int
    """Bytes."""


def make_part(name: str, case: Case, device: Device) -> Part:
    images = Images(encoder=case.run.modules[VISION].model, grids=case.grids)
    whole = plan(case.run, 1)
    alone = plan(replace(case.run, modules={}), 1)
    text = case.run.train.batch_samples * training_flops(alone)
    of_item, samples = item_flops(whole, VISION), case.run.train.batch_samples
    seen = samples * sum(of_item(rows * columns) for rows, columns in case.grids)
    kind = device.torch.type
    if name == "encoder":
        told = estimate(whole, device=kind).stations[0].modules[VISION].memory.peak
        return Part(_encoder(whole, images, device), seen, told)
    planned = whole if name == "whole" else alone
    state = make_state(planned, device)
    states.initialize(state, planned.run)
    rows = cast(Loader, Rows(case=case, images=images, text_alone=name == "language"))

    def begin() -> Wait:
        return begin_step(state, planned.run, rows, RATE).result

    return Part(begin, text + seen if name == "whole" else text, estimate(planned, device=kind).peak)


def _encoder(planned: Plan, images: Images, device: Device) -> Callable[[], Wait]:
    """Steps of the encoder alone, by what `begin_step` does for it: the state of a rank without the language
    model holds the same weights and optimizer, `EncoderStep` the same way of weight gradients into them."""
    run = planned.run
    state = make_outside_state(planned, device, ALONE)
    state.modules[VISION].initialize(run.train.seed)
    sizes = images.sizes(range(run.train.batch_samples))
    rows = sum(run.modules[VISION].model.rows(each) for of_sample in sizes for each in of_sample)
    drawn = torch.Generator().manual_seed(0)
    gradient_RW = torch.randn(rows, run.model.hidden, generator=drawn) / (rows * run.model.hidden)
    model = state.modules[VISION].model
    gradient_RW = gradient_RW.to(device.torch, model.dtype)

    def begin() -> Wait:
        return _encoder_step(state, run, images, gradient_RW)

    return begin


def _encoder_step(state: JobState, run: Run, images: Images, gradient_RW: torch.Tensor) -> Wait:
    module, step, first = state.modules[VISION], state.step + 1, state.samples
    assert isinstance(module.model, EncoderModel)
    samples = range(first, first + run.train.batch_samples)
    tables = {VISION: [_table(run, images, samples)]}
    counts = Counts(tokens=1, mtp_tokens=[], totals=[], fractions=[], tables=tables)
    items = read_items(state, tables, {VISION: images}, [samples], step=step)
    work = EncoderStep(state, module, items[VISION], counts)
    rows_RW, _ = module.model.run(module.model.segments, None, work.prepare(0))
    rows_RW.backward(gradient_RW)
    work.end()
    state.step, state.samples = step, samples.stop
    grads, kernels = module.optimizer.gradients(), module.optimizer.kernels
    norm = gradients.total_norm(gradients.own_square(grads, kernels=kernels), state.job)
    module.optimizer.update(RATE, scale=gradients.clip_scale(norm, run.optim.clip), skip=~norm.isfinite())
    return AsyncHostCopy(norm).wait


def _table(run: Run, images: Images, samples: Sequence[int]) -> ItemTable:
    sizes, encoder = images.sizes(samples), run.modules[VISION].model
    patches = tuple(each for of_sample in sizes for each in of_sample)
    return ItemTable(
        counts=tuple(map(len, sizes)),
        rows=tuple(map(encoder.rows, patches)),
        patches=patches,
        slices=1,
        placeholders=tuple(sum(map(encoder.rows, of_sample)) for of_sample in sizes),
    )


# ------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Times on the device at which all work so far is done."""

    device: Device
    marks: list[Any] = field(default_factory=list)

    def mark(self) -> None:
        if self.device.torch.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between marks, all of which have passed."""
        if self.device.torch.type == "cuda":
            return [before.elapsed_time(after) for before, after in itertools.pairwise(self.marks)]
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.marks)]


def child(name: str, experts: int, small: bool) -> dict[str, Any]:
    """The steps of one part."""
    case = tiny(experts) if small else vlm(experts)
    device = choose_device("cpu" if small else "cuda")
    set_arithmetic(deterministic=False)
    part = make_part(name, case, device)
    warm_up, steps = (TINY_WARM_UP, TINY_STEPS) if small else (WARM_UP, STEPS)
    timer, handovers = Timer(device=device), []
    with frozen_gc():
        wait = part.begin()
        timer.mark()
        for _ in range(warm_up + steps):
            last, wait = wait, part.begin()
            timer.mark()
            last()
        for _ in range(HANDOVERS):
            wait()
            device.synchronize()
            started = time.perf_counter()
            wait = part.begin()
            handovers.append(1e3 * (time.perf_counter() - started))
        wait()
        device.synchronize()
    milliseconds = timer.milliseconds()[warm_up:]
    seconds = statistics.median(milliseconds) / 1e3
    mfu = device.mfu(part.flops, seconds, case.run.train.dtype)
    tokens = case.run.train.batch_samples * case.run.data.sequence_tokens
    patches = case.run.train.batch_samples * sum(rows * columns for rows, columns in case.grids)
    read = {"whole": {"tokens": tokens, "patches": patches}, "language": {"tokens": tokens}}
    of_part = read.get(name, {"patches": patches})
    return {
        "median_ms": round(1e3 * seconds, 1),
        "slowest": round(max(milliseconds) / 1e3 / seconds, 3),
        "handover_ms": round(statistics.median(handovers), 1),
        **{f"{what}_per_s": round(count / seconds) for what, count in of_part.items()},
        "teraflops": round(part.flops / 1e12, 3),
        "mfu": None if mfu is None else round(mfu, 4),
        "memory_gib": round(device.memory_bytes() / 2**30, 2),
        "planned_gib": round(part.planned / 2**30, 2),
    }


# ------------------------------------------------------------------------------------------------ report


def measure(experts: int, small: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"experts": experts}
    for name in PARTS:
        words = [sys.executable, "-m", "benchmarks.vlm_step", "--child", name, "--experts", str(experts)]
        command = [*words, "--tiny"] if small else words
        done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, json.dumps(figures[name]), flush=True)
    alone = figures["language"]["median_ms"] + figures["encoder"]["median_ms"]
    return figures | {"ratio": round(figures["whole"]["median_ms"] / alone, 3), "bar": BAR}


def table(figures: dict[str, Any]) -> str:
    times = ("median_ms", "slowest", "handover_ms", "tokens_per_s", "patches_per_s", "mfu")
    columns = (*times, "memory_gib", "planned_gib")
    lines = [f"{'':<10}" + "".join(f"{each:>14}" for each in columns)]
    for name in PARTS:
        cells = (f"{figures[name].get(each) or '-':>14}" for each in columns)
        lines.append(f"{name:<10}" + "".join(cells))
    lines.append(f"whole / (language + encoder): {figures['ratio']}, to be at most {figures['bar']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, help="routed experts of an MoE layer: 64, or 8 with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU; writes no results")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    experts = given.experts or (8 if given.tiny else 64)
    if not given.tiny:
        machine.needs_gpu()
    if given.child is not None:
        print(json.dumps(child(given.child, experts, given.tiny)))
        return
    origin = machine.describe()
    figures = measure(experts, given.tiny)
    print(table(figures))
    if not given.tiny:
        machine.write("vlm_step", figures, origin)


if __name__ == "__main__":
    main()
