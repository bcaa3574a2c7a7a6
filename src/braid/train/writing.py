"""Generation by all ranks together, whatever they share: each token is told by the whole topology.

No rank needs room for the whole model. Nothing is remembered between tokens, so this is for a few of them; one
process that has the whole model writes much faster (`braid.model.generate`).

Shapes: B rows, T tokens, t tokens of this rank, s tokens of all tp ranks, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.collectives import gathered, summed
from braid.config import Run
from braid.data import Tokenizer
from braid.engine.executor import Turn, execute
from braid.model.context import MicroBatch
from braid.model.generate import sample
from braid.model.language import LanguageModel
from braid.parallel.sharding import release
from braid.schedule import Op, evaluation
from braid.train.state import State
from braid.train.step import segments_of


@torch.no_grad()
def write_together(
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
    reading = _Reading(state.model, tokens_BT)
    schedule = evaluation(state.schedule.holder, 1)
    wires = state.wires(rows, replace(run, data=replace(run.data, sequence_tokens=reading.padded)))
    execute(schedule, groups.pp.rank, reading, wires)
    release(state.model)
    # Only the last stage, and there only the cp rank that has the last token, has anything to say.
    logits_BV = summed(summed(reading.logits_BV, groups.cp), groups.pp)
    return gathered(logits_BV, groups.tp, dim=1).float().cpu()[:, : state.model.shape.vocab]


class _Reading:
    """One forward of rows that are filled up to what ranks can share equally."""

    def __init__(self, model: LanguageModel, tokens_BT: Tensor) -> None:
        self.model = model
        self.last = tokens_BT.shape[1] - 1
        share = model.groups.tp_cp.size
        self.padded = -(-tokens_BT.shape[1] // share) * share
        more = self.padded - tokens_BT.shape[1]
        batch = MicroBatch.of_tokens(F.pad(tokens_BT, (0, more)))
        batch = replace(batch, documents_BT=F.pad(torch.zeros_like(tokens_BT), (0, more), value=-1))
        self.context = model.prepare(batch)
        rows = -(-model.shape.vocab // model.groups.tp.size)
        self.logits_BV = torch.zeros(len(tokens_BT), rows, dtype=model.dtype, device=model.device)

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        segments = segments_of(self.model, turn[1])
        y_BtC = self.model.read(segments, x, self.context)
        if segments[-1] < len(self.model.layout.segments) - 1:
            return y_BtC, None
        logits_BsV = self.model.tell(y_BtC)
        place = self.last - self.model.groups.cp.rank * logits_BsV.shape[1]
        if 0 <= place < logits_BsV.shape[1]:
            self.logits_BV = logits_BsV[:, place]
        return None, None

    def before_backward(self, turn: Turn) -> None:
        raise NotImplementedError("reading has no backward")

    after_backward = before_backward

    def sum_copies(self, op: Op) -> None:
        raise NotImplementedError("reading has no gradients")
