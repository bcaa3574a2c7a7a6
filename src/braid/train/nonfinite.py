"""Where gradients that are not finite come from: the rank, the parameter and the micro-batch, before any
reduction has spread them.

A step that was skipped has changed nothing, so it can be run again. The second run looks at the gradients of
this rank after every op that adds to them. Training itself does not pay for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from braid.config import Run
from braid.data import Loader
from braid.launch.process import all_gather_json
from braid.launch.rendezvous import format_ranks
from braid.schedule import Act, Op
from braid.train.module_state import ModuleState
from braid.train.state import JobState
from braid.train.step import backward, read_step

MOST_NAMES = 3
"""Parameters that are named for each micro-batch."""

ADDING = frozenset({Act.B, Act.W})
"""Ops that add to gradients."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first micro-batch of a rank after which its gradients were not finite."""

    rank: int
    micro_batch: int
    parameters: tuple[str, ...]
    """By canonical name, those that the same op made so."""


@dataclass
class _Search:
    """Looks at the gradients of a rank while ops run, until some are not finite."""

    modules: Mapping[str, ModuleState]
    found: tuple[int, tuple[str, ...]] | None = field(default=None)
    """The micro-batch and the parameters."""

    def look(self, op: Op) -> None:
        if self.found is not None or op.act not in ADDING or op.micro_batch is None:
            return
        names: list[str] = []
        finite: list[Tensor] = []
        for module in self.modules.values():
            for name, gradients in module.keeper.unreduced().items():
                names += [module.prefix + module.names.get(name, name)] * len(gradients)
                finite += [gradient.isfinite().all() for gradient in gradients]
        verdicts = torch.stack(finite).tolist() if finite else []
        wrong = [name for name, good in zip(names, verdicts, strict=True) if not good]
        if wrong:
            self.found = op.micro_batch, tuple(dict.fromkeys(wrong))


def find_origins(state: JobState, run: Run, loader: Loader, step: int, first: int) -> list[Origin]:
    """Run the forwards and backwards of a step again, from sample `first` on, and say which ranks make
    gradients that are not finite. Collective over the job. The state stays as it is."""
    state.progress.enter("a search for what is not finite")
    search = _Search(state.modules)
    inputs = read_step(state, run, loader, step, first)
    if state.modules:
        backward(state, run, inputs.batches, inputs.counts, items=inputs.items, after_op=search.look)
        for module in state.modules.values():
            module.optimizer.zero_grad()
    told = all_gather_json(search.found, state.job)
    return [
        Origin(rank=rank, micro_batch=found[0], parameters=tuple(found[1]))
        for rank, found in enumerate(told)
        if found is not None
    ]


def describe_origins(origins: list[Origin]) -> str:
    """In words, by micro-batch and parameters."""
    if not origins:
        return (
            "before the reduction over ranks all gradients of a second run were finite: they overflowed in it, "
            "or the fault does not repeat, as one of the hardware"
        )
    ranks: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for each in origins:
        ranks.setdefault((each.micro_batch, each.parameters), []).append(each.rank)
    found = [
        f"{_listed(names)} in micro-batch {micro_batch} on {format_ranks(of)}"
        for (micro_batch, names), of in ranks.items()
    ]
    return f"before any reduction: {'; '.join(found)}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
