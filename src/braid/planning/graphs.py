"""Which parts of a step run as CUDA graphs, and why the others do not: a property of the plan.

A graph repeats the addresses, the shapes and the numbers that it was captured with. A part can be captured if
none of them depends on what the host learns while steps run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from braid.config import Run
from braid.pattern import Kind
from braid.planning.plan import Plan
from braid.precision import precision_of
from braid.schedule.sections import sections_of

MOST_GRAPHS = 16
"""Graphs that a run holds. Micro-batches of further forms run without a graph."""

LOADS = 11
"""Copies and launches of the host for a micro-batch of a graph: its tensors, tables, step and loss scale, and
the replay."""

MOST_MICRO_BATCHES = 64
"""Micro-batches in one graph. A graph of more would take seconds to capture, and gigabytes of host memory."""


@dataclass(frozen=True, kw_only=True)
class GraphPart:
    """A part of a step, and whether it is captured."""

    what: str
    reasons: tuple[str, ...] = ()
    """Why not; none if it is."""

    @property
    def captured(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.what}: " + ("captured" if self.captured else "not captured, " + "; ".join(self.reasons))


def graph_parts(plan: Plan, device: str) -> tuple[GraphPart, ...]:
    """The parts of a step under `train.graphs`, on devices of a type; none if that is `none`."""
    if plan.run.train.graphs == "none":
        return ()
    return (
        GraphPart(what=_section_text(plan), reasons=tuple(step_reasons(plan, device))),
        GraphPart(what="optimizer and evaluation", reasons=("they run once per step or less",)),
    )


def captures(plan: Plan, device: str) -> bool:
    """Whether steps have anything to capture."""
    return any(part.captured for part in graph_parts(plan, device))


def step_reasons(plan: Plan, device: str) -> Iterator[str]:
    """Why forward and backward of micro-batches cannot be captured."""
    run = plan.run
    if device != "cuda":
        yield f"a {device.upper()} has no CUDA graphs"
    if plan.grid.size > 1 or plan.world > 1:
        yield f"{plan.world} ranks share the weights, which FSDP2 gathers into fresh memory in every step"
        return
    if plan.encoders:
        yield "rows of modules differ in number from one micro-batch to the next"
    if precision_of(run.train.precision).quantised:
        yield "train.precision makes quantised copies of weights anew in every step"
    if run.train.offload_share:
        yield "train.offload copies to host memory that steps assign while they run"
    yield from _kernel_reasons(plan, device)
    yield from _expert_reasons(run, plan)
    longest = max(len(each.micro_batches) for each in sections_of(plan.schedule, 0))
    if longest > MOST_MICRO_BATCHES:
        yield (
            f"mesh.overlap has some micro-batch in flight from the first op to the last, and one graph of all "
            f"{longest} would be too large: at most {MOST_MICRO_BATCHES}"
        )


def _section_text(plan: Plan) -> str:
    if plan.world > 1:
        return "forward and backward"
    longest = max(len(each.micro_batches) for each in sections_of(plan.schedule, 0))
    return "forward and backward of " + (
        "a micro-batch" if longest == 1 else f"{longest} micro-batches at once"
    )


def _kernel_reasons(plan: Plan, device: str) -> Iterator[str]:
    """Kernels whose launches the host decides from the data."""
    import torch

    from braid.kernels.attention.sizes import supports
    from braid.planning.local_model import choose_kernels

    shape = plan.run.model
    chosen = choose_kernels(plan, torch.device(device))
    attends = not {Kind.ATTENTION, Kind.LATENT_ATTENTION}.isdisjoint(plan.layout.kinds())
    if attends and chosen.attention is not None and device == "cuda":
        dims = [] if shape.attention is None else [shape.attention.head_dim]
        wide = [dim for dim in dims if not supports(dim)]
        if chosen.attention.name != "fused" or wide:
            name = chosen.attention.name if not wide else f"sdpa, as for heads of {wide[0]} channels,"
            yield f"attention by {name} cuts documents on the host, whose lengths are the shapes of its calls"
    if chosen.grouped_mlp is not None and chosen.grouped_mlp.name == "reference" and device == "cuda":
        yield "the reference kernel of experts reads their numbers of rows on the host"


def _expert_reasons(run: Run, plan: Plan) -> Iterator[str]:
    moe = run.model.moe
    if moe is None or Kind.MOE not in plan.layout.kinds():
        return
    if moe.capacity_factor is not None and not moe.pad_to_capacity:
        yield (
            "the host reads how many rows experts keep within their capacity: "
            "with model.moe.pad_to_capacity it need not"
        )
    if run.data.packing == "documents":
        yield "data.packing documents pads sequences, and experts have no rows for padding, whose amount varies"
