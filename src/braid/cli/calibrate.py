"""`braid calibrate`: measure this GPU, for the step times of `braid plan`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from braid.cli.args import optional, parse_options
from braid.console import say
from braid.errors import ConfigError, ExitCode
from braid.timing import measure, measure_kernels, samples
from braid.timing.calibration import to_json
from braid.timing.measure_collectives import collectives, contention
from braid.timing.measure_precision import Sizes as PrecisionSizes
from braid.timing.measure_precision import low_precision
from braid.timing.peaks import device_name
from braid.timing.samples import Sample, Samples
from braid.timing.step_models import MODELS
from braid.timing.stopwatch import Stopwatch
from braid.timing.tables import calibration_of, with_shipped_links
from braid.train.step_timing import steps

MEASURED = f"""\
what is measured (one GPU, two to three minutes)
  products          x Wᵀ, dy W and dyᵀ x in bfloat16 over a grid of sizes, and held-out sizes between them
  grouped products  those of experts, through the kernels that a run would choose
  products in fp8   the same in fp8_block, and what quantises their operands, on Hopper
  kernels           {", ".join(measure_kernels.NAMES)}: forward and backward
  memory traffic    add, rms_norm, glu, rotary over a range of sizes
  host              seconds of a launch
  link to the host  copies to page-locked host memory and back
  optimizer         gradient norm and AdamW
  whole steps       {", ".join(MODELS)}: measured over predicted seconds is the sustained factor
under a launcher on several GPUs, also
  collectives       all-gather, reduce-scatter, all-reduce, all-to-all over groups of 2, 4, ... ranks
  contention        a product while an all-reduce runs"""


MOST_PROCESSES = 16
"""That compile kernels: each has a CUDA context."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure the GPU at hand, and write a calibration, from which `braid plan --time` predicts seconds.

    Takes two to three minutes; `--list` says what is measured. Start it under a launcher (`torchrun`) on all
    GPUs of a node, or of several nodes, to measure collectives too."""

    out: Annotated[Path | None, optional("FILE", "the device's name, such as h200.json")] = None
    """Where to write the calibration."""
    samples: Annotated[Path | None, optional("FILE", "beside the calibration")] = None
    """Where to write all measurements; `--from-samples` derives a calibration from them again."""
    from_samples: Annotated[Path | None, optional("FILE", "measure")] = None
    """Measure nothing, and derive the calibration from this file of `--samples`."""
    list: bool = False
    """Print what is measured, and measure nothing."""


def calibrate(args: list[str]) -> int:
    opts = parse_options(CalibrateOptions, args, "braid calibrate")
    if opts.list:
        print(MEASURED)
        return ExitCode.OK
    if opts.from_samples is not None:
        given = samples.load(opts.from_samples)
        _write(given, opts.out or Path(f"{device_name(given.device)}.json"))
        return ExitCode.OK
    if not torch.cuda.is_available():
        raise ConfigError(
            "`braid calibrate` measures a GPU, and torch sees none here: run it on a machine with one, or plan "
            "with the calibration that is shipped for a device; `braid calibrate --list` says what is measured"
        )
    found = measure_all(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    if found is not None:
        out = opts.out or Path(f"{device_name(found.device)}.json")
        # First: tables can be derived from it again.
        measurements = opts.samples or out.with_suffix(".samples.json")
        measurements.write_text(samples.to_json(found))
        say(f"wrote {measurements}")
        _write(found, out)
    return ExitCode.OK


def _write(found: Samples, out: Path) -> None:
    calibration = with_shipped_links(calibration_of(found))
    out.write_text(to_json(calibration))
    say(f"wrote {out}: sustained {calibration.sustained:.3f}, spread {format_spread(calibration.spread)}")


def format_spread(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in spread.items())


# ------------------------------------------------------------------------------------------ measuring


class _Progress:
    """Measures sections, prints how long each took, and keeps what failed."""

    def __init__(self) -> None:
        self.found: list[Sample] = []
        self.skipped: dict[str, str] = {}
        self.sections: dict[str, float] = {}
        self.began = time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error ends the section, and is reported: the others may still be measured."""
        started, before, skipped = time.perf_counter(), len(self.found), len(self.skipped)
        try:
            yield
        except Exception as error:
            self.skipped[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        for what, reason in list(self.skipped.items())[skipped:]:
            say(f"  not measured: {what}: {reason}")
        seconds = time.perf_counter() - started
        self.sections[name] = round(seconds, 1)
        say(f"{name:<18} {len(self.found) - before:>5} measurements  {seconds:5.1f} s")

    def measure(self, name: str, samples: Callable[[], Iterable[Sample]]) -> None:
        with self.section(name):
            for sample in samples():
                self.found.append(sample)


def measure_all(device: torch.device) -> Samples | None:
    """Everything of this device; None on ranks other than the first, which only take part in collectives."""
    torch.cuda.set_device(device)
    progress, sizes = _Progress(), measure.Sizes()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
        progress.measure("collectives", lambda: collectives(device))
        progress.measure("contention", lambda: contention(device))
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return None
    watch = Stopwatch(device)
    torch.set_float32_matmul_precision("highest")  # as a run does
    cases = list(measure_kernels.cases())
    with progress.section("compilation"):
        others = (measure.compile_grouped, measure.compile_elementwise)
        measure_kernels.compile_all(cases, others, device, min(os.cpu_count() or 1, MOST_PROCESSES))
    progress.measure("products", lambda: measure.products(sizes, watch))
    torch.cuda.empty_cache()
    progress.measure("grouped products", lambda: measure.grouped_products(sizes, watch))
    torch.cuda.empty_cache()
    progress.measure("products in fp8", lambda: low_precision(PrecisionSizes(), watch))
    torch.cuda.empty_cache()
    with progress.section("kernels"):
        found, skipped = measure_kernels.measure(cases, watch)
        progress.found += found
        progress.skipped |= skipped
    torch.cuda.empty_cache()
    progress.measure("memory traffic", lambda: measure.moved(sizes, watch))
    progress.measure("optimizer", lambda: measure.optimizer_step(sizes, watch))
    torch.cuda.empty_cache()
    progress.measure("host", lambda: measure.launches(sizes, watch))
    progress.measure("link to the host", lambda: measure.host_link(sizes, watch))
    torch.cuda.empty_cache()
    progress.measure("whole steps", steps)
    took = time.perf_counter() - progress.began
    say(f"{len(progress.found)} measurements in {took:.0f} s, {len(progress.skipped)} not measured")
    return Samples(
        device=torch.cuda.get_device_name(device),
        when=datetime.now(UTC).date().isoformat(),
        versions=_versions(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        samples=tuple(progress.found),
        skipped=progress.skipped,
        took_seconds=round(took, 1),
        sections=progress.sections,
    )


def _versions() -> dict[str, str]:
    import triton

    cuda = torch.version.cuda or "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": cuda,
    }
