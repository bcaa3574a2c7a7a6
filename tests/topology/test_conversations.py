"""Conversations: the loss counts what the assistant says alone, on every topology as on one process."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.data.chat import ChatTemplate
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, started, train_each
from braid.train.step import train_step
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE, run_of
from tests.topology.matrix import Topology

pytestmark = pytest.mark.costly("every point trains a model on ranks")

TEMPLATE = ChatTemplate(
    source="{% for m in messages %}{{ m.role[0] }}:{% generation %}{{ m.content if m.role == 'assistant' }}"
    "{{ ';' if m.role == 'assistant' }}{% endgeneration %}{{ m.content + '.' if m.role != 'assistant' }}"
    "{% endfor %}",
    origin="a test",
)
"""Short, so that several conversations share a sample: `u:hi.a:ok;`."""


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some with short answers and some with long ones, so that ranks count different numbers of tokens."""
    chosen, folder = random.Random(0), tmp_path_factory.mktemp("conversations")
    rows = []
    for _ in range(200):
        texts = ["".join(chosen.choices("abcdef", k=chosen.choice([0, 1, 9]))) for _ in range(4)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        rows.append(json.dumps({"messages": turns[: chosen.choice([2, 4])]}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return build(folder / "rows.jsonl", folder / "out", ByteTokenizer(), chat=TEMPLATE, validation=0.2).output


def run_on(corpus: Path, model: str = "hybrid", micro_batches: int = 2) -> Run:
    run = run_of(model, corpus, samples=16, micro_batches=micro_batches)
    return replace(run, data=replace(run.data, sequence_tokens=48, packing="documents"))


def test_the_loss_is_the_mean_over_what_the_assistant_says(conversations: Path) -> None:
    """Counted from the text of each sample, which knows nothing of stored masks."""
    run = run_on(conversations, "tied")
    run = replace(run, model=replace(run.model, dropout=0.0))
    state, feed = started(0, 1, run)
    batch = feed.train.batch(range(16))
    logits = state.model.logits(state.model.prepare(batch)).detach()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="none")
    said = []
    for tokens, documents in zip(batch.tokens_BT.tolist(), batch.documents_BT.tolist(), strict=True):
        text = "".join(map(chr, [*tokens, 256]))  # the end of a document is a letter of its own here
        last = documents.index(-1) if -1 in documents else len(documents)
        spans = [match.span(1) for match in re.finditer(r"a:([a-f]*;)", text[:last])]
        said.append([any(start <= place + 1 < stop for start, stop in spans) for place in range(len(tokens))])
    counted = torch.tensor(said).flatten()
    assert 0.1 < counted.float().mean() < 0.6
    found = train_step(state, run, feed.train, LEARNING_RATE)
    assert found.tokens == int(counted.sum())
    torch.testing.assert_close(found.metrics["loss"], float(losses[counted].mean()), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ""),
        (2, "pp2"),
        pytest.param(4, "tp2 cp2 ep4 none", marks=pytest.mark.long),
        pytest.param(4, "pp2 ep2 overlap", marks=pytest.mark.long),
    ],
)
def test_masked_turns_do_not_depend_on_the_topology(world, words, conversations, tmp_path):
    run = run_on(conversations, micro_batches=4 if "pp" in words else 2)
    sound = alone(Task(run=run, checkpoints=tmp_path / "alone"))
    task = Task(run=Topology(world=world, words=words).of(run), checkpoints=tmp_path / "ranks")
    ranks = run_ranks(world, train_each, [task], timeout_s=120)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))
