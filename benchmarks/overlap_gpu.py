"""Expert communication behind computation, on one GPU: what overlap hides.

    python -m benchmarks.overlap_gpu

Rows of tokens really leave the GPU on their way to the experts and back, forward and backward: a share of them
goes to pinned memory of the host and returns, as a stand-in for a network. The share is chosen so that all
transfers alone take 0.25, 0.5 and 1.0 of the computation alone. For each of them:

    compute     the plain schedule, where nothing travels
    transfers   the transfers of a step by themselves
    serial      the plain schedule, where every transfer is waited for
    overlapped  the overlapped schedule: weight gradients at once, delayed, late; ends in pairs; both
    host        what the host takes to hand a step over: how long steps take that have few tokens
    handed      when the host had handed all of an overlapped step over; late, where the device waited for it
    stalls      how often the allocator had to wait for the device, and give memory back, to find room
    hidden      what part of the shorter one of compute and transfers disappears behind the other: how much less
                overlapped takes than the two of them, and than serial

An H200 that only computes runs into its power limit; where it waits for transfers in between it does not, and
its clock is up to a seventh faster: serial takes less than compute and transfers together.

The head is small: computation is that of the blocks. `nccl` is the overlapped schedule with rows that go
through an all-to-all of a group of one rank instead. Losses and gradients of all schedules are compared bit by
bit, with kernels whose results do not depend on timing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from benchmarks.memory_gpu import random_batches
from braid.architecture import Attention, Model, Moe
from braid.config import Data, Mesh, Run, Train
from braid.distributed.collectives import ALONE, Group, all_to_all_v
from braid.engine.executor import Program
from braid.engine.streams import CudaStreams
from braid.nn.moe.all_to_all import AllToAll
from braid.nn.moe.dispatch_plan import Dispatcher, DispatchPlan, Slots
from braid.nn.moe.layer import Moe as MoeLayer
from braid.planning.plan import plan
from braid.schedule import Stream
from braid.train.build import make_state
from braid.train.counts import count
from braid.train.device import choose_device
from braid.train.gc_freeze import frozen_gc
from braid.train.step import backward

BLOCKS, TOKENS, ROWS, EXPERTS, TOP_K, HIDDEN = 8, 4096, 4, 64, 8, 2048
MICRO_BATCHES = 20
FRACTIONS = (0.25, 0.5, 1.0)
FEW = 64
"""Tokens of a sample, where the host takes longer than the device."""
MESHES = {
    "plain": Mesh(),
    "overlapped": Mesh(overlap=True),
    "delayed": Mesh(overlap=True, delay_weights=True),
    "late": Mesh(overlap=True, delay_weights=True, late_weights=True),
    "paired": Mesh(overlap=True, delay_weights=True, paired_ends=True),
    "late_paired": Mesh(overlap=True, delay_weights=True, late_weights=True, paired_ends=True),
}
USUAL = ("delayed", "paired", "late_paired")
"""The schedules that are measured unless others are asked for."""


def run_of(mesh: Mesh, micro_batches: int, tokens: int = TOKENS) -> Run:
    return Run(
        model=Model(
            pattern="[*E]" * BLOCKS,
            hidden=HIDDEN,
            vocab=256,
            tied=False,
            attention=Attention(heads=16, kv_heads=4, head_dim=128, qk_norm=True),
            moe=Moe(experts=EXPERTS, top_k=TOP_K, ffn=1024, aux_loss=1e-3),
        ),
        data=Data(sequence_tokens=tokens, tokenizer="none.json"),
        train=Train(
            steps=1,
            batch_samples=ROWS * micro_batches,
            micro_batches=micro_batches,
            dtype="bf16",
            eval_samples=0,
        ),
        mesh=mesh,
    )


# ------------------------------------------------------------------------------------------- dispatchers


class _ThroughHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MC: Tensor, host: Host) -> Tensor:
        ctx.host = host
        return host.sent(x_MC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.host.sent(grads[0]), None


@dataclass
class Host:
    """Memory of the host that rows visit. Transfers of one stream use it one after the other."""

    pinned_MC: Tensor
    share: float = 0.0
    """Of all rows: how many visit."""

    def sent(self, x_MC: Tensor) -> Tensor:
        """The same rows, some of which have come back from the host to their place."""
        there = round(self.share * len(x_MC))
        rows_MC = x_MC.data[:there]
        self.pinned_MC[:there].copy_(rows_MC, non_blocking=True)
        rows_MC.copy_(self.pinned_MC[:there], non_blocking=True)
        return x_MC.view_as(x_MC)


@dataclass
class Staged:
    """The dispatcher of one process, whose rows visit the host on each way."""

    inner: AllToAll
    host: Host

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        return self.inner.dispatch_plan(slots)

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        return _ThroughHost.apply(x, self.host), probs, dispatch_plan

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return _ThroughHost.apply(y, self.host)


@dataclass
class OneRank:
    """The dispatcher of one process, whose rows go through the all-to-all of a group."""

    inner: AllToAll
    group: Group

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        return self.inner.dispatch_plan(slots)

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        return self._sent(x), self._sent(probs), dispatch_plan

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return self._sent(y)

    def _sent(self, x: Tensor) -> Tensor:
        return all_to_all_v(x, self.group, [len(x)], [len(x)])


# ---------------------------------------------------------------------------------------------- measuring


class Bench:
    """One model with its gradients, trained by one schedule or another."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        run = run_of(MESHES["plain"], micro_batches)
        self.state = make_state(plan(run, 1), choose_device("cuda"))
        with torch.no_grad():
            for parameter in self.state.model.parameters():
                parameter.normal_(std=0.02)
        self.batches = {
            tokens: random_batches(run_of(run.mesh, micro_batches, tokens), 0) for tokens in (TOKENS, FEW)
        }
        self.local = AllToAll(group=ALONE, dispatch_group=ALONE, local_experts=EXPERTS, etp=1)
        rows = ROWS * TOKENS * TOP_K
        self.host = Host(torch.empty(rows, HIDDEN, dtype=torch.bfloat16, pin_memory=True))

    def prepared(
        self, name: str, dispatcher: Dispatcher, batches: int | None = None, tokens: int = TOKENS
    ) -> Callable[[], dict[str, Tensor]]:
        """Forward and backward of every micro-batch, or of the first few: planned, and to be run."""
        used = self.batches[tokens][:batches]
        run, counts = run_of(MESHES[name], len(used), tokens), count(self.state, used)
        worked_out = plan(run, 1)
        program = Program(worked_out.schedule, 0)

        def step() -> dict[str, Tensor]:
            self.state.plan, self.state.program = worked_out, program
            for module in self.state.model.modules():
                if isinstance(module, MoeLayer):
                    module.dispatcher = dispatcher
            parts, _ = backward(self.state, run, used, counts)
            return parts["language"]

        return step

    def seconds(self, name: str, dispatcher: Dispatcher, *, tokens: int = TOKENS, once: bool = False) -> Took:
        """Of a whole step, after a short one that has as many micro-batches under way."""
        torch.cuda.empty_cache()  # no schedule begins with what another one has left
        step = self.prepared(name, dispatcher, tokens=tokens)
        self.prepared(name, dispatcher, 4, tokens)()
        self.state.optimizer.zero_grad()
        with frozen_gc():  # as the training loop has it
            return timed(step, self.state.optimizer.zero_grad, once=once)

    def transfers(self) -> float:
        """Seconds of all transfers of a step by themselves."""
        x_MC = torch.randn(ROWS * TOKENS * TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)

        def send() -> None:
            for _ in range(4 * BLOCKS * self.micro_batches):
                self.host.sent(x_MC)

        self.host.sent(x_MC)
        return timed(send, once=True).seconds

    def fingerprint(self, name: str, dispatcher: Dispatcher) -> dict[str, Tensor]:
        """Losses and gradients of a short step, with kernels whose result does not depend on timing."""
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Where this is set, torch reads it for every product: that takes the host longer than all the rest.
        with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
            told = self.prepared(name, dispatcher, 3)()
        found = {f"grad:{key}": value.cpu() for key, value in self.state.optimizer.gradients().items()}
        self.state.optimizer.zero_grad()
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(False)
        return {**{key: value.cpu() for key, value in told.items()}, **found}

    def profile(
        self, name: str, dispatcher: Dispatcher, batches: int = 4
    ) -> list[tuple[str, str, float, float]]:
        """When each op of a short step began and ended, in milliseconds, and on which stream."""
        assert isinstance(self.state.streams, CudaStreams)
        streams, step = Stamped(self.state.streams), self.prepared(name, dispatcher, batches)
        with patch.object(self.state, "streams", streams), frozen_gc():
            step()
        torch.cuda.synchronize()
        ops, begin = [op for op in self.state.plan.schedule.ops[0] if op.phase], streams.stamps[0][1]
        self.state.optimizer.zero_grad()
        return [
            (str(op), stream.value, begin.elapsed_time(first), begin.elapsed_time(last))
            for op, (stream, first, last) in zip(ops, streams.stamps, strict=True)
        ]


class Stamped(CudaStreams):
    """Streams that remember when each job ran."""

    def __init__(self, usual: CudaStreams) -> None:
        self.job_times, self.streams = None, usual.streams
        self.stamps: list[tuple[Stream, torch.cuda.Event, torch.cuda.Event]] = []

    def issue(self, stream: Stream, job: Callable[[], None]) -> torch.cuda.Event:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self.streams[stream])
        event = super().issue(stream, job)
        last.record(self.streams[stream])
        self.stamps.append((stream, first, last))
        return event


class Took(NamedTuple):
    """Of a run."""

    seconds: float
    handed: float
    """Seconds until the host had handed everything over."""


def timed(work: Callable[[], Any], after: Callable[[], Any] = lambda: None, *, once: bool = False) -> Took:
    """The slower of two runs, or the middle one of three where these differ by more than a hundredth. One is
    enough where the device waits for transfers, and never for the host."""
    told: list[Took] = []
    while not told or (not once and (len(told) < 2 or (len(told) == 2 and max(told)[0] > 1.01 * min(told)[0]))):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        work()
        end.record()
        handed = time.perf_counter() - start
        torch.cuda.synchronize()
        told.append(Took(begin.elapsed_time(end) / 1e3, handed))
        after()
    return sorted(told)[len(told) // 2]


def measured(bench: Bench, schedules: Sequence[str]) -> dict[str, Any]:
    least = bench.seconds("plain", bench.local).seconds
    print(f"nothing travels: {least:.3f} s", flush=True)
    bench.host.share = 0.25
    whole = bench.transfers() / 0.25
    staged = Staged(bench.local, bench.host)
    host = {name: bench.seconds(name, staged, tokens=FEW).seconds for name in ("plain", *schedules)}
    print(f"the host alone: {_short(host)}", flush=True)
    figures: dict[str, Any] = {"compute": least, "host": host, "fractions": {}}
    for fraction in FRACTIONS:
        bench.host.share = fraction * least / whole
        transfers = bench.transfers()
        serial = bench.seconds("plain", staged, once=True).seconds
        row, handed, stalls = {}, {}, {}
        for name in schedules:
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            row[name], handed[name] = bench.seconds(name, staged)
            stalls[name] = torch.cuda.memory_stats()["num_alloc_retries"] - before
        shorter = min(least, transfers)
        told = {
            "share": bench.host.share,
            "transfers": transfers,
            "serial": serial,
            **row,
            "handed": handed,
            "stalls": stalls,
            "hidden": {name: (least + transfers - each) / shorter for name, each in row.items()},
            "hidden_of_serial": {name: (serial - each) / shorter for name, each in row.items()},
        }
        figures["fractions"][str(fraction)] = told
        print(f"{fraction}: " + str({key: _short(value) for key, value in told.items()}), flush=True)
    return figures


def _short(value: Any) -> Any:
    return {key: round(each, 3) for key, each in value.items()} if isinstance(value, dict) else round(value, 3)


def over_nccl(bench: Bench, schedules: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        one = Group(name="one", size=1, rank=0, handle=dist.group.WORLD)
        dispatcher = OneRank(bench.local, one)
        told = {name: bench.seconds(name, dispatcher, once=True).seconds for name in ("plain", *schedules)}
        dist.destroy_process_group()
    return {"seconds": told}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    parser.add_argument("--schedules", nargs="+", choices=[*MESHES][1:], default=USUAL)
    parser.add_argument(
        "--profile",
        help="write when each op of a short step ran, with no transfers and with as many as take as long as "
        "computation, to this file, and nothing else",
    )
    chosen = parser.parse_args()
    origin = machine.describe()
    bench = Bench(chosen.micro_batches)
    staged = Staged(bench.local, bench.host)
    if chosen.profile:
        least, bench.host.share = bench.seconds("plain", bench.local).seconds, 0.25
        as_long = 0.25 * least / bench.transfers()
        profiles = {}
        for bench.host.share in (0.0, as_long):
            for name in chosen.schedules:
                bench.prepared(name, staged, 3)()
                profiles[f"{name} {bench.host.share}"] = bench.profile(name, staged)
        stats = torch.cuda.memory_stats()
        kept = {key: stats[key] for key in ("num_alloc_retries", "num_ooms", "reserved_bytes.all.peak")}
        Path(chosen.profile).write_text(json.dumps({"ops": profiles, "memory": kept}))
        print(kept)
        return
    figures = {
        "blocks": BLOCKS,
        "tokens": ROWS * TOKENS,
        "micro_batches": chosen.micro_batches,
        **measured(bench, chosen.schedules),
    }
    machine.write("overlap_gpu", figures, origin)
    figures["nccl"] = over_nccl(bench, chosen.schedules)
    print(f"nccl: {figures['nccl']}", flush=True)
    machine.write("overlap_gpu", figures, origin)
    bench.host.share = 0.3
    plain = bench.fingerprint("plain", bench.local)
    figures["bitwise"] = {name: same(plain, bench.fingerprint(name, staged)) for name in chosen.schedules}
    print(f"bit by bit as the plain schedule: {figures['bitwise']}", flush=True)
    print(machine.write("overlap_gpu", figures, origin))


if __name__ == "__main__":
    main()
