"""Rules of `train.precision`: what a run may quantise on its ranks, so that the topology changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from braid.config import Run
from braid.errors import Problem
from braid.pattern import Kind, Layout
from braid.planning.divisibility import AxisSizes, tp_runs
from braid.precision import BLOCK_TOKENS, ENDS, Precision, precision_of


def problems(run: Run, layout: Layout, axes: AxisSizes) -> Iterator[Problem]:
    """Every rule that a run violates. Settings that mean nothing are reported by the run itself."""
    try:
        precision = precision_of(run.train.precision)
    except ValueError:
        return
    if not precision.quantised:
        return
    kinds = layout.kinds()
    yield from _blocks(run, layout, precision)
    yield from _shared_heads(run, kinds, axes, precision)
    yield from _tokens(run, kinds, axes, precision)
    by_rows = precision.experts.weight_grad or precision.experts_down.weight_grad
    if by_rows and Kind.MOE in kinds and axes.slab > 1:
        rule = f"{axes.slab} ranks have rows of the same expert, in an order that depends on their number"
        yield _problem(run, rule, "experts.weight_grad=bf16 behind it")


def _blocks(run: Run, layout: Layout, precision: Precision) -> Iterator[Problem]:
    blocks = len(layout.blocks)
    if not any(precision.quantises(block, blocks) for block in range(blocks)):
        rule = f"the first and the last block are not quantised, and the pattern has {blocks}"
        yield _problem(run, rule, f"the word {ENDS} behind it")


def _shared_heads(run: Run, kinds: frozenset[Kind], axes: AxisSizes, precision: Precision) -> Iterator[Problem]:
    if precision.dense.quantised and (copies := tp_runs(run.model, kinds, axes.tp)):
        rule = (
            f"{max(copies)} ranks share KV heads, key heads or groups: their weights are no slices of the whole"
        )
        smaller = axes.tp // max(copies)
        yield Problem(
            field="mesh.tp", value=axes.tp, rule=rule, remedy=f"{smaller}, or train.precision dense=bf16"
        )


def _tokens(run: Run, kinds: frozenset[Kind], axes: AxisSizes, precision: Precision) -> Iterator[Problem]:
    """Slices of a sequence are whole blocks. Layers that are replicated over tp see the slices between layers,
    and those around a latent see all sequences in a row."""
    form = precision.dense.weight_grad
    if form is None:
        return
    latent = Kind.MOE in kinds and run.model.moe is not None and run.model.moe.latent
    replicated = latent or Kind.LATENT_ATTENTION in kinds
    slices = axes.cp * (axes.tp if replicated else 1)
    if slices == 1 and not latent:
        return
    block, tokens = BLOCK_TOKENS[form], run.data.sequence_tokens
    if block is None:
        rule = (
            f"dense.weight_grad={form} has blocks of whole sequences, which ranks or layers around a latent cut"
        )
        yield _problem(run, rule, "dense.weight_grad=bf16 behind it")
    elif tokens % (block * slices):
        unit = math.lcm(block * slices, axes.tp * axes.cp)
        near = sorted({max(unit, tokens // unit * unit), -(-tokens // unit) * unit})
        rule = f"dense.weight_grad={form} needs whole blocks of {block} tokens in each of {slices} slices"
        remedy = f"{' or '.join(map(str, near))}, or train.precision with dense.weight_grad=bf16"
        yield Problem(field="data.sequence_tokens", value=tokens, rule=rule, remedy=remedy)


def _problem(run: Run, rule: str, remedy: str) -> Problem:
    return Problem(field="train.precision", value=" ".join(run.train.precision), rule=rule, remedy=remedy)
