"""Exact match: the share of held-out answers that greedy decoding gets right to the last token.

The answer of a document is what counts in its loss: the response of a row of prompt and response, and the end
of the document. Greedy decoding gives exactly this answer if each of its tokens is the likeliest behind those
before it, so one forward over the documents tells, on any topology, and nothing has to be generated.

Shapes: B rows, T tokens, t tokens of this rank, s tokens of this cp rank, V vocabulary, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from braid.config import Run
from braid.data import Loader
from braid.distributed.collectives import all_gather_no_grad, all_reduce_no_grad
from braid.engine.node import PhaseFn
from braid.model import nodes
from braid.model.context import MicroBatch
from braid.schedule import Phase, Turn
from braid.train.state import JobState, State
from braid.train.step import evaluation_sums
from braid.train.step_work import EvaluationWork


def exact_match(state: JobState, run: Run, loader: Loader, vocab: int) -> float:
    """The share of exact answers in the first `eval_samples` samples; 0 if there are no answers. Tokens from
    `vocab` on are never generated. Collective over the job."""
    exact, answers = evaluation_sums(
        state, run, loader, lambda own, batches: ExactMatchEvaluation(own, batches, vocab)
    )
    return exact / max(1.0, answers)


def count_exact(predicted_BT: Tensor, batch: MicroBatch) -> tuple[int, int]:
    """How many answers of a micro-batch the predictions of all its labels get exactly right, and how many
    answers there are."""
    wrong_BD, counted_BD = _by_document(predicted_BT, batch, 0)
    return _exact(wrong_BD, counted_BD)


def _by_document(predicted_Bs: Tensor, batch: MicroBatch, first: int) -> tuple[Tensor, Tensor]:
    """Of each document: how many predictions of labels from `first` on are wrong, and how many count."""
    rows, tokens = batch.labels_BT.shape
    own = slice(first, first + predicted_Bs.shape[1])
    counts_Bs = batch.loss_mask_BT[:, own]
    wrong_Bs = counts_Bs & (predicted_Bs != batch.labels_BT[:, own])
    document_Bs = batch.documents_BT[:, own].clamp(min=0)  # padding counts in no loss
    wrong_BD, counted_BD = (torch.zeros(rows, tokens, dtype=torch.int64) for _ in range(2))
    wrong_BD.scatter_add_(1, document_Bs, wrong_Bs.long())
    counted_BD.scatter_add_(1, document_Bs, counts_Bs.long())
    return wrong_BD, counted_BD


def _exact(wrong_BD: Tensor, counted_BD: Tensor) -> tuple[int, int]:
    answers_BD = counted_BD > 0
    return int((answers_BD & (wrong_BD == 0)).sum()), int(answers_BD.sum())


class ExactMatchEvaluation(EvaluationWork):
    """Counts exact answers: `totals` are these and all answers, zero on all but one of the tp and cp ranks."""

    def __init__(self, state: State, batches: Sequence[MicroBatch], vocab: int) -> None:
        super().__init__(state, batches)
        self.vocab = vocab

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        context, batch = self.context(turn[0]), self.batches[turn[0]]

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            if phase.kind == "segment":
                hidden_BtC = self.model.hidden(context, tensors)
            elif phase.kind == "head":
                (hidden_BtC,) = tensors.values()
            else:
                return nodes.run(self.model, phase, context, tensors)[0], None
            self._count(hidden_BtC, batch)
            return {}, None

        return run

    def _count(self, hidden_BtC: Tensor, batch: MicroBatch) -> None:
        groups = self.model.groups
        # Row by row, so that the logits of one exist at a time.
        predicted_Bs = torch.cat([self._predicted(hidden_1tC) for hidden_1tC in hidden_BtC.split(1)])
        first = groups.cp.rank * predicted_Bs.shape[1]
        # A document may lie on several cp ranks.
        wrong_BD, counted_BD = (
            all_reduce_no_grad(each, groups.cp) for each in _by_document(predicted_Bs, batch, first)
        )
        if groups.tp.rank == 0 and groups.cp.rank == 0:
            counts = torch.tensor(_exact(wrong_BD, counted_BD), dtype=torch.float64)
            self.totals += counts.to(self.totals.device)

    def _predicted(self, hidden_1tC: Tensor) -> Tensor:
        logits_1sV = all_gather_no_grad(self.model.head_logits(hidden_1tC), self.model.groups.tp, dim=2)
        return logits_1sV[..., : self.vocab].argmax(-1).cpu()
