"""Fine-tuning checks: compares a run's model settings with those of the checkpoint it starts from.

Matching tensor names and shapes do not make the same model. With another RoPE base, norm epsilon, attention
window or top-k the same weights compute another function, and training silently starts from a worse loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from braid.architecture import SHAPE_OF, Model
from braid.errors import CheckpointError, Problem
from braid.pattern import Layout, parse

FREE_SETTINGS = (
    # Initialisation, which the checkpoint's weights replace.
    "model.init_std",
    # Noise and token dropping, which apply in training only.
    "model.dropout",
    "model.moe.jitter",
    "model.moe.capacity_factor",
    "model.moe.drop",
    "model.moe.pad_to_capacity",
    # Auxiliary losses, and the step size of selection biases.
    "model.mtp_loss",
    "model.moe.aux_loss",
    "model.moe.sequence_aux_loss",
    "model.moe.global_aux_loss",
    "model.moe.z_loss",
    "model.moe.selection_bias_rate",
    # Precision, like `train.dtype`.
    "model.moe.router_dtype",
)
"""Model settings that a fine-tuning run may change, because they do not affect what trained weights compute.
All others must match the checkpoint. `model.moe.routing` must match too: sinkhorn applies in training only, but
round_robin applies always."""


def check_settings(path: Path, saved: Model, chosen: Model) -> None:
    """Reject a model that would compute another function with the weights of the checkpoint at `path`."""
    problems = list(setting_problems(saved, chosen))
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        summary = f"the model in {path} and that of the run differ in {count}"
        raise CheckpointError("\n".join([summary, *(str(problem) for problem in problems)]))


def setting_problems(saved: Model, chosen: Model) -> Iterator[Problem]:
    """Every setting in which a run's model differs from the checkpoint's, with the checkpoint's value."""
    saved_layout, chosen_layout = parse(saved.pattern), parse(chosen.pattern)
    if _blocks(saved_layout) != _blocks(chosen_layout):
        yield Problem(
            field="model.pattern",
            value=chosen.pattern,
            rule=f"the checkpoint has the layers of {saved.pattern!r}",
            remedy=f"{saved.pattern!r}; | may stand elsewhere",
        )
    # Settings of layer kinds that the pattern does not use do not affect its weights.
    used = saved_layout.kinds() & chosen_layout.kinds()
    unused = [f"model.{name}" for kind, name in SHAPE_OF if kind not in used]
    ignored = {"model.pattern", *unused, *FREE_SETTINGS}
    for name, old, new in _differences(saved, chosen, "model", ignored):
        rule = f"the weights of the checkpoint are those of a model with {old!r}"
        yield Problem(field=name, value=new, rule=rule, remedy=repr(old))


def _blocks(layout: Layout) -> list[list[list[str]]]:
    """Layer kinds by block, of the main stack and each MTP depth. Segment boundaries and brackets around a
    single layer are left out: they change neither names nor results."""
    stacks = [layout.blocks, *(depth.blocks for depth in layout.mtp)]
    return [[[layer.kind.value for layer in block.layers] for block in blocks] for blocks in stacks]


def _differences(
    saved: Any, chosen: Any, path: str, ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, saved value, chosen value) of every field that differs and is not ignored."""
    if path in ignored:
        return
    if dataclasses.is_dataclass(saved) and type(saved) is type(chosen):
        for field in dataclasses.fields(saved):
            values = getattr(saved, field.name), getattr(chosen, field.name)
            yield from _differences(*values, f"{path}.{field.name}", ignored)
    elif saved != chosen:
        yield path, saved, chosen
