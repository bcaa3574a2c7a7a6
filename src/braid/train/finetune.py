"""Fine-tuning: which settings a model shares with the checkpoint that its first weights come from.

Equal names and shapes of tensors do not make the same model. With another rotary base, norm epsilon, window or
top-k the same weights compute another function, and training would start from a worse loss without a word.
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
    # How new weights are drawn: these come from the checkpoint.
    "model.init_std",
    # Noise and dropped tokens, in training alone.
    "model.dropout",
    "model.moe.jitter",
    "model.moe.capacity_factor",
    "model.moe.drop",
    "model.moe.pad_to_capacity",
    # What is added to the loss, and how far a step moves selection biases.
    "model.mtp_loss",
    "model.moe.aux_loss",
    "model.moe.sequence_aux_loss",
    "model.moe.global_aux_loss",
    "model.moe.z_loss",
    "model.moe.selection_bias_rate",
    # Rounding, as `train.dtype` is.
    "model.moe.router_dtype",
)
"""Settings of a model that a fine-tuned run may choose anew, because trained weights compute the same with any
value of them. Every other setting has to be the checkpoint's. `model.moe.routing` is not free: sinkhorn takes
part in training alone, but round_robin always does."""


def check_settings(path: Path, saved: Model, chosen: Model) -> None:
    """Refuse a model that would compute something else with the weights of the checkpoint at `path`."""
    problems = list(setting_problems(saved, chosen))
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        first = f"the model in {path} and that of the run differ in {count}"
        raise CheckpointError("\n".join([first, *(str(problem) for problem in problems)]))


def setting_problems(saved: Model, chosen: Model) -> Iterator[Problem]:
    """Every setting in which the model of a run is not that of a checkpoint, with the checkpoint's value."""
    before, now = parse(saved.pattern), parse(chosen.pattern)
    if _blocks(before) != _blocks(now):
        yield Problem(
            field="model.pattern",
            value=chosen.pattern,
            rule=f"the checkpoint has the layers of {saved.pattern!r}",
            remedy=f"{saved.pattern!r}; | may stand elsewhere",
        )
    # Shapes of layers that a pattern does not have say nothing about its weights.
    unused = [f"model.{name}" for kind, name in SHAPE_OF if kind not in before.kinds() & now.kinds()]
    settled = {"model.pattern", *unused, *FREE_SETTINGS}
    for name, was, given in _differing(saved, chosen, "model", settled):
        rule = f"the weights of the checkpoint are those of a model with {was!r}"
        yield Problem(field=name, value=given, rule=rule, remedy=repr(was))


def _blocks(layout: Layout) -> list[list[list[str]]]:
    """The layers of every block, of the main stack and of each MTP depth. How segments cut the stack, and
    brackets around a single layer, change neither names nor results."""
    stacks = [layout.blocks, *(depth.blocks for depth in layout.mtp)]
    return [[[layer.kind.value for layer in block.layers] for block in blocks] for blocks in stacks]


def _differing(saved: Any, chosen: Any, at: str, settled: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value there, value here) of every field that differs and is not settled."""
    if at in settled:
        return
    if dataclasses.is_dataclass(saved) and type(saved) is type(chosen):
        for field in dataclasses.fields(saved):
            values = getattr(saved, field.name), getattr(chosen, field.name)
            yield from _differing(*values, f"{at}.{field.name}", settled)
    elif saved != chosen:
        yield at, saved, chosen
