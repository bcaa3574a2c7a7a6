"""Exact match: what it counts, and that greedy decoding writes it; `tiny-vlm` on one and on four ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid import recipes
from braid.config import Run
from braid.data import ByteTokenizer, digit_strips
from braid.data.prompts import encode_prompt, parts_with_images
from braid.model.context import MicroBatch
from braid.planning.plan import check, plan
from braid.prove.outcome import started
from braid.train.exact_match import count_exact, exact_match
from braid.train.load_model import image_limits, load_models
from braid.train.step import evaluate, train_step
from braid.train.trainer import Trainer
from tests.ranks import run_ranks


def answers() -> MicroBatch:
    """Two rows: documents of answers 5 6 and 7, then one of 8 9 behind a document that is all prompt."""
    batch = MicroBatch.of_tokens(torch.zeros(2, 6, dtype=torch.int64))
    return replace(
        batch,
        labels_BT=torch.tensor([[1, 5, 6, 2, 7, 0], [1, 2, 3, 8, 9, 0]]),
        loss_mask_BT=torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0]]).bool(),
        documents_BT=torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 1, -1]]),
    )


def test_an_answer_is_exact_if_all_of_its_tokens_are_right() -> None:
    batch = answers()
    assert count_exact(batch.labels_BT, batch) == (3, 3)
    assert count_exact(batch.labels_BT.where(batch.loss_mask_BT, 99), batch) == (3, 3), "prompts do not count"
    for row, token, exact in ((0, 1, 2), (0, 2, 2), (0, 4, 2), (1, 3, 2), (1, 4, 2)):
        predicted = batch.labels_BT.clone()
        predicted[row, token] += 1
        assert count_exact(predicted, batch) == (exact, 3)
    assert count_exact(batch.labels_BT + 1, batch) == (0, 3)
    nothing = replace(batch, loss_mask_BT=torch.zeros(2, 6, dtype=torch.bool))
    assert count_exact(batch.labels_BT, nothing) == (0, 0)


def tiny(**train: object) -> Run:
    run = recipes.load("tiny-vlm")
    train = {"batch_samples": 12, "eval_samples": 10, "dtype": "fp64", "steps": 3, **train}
    return replace(run, train=replace(run.train, **train), optim=replace(run.optim, warmup_steps=1))


@pytest.fixture(scope="module")
def strips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of strips."""
    folder = tmp_path_factory.mktemp("strips") / "corpus"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digit_strips, "STRIPS", {"train": 60, "validation": 10})
        digit_strips.build_strips(folder, ByteTokenizer())
    return folder


def on(strips: Path, run: Run) -> Run:
    return replace(run, data=replace(run.data, sources=(str(strips),)))


def placed(run: Run, world: int) -> Run:
    """The run on the ranks that the recipe chooses."""
    chosen = recipes.load("tiny-vlm", world)
    vision = replace(run.modules["vision"], mesh=chosen.modules["vision"].mesh)
    return replace(run, mesh=chosen.mesh, modules={"vision": vision})


def curve(rank: int, world: int, run: Run) -> list[float]:
    state, feed = started(rank, world, run)
    assert feed.validation is not None
    told = []
    for _ in range(3):
        result = train_step(state, run, feed.train, 3e-3)
        told += [result.loss, result.grad_norm]
    found = (
        evaluate(state, run, feed.validation),
        exact_match(state, run, feed.validation, feed.tokenizer.vocab),
    )
    return [*told, *found]


def test_one_process_and_four_ranks_learn_the_same(strips):
    run = on(strips, tiny())
    four = placed(run, 4)
    assert (four.mesh.ranks, four.modules["vision"].mesh.ranks) == ((0, 2), (2, 2))
    expected = curve(0, 1, run)
    for found in run_ranks(4, curve, four):
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_the_recipe_fits_so_many_ranks(world):
    run = recipes.load("tiny-vlm", world)
    assert not check(run, world)
    assert (run.mesh.ranks is None) == (world == 1)


def test_exact_match_is_what_greedy_decoding_writes(strips, tmp_path):
    """Of a model that has learned ten strips by heart, and of one that has learned nothing."""
    run = on(strips, tiny(steps=60, batch_samples=10, dtype="fp32"))
    held_out = (str(strips / "validation"),)
    run = replace(run, data=replace(run.data, sources=held_out, validation=held_out))
    validation = digit_strips.load_digits("validation")
    shown = [digit_strips.make_strip(validation, number) for number in range(10)]
    files = [tmp_path / f"{number}.png" for number in range(10)]
    for file, strip in zip(files, shown, strict=True):
        file.write_bytes(digit_strips.png(strip.pixels_HW))
    shares = []
    with Trainer(plan(run, 1), out=tmp_path / "run", device="cpu", quiet=True) as trainer:
        for steps in (0, 25, 35):
            for _ in range(steps):
                trainer.step()
            loaded = load_models(trainer.save(), "cpu")
            written = []
            for file in files:
                parts = parts_with_images([file], digit_strips.PROMPT)
                prompt = encode_prompt(parts, loaded.tokenizer, image_limits(run), "the run")
                written.append(loaded.generate(prompt, tokens=6, temperature=0.0, seed=0))
            end = loaded.tokenizer.decode([loaded.tokenizer.end_of_document])
            right = [
                text == digit_strips.PROMPT + strip.text + end
                for text, strip in zip(written, shown, strict=True)
            ]
            assert trainer.data.validation is not None
            vocab = trainer.data.tokenizer.vocab
            found = exact_match(trainer.state, run, trainer.data.validation, vocab)
            assert found == pytest.approx(sum(right) / 10)
            shares.append(found)
    assert shares[0] == 0.0
    assert shares[-1] > 0.0


def test_exact_match_needs_whole_documents():
    run = recipes.load("tiny-vlm")
    (problem,) = check(replace(run, data=replace(run.data, packing="concatenate")), 1)
    assert problem.field == "train.exact_match"
