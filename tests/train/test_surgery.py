"""Surgery on load: where tensors of another model come from, and that its function is preserved where that is
promised."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid import checkpoint
from braid.architecture import Attention, HyperConnections, Mamba2, Mlp, Model, Moe
from braid.config import Run
from braid.errors import CheckpointError, ConfigError
from braid.model.context import MicroBatch
from braid.model.names import layers_by_name, regrouped_names, renamed, symbols
from braid.pattern import parse
from braid.planning.plan import plan
from braid.prove import outcome
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.init_from import InitOptions, plan_lines, start_from
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.step import train_step
from braid.train.surgery import FRESH, Stored, Transfer, Values, check_plan, parse_rules, plan_init
from tests.ranks import run_ranks
from tests.topology.matrix import Topology
from tests.train.helpers import run_on

ROWS = torch.arange(30).view(2, 15) * 7 % 257

PLAIN = Model(
    pattern="[*-]M[*-]/*-",
    hidden=16,
    vocab=259,
    tied=True,
    init_std=0.2,
    attention=Attention(heads=4, kv_heads=2, head_dim=4),
    mamba2=Mamba2(heads=4, head_dim=4, state=4),
    mlp=Mlp(ffn=24),
)
TOGETHER = ["untie", "hyper", "upcycle"]
EXPERTS = Moe(experts=4, top_k=2, ffn=24, shared_ffn=8, shared_gate=True)


def run_with(corpus: Path, model: Model) -> Run:
    return replace(run_on(corpus, dtype="fp64"), model=model)


def logits(state: states.State) -> Tensor:
    with torch.no_grad():
        return state.model.logits(state.model.prepare(MicroBatch.of_tokens(ROWS)))


def saved_as(model: Model, corpus: Path, root: Path) -> tuple[Tensor, Path]:
    """A model with weights far from their initial values: its logits and its checkpoint."""
    run = run_with(corpus, model)
    state, feed = make_state(plan(run, 1), choose_device("cpu")), open_data_pipeline(run, root / "data")
    states.initialize(state, run)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in state.optimizer.main.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype), alpha=0.1)
    state.optimizer.copy_to_model()
    return logits(state), states.save(root / "checkpoints", state, run, feed.train, feed.tokenizer)


def started_from(
    path: Path, model: Model, corpus: Path, out: Path, *rules: str, allow: tuple[str, ...] = ()
) -> states.State:
    run = run_with(corpus, model)
    state, feed = make_state(plan(run, 1), choose_device("cpu")), open_data_pipeline(run, out / "data")
    options = InitOptions(rules=parse_rules(rules), allow=allow)
    initialize_or_resume(state, run, feed, RunDir(out=out), init=path, options=options)
    return state


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def weight(state: states.State, name: str) -> Tensor:
    tensor = state.model.canonical()[name]
    return tensor.read(state.weights()[tensor.parameter]).detach().clone()


# -------------------------------------------------------------------------------------------- function


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Path]:
    return saved_as(PLAIN, corpus, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"pattern": "*-|M*-/*-"}, []),
        ({"pattern": "[*-M]*-/*-"}, []),
        ({"tied": False}, ["untie"]),
        ({"pattern": "[*-]M[*-]"}, ["mtp"]),
        ({"pattern": "[*-]M[*-]/*-/*-"}, ["mtp"]),
        ({"pattern": "[*-]M[*-]/M"}, ["mtp"]),
        ({"pattern": "[*E]M[*-]/*-", "moe": EXPERTS}, ["upcycle"]),
        ({"pattern": "*EM*E/*E", "moe": EXPERTS}, ["upcycle"]),
        ({"hyper": HyperConnections(streams=3)}, ["hyper"]),
        ({"hyper": HyperConnections(streams=2, eps=1e-3, sinkhorn_steps=1)}, ["hyper"]),
        ({"pattern": "*EM*E/*E", "tied": False, "moe": EXPERTS, "hyper": HyperConnections()}, TOGETHER),
        ({"pattern": "[*-][M][*-]/*-"}, ["blocks:0,1,2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.get("pattern", ""),
)
def test_the_function_is_preserved(changes, rules, plain, corpus, tmp_path):
    before, path = plain
    state = started_from(path, replace(PLAIN, **changes), corpus, tmp_path, *rules)
    assert difference(logits(state), before) < (1e-12 if rules else 1e-300)
    assert state.init["rules"] == rules


def test_a_mean_of_streams_preserves_the_function_up_to_the_eps_of_the_norm(plain, corpus, tmp_path):
    before, path = plain
    model = replace(PLAIN, hyper=HyperConnections(exit="mean"))
    state = started_from(path, model, corpus, tmp_path, "hyper")
    assert 0 < difference(logits(state), before) < 1e-8


@pytest.mark.parametrize("rule", ["vocab", "vocab:zeros"])
def test_more_rows_of_the_vocabulary_leave_the_others_alone(rule, plain, corpus, tmp_path):
    before, path = plain
    state = started_from(path, replace(PLAIN, vocab=300, tied=False), corpus, tmp_path, rule, "untie")
    after = logits(state)
    assert difference(after[..., :259], before) < 1e-14
    for name in ("embedding.weight", "head.weight"):
        assert bool(weight(state, name)[259:].any()) == (rule == "vocab")
    assert bool(after[..., 259:].any()) == (rule == "vocab")


def test_blocks_come_from_where_the_rule_says(plain, corpus, tmp_path):
    _, path = plain
    model = replace(PLAIN, pattern="[*-][*-]MM[*-]")
    state = started_from(path, model, corpus, tmp_path, "blocks:2,-,1,1,0", "mtp")
    stored = dict(checkpoint.LazyCheckpoint(path, states.weight_names(path)))
    for name in state.names:
        block, _, rest = name.removeprefix("blocks.").partition(".")
        if name.startswith("blocks.") and block != "1":
            source = f"blocks.{dict(zip('0234', '2110', strict=True))[block]}.{rest}"
            assert torch.equal(weight(state, name), stored[source]), name
    twin = make_state(plan(run_with(corpus, model), 1), choose_device("cpu"))
    states.initialize(twin, run_with(corpus, model))
    fresh = "blocks.1.mlp.up.weight"
    assert torch.equal(weight(state, fresh), weight(twin, fresh))


def test_fresh_and_dropped_tensors(plain, corpus, tmp_path):
    _, path = plain
    model = replace(PLAIN, attention=replace(PLAIN.attention, qk_norm=True))
    with pytest.raises(CheckpointError, match=r"--init-allow model\.attention\.qk_norm"):
        started_from(path, model, corpus, tmp_path)
    allow = ("model.attention.qk_norm",)
    with pytest.raises(CheckpointError, match=r"(?s)missing .*q_norm.weight.*'fresh:blocks"):
        started_from(path, model, corpus, tmp_path, allow=allow)
    state = started_from(path, model, corpus, tmp_path, "fresh:*[qk]_norm.weight", allow=allow)
    assert state.init["allowed"] == {"model.attention.qk_norm": ["False", "True"]}
    assert torch.equal(
        weight(state, "final_norm.weight"),
        dict(checkpoint.LazyCheckpoint(path, states.weight_names(path)))["final_norm.weight"],
    )
    state = started_from(path, PLAIN, corpus, tmp_path / "other", "fresh:blocks.0.mlp.*", "fresh:mtp.*")
    assert (weight(state, "blocks.0.mlp.norm.weight") == 1).all()
    with pytest.raises(CheckpointError, match=r"missing +final_norm.weight"):
        started_from(path, PLAIN, corpus, tmp_path / "third", "drop:final_norm.*")


def test_rules_that_match_nothing_and_settings_that_do_not_exist_are_refused(plain, corpus, tmp_path):
    _, path = plain
    for rules, allow, message in (
        (["fresh:blocks.9.*"], (), "no tensor of the model"),
        (["drop:blocks.9.*"], (), "no tensor of the checkpoint"),
        ([], ("model.rope",), "--init-allow model.rope"),
        ([], ("model.pattern",), "another pattern needs a rule"),
    ):
        with pytest.raises(ConfigError, match=message):
            started_from(path, PLAIN, corpus, tmp_path, *rules, allow=allow)


@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({"tied": False}, [], "--init-rules untie"),
        ({"vocab": 300}, [], "--init-rules vocab"),
        ({"vocab": 258}, ["vocab"], "--init-allow model.vocab"),
        ({"hyper": HyperConnections()}, [], "--init-rules hyper"),
        ({"hyper": HyperConnections(streams=1)}, ["hyper"], "streams to 2 or more"),
        ({"pattern": "[*-]M[*-]"}, [], "--init-rules mtp"),
        ({"pattern": "[*E]M[*E]/*E", "moe": EXPERTS}, [], "--init-rules upcycle"),
        ({"pattern": "[*E]M[*-]/*-", "moe": replace(EXPERTS, ffn=8)}, ["upcycle"], r"model\.moe\.ffn = 8"),
        ({"pattern": "[*E]M[*-]/*-", "moe": replace(EXPERTS, latent=8)}, ["upcycle"], "latent = 8"),
        ({"pattern": "[*-]M"}, ["mtp"], "--init-rules blocks"),
        ({"pattern": "[*-]M"}, ["mtp", "blocks:0"], "it has 2 blocks"),
        ({"pattern": "[*-]M"}, ["mtp", "blocks:0,2"], r"takes block 1 \(M\) from block 2 \(\*-\)"),
        ({"pattern": "[*-]M"}, ["mtp", "blocks:0,7"], "names block 7"),
    ],
    ids=str,
)
def test_a_refusal_suggests_the_rule_that_would_help(changes, rules, message, plain, corpus, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        started_from(plain[1], replace(PLAIN, **changes), corpus, tmp_path, *rules)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"vocab": 258}, []),
        ({"vocab": 258}, ["vocab"]),
        ({"vocab": 258, "tied": False}, []),
        ({"vocab": 300}, []),
        ({"tied": False}, []),
        ({"mlp": Mlp(ffn=20)}, []),
        ({"mlp": Mlp(ffn=24, bias=True), "vocab": 300}, []),
        ({"norm_eps": 1e-6}, []),
        ({"pattern": "[*-]M[*-]", "attention": replace(PLAIN.attention, kv_heads=4)}, []),
        ({"pattern": "*EM*E/*E", "moe": EXPERTS, "tied": False, "hyper": HyperConnections()}, []),
        ({"norm": "layer"}, ["fresh:final_norm.*"]),
    ],
    ids=str,
)
def test_the_command_that_a_refusal_recommends_works(changes, rules, plain, corpus, tmp_path):
    """Options as a person would copy them: every --init-allow, and the last list of rules, or each rule."""
    model = replace(PLAIN, **changes)
    with pytest.raises(CheckpointError) as refused:
        started_from(plain[1], model, corpus, tmp_path, *rules)
    told = str(refused.value)
    allow = tuple(re.findall(r"--init-allow (\S+)", told))
    lists = re.findall(r"--init-rules (.+)", told)
    full = [each for each in lists if "fresh:" in each or "drop:" in each]
    named = shlex.split(full[-1]) if full else [*rules, *lists]
    started_from(plain[1], model, corpus, tmp_path, *named, allow=allow)


def test_a_refusal_of_tensors_recommends_rules_that_work(plain, corpus, tmp_path):
    _, path = plain
    model, allow = replace(PLAIN, mlp=Mlp(ffn=20), norm="layer"), ("model.mlp.ffn", "model.norm")
    with pytest.raises(CheckpointError, match="differ in 16 tensors") as refused:
        started_from(path, model, corpus, tmp_path, "fresh:blocks.0.mlp.*", allow=allow)
    rules = shlex.split(str(refused.value).rpartition("set   --init-rules ")[2])
    assert rules[0] == "fresh:blocks.0.mlp.*"
    started_from(path, model, corpus, tmp_path, *rules, allow=allow)


@pytest.mark.parametrize("rule", ["untie", "vocab", "vocab:zeros", "mtp", "upcycle", "hyper"])
def test_a_rule_that_changes_nothing_is_refused(rule, plain, corpus, tmp_path):
    _, path = plain
    with pytest.raises(ConfigError, match=rf"--init-rules {rule}: changes nothing: .*; leave it out"):
        started_from(path, PLAIN, corpus, tmp_path, rule)


@pytest.mark.parametrize("changes", [{"tied": False}, {"hyper": HyperConnections()}], ids=str)
def test_what_is_done_already_is_not_done_again(changes, corpus, tmp_path):
    """A checkpoint that has a head, or hyper-connections, of its own."""
    model = replace(PLAIN, **changes)
    _, path = saved_as(model, corpus, tmp_path / "first")
    rule = "untie" if "tied" in changes else "hyper"
    with pytest.raises(ConfigError, match=f"--init-rules {rule}: changes nothing"):
        started_from(path, model, corpus, tmp_path / "second", rule)


def test_a_rule_is_given_once():
    with pytest.raises(ConfigError, match="--init-rules vocab: is given 2 times"):
        parse_rules(["vocab", "vocab:zeros"])
    assert len(parse_rules(["fresh:a", "fresh:b", "drop:a", "drop:b"])) == 4


@pytest.mark.parametrize("text", ["fresh", "drop:", "blocks", "blocks:0,x", "vocab:mean", "untie:all", "grow"])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match=f"--init-rules {text}: "):
        parse_rules(["untie", text])


def test_experts_that_are_not_normalised_are_noted(plain, corpus, tmp_path, capsys):
    model = replace(PLAIN, pattern="*EM*E/*E", moe=replace(EXPERTS, normalize_top_k=False, scale=2.0))
    started_from(plain[1], model, corpus, tmp_path, "upcycle")
    said = capsys.readouterr().err
    assert "normalize_top_k is False" in said
    assert "scale is 2.0" in said


def test_what_began_a_run_stays_in_its_manifest(plain, corpus, tmp_path):
    _, path = plain
    model = replace(PLAIN, tied=False, norm_eps=1e-6)
    state = started_from(path, model, corpus, tmp_path, "untie", allow=("model.norm_eps",))
    run = run_with(corpus, model)
    feed = open_data_pipeline(run, tmp_path / "data")
    states.save(tmp_path / "checkpoints", state, run, feed.train, feed.tokenizer)
    again = started_from(path, model, corpus, tmp_path)
    assert dict(again.init) == {
        "version": 2,
        "from": str(path),
        "rules": ["untie"],
        "allowed": {"model.norm_eps": ["1e-05", "1e-06"]},
    }


def test_the_plan_names_every_tensor_its_origin_and_changes_of_dtype(plain, corpus):
    _, path = plain
    model = replace(PLAIN, pattern="*EM*-", vocab=300, tied=False, moe=EXPERTS)
    planned = plan(replace(run_on(corpus, dtype="bf16"), model=model), 1)
    rules = parse_rules(["mtp", "upcycle", "untie", "vocab"])
    start = start_from(path, planned, InitOptions(rules=rules))
    lines = list(plan_lines(path, planned, start))
    flat = [" ".join(line.split()) for line in lines]
    assert "head.weight [300, 16] <- embedding.weight[0:259, 0:16], rest fresh, float64 -> float32" in flat
    assert "blocks.1.moe.experts.3.up.weight [24, 16] <- blocks.0.mlp.up.weight, float64 -> float32" in flat
    assert "blocks.1.moe.router.weight [4, 16] <- fresh" in flat
    assert "blocks.1.moe.shared.down.weight [16, 8] <- values 0" in flat
    assert "(none) <- mtp.0.projection.weight, left out" in flat
    assert {line.split()[0] for line in lines} >= start.plan.origins.keys()


# ------------------------------------------------------------------------------------------- topologies

GROWN = replace(
    PLAIN,
    pattern="*EM*E/*E",
    vocab=263,
    tied=False,
    moe=EXPERTS,
    hyper=HyperConnections(streams=2),
)
GROWTH = ("untie", "vocab", "upcycle", "hyper", "fresh:final_norm.*")


def _grow(rank: int, world: int, run: Run, path: Path, out: Path) -> None:
    state, feed = outcome.started(rank, world, run)
    start = start_from(path, state.plan, InitOptions(rules=parse_rules(GROWTH)))
    states.load_state_weights(path, state, start.plan)
    states.save(out, state, run, feed.train, feed.tokenizer)


@pytest.mark.costly("two ranks in two arrangements")
@pytest.mark.parametrize("words", ["tp2 ep2", "pp2"])
def test_ranks_start_from_what_one_process_starts_from(words, plain, corpus, tmp_path):
    run = run_with(corpus, GROWN)
    _grow(0, 1, run, plain[1], tmp_path / "one")
    run_ranks(2, _grow, Topology(world=2, words=words).of(run), plain[1], tmp_path / "two")
    one, two = outcome.read_whole(tmp_path / "one"), outcome.read_whole(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


# ------------------------------------------------------------------------------------------- brackets


@pytest.mark.parametrize(
    ("before", "after"),
    [("[*E]M[*E]/*E", "*EM*E/*E"), ("[*-][*-]/*-", "*-*-/*-"), ("*-*-", "[*-][*-]"), ("*E|-", "*[E]|[-]")],
)
def test_a_run_resumes_with_other_brackets(before, after, corpus, tmp_path, capsys):
    """Bit-equal logits, and steps that agree to rounding; the console says what happens."""
    model = replace(GROWN, hyper=None) if "-" in before else GROWN
    runs = [run_with(corpus, replace(model, pattern=text)) for text in (before, after)]
    first, second = (make_state(plan(run, 1), choose_device("cpu")) for run in runs)
    feed, places = open_data_pipeline(runs[0], tmp_path), RunDir(out=tmp_path)
    states.initialize(first, runs[0])
    train_step(first, runs[0], feed.train, 1e-2)
    states.save(places.checkpoints, first, runs[0], feed.train, feed.tokenizer)
    initialize_or_resume(second, runs[1], feed, places)
    assert "layer by layer" in capsys.readouterr().err
    assert torch.equal(logits(first), logits(second))
    for _ in range(3):
        losses = [train_step(*each, feed.train, 1e-2).loss for each in zip((first, second), runs, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert second.init == {"version": 2}


@st.composite
def groupings(draw: st.DrawFn) -> tuple[str, str]:
    """Two patterns of the same layers, with brackets wherever they fall."""
    layers = draw(st.lists(st.sampled_from("*-ME"), min_size=1, max_size=9))
    depths = draw(st.sampled_from(["", "/*E", "/*-/*-", "/MM"]))

    def grouped() -> str:
        text, group = "", ""
        for layer in layers:
            if group and (draw(st.booleans()) or layer in group or "E" in group):
                text, group = text + (f"[{group}]" if draw(st.booleans()) or len(group) > 1 else group), ""
            group += layer
        return f"{text}[{group}]{depths}"

    return grouped(), grouped()


def tensors_of(pattern: str) -> dict[str, tuple[int, ...]]:
    names = [f"{layer}.{part}.weight" for layer in layers_by_name(parse(pattern)) for part in ("norm", "x")]
    return dict.fromkeys(("embedding.weight", *names), (3, 2))


@settings(deadline=None, max_examples=25)
@given(groupings())
def test_names_map_one_to_one_between_groupings(patterns):
    one, two = (parse(text) for text in patterns)
    assert symbols(one) == symbols(two)
    there, back = regrouped_names(one, two), regrouped_names(two, one)
    assert there is not None
    assert back is not None
    stored, wanted = tensors_of(patterns[0]), tensors_of(patterns[1])
    assert {renamed(name, there) for name in stored} == wanted.keys()
    assert all(renamed(renamed(name, there), back) == name for name in stored)
    models = [Model(pattern=text, hidden=2, vocab=3) for text in patterns]
    planned = plan_init(Transfer(saved=models[0], chosen=models[1], stored=stored, wanted=wanted))
    assert {name: Stored(name=renamed(name, back)) for name in wanted} == planned.origins
    check_plan("here", planned, stored, wanted)


@settings(deadline=None, max_examples=25)
@given(groupings(), st.data())
def test_every_tensor_has_one_origin_whatever_the_blocks(patterns, data):
    saved, chosen = (Model(pattern=text.partition("/")[0], hidden=2, vocab=3) for text in patterns)
    stored, wanted = tensors_of(saved.pattern), tensors_of(chosen.pattern)
    old, new = parse(saved.pattern).blocks, parse(chosen.pattern).blocks
    kinds = [[layer.kind for layer in block.layers] for block in old]
    entries = []
    for block in new:
        same = [i for i, each in enumerate(kinds) if each == [layer.kind for layer in block.layers]]
        entries.append(data.draw(st.sampled_from(["-", *map(str, same)])))
    rules = parse_rules([f"blocks:{','.join(entries)}"])
    planned = plan_init(Transfer(saved=saved, chosen=chosen, stored=stored, wanted=wanted, rules=rules))
    check_plan("here", planned, stored, wanted)
    assert planned.origins.keys() == wanted.keys()
    assert not any(isinstance(origin, Values) for origin in planned.origins.values())
    for name, origin in planned.origins.items():
        if name.startswith("blocks."):
            _, block, rest = name.split(".", 2)
            entry = entries[int(block)]
            assert origin == (FRESH if entry == "-" else Stored(name=f"blocks.{entry}.{rest}"))
    used = {origin.name for origin in planned.origins.values() if isinstance(origin, Stored)}
    assert used | planned.dropped == stored.keys()
    assert not used & planned.dropped


def test_a_plain_checkpoint_of_the_first_version_of_names_is_read(plain):
    assert checkpoint.read_manifest(plain[1]).extra["names"] == 1
