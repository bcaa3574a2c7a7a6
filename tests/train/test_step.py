"""One step: what it computes, and what it refuses to do."""

from dataclasses import replace

import pytest
import torch

from braid.config import Mesh
from braid.engine.executor import execute
from braid.train.step import LanguageEvaluation, evaluate, micro_batches, train_step
from tests.planning.modules import run_with
from tests.train.helpers import run_on, started


def weights(state):
    return {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}


@pytest.fixture
def fp64(corpus):
    """A run whose auxiliary loss is off: it is a mean over a micro-batch and so depends on the cut."""
    run = run_on(corpus, dtype="fp64")
    return replace(run, model=replace(run.model, moe=replace(run.model.moe, aux_loss=0.0)))


def test_the_number_of_micro_batches_does_not_change_a_step(fp64, tmp_path):
    after = []
    for count in (1, 2, 4):
        run = replace(fp64, train=replace(fp64.train, micro_batches=count))
        feed, state, _ = started(run, tmp_path / str(count))
        results = [train_step(state, run, feed.train, 1e-2) for _ in range(3)]
        after.append((weights(state), [x for r in results for x in (r.loss, r.grad_norm)]))
    for others, figures in after[1:]:
        assert figures == pytest.approx(after[0][1], rel=1e-12)
        for name, weight in after[0][0].items():
            torch.testing.assert_close(others[name], weight, rtol=1e-10, atol=1e-12)


def test_the_loss_is_the_mean_over_the_tokens_that_count(fp64, tmp_path):
    feed, state, _ = started(fp64, tmp_path)
    (batch,) = micro_batches(replace(fp64, train=replace(fp64.train, micro_batches=1)), feed.train, 1, 0)
    with torch.no_grad():
        logits = state.model.logits(state.model.prepare(batch))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="none"
    )
    wanted = losses[batch.loss_mask_BT.flatten()].mean()
    assert train_step(state, fp64, feed.train, 0.0).loss == pytest.approx(float(wanted), rel=1e-12)


def test_an_all_masked_batch_has_zero_loss_and_zero_gradient(fp64, tmp_path, monkeypatch):
    feed, state, _ = started(fp64, tmp_path)
    real = feed.train.batch

    def all_masked(self, indices):
        batch = real(indices)
        return replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))

    monkeypatch.setattr(type(feed.train), "batch", all_masked)
    result = train_step(state, fp64, feed.train, 1e-2)
    assert (result.loss, result.grad_norm, result.not_finite) == (0.0, 0.0, ())


def test_a_step_that_is_not_finite_leaves_the_weights_and_names_the_parameter(fp64, tmp_path):
    feed, state, _ = started(fp64, tmp_path)
    before = weights(state)
    name, parameter = next(
        (name, p) for name, p in state.model.named_parameters() if name.startswith("final_norm")
    )
    hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
    result = train_step(state, fp64, feed.train, 1e-2)
    hook.remove()
    assert result.not_finite == (name,)
    assert (state.step, state.skipped_in_a_row) == (1, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(state).items())
    assert train_step(state, fp64, feed.train, 1e-2).not_finite == ()
    assert state.skipped_in_a_row == 0


def test_what_is_not_finite_has_the_names_of_checkpoints(fp64, tmp_path):
    feed, state, _ = started(fp64, tmp_path)
    with torch.no_grad():
        state.model.get_parameter("final_norm.weight").fill_(float("nan"))
    named = {name.removesuffix(" ...") for name in train_step(state, fp64, feed.train, 1e-2).not_finite}
    assert len(named) > 2
    assert named - {"loss"} <= state.model.canonical().keys()


def test_evaluation_does_not_depend_on_how_much_is_done_at_once(fp64, tmp_path):
    feed, state, _ = started(fp64, tmp_path)
    losses = [
        evaluate(state, replace(fp64, train=replace(fp64.train, batch_samples=n)), feed.validation)
        for n in (2, 4, 16)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_evaluation_keeps_nothing_of_what_it_has_read(fp64, tmp_path):
    run = replace(fp64, model=replace(fp64.model, pattern="[*-]|[*E]"))
    feed, state, _ = started(run, tmp_path)
    work = LanguageEvaluation(state, micro_batches(run, feed.train, 1, 0))
    rows, count = len(work.batches[0].sample_B), len(work.batches)
    with torch.no_grad():
        execute(state.evaluation(count), work, state.keeper, state.links(rows, run))
    assert work.contexts == {}
    assert float(work.totals[1]) > 0


def test_predictions_of_placeholders_have_no_loss(fp64, tmp_path):
    """Texts may bring placeholders along: here every `e` is one."""
    token = ord("e")
    vision = replace(run_with({"vision": Mesh()}).modules["vision"], token=token)
    with_module = replace(fp64, modules={"vision": vision})
    feed, _, _ = started(fp64, tmp_path)
    plain, masked = (micro_batches(run, feed.train, 1, 0) for run in (fp64, with_module))
    for before, after in zip(plain, masked, strict=True):
        is_target_BT = before.labels_BT == token
        assert (before.loss_mask_BT & is_target_BT).any()
        assert torch.equal(after.loss_mask_BT, before.loss_mask_BT & ~is_target_BT)
