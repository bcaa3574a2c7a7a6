"""A run as a whole: it is the plain PyTorch loop one would write, with every field in its place."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from braid import data, recipes
from braid.config import Data
from braid.errors import CheckpointError, ConfigError, DataError
from braid.model.language import StepFraction
from braid.nn.moe.balance import Balance, load
from braid.optim.gradients import own_square, total_norm
from braid.optimizer import Muon
from braid.pattern import parse
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import Device, choose_device
from braid.train.expert_load import ExpertLoad, load_metrics, update_selection_biases
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.step import backward, evaluate, micro_batches, train_step
from braid.train.step import count as count_tokens
from tests.model.cases import SHAPE, build
from tests.runs import small_run
from tests.train.helpers import run_on, started, train_to_end


def test_a_run_is_the_plain_loop_with_all_its_fields(corpus, tmp_path):
    run = run_on(corpus, dtype="fp64", steps=6)
    optim = replace(
        run.optim,
        lr=0.02,
        warmup_steps=2,
        betas=(0.7, 0.8),
        eps=1e-4,
        weight_decay=0.3,
        clip=0.5,
        final_lr_share=0.2,
    )
    run = replace(run, optim=optim)
    feed, state, places = started(run, tmp_path / "run")
    train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)

    _, plain, _ = started(run, tmp_path / "plain")
    named = dict(plain.model.named_parameters())
    matrices = [p for name, p in named.items() if name in plain.model.decaying()]
    others = [p for name, p in named.items() if name not in plain.model.decaying()]
    assert all(p.ndim >= 2 for p in matrices)
    assert all("norm" in name for name in named if name not in plain.model.decaying())
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.7, 0.8), eps=1e-4, fused=False, foreach=False)
    for step in range(1, 7):
        batches = micro_batches(run, feed.train, step, 4 * (step - 1))
        tokens = sum(int(batch.loss_mask_BT.sum()) for batch in batches)
        adamw.zero_grad()
        for batch in batches:
            half = StepFraction(tokens=0.5, rows=0.5)
            plain.model(batch).share(tokens, fraction=half).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in named.values()))
        for p in named.values():
            p.grad *= min(1.0, 0.5 / norm)
        fallen = (1 + math.cos(math.pi * (step - 2) / 4)) / 2
        rate = 0.02 * (step / 2 if step <= 2 else 0.2 + 0.8 * fallen)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-10, atol=1e-12)


def test_a_changed_batch_continues_with_the_next_sample(corpus, tmp_path, monkeypatch):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    for _ in range(3):
        train_step(state, run, feed.train, 1e-3)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    larger = replace(run, train=replace(run.train, batch_samples=8))
    feed, state, _ = started(larger, tmp_path)
    assert (state.samples, state.tokens) == (12, 12 * 32)
    read = []
    real = type(feed.train).batch
    monkeypatch.setattr(type(feed.train), "batch", lambda self, i: (read.extend(i), real(self, i))[1])
    train_step(state, larger, feed.train, 1e-3)
    assert read == list(range(12, 20))
    assert state.tokens == 20 * 32


def test_torchs_own_generator_continues_too(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    torch.rand(5)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    expected = torch.rand(3)
    torch.manual_seed(99)
    started(run, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_drops_nothing_out(corpus, tmp_path):
    run = run_on(corpus)
    dropping = replace(run, model=replace(run.model, dropout=0.5))
    losses = []
    for each in (run, dropping):
        feed, state, _ = started(each, tmp_path / str(each.model.dropout))
        losses.append(evaluate(state, each, feed.validation))
    assert losses[0] == losses[1]


def test_means_of_micro_batches_weigh_by_their_tokens_that_are_not_padding(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, _ = started(run, tmp_path)
    batches = micro_batches(run, feed.train, 1, 0)
    with torch.no_grad():
        parts = [state.model(batch) for batch in batches]
    wanted = sum(float(each.aux["load_balance"]) for each in parts) / 2  # as many tokens in each, no padding
    metrics = train_step(state, run, feed.train, 0.0).metrics
    assert metrics["aux_load_balance"] == pytest.approx(wanted, rel=1e-5)
    assert 1 <= metrics["moe_max_over_mean"] <= 4
    assert metrics["moe_dropped"] == 0


def test_selection_biases_move_towards_even_load_once_a_step(corpus, tmp_path):
    run = run_on(corpus)
    moe = replace(run.model.moe, score="sigmoid", selection_bias=True, selection_bias_rate=0.5)
    run = replace(run, model=replace(run.model, moe=moe))
    feed, state, places = started(run, tmp_path)
    ((layer, module),) = state.model.moe_layers()
    with torch.no_grad():
        contexts = [state.model.prepare(batch) for batch in micro_batches(run, feed.train, 1, 0)]
        for context in contexts:
            state.model.losses(context)
    counts = sum(context.balances[layer].counts_E for context in contexts).double()
    train_step(state, run, feed.train, 1e-3)
    wanted = 0.5 * torch.sign(counts.mean() - counts)
    assert torch.equal(module.router.bias.double(), wanted)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    _, again, _ = started(run, tmp_path)
    ((_, loaded),) = again.model.moe_layers()
    assert torch.equal(loaded.router.bias, module.router.bias)


def test_mfu_counts_three_forward_passes(corpus, tmp_path):
    run = run_on(corpus, dtype="bf16")
    feed, state, places = started(run, tmp_path)
    device = Device(torch=torch.device("cpu"), name="known", peak_bf16_flops=1e12)
    train_to_end(plan(run, 1), places, device, feed, state)
    line = json.loads(places.metrics.read_text().splitlines()[-1])
    seconds = 4 * 32 / line["tokens_per_s"]
    assert line["mfu"] == pytest.approx(3 * 4 * state.model.flops(32) / seconds / 1e12)
    assert device.mfu(1e12, 1.0, "fp32") is None


def test_data_of_another_tokenizer_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("braid.data.ByteTokenizer.description", property(lambda self: {"kind": "other"}))
    with pytest.raises(DataError, match="another tokenizer"):
        open_data_pipeline(run_on(corpus), tmp_path)


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    with RunDir(out=tmp_path / "run").lock():
        with pytest.raises(ConfigError, match="this process is training into"):
            with RunDir(out=tmp_path / "run").lock():
                pass
    with RunDir(out=tmp_path / "run").lock():
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "lock").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="full cannot be used"):
        with RunDir(out=tmp_path / "full").lock():
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        with RunDir(out=tmp_path / "file").lock():
            pass


def test_a_run_without_a_single_label_says_so(corpus, tmp_path, monkeypatch, capsys):
    run = run_on(corpus, steps=3)
    run = replace(run, optim=replace(run.optim, warmup_steps=0))
    feed, state, places = started(run, tmp_path)
    real = type(feed.train).batch

    def masked(self, indices):
        batch = real(self, indices)
        return replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))

    monkeypatch.setattr(type(feed.train), "batch", masked)
    train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)
    assert capsys.readouterr().err.count("no token counts in the loss") == 1


def test_fewer_steps_than_are_done_is_refused(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    for _ in range(3):
        train_step(state, run, feed.train, 1e-3)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    fewer = replace(run, train=replace(run.train, steps=2))
    with pytest.raises(ConfigError, match=r"is at step 3, train\.steps is 2"):
        started(fewer, tmp_path)


def test_another_optimizer_is_refused_and_rates_of_kinds_apply(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path)
    saved = states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    muon = replace(run, optim=replace(run.optim, name="muon"))
    with pytest.raises(ConfigError, match=r"optim\.name: adamw -> muon: .* has no optimizer state"):
        started(muon, tmp_path)
    rates = {"embedding": 5 * run.optim.lr, "vector": run.optim.lr / 2}
    kinds = replace(run, optim=replace(run.optim, lr_by_kind=rates, weight_decay=0.0))
    _, state, _ = started(kinds, tmp_path)
    before = {name: main.detach().clone() for name, main in state.optimizer.main.items()}
    for main in state.optimizer.main.values():
        main.grad = torch.ones_like(main)
    state.optimizer.update(0.01)
    for name, main in state.optimizer.main.items():
        rate = 0.05 if name == "embedding.weight" else 0.005 if main.ndim == 1 else 0.01
        torch.testing.assert_close(before[name] - main.detach(), torch.full_like(main, rate), rtol=1e-3, atol=0)
    assert saved.is_dir()


def test_kinds_of_muon_matter_to_a_run_by_muon_alone(corpus, tmp_path):
    run = run_on(corpus)
    feed, state, places = started(run, tmp_path / "adamw")
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    router = Muon(kinds=("router", "matrix"))
    started(replace(run, optim=replace(run.optim, muon=router)), tmp_path / "adamw")
    run = replace(run, optim=replace(run.optim, name="muon"))
    feed, state, places = started(run, tmp_path / "muon")
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    turned = Muon(kinds=tuple(reversed(run.optim.muon.kinds)))
    started(replace(run, optim=replace(run.optim, muon=turned)), tmp_path / "muon")
    with pytest.raises(ConfigError, match=r"optim\.muon\.kinds: .*no optimizer state"):
        started(replace(run, optim=replace(run.optim, muon=router)), tmp_path / "muon")


def test_the_prompt_of_the_sample_is_the_beginning_of_a_document_without_its_padding(tmp_path):
    rows = [{"prompt": "Capital of France? ", "response": "Paris."}, {"prompt": "Hi", "response": "!"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 4))
    data.build(tmp_path / "rows.jsonl", tmp_path / "rows", data.ByteTokenizer())
    run = small_run()
    run = replace(run, data=Data(sources=(str(tmp_path / "rows"),), sequence_tokens=50, packing="documents"))
    run = replace(run, train=replace(run.train, eval_samples=0))
    assert open_data_pipeline(run, tmp_path / "data").prompt in ("Capital ", "Hi!")


def test_masked_prompts_change_no_weight_of_a_mean_over_tokens(corpus, tmp_path):
    run = run_on(corpus, dtype="fp64")
    moe = replace(run.model.moe, aux_loss=0.0, z_loss=1.0, sequence_aux_loss=1.0)
    run = replace(run, model=replace(run.model, moe=moe))
    figures = []
    for count in (1, 2, 4):
        each = replace(run, train=replace(run.train, micro_batches=count))
        feed, state, _ = started(each, tmp_path / str(count))
        batches = micro_batches(each, feed.train, 1, 0)
        for batch in batches:  # the first rows of the step are all prompt but for one token
            batch.loss_mask_BT[batch.sample_B < 2, 1:] = False
        metrics = backward(state, each, batches, count_tokens(state, batches))[0]["language"]
        norm = float(total_norm(own_square(state.optimizer.gradients())))
        figures.append([float(metrics["aux_router_z"]), float(metrics["aux_sequence_balance"]), norm])
    assert figures[1] == pytest.approx(figures[0], rel=1e-12)
    assert figures[2] == pytest.approx(figures[0], rel=1e-12)


def test_loads_add_up_over_micro_batches():
    layer = parse("E").layers[0]
    first, second = (
        Balance({}, torch.tensor(counts), torch.tensor(kept), torch.tensor(favourites))
        for counts, kept, favourites in (([4, 0, 2], [3, 0, 2], [4, 1, 1]), ([2, 2, 2], [2, 2, 2], [0, 3, 3]))
    )
    loads = ExpertLoad().plus({layer: first}).plus({layer: second})
    assert loads.counts_E[layer].tolist() == [6, 2, 4]
    assert loads.raw_counts_E[layer].tolist() == [4, 4, 4]
    metrics = load_metrics([load(*pair) for pair in loads.pairs()])
    assert metrics["moe_max_over_mean"] == pytest.approx(1.5)
    assert metrics["moe_min_over_mean"] == pytest.approx(0.5)
    assert metrics["moe_dropped"] == pytest.approx(1 / 12)


def test_selection_biases_follow_what_was_chosen_and_not_what_found_a_place():
    shape = replace(
        SHAPE, moe=replace(SHAPE.moe, score="sigmoid", selection_bias=True, selection_bias_rate=1.0)
    )
    model = build("E", shape)
    ((layer, moe),) = model.moe_layers()
    chosen, kept = torch.tensor([9, 1, 1, 1, 3]), torch.tensor([1, 1, 1, 1, 1])
    loads = ExpertLoad().plus({layer: Balance({}, chosen, kept, chosen)})
    before = moe.router.bias.clone()
    update_selection_biases(model, loads, apply=torch.tensor(False))
    assert torch.equal(moe.router.bias, before), "a skipped step moves nothing"
    update_selection_biases(model, loads, apply=torch.tensor(True))
    assert (moe.router.bias - before).tolist() == [-1, 1, 1, 1, 0]


def test_a_new_run_may_start_from_the_weights_of_another(corpus, tmp_path):
    run = run_on(corpus, dtype="bf16")
    feed, state, places = started(run, tmp_path / "first")
    train_step(state, run, feed.train, 1e-2)
    states.save(places.checkpoints, state, run, feed.train, feed.tokenizer)
    second = make_state(plan(run, 1), choose_device("cpu"))
    initialize_or_resume(second, run, feed, RunDir(out=tmp_path / "second"), init=tmp_path / "first")
    assert (second.step, second.samples, second.optimizer.updates) == (0, 0, 0)
    for name, tensor in state.optimizer.main.items():
        assert torch.equal(second.optimizer.main[name], tensor)
        assert not second.optimizer.moment("exp_avg", name).any()
    other = replace(run, model=replace(run.model, hidden=8))
    with pytest.raises(CheckpointError, match="differ in"):
        initialize_or_resume(
            make_state(plan(other, 1), choose_device("cpu")),
            other,
            feed,
            RunDir(out=tmp_path / "third"),
            init=tmp_path / "first",
        )


def test_a_model_that_cannot_fit_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(Device, "memory_total", lambda self: 1 << 20)
    with pytest.raises(ConfigError, match="weights, gradients and moments take"):
        make_state(plan(recipes.load("tiny"), 1), choose_device("cpu"))
