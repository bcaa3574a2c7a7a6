"""Faults written by hand: modules on grids of their own, and what passes between them."""

from __future__ import annotations

from scripts.mutants.mutant import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="every-lane-encodes-the-items-of-the-first",
        file="train/items.py",
        old="mine = table.items_of_lane(groups.dp.rank, groups.dp.size)",
        new="mine = table.items_of_lane(0, groups.dp.size)",
        kind="wrong group",
        why="data-parallel ranks of an encoder send rows of other items than they should",
    ),
    Fault(
        name="rows-leave-from-the-first-stage",
        file="train/items.py",
        old="source = held(Lanes(stage=each.axes.pp - 1), each.grid, table)",
        new="source = held(Lanes(stage=0), each.grid, table)",
        kind="wrong group",
        why="an encoder with a pipeline sends rows from ranks that do not have them",
    ),
    Fault(
        name="gradients-of-rows-take-the-way-of-rows",
        file="engine/edges.py",
        old='planned = planned if direction == "F" else planned.backward()',
        new="planned = planned",
        kind="swapped",
        why="gradients of rows go from the encoder to the language model",
    ),
    Fault(
        name="norm-of-the-last-module-only",
        file="train/step.py",
        old="square = square + gradients.own_square(",
        new="square = gradients.own_square(",
        kind="dropped term",
        why="gradients are clipped by the length of one module's",
    ),
    Fault(
        name="frozen-language-models-end-the-backward",
        file="schedule/freezing.py",
        old="differentiable = {edge.name for edge in graph.inputs(number) if passes[edge.source]}",
        new="differentiable = set[str]()",
        kind="dropped term",
        why="an encoder behind a frozen language model learns nothing",
    ),
    Fault(
        name="loss-on-placeholders",
        file="train/step.py",
        old="return mask_placeholders(batch, {name: module.token for name, module in run.modules.items()})",
        new="return batch",
        kind="ignored mask",
        why="the language model learns to predict placeholders that a text brings along",
    ),
    Fault(
        name="modules-share-names-in-checkpoints",
        file="train/state.py",
        old="return module.prefix + renamed(name, renames.get(module.name, {}))",
        new="return renamed(name, renames.get(module.name, {}))",
        kind="lost data",
        why="the blocks of an encoder overwrite those of the language model",
    ),
    Fault(
        name="every-image-of-a-prompt-takes-all-patches",
        file="data/prompts.py",
        old="share = patches_of_each(count, limits)",
        new="share = patches_of_each(1, limits)",
        kind="missing scale",
        why="images of a prompt are larger than those of a document, and too many for a sample",
    ),
    Fault(
        name="an-answer-with-one-wrong-token-is-exact",
        file="train/exact_match.py",
        old="(answers_BD & (wrong_BD == 0)).sum()",
        new="(answers_BD & (wrong_BD <= 1)).sum()",
        kind="comparison",
        why="exact match is too good",
    ),
    Fault(
        name="held-out-digits-are-trained-on",
        file="data/digit_strips.py",
        old='number_D = np.flatnonzero([each == (split == "validation") for each in held_out])',
        new="number_D = np.flatnonzero([True for _ in held_out])",
        kind="lost data",
        why="validation strips show digits that the model has seen",
    ),
)
