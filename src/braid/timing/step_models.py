"""Small models whose whole steps `braid calibrate` measures, and what a calibration predicts for them.

Measured over predicted seconds is the sustained factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from braid.architecture import Attention, DeltaNet, Mamba2, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.nn.work import Work
from braid.planning.estimate.rank import held_modules
from braid.planning.plan import plan
from braid.timing.calibration import Calibration, seconds
from braid.timing.measure import OPTIMIZER_BYTES


def small_run(pattern: str, *, hidden: int, tokens: int, samples: int, **layers: object) -> Run:
    model = Model(pattern=pattern, hidden=hidden, vocab=32768, tied=False, **layers)  # type: ignore[arg-type]
    return Run(
        model=model,
        data=Data(sequence_tokens=tokens),
        optim=Optim(lr=1e-4),
        train=Train(steps=1000, batch_samples=samples, dtype="bf16", eval_samples=0),
    )


_HEADS = Attention(heads=16, kv_heads=4, head_dim=128)
MODELS: Mapping[str, Run] = MappingProxyType(
    {
        "dense": small_run(
            "[*-]" * 6, hidden=3072, tokens=4096, samples=4,
            attention=Attention(heads=24, kv_heads=8, head_dim=128), mlp=Mlp(ffn=8192),
        ),
        "experts": small_run(
            "[*E]" * 4, hidden=2048, tokens=4096, samples=4, attention=_HEADS,
            moe=Moe(experts=64, top_k=8, ffn=1024),
        ),
        "hybrid": small_run(
            "M-M*M-G-", hidden=2048, tokens=4096, samples=4, attention=_HEADS,
            mamba2=Mamba2(heads=64, head_dim=64, state=128, groups=8), mlp=Mlp(ffn=6144),
            delta_net=DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        ),
    }
)  # fmt: skip
"""Models that are measured; other sizes than those of the kernels' tables."""


def step_work(run: Run) -> tuple[Work, int]:
    """The work of one step on one GPU, and the parameters that it updates."""
    planned = plan(run, 1)
    held = held_modules(planned, 0, "cuda")[-1]
    parts = held.model.works(held.workload).values()
    work = sum((each for part in parts for each in part.values()), Work())
    micro_batches = run.train.batch_samples // held.workload.rows
    return work.times(micro_batches), sum(p.numel() for p in held.model.parameters())


def predicted(run: Run, calibration: Calibration) -> float:
    """The seconds of a step on the device, without the sustained factor."""
    work, parameters = step_work(run)
    passes = work.passes().items()
    device = sum(seconds(piece, pass_, calibration) for pass_, pieces in passes for piece in pieces)
    return device + OPTIMIZER_BYTES * parameters / calibration.optimizer
