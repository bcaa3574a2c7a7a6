"""Distributed generation: samples from a model that is sharded over any topology (tp, cp, dp, pp, ep).

Every token is a full forward through the evaluation schedule, encoders included, without a KV cache, so this
suits short samples during training. With the whole model on one process, `braid.model.generate` is much faster.

Shapes: B rows, T tokens, t tokens of this rank, s tokens of all tp ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.config import Run
from braid.data import Tokenizer
from braid.data.prompts import Prompt, PromptItems, text_prompt
from braid.distributed.collectives import all_gather_no_grad, all_reduce_max_no_grad, all_reduce_no_grad
from braid.engine.node import PhaseFn, StepWork
from braid.launch.process import check_agreement
from braid.model import nodes
from braid.model.context import MicroBatch
from braid.model.generate import decode_text, prompt_ids, sample, without
from braid.planning.plan import Plan
from braid.schedule import Phase, Turn
from braid.schedule.graph import LANGUAGE
from braid.topology.items import ItemTable, SampleItems, TableShape, decode, encode
from braid.train.items import read_items
from braid.train.state import JobState, State
from braid.train.step import run_schedule
from braid.train.step_work import EncoderEvaluation, placeholder_ids

NO_ITEMS: Mapping[str, PromptItems] = MappingProxyType({})
"""Those of text alone."""


@torch.no_grad()
def generate_distributed(
    state: JobState,
    run: Run,
    tokenizer: Tokenizer,
    prompt: str | Prompt,
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt and its continuation, the same on every rank. Collective over the job."""
    if isinstance(prompt, str):
        prompt = text_prompt(prompt, tokenizer)
    placeholders = placeholder_ids(state.plan)
    # Ranks with prompts of different lengths would exchange messages of different sizes.
    text = decode_text(tokenizer, prompt.ids, placeholders)
    asked = {"prompt": text, "tokens": tokens, "temperature": temperature, "seed": seed}
    asked |= {"images": prompt.fingerprint} if prompt.items else {}
    rule = "the ranks were asked for different texts: generate is called with the same arguments on all of them"
    check_agreement(asked, state.job, rule)
    ids = prompt_ids(tokenizer, prompt.ids, tokens=tokens, temperature=temperature, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        token = 0
        logits_BV = next_logits(state, run, torch.tensor([ids]), prompt.items) if state.modules else None
        if logits_BV is not None:
            logits_BV = without(logits_BV[:, : tokenizer.vocab], placeholders.values())
            (token,) = sample(logits_BV, temperature=temperature, top_k=None, generator=generator).tolist()
        if state.plan.grid.size < state.job.size:  # ranks outside the grid take the token from those within
            token = int(all_reduce_max_no_grad(torch.tensor(token), state.job))
        ids.append(token)
        if token == tokenizer.end_of_document:
            break
    return decode_text(tokenizer, ids, placeholders)


@torch.no_grad()
def next_logits(
    state: JobState, run: Run, tokens_BT: Tensor, items: Mapping[str, PromptItems] = NO_ITEMS
) -> Tensor | None:
    """Next-token logits of each row, on the host, the same on every rank of the language model; None on others,
    which hold encoders. Every rank passes the same rows, each with the same items, if any."""
    works: dict[str, StepWork] = {}
    # Every data-parallel rank has all rows, so these are a micro-batch of several copies of them.
    copies = state.plan.axes.dp * len(tokens_BT)
    padded_BT = _padded(tokens_BT, state.plan.axes.tp * state.plan.axes.cp)
    forward = _Forward(state, tokens_BT, padded_BT) if isinstance(state, State) else None
    if forward is not None:
        works[LANGUAGE] = forward
    tables = {name: [_table(state.plan, name, padded_BT[0], copies, items)] for name in state.plan.encoders}
    read = read_items(state, tables, items, [[0] * copies], step=0, training=False) if tables else {}
    for name, module in state.encoders.items():
        works[name] = EncoderEvaluation(state, module, read[name], tables[name])
    padded = padded_BT.shape[1]
    padded_run = replace(run, data=replace(run.data, sequence_tokens=padded))
    run_schedule(state, padded_run, state.evaluation(1), works, tables, rows=len(tokens_BT))
    if forward is None or not isinstance(state, State):
        return None
    # Zero everywhere but on the last stage's cp rank that holds the last token: the sums broadcast its logits.
    groups = state.model.groups
    logits_BV = all_reduce_no_grad(all_reduce_no_grad(forward.logits_BV, groups.cp), groups.pp)
    return all_gather_no_grad(logits_BV, groups.tp, dim=1).float().cpu()[:, : state.model.shape.vocab]


def _padded(tokens_BT: Tensor, multiple: int) -> Tensor:
    """Rows that all tp and cp ranks have equal slices of."""
    return F.pad(tokens_BT, (0, -tokens_BT.shape[1] % multiple))


def _table(
    plan: Plan, module: str, tokens_T: Tensor, samples: int, items: Mapping[str, PromptItems]
) -> ItemTable:
    """The table of a micro-batch in which every sample has these tokens and the items of a prompt."""
    encoder, slices = plan.encoders[module].module, plan.axes.tp * plan.axes.cp
    patches = items[module].lengths if module in items else ()
    shape = TableShape(samples=samples, items=max(1, len(patches)), slices=slices)
    found_S = (tokens_T == encoder.token).reshape(slices, -1).sum(1).tolist()
    rows = tuple(encoder.model.rows(each) for each in patches)
    sample = SampleItems(rows=rows, patches=patches, placeholders=tuple(found_S))
    return decode(shape, encode(shape, 0, [sample] * samples))


class _Forward(StepWork):
    """One forward pass over padded rows."""

    def __init__(self, state: State, tokens_BT: Tensor, padded_BT: Tensor) -> None:
        self.model, self.streams = state.model, state.streams
        model = state.model
        self.last = tokens_BT.shape[1] - 1
        padding = padded_BT.shape[1] - tokens_BT.shape[1]
        batch = MicroBatch.of_tokens(padded_BT)
        batch = replace(batch, documents_BT=F.pad(torch.zeros_like(tokens_BT), (0, padding), value=-1))
        self.context = model.prepare(batch, modules=placeholder_ids(state.plan))
        local_vocab = -(-model.shape.vocab // model.groups.tp.size)
        self.logits_BV = torch.zeros(len(tokens_BT), local_vocab, dtype=model.dtype, device=model.device)

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            if phase.kind == "segment":
                hidden_BtC = self.model.hidden(self.context, tensors)
            elif phase.kind == "head":
                (hidden_BtC,) = tensors.values()
            else:
                return nodes.run(self.model, phase, self.context, tensors)[0], None
            logits_BsV = self.model.head_logits(hidden_BtC)
            # The last token's index within the slice of this cp rank.
            index = self.last - self.model.groups.cp.rank * logits_BsV.shape[1]
            if 0 <= index < logits_BsV.shape[1]:
                self.logits_BV = logits_BsV[:, index]
            return {}, None

        return run
