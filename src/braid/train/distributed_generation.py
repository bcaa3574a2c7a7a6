"""Distributed generation, by all ranks together, whatever they share: each token is told by the whole topology.

No rank needs room for the whole model. Nothing is remembered between tokens, so this is for a few of them; one
process that has the whole model writes much faster (`braid.model.generate`).

Shapes: B rows, T tokens, t tokens of this rank, s tokens of all tp ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.config import Run
from braid.data import Tokenizer
from braid.distributed.collectives import all_gather_no_grad, all_reduce_no_grad
from braid.engine.executor import execute
from braid.engine.node import Function, StepWork
from braid.model import nodes
from braid.model.context import MicroBatch
from braid.model.generate import sample
from braid.schedule import Phase, Turn
from braid.train.state import State


@torch.no_grad()
def generate_together(
    state: State, run: Run, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and what the model makes of it, the same on every rank."""
    ids = list(tokenizer.encode(prompt))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits_BV = next_logits(state, run, torch.tensor([ids]))[:, : tokenizer.vocab]
        (token,) = sample(logits_BV, temperature=temperature, top_k=None, generator=generator).tolist()
        ids.append(token)
        if token == tokenizer.end_of_document:
            break
    return tokenizer.decode(ids)


@torch.no_grad()
def next_logits(state: State, run: Run, tokens_BT: Tensor) -> Tensor:
    """Scores of the token after each row, on the host, the same on every rank. All ranks are given the rows."""
    groups, rows = state.model.groups, len(tokens_BT)
    reading = _Reading(state, tokens_BT)
    links = state.links(rows, replace(run, data=replace(run.data, sequence_tokens=reading.padded)))
    execute(state.evaluation(1), reading, state.keeper, links)
    # Only the last stage, and there only the cp rank that has the last token, has anything to say.
    logits_BV = all_reduce_no_grad(all_reduce_no_grad(reading.logits_BV, groups.cp), groups.pp)
    return all_gather_no_grad(logits_BV, groups.tp, dim=1).float().cpu()[:, : state.model.shape.vocab]


class _Reading(StepWork):
    """One forward of rows that are filled up to what ranks can share equally."""

    def __init__(self, state: State, tokens_BT: Tensor) -> None:
        self.model, self.streams = state.model, state.streams
        model = state.model
        self.last = tokens_BT.shape[1] - 1
        share = model.groups.tp_cp.size
        self.padded = -(-tokens_BT.shape[1] // share) * share
        more = self.padded - tokens_BT.shape[1]
        batch = MicroBatch.of_tokens(F.pad(tokens_BT, (0, more)))
        batch = replace(batch, documents_BT=F.pad(torch.zeros_like(tokens_BT), (0, more), value=-1))
        self.context = model.prepare(batch)
        rows = -(-model.shape.vocab // model.groups.tp.size)
        self.logits_BV = torch.zeros(len(tokens_BT), rows, dtype=model.dtype, device=model.device)

    def function(self, turn: Turn, phase: Phase) -> Function:
        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            if phase.kind == "segment":
                hidden_BtC = self.model.hidden(self.context)
            elif phase.kind == "head":
                (hidden_BtC,) = tensors.values()
            else:
                return nodes.run(self.model, phase, self.context, tensors)[0], None
            logits_BsV = self.model.head_logits(hidden_BtC)
            place = self.last - self.model.groups.cp.rank * logits_BsV.shape[1]
            if 0 <= place < logits_BsV.shape[1]:
                self.logits_BV = logits_BsV[:, place]
            return {}, None

        return run
