"""A module on a rank of its grid: this rank's part of the model, its optimizer, and where its weights lie."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from braid.engine.weights import ModelWeights
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.nn.canonical import Canonical, Held
from braid.optim.adamw import AdamW
from braid.optim.gradients import ReplicatedPart, replicated_parts
from braid.optim.shards import LocalShard, local, local_shard


@dataclass(kw_only=True)
class ModuleState:
    """The language model or an encoder."""

    name: str
    model: LanguageModel | EncoderModel
    optimizer: AdamW
    keeper: ModelWeights
    """Unshards, reshards and reduces its units while ops run."""
    trained_buffers: frozenset[str]
    """Buffers that steps may change: selection biases that are trained."""
    prefix: str = ""
    """What its canonical names begin with in checkpoints: `modules.vision.`, nothing for the language model."""
    first_segment: int = 0
    """The number of its first segment in the schedule."""

    def weights(self) -> dict[str, Tensor]:
        """By parameter name: the main copy of what the optimizer updates, the model's tensor (or this rank's
        shard of it) for the rest."""
        return {**{name: local(each) for name, each in self.model.tensors().items()}, **self.optimizer.main}

    @functools.cached_property
    def kept(self) -> dict[str, LocalShard]:
        """The shard of every parameter on this rank. Buffers are replicated on all ranks."""
        first = self.model.groups.slab.rank == 0
        buffers = {name: LocalShard(None, first=first) for name, _ in self.model.named_buffers()}
        return {name: local_shard(parameter) for name, parameter in self.model.named_parameters()} | buffers

    @functools.cached_property
    def tensors(self) -> Mapping[str, tuple[Canonical, Held]]:
        """Every tensor by its canonical name within the module, and this rank's part of it."""
        shards = {name: kept.shard for name, kept in self.kept.items()}
        return {
            name: (tensor, tensor.within(shards[tensor.parameter]))
            for name, tensor in self.model.canonical().items()
        }

    @property
    def frozen_buffers(self) -> frozenset[str]:
        """Buffers that the run does not train: selection biases that stay as they are."""
        return frozenset(name for name, _ in self.model.named_buffers() if name not in self.trained_buffers)

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """By parameter, the canonical names of its tensors, as a person reads them: with ` ...` for the others
        if there are several."""
        tensors: dict[str, list[str]] = {}
        for name, tensor in self.model.canonical().items():
            tensors.setdefault(tensor.parameter, []).append(name)
        return {
            parameter: first if not more else f"{first} ..." for parameter, (first, *more) in tensors.items()
        }

    @functools.cached_property
    def copies(self) -> list[ReplicatedPart]:
        """The parts of parameters that are replicated on other ranks."""
        shards = {name: self.kept[name].shard for name in self.optimizer.main}
        return replicated_parts(self.model.canonical().values(), shards)

    def initialize(self, seed: int) -> None:
        """Initialise the main parameters. Weights are drawn by their full names, so that a module has the same
        ones in any run."""
        shards = {name: kept.shard for name, kept in self.kept.items() if kept.shard is not None}
        self.model.initialize(seed, into=self.weights(), shards=shards, prefix=self.prefix)
        self.optimizer.copy_to_model()

    def own_updates(self) -> dict[str, int]:
        """By canonical name, the updates of tensors that have another number of them than the optimizer."""
        own, tensors = self.optimizer.own_updates(), self.tensors.items()
        return {self.prefix + name: own[t.parameter] for name, (t, _) in tensors if t.parameter in own}
