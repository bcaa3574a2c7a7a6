"""States of a language model that a test has put together by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from braid.config import Run
from braid.distributed.collectives import Group
from braid.engine.node import Watch
from braid.engine.weights import ModelWeights
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel
from braid.optim.adamw import AdamW
from braid.planning.plan import Plan
from braid.schedule import Channel
from braid.schedule.graph import LANGUAGE
from braid.train import step as steps
from braid.train.counts import Counts
from braid.train.expert_load import ExpertLoad
from braid.train.module_state import ModuleState
from braid.train.state import State


def language_state(
    plan: Plan,
    model: LanguageModel,
    optimizer: AdamW,
    keeper: ModelWeights,
    device: torch.device,
    channels: Mapping[Channel, Group] | None = None,
) -> State:
    """The state of a run that trains everything, on a rank of a job without other ranks than the grid's."""
    buffers = frozenset(name for name, _ in model.named_buffers())
    module = ModuleState(
        name=LANGUAGE, model=model, optimizer=optimizer, keeper=keeper, trained_buffers=buffers
    )
    return State(
        plan=plan,
        job=model.groups.world,
        device=device,
        names=frozenset(model.canonical()),
        modules={LANGUAGE: module},
        channels=channels or {},
    )


def backward(
    state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts, watch: Watch | None = None
) -> tuple[dict[str, Tensor], ExpertLoad]:
    """The schedule of a step of a language model alone: this rank's metrics, and the load of its experts."""
    metrics, loads = steps.backward(state, run, batches, counts, watch)
    return metrics[LANGUAGE], loads[LANGUAGE]
