"""What a person should know of a plan besides its numbers: how its schedule goes, which choices change nothing,
and which ones the estimate of memory leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from braid.planning.plan import Plan, span_of


def schedule_words(worked_out: Plan) -> str:
    """How micro-batches pass, where there is more to say than one after the other."""
    run, schedule = worked_out.run, worked_out.schedule
    mesh = run.mesh
    words = [schedule.name] if worked_out.axes.pp > 1 or mesh.overlap else []
    words += ["overlapped"] if mesh.overlap and words != ["overlapped"] else []
    words += [f"{'late ' if mesh.late_weights else ''}delayed weight gradients"] if schedule.delayed else []
    words += ["paired ends"] if mesh.paired_ends else []
    words += ["early release"] if mesh.early_release else []
    words += [f"recompute of {' and '.join(_recomputed(worked_out))}"] if run.train.recompute else []
    return ", ".join(words)


def _recomputed(worked_out: Plan) -> Iterator[str]:
    """What is made again; hyper-connections with how many blocks at a time, as a person or the plan chose."""
    longest = max((len(segment.blocks) for segment in worked_out.layout.segments), default=1)
    span = min(span_of(worked_out.run, worked_out.layout), longest)
    spans = (
        f" (spans of {span} {'block' if span == 1 else 'blocks'})" if _recomputes_in_spans(worked_out) else ""
    )
    for name in worked_out.run.train.recompute:
        yield name + (spans if name == "hyper" else "")


def _recomputes_in_spans(worked_out: Plan) -> bool:
    """Whole blocks keep the streams between them: then there is nothing left to span."""
    run = worked_out.run
    again = set(run.train.recompute)
    return run.model.hyper is not None and "hyper" in again and again.isdisjoint({"block", "full"})


def idle_choices(worked_out: Plan) -> Iterator[str]:
    """Choices that change nothing in this run, each with what to set instead."""
    run = worked_out.run
    if run.mesh.overlap and run.train.micro_batches == 1:
        still = ", and only delayed weight gradients hide transfers" if worked_out.schedule.delayed else ""
        yield (
            f"mesh.overlap has no second micro-batch to run beside the first{still}: "
            "set train.micro_batches to 2 or more"
        )
    if run.train.recompute_span and not _recomputes_in_spans(worked_out):
        if run.model.hyper is None:
            why, remedy = "the model has no hyper-connections", "leave it out"
        elif "hyper" not in run.train.recompute:
            why, remedy = (
                "hyper-connections are not recomputed",
                "add hyper to train.recompute, or leave it out",
            )
        else:
            why, remedy = "where whole blocks are recomputed, each begins anew", "leave it out"
        yield f"train.recompute_span {run.train.recompute_span} changes nothing, {why}: {remedy}"


def uncounted(worked_out: Plan) -> Iterator[str]:
    """What the choices of this run do to memory that its estimate does not know of."""
    mesh = worked_out.run.mesh
    if worked_out.schedule.delayed:
        late = ", a block longer by mesh.late_weights" if mesh.late_weights else ""
        yield f"what delayed weight gradients hold until they are added{late}: the peak may be higher"
    if mesh.early_release:
        yield "what mesh.early_release frees earlier: the peak may be lower"
