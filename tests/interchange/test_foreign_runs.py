"""Models that others trained become runs on any ranks and go back, with their optimizer, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from braid import checkpoint
from braid.architecture import Attention, Model, Moe
from braid.checkpoint import LazyCheckpoint
from braid.cli.convert import export, import_
from braid.config import Data, Run, Train, to_json
from braid.errors import CheckpointError, ConfigError
from braid.interchange import adapter_for, to_hf, to_theirs
from braid.interchange.convert import convert
from braid.interchange.trained import targets
from braid.nn.moe.experts import Experts
from braid.prove.outcome import parts, started
from braid.train import state as states
from braid.train import stored_run
from braid.train.state import State
from tests.interchange.layouts import MOMENTS, optimized, same
from tests.model.cases import build
from tests.ranks import run_ranks
from tests.topology.cases import make_corpus
from tests.topology.matrix import Topology

MODEL = Model(
    pattern="[*E][*E]",
    hidden=16,
    vocab=259,
    attention=Attention(heads=4, kv_heads=2, head_dim=4, qk_norm=True),
    moe=Moe(experts=4, top_k=2, ffn=8, bias=True, shared_ffn=4, selection_bias=True, score="sigmoid"),
)
PLAIN = replace(MODEL, moe=Moe(experts=4, top_k=2, ffn=8))
"""As Qwen3-MoE has it."""
UPDATES = 11
TOPOLOGIES = ((1, ("",)), (2, ("ep2", "etp2", "ep2 none")), (4, ("ep4", "ep2", "ep2 etp2")))
"""Ranks, and how they are arranged, one way after the other: with `ep2` four ranks share ffn channels too."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def run_with(model: Model, corpus: Path) -> Run:
    data = Data(sources=(str(corpus),), sequence_tokens=16)
    return Run(model=model, data=data, train=Train(steps=20, batch_samples=4, eval_samples=0, dtype="bf16"))


def recipe_of(run: Run, folder: Path) -> str:
    """A recipe file that returns this run."""
    (folder / "run.json").write_text(json.dumps(to_json(run)))
    (folder / "foreign.py").write_text(
        "import json, pathlib\nfrom braid.config import Run, from_json\n\n\ndef recipe() -> Run:\n"
        "    return from_json(json.loads((pathlib.Path(__file__).parent / 'run.json').read_text()))\n"
    )
    return f"{folder / 'foreign.py'}:recipe"


def trained(shape: Model) -> dict[str, Tensor]:
    """Everything that a run saves of a model, by canonical name; no number of it fits into bfloat16."""
    model = build(shape.pattern, shape, dtype=torch.float32)
    tensors = model.tensors()
    ours = {name: torch.randn_like(t.read(tensors[t.parameter])) for name, t in model.canonical().items()}
    moments = optimized(
        ours, [name for name, target in targets(shape, torch.float32).items() if target.updated]
    )
    return ours | {f"optimizer.{m}.{name}": t for m in MOMENTS for name, t in moments[m].items()}


def weights_of(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in ours.items() if not name.startswith("optimizer.")}


def write_megatron(folder: Path, ours: Mapping[str, Tensor], way: str, interleave: int = 0) -> None:
    """Files as somebody may have dumped them: bfloat16 weights, the optimizer beside them, no config.json."""
    adapter = adapter_for("megatron", "indexed", experts=way, interleave=interleave)
    folder.mkdir()
    weights = convert(weights_of(ours), adapter, MODEL, "to_theirs")
    narrow = {n: t if n.endswith("expert_bias") else t.bfloat16() for n, t in weights.items()}
    state = dict(to_theirs(ours, adapter, MODEL, updates=UPDATES))
    for tensors, file in ((narrow, "model"), (state, "optimizer")):
        held = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(held, folder / f"{file}.safetensors")


def files_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def read_all(path: Path) -> dict[str, Tensor]:
    stored = checkpoint.read_manifest(path).tensors
    meta = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in stored.items() if n != states.RNG}
    return checkpoint.read(path, meta, unread={states.RNG})


# ------------------------------------------------------------------------------------------- on any ranks


def _carry(rank: int, world: int, runs: Sequence[Run], ours: Mapping[str, Tensor], root: Path) -> None:
    """Load a checkpoint, look at what lies in memory, and save it again; on one topology after the other."""
    for place, run in enumerate(runs):
        state, feed = started(rank, world, run)
        states.load(states.resolve_checkpoint(root / str(place)), state)
        assert state.optimizer.updates == UPDATES
        assert {main.dtype for main in state.optimizer.main.values()} == {torch.float32}
        _look(state, state.weights(), "", ours)
        for moment in MOMENTS:
            holders = {name: state.optimizer.moment(moment, name) for name in state.optimizer.main}
            _look(state, holders, f"optimizer.{moment}.", ours)
        states.save(root / str(place + 1), state, run, feed.train, feed.tokenizer)


def _look(state: State, holders: Mapping[str, Tensor], prefix: str, ours: Mapping[str, Tensor]) -> None:
    """Every part that this rank holds is that of the whole tensor."""
    held = parts(state.language, holders)
    assert held
    for name, (offset, value) in held.items():
        box = tuple(slice(start, start + size) for start, size in zip(offset, value.shape, strict=True))
        assert torch.equal(value, ours[prefix + name][box]), prefix + name
    _look_at_experts(state, holders, prefix, ours)


def _look_at_experts(
    state: State, holders: Mapping[str, Tensor], prefix: str, ours: Mapping[str, Tensor]
) -> None:
    """In memory gate and up of a channel lie side by side, for the experts and channels of this rank."""
    layers = [(name, m) for name, m in state.model.named_modules() if isinstance(m, Experts)]
    for block, (name, module) in enumerate(layers):
        stem = f"{prefix}blocks.{block}.moe.experts"
        pairs = [[ours[f"{stem}.{n}.{part}.weight"] for part in ("gate", "up")] for n in module.expert_ids]
        whole_EFGC = torch.stack([torch.stack(pair, 1) for pair in pairs])
        mine_EFGC = whole_EFGC.chunk(module.etp.size, 1)[module.etp.rank]
        shard = state.language.kept[f"{name}.w_in_EFGC"].shard
        if shard is not None:
            mine_EFGC = mine_EFGC.narrow(shard.dim, shard.start, shard.stop - shard.start)
        assert torch.equal(holders[f"{name}.w_in_EFGC"], mine_EFGC)
    assert len(layers) == 2


@pytest.mark.parametrize(
    ("way", "interleave", "worlds"),
    [("grouped", 2, 2), ("indexed", 0, 1), pytest.param("grouped", 2, 3, marks=pytest.mark.long)],
)
def test_a_model_of_megatron_goes_over_all_ranks_and_back(
    way: str, interleave: int, worlds: int, corpus: Path, tmp_path: Path
) -> None:
    ours, run = trained(MODEL), run_with(MODEL, corpus)
    write_megatron(tmp_path / "theirs", ours, way, interleave)
    words = ["--recipe", recipe_of(run, tmp_path), "--interleave", str(interleave)]
    assert import_([str(tmp_path / "theirs"), "--out", str(tmp_path / "run"), *words]) == 0
    newest = states.resolve_checkpoint(tmp_path / "run")
    same(read_all(newest), ours)
    for world, named in TOPOLOGIES[:worlds]:
        root = tmp_path / str(world)
        shutil.copytree(newest.parent, root / "0")
        runs = [Topology(world=world, words=words).of(run) for words in named]
        _carry(0, 1, runs, ours, root) if world == 1 else run_ranks(world, _carry, runs, ours, root)
        newest = states.resolve_checkpoint(root / str(len(runs)))
        same(read_all(newest), ours)
    back = ["--model-type", "megatron", "--experts", way, "--interleave", str(interleave), "--optimizer"]
    assert export([str(newest), "--out", str(tmp_path / "back"), *back]) == 0
    same(files_of(tmp_path / "back"), files_of(tmp_path / "theirs"))


def _begin(rank: int, world: int, runs: Sequence[Run], ours: Mapping[str, Tensor], path: Path) -> None:
    """Take the weights of a checkpoint, and nothing else of it."""
    for run in runs:
        state, _ = started(rank, world, run)
        states.load_state_weights(path, state)
        assert {main.dtype for main in state.optimizer.main.values()} == {torch.float32}
        _look(state, state.weights(), "", ours)
        assert all(not state.optimizer.moment(m, n).any() for m in MOMENTS for n in state.optimizer.main)
        assert state.optimizer.updates == 0


def test_a_bf16_run_begins_from_the_fp32_weights_of_a_file(corpus: Path, tmp_path: Path) -> None:
    ours = weights_of(trained(PLAIN))
    to_hf(PLAIN, ours, tmp_path / "hub", model_type="qwen3_moe", form="packed")
    assert import_([str(tmp_path / "hub"), "--out", str(tmp_path / "run")]) == 0
    run, path = run_with(PLAIN, corpus), states.resolve_checkpoint(tmp_path / "run")
    _begin(0, 1, [run], ours, path)
    runs = [Topology(world=2, words=words).of(run) for words in ("ep2", "etp2 none")]
    run_ranks(2, _begin, runs, ours, path)


# ---------------------------------------------------------------------------------------------- commands


def test_an_export_tells_its_shape_and_its_layout(corpus: Path, tmp_path: Path) -> None:
    ours = trained(MODEL)
    write_megatron(tmp_path / "theirs", ours, "packed", 4)
    recipe = recipe_of(run_with(MODEL, corpus), tmp_path)
    words = ["--recipe", recipe, "--interleave", "4"]
    assert import_([str(tmp_path / "theirs"), "--out", str(tmp_path / "one"), *words]) == 0
    words = ["--model-type", "megatron", "--experts", "sequential", "--interleave", "2", "--optimizer"]
    assert export([str(tmp_path / "one"), "--out", str(tmp_path / "back"), *words]) == 0
    with pytest.raises(ConfigError, match="says 2, leave it out"):
        import_([str(tmp_path / "back"), "--out", str(tmp_path / "two"), "--interleave", "4"])
    assert import_([str(tmp_path / "back"), "--out", str(tmp_path / "two")]) == 0
    newest = states.resolve_checkpoint(tmp_path / "two")
    same(read_all(newest), ours)
    saved = stored_run.describe(newest)
    assert (saved.step, saved.updates, saved.run.model) == (UPDATES, UPDATES, MODEL)


def test_without_the_optimizer_its_main_parameters_remain(corpus: Path, tmp_path: Path) -> None:
    ours = trained(MODEL)
    write_megatron(tmp_path / "theirs", ours, "each")
    words = ["--recipe", recipe_of(run_with(MODEL, corpus), tmp_path), "--no-optimizer"]
    assert import_([str(tmp_path / "theirs"), "--out", str(tmp_path / "run"), *words]) == 0
    newest = states.resolve_checkpoint(tmp_path / "run")
    same(dict(LazyCheckpoint(newest, states.weight_names(newest))), weights_of(ours))
    assert stored_run.describe(newest).updates == 0
    words = ["--model-type", "megatron", "--optimizer"]
    with pytest.raises(CheckpointError, match="does not hold the optimizer's state"):
        export([str(tmp_path / "run"), "--out", str(tmp_path / "back"), *words])
    assert not (tmp_path / "back").exists()


def test_updates_are_told_by_the_files_or_by_whoever_imports(corpus: Path, tmp_path: Path) -> None:
    write_megatron(tmp_path / "theirs", trained(MODEL), "stacked")
    file = tmp_path / "theirs" / "optimizer.safetensors"
    words = ["--recipe", recipe_of(run_with(MODEL, corpus), tmp_path), "--out", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="the files say 11"):
        import_([str(tmp_path / "theirs"), *words, "--updates", "12"])
    save_file({n: t for n, t in load_file(file).items() if n != "optimizer.state.step"}, file)
    with pytest.raises(ConfigError, match="set   --updates N"):
        import_([str(tmp_path / "theirs"), *words])
    assert import_([str(tmp_path / "theirs"), *words, "--updates", "12"]) == 0
    assert stored_run.describe(states.resolve_checkpoint(tmp_path / "run")).updates == 12


def test_files_without_a_shape_need_a_recipe(tmp_path: Path) -> None:
    write_megatron(tmp_path / "theirs", trained(MODEL), "stacked")
    with pytest.raises(ConfigError, match="set   --recipe NAME"):
        import_([str(tmp_path / "theirs"), "--out", str(tmp_path / "run")])
    to_hf(PLAIN, weights_of(trained(PLAIN)), tmp_path / "hub", model_type="qwen3_moe")
    with pytest.raises(ConfigError, match="are for megatron"):
        import_([str(tmp_path / "hub"), "--out", str(tmp_path / "run"), "--interleave", "2"])


def test_layouts_that_a_family_does_not_have_are_refused(tmp_path: Path) -> None:
    to_hf(PLAIN, weights_of(trained(PLAIN)), tmp_path / "hub", model_type="qwen3_moe")
    assert import_([str(tmp_path / "hub"), "--out", str(tmp_path / "run")]) == 0
    words = [str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--model-type", "qwen3_moe"]
    for wrong in (["--experts", "indexed"], ["--interleave", "2"], ["--form", "stacked"]):
        with pytest.raises(ConfigError, match="has no such layout"):
            export([*words, *wrong])
    assert export([*words, "--experts", "stacked"]) == 0
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "back" / "model.safetensors")
