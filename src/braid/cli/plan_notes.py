"""Remarks on a plan: a summary of its schedule, options without effect, and gaps in the memory estimate."""

from __future__ import annotations

from collections.abc import Iterator

from braid.errors import enumeration
from braid.pattern import compact, parse
from braid.planning.layouts import is_split_by_work
from braid.planning.plan import Plan, span_of, whole_models
from braid.planning.trained import governed
from braid.schedule import DUAL_PIPE_V, Act
from braid.schedule.graph import LANGUAGE
from braid.schedule.phases import Phase


def schedule_summary(plan: Plan) -> str:
    """The schedule, overlap, recompute and offload in one line; empty if micro-batches just run in sequence."""
    run, schedule = plan.run, plan.schedule
    mesh = run.mesh
    parts = [schedule.name] if plan.axes.pp > 1 or mesh.overlap else []
    parts += ["overlapped"] if mesh.overlap and parts != ["overlapped"] else []
    parts += [f"{'late ' if mesh.late_weights else ''}delayed weight gradients"] if schedule.delayed else []
    parts += ["paired ends"] if mesh.paired_ends else []
    parts += ["early release"] if mesh.early_release else []
    if "full" in run.train.recompute:
        parts += ["full recompute"]
    elif run.train.recompute:
        parts += [f"recompute of {enumeration(list(_recomputed(plan)))}"]
    if away := sum(map(len, schedule.offloaded)):
        parts += [f"{away} {'block waits' if away == 1 else 'blocks wait'} in host memory"]
    return ", ".join(parts)


def graph_lines(plan: Plan, device: str) -> list[str]:
    """What runs as CUDA graphs, and why the rest does not; empty without `train.graphs`."""
    from braid.planning.graphs import graph_parts  # imports torch

    return [str(part) for part in graph_parts(plan, device)]


def split_summary(plan: Plan) -> str:
    """The pattern with the `|` that plan has placed by the FLOPs of blocks; empty if it has placed none."""
    folded = plan.run.mesh.schedule == DUAL_PIPE_V
    if not is_split_by_work(parse(plan.run.model.pattern), plan.axes.pp, folded=folded):
        return ""
    return f"{compact(plan.layout)}, cut by the FLOPs of its blocks: no equal cut for pp {plan.axes.pp}"


def trained_summaries(plan: Plan) -> list[str]:
    """What is trained of each module, the language model first; those of which everything is are left out."""
    return [text for name in (LANGUAGE, *plan.encoders) if (text := trained_summary(plan, name))]


def trained_summary(plan: Plan, module: str = LANGUAGE) -> str:
    """What is trained of a module, and where its backward ends, in one line; empty if everything is trained."""
    selection = plan.selection_of(module)
    if selection is None:
        return ""
    from braid.planning.estimate.weights import phases_of  # imports torch

    model = whole_models(plan)[module]
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    learned = sum(counts[name] for name in selection.parameters(model) & counts.keys())
    segments = range(len(plan.layout.segments)) if module == LANGUAGE else plan.encoders[module].segments
    phases = [phase for segment in segments for phase in phases_of(plan, segment)]
    first = next((phase for phase in phases if phase.backward), None)
    saved = "" if first is phases[0] else "; no backward"
    saved += "" if first is phases[0] or first is None else f" before {_begins(first, module)}"
    rates = f"; {len(selection.shares)} tensors at rates of their own" if selection.shares else ""
    of_model = " of the language model" if module == LANGUAGE else f" of {module}"
    return (
        f"{learned:,} of {sum(counts.values()):,} parameters{of_model if plan.encoders else ''}{saved}{rates}"
    )


def _begins(phase: Phase, module: str) -> str:
    """The part of a module that a phase runs, by its canonical name."""
    from braid.planning.estimate.weights import part_of  # imports torch

    of_encoder = {"head": "projector", "final_norm": "final_norm"}
    return part_of(phase) if module == LANGUAGE else of_encoder.get(phase.kind, part_of(phase))


def _recomputed(plan: Plan) -> Iterator[str]:
    """The recomputed regions; hyper-connections with the number of blocks per recompute span."""
    longest = max((len(segment.blocks) for segment in plan.layout.segments), default=1)
    span = min(span_of(plan.run, plan.layout), longest)
    spans = f" (spans of {span} {'block' if span == 1 else 'blocks'})" if _uses_spans(plan) else ""
    for name in plan.run.train.recompute:
        yield name + (spans if name == "hyper" else "")


def _uses_spans(plan: Plan) -> bool:
    """Whether `train.recompute_span` applies. Recompute of whole blocks saves the streams before each block."""
    run = plan.run
    regions = set(run.train.recompute)
    return run.model.hyper is not None and "hyper" in regions and regions.isdisjoint({"block", "full"})


def ineffective_options(plan: Plan) -> Iterator[str]:
    """Options that have no effect in this run, each with what to set instead."""
    run = plan.run
    if not plan.encoders and (idle := plan.world - plan.grid.size):
        hold = "rank holds" if idle == 1 else "ranks hold"
        yield (
            f"{idle} {hold} no part of the model, only taking part in the job's collectives: "
            f"leave mesh.ranks out to use all {plan.world} ranks"
        )
    if run.mesh.overlap and run.train.micro_batches == 1:
        still = ", and only delayed weight gradients hide transfers" if plan.schedule.delayed else ""
        yield (
            f"mesh.overlap needs a second micro-batch to overlap with{still}: "
            "set train.micro_batches to 2 or more"
        )
    if run.train.recompute_span and not _uses_spans(plan):
        if run.model.hyper is None:
            why, remedy = "the model has no hyper-connections", "leave it out"
        elif "hyper" not in run.train.recompute:
            why, remedy = (
                "hyper-connections are not recomputed",
                "add hyper to train.recompute, or leave it out",
            )
        else:
            why, remedy = "recompute of whole blocks saves the streams before every block", "leave it out"
        yield f"train.recompute_span {run.train.recompute_span} changes nothing, {why}: {remedy}"
    if run.train.offload and not any(op.act is Act.OFFLOAD for ops in plan.schedule.ops for op in ops):
        yield (
            f"train.offload {run.train.offload:g} changes nothing: it is less than half a block of each "
            "stage, or no other block runs between forward and backward: raise it, or leave it out"
        )
    yield from _frozen_shares(plan)


def _frozen_shares(plan: Plan) -> Iterator[str]:
    """Learning rates of tensors that are not trained."""
    shares = {LANGUAGE: plan.run.lr_share} | {name: each.lr_share for name, each in plan.run.modules.items()}
    for module, globs in shares.items():
        selection = plan.selection_of(module)
        if not globs or selection is None:
            continue
        at = plan.prefix_of(module)
        for glob, tensors in governed(whole_models(plan)[module].canonical(), globs).items():
            if tensors and selection.tensors.isdisjoint(tensors):
                yield (
                    f"{at}lr_share[{glob}] changes nothing, as the tensors that it matches are frozen: "
                    f"leave it out, or add them to {at}trained"
                )


def module_notes(plan: Plan) -> Iterator[str]:
    """What modules do that is easily overlooked."""
    if plan.encoders and plan.layout.mtp:
        yield "MTP depths embed placeholders as plain ids: rows of modules are read before the first layer only"


def estimate_gaps(plan: Plan) -> Iterator[str]:
    """Effects of this run's options on memory that the estimate does not model."""
    mesh = plan.run.mesh
    if plan.schedule.delayed:
        late = ", one block longer with mesh.late_weights" if mesh.late_weights else ""
        yield f"tensors held for delayed weight gradients{late}: the peak may be higher"
    if mesh.early_release:
        yield "memory that mesh.early_release frees earlier: the peak may be lower"
