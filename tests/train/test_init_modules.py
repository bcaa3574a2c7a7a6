"""Starting from checkpoints with and without encoders: what is loaded, what starts fresh, what is refused; and
what an export takes along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from braid import checkpoint
from braid.checkpoint import LazyCheckpoint
from braid.config import Run
from braid.encoders import Encoder, Projector
from braid.errors import CheckpointError, ConfigError
from braid.planning.plan import canonical_names, plan
from braid.prove import outcome
from braid.train import state as states
from braid.train import stored_run
from braid.train.encoder_checkpoint import encoder_extra
from braid.train.export_settings import ExportSettings
from braid.train.exporting import export_checkpoint
from braid.train.init_from import InitOptions, Start, plan_lines, start_from
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.surgery import parse_rules
from tests.ranks import run_ranks
from tests.topology.cases import VOCAB
from tests.topology.module_cases import EXPERTS, VISION, Placement, multimodal

pytestmark = pytest.mark.costly("every way to start from a checkpoint with encoders builds one, many on ranks")

APART = Placement(world=2, language="at0+1", modules={"vision": "at1+1"})
FIRST_APART = Placement(world=2, language="at1+1", modules={"vision": "at0+1"})
COLOCATED = Placement(world=2, language="tp2", modules={"vision": "tp2"})


PLAIN = {"norm_position": "pre", "embedding_scale": 1.0, "residual_scale": 1.0, "logits_scale": 1.0}
"""What Megatron's names and hyper-connections need."""


def vision_run(corpus: Path, encoder: Encoder = VISION) -> Run:
    run = multimodal("tied", corpus, {"vision": encoder}, samples=4, micro_batches=2)
    return replace(run, model=replace(run.model, **PLAIN))


def other_encoder(run: Run, **settings: object) -> Run:
    """The run with another encoder of the same name."""
    module = run.modules["vision"]
    return replace(run, modules={"vision": replace(module, model=replace(module.model, **settings))})


def save_trained(run: Run, root: Path) -> Path:
    """A checkpoint whose weights are far from the initial ones of any seed, and differ from each other."""
    state, feed = outcome.started(0, 1, run)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in state.modules.values():
            for tensor in module.optimizer.main.values():
                tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
            module.optimizer.copy_to_model()
    return states.save(root, state, run, feed.train, feed.tokenizer)


def weights(path: Path) -> dict[str, Tensor]:
    return dict(LazyCheckpoint(path, states.weight_names(path)))


def begin(
    rank: int,
    world: int,
    run: Run,
    path: Path,
    out: Path,
    rules: tuple[str, ...],
    modules: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """What a rank of `braid train --init` does before the first step; then its weights are saved."""
    state, feed = outcome.started(rank, world, run)
    options = InitOptions(rules=parse_rules(rules), modules=dict(modules))
    initialize_or_resume(state, run, feed, RunDir(out=out / "run"), init=path, options=options)
    states.save(out / "told", state, run, feed.train, feed.tokenizer)


def begun(
    run: Run,
    path: Path,
    out: Path,
    *rules: str,
    placement: Placement | None = None,
    modules: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The weights with which a run begins."""
    if placement is None:
        begin(0, 1, run, path, out, rules, modules)
    else:
        run_ranks(placement.world, begin, placement.of(run), path, out, rules, dict(modules))
    newest = checkpoint.latest(out / "told").path
    assert newest is not None
    return weights(newest)


def planned(path: Path, run: Run, *rules: str, allow: tuple[str, ...] = ()) -> Start:
    return start_from(path, plan(run, 1), InitOptions(rules=parse_rules(rules), allow=allow))


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def of_vision(tensors: Mapping[str, Tensor], *, inside: bool = True) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith("modules.vision.") == inside}


@pytest.fixture(scope="module")
def fresh(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights that the run draws from its seed."""
    run, root = vision_run(corpus), tmp_path_factory.mktemp("fresh")
    state, feed = outcome.started(0, 1, run)
    return weights(states.save(root, state, run, feed.train, feed.tokenizer))


@pytest.fixture(scope="module")
def text(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of the same vocabulary, without encoders."""
    return save_trained(replace(vision_run(corpus), modules={}), tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(vision_run(corpus), tmp_path_factory.mktemp("both"))


PLACEMENTS = [
    None,
    APART,
    pytest.param(COLOCATED, marks=pytest.mark.long),
    pytest.param(FIRST_APART, marks=pytest.mark.long),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_encoder_starts_fresh_beside_a_language_model(placement, text, fresh, corpus, tmp_path):
    found = begun(vision_run(corpus), text, tmp_path, placement=placement)
    assert equal(of_vision(found, inside=False), weights(text))
    assert equal(of_vision(found), of_vision(fresh))


def test_a_line_says_which_module_starts_fresh(text, corpus, tmp_path, capsys):
    run = vision_run(corpus)
    begun(run, text, tmp_path)
    note = "modules.vision starts fresh: the checkpoint has no such module"
    assert note in capsys.readouterr().err
    lines = list(plan_lines(text, plan(run, 1), planned(text, run)))
    assert note in lines
    assert {line.split()[0] for line in lines} >= canonical_names(plan(run, 1)).keys()


def test_a_vocabulary_grows_by_the_placeholder(fresh, corpus, tmp_path):
    run = vision_run(corpus)
    before = replace(run, model=replace(run.model, vocab=VOCAB), modules={})
    path = save_trained(before, tmp_path / "before")
    with pytest.raises(CheckpointError, match="--init-rules vocab") as refused:
        planned(path, run)
    assert "modules" not in str(refused.value)
    found, old = begun(run, path, tmp_path / "after", "vocab"), weights(path)
    assert torch.equal(found["embedding.weight"][:VOCAB], old["embedding.weight"])
    assert equal(of_vision(found), of_vision(fresh))


@pytest.mark.parametrize("placement", [COLOCATED, pytest.param(APART, marks=pytest.mark.long)], ids=str)
def test_all_modules_of_both_are_loaded(placement, both, corpus, tmp_path):
    assert equal(begun(vision_run(corpus), both, tmp_path, placement=placement), weights(both))


def encoder_alone(both: Path, root: Path, run: Run) -> Path:
    """A checkpoint of the trunk of an encoder by itself, as an import of one makes it."""
    trunk = {name: each for name, each in of_vision(weights(both)).items() if ".projector." not in name}
    shape = run.modules["vision"].model
    alone = replace(shape, group=1, projector=Projector(width=shape.hidden, bias=False))
    checkpoint.begin(root, 0)
    pieces = [checkpoint.Piece.whole(name, each) for name, each in trunk.items()]
    record = checkpoint.write_part(root, 0, 0, pieces)
    return checkpoint.commit(root, 0, [record], extra=encoder_extra({"vision": alone}))


AFRESH = "fresh:modules.vision.projector.*"


@pytest.mark.parametrize("placement", [None, pytest.param(APART, marks=pytest.mark.long)], ids=str)
def test_an_encoder_starts_from_a_checkpoint_of_its_own(placement, text, both, fresh, corpus, tmp_path):
    run = vision_run(corpus)
    own = {"vision": encoder_alone(both, tmp_path / "encoder", run)}
    found = begun(run, text, tmp_path, AFRESH, placement=placement, modules=own)
    assert equal(of_vision(found, inside=False), weights(text))
    for name, tensor in of_vision(found).items():
        assert torch.equal(tensor, (fresh if ".projector." in name else weights(both))[name]), name
    # Also from a run with a language model, which stays behind; then the projector is there too.
    loaded = begun(run, text, tmp_path / "other", modules={"vision": both})
    assert equal(of_vision(loaded), of_vision(weights(both)))
    assert equal(of_vision(loaded, inside=False), weights(text))


def test_checkpoints_of_encoders_are_checked(text, both, corpus, tmp_path):
    run = vision_run(corpus)
    path = encoder_alone(both, tmp_path / "encoder", run)

    def start(run: Run, *rules: str, **modules: Path) -> Start:
        return start_from(text, plan(run, 1), InitOptions(rules=parse_rules(rules), modules=modules))

    with pytest.raises(CheckpointError) as refused:
        start(run, vision=path)
    assert f"set   --init-rules '{AFRESH}'" in str(refused.value)
    with pytest.raises(CheckpointError, match=r"modules\.vision\.model\.norm_eps"):
        start(other_encoder(run, norm_eps=0.5), AFRESH, vision=path)
    with pytest.raises(ConfigError, match="the modules of the run are: vision"):
        start(run, AFRESH, audio=path)
    with pytest.raises(CheckpointError, match="the modules of this checkpoint are: none"):
        start(run, AFRESH, vision=text)
    started = start(run, AFRESH, vision=path)
    assert started.record["modules"] == {"vision": str(path)}
    assert any("modules.vision.patches" in line for line in plan_lines(text, plan(run, 1), started))
    with pytest.raises(CheckpointError, match="it is an encoder alone, for --init-modules"):
        stored_run.describe(path)


def test_brackets_of_an_encoder_do_not_matter(both, corpus, tmp_path):
    found, old = begun(other_encoder(vision_run(corpus), pattern="*-*-"), both, tmp_path), weights(both)
    name = "modules.vision.blocks.{}.mlp.up.weight".format
    assert torch.equal(found[name(3)], old[name(1)])
    assert torch.equal(found[name(1)], old[name(0)])


def test_a_module_that_the_run_does_not_have_is_dropped_by_one_rule(both, corpus, tmp_path):
    run, rule = replace(vision_run(corpus), modules={}), "drop:modules.vision.*"
    with pytest.raises(CheckpointError) as refused:
        planned(both, run)
    assert str(refused.value).splitlines()[-1] == f"  set   --init-rules '{rule}'"
    assert equal(begun(run, both, tmp_path, rule), of_vision(weights(both), inside=False))


@pytest.mark.parametrize(
    "settings", [{}, {"hidden": 32, "pattern": "[*-]", "norm_eps": 1e-3}], ids=["same", "other"]
)
def test_a_module_starts_afresh_although_the_checkpoint_has_one(settings, both, corpus, tmp_path):
    run = other_encoder(vision_run(corpus), **settings)
    found = begun(run, both, tmp_path / "new", "fresh:modules.vision.*")
    state, feed = outcome.started(0, 1, run)
    drawn = weights(states.save(tmp_path / "drawn", state, run, feed.train, feed.tokenizer))
    assert equal(of_vision(found), of_vision(drawn))
    assert equal(of_vision(found, inside=False), of_vision(weights(both), inside=False))


def test_a_part_of_a_module_may_start_afresh(both, corpus, fresh, tmp_path):
    found = begun(vision_run(corpus), both, tmp_path, "fresh:modules.vision.projector.*")
    for name, tensor in found.items():
        source = fresh if name.startswith("modules.vision.projector.") else weights(both)
        assert torch.equal(tensor, source[name]), name


def test_a_setting_that_changes_what_an_encoder_computes_is_refused_by_name(both, corpus):
    run = vision_run(corpus)
    free = other_encoder(run, init_std=0.5)
    module = free.modules["vision"]
    planned(both, replace(free, modules={"vision": replace(module, most_patches=4, trained=("projector.*",))}))
    attention = replace(VISION.attention, rope_base=5e5)
    with pytest.raises(CheckpointError) as refused:
        planned(both, other_encoder(run, norm_eps=1e-3, attention=attention))
    told = str(refused.value)
    assert "differ in 2 settings" in told
    assert "modules.vision.model.norm_eps = 0.001" in told
    assert "--init-allow modules.vision.model.attention.rope_base" in told
    allowed = planned(both, other_encoder(run, norm_eps=1e-3), allow=("modules.vision.model.norm_eps",)).record[
        "allowed"
    ]
    assert allowed == {"modules.vision.model.norm_eps": [str(VISION.norm_eps), "0.001"]}


def test_an_encoder_of_other_layers_is_refused_with_the_rule_that_starts_it_afresh(both, corpus):
    with pytest.raises(CheckpointError) as refused:
        planned(both, other_encoder(vision_run(corpus), pattern="[*-]"))
    assert "modules.vision.model.pattern = '[*-]'" in str(refused.value)
    assert "Or --init-rules 'fresh:modules.vision.*'" in str(refused.value)
    with pytest.raises(ConfigError, match=r"--init-allow modules\.vision\.model\.pattern: names of settings"):
        planned(both, vision_run(corpus), allow=("modules.vision.model.pattern",))


def test_rules_of_the_language_model_leave_hyper_connections_of_an_encoder_alone(corpus, tmp_path):
    run = vision_run(corpus, EXPERTS)
    path = save_trained(run, tmp_path / "before")
    streams = replace(run, model=replace(run.model, hyper=EXPERTS.hyper))
    found = begun(streams, path, tmp_path / "after", "hyper")
    assert equal(of_vision(found), of_vision(weights(path)))


@pytest.mark.parametrize(
    "settings",
    [ExportSettings(model_type="megatron"), ExportSettings(model_type="megatron", optimizer=True)],
    ids=["weights", "optimizer"],
)
def test_an_export_has_the_language_model_and_names_what_stays_behind(settings, text, both, tmp_path):
    made = export_checkpoint(both, tmp_path / "both", settings)
    assert made.notes == ("not in the export, which has the language model alone: modules.vision",)
    assert export_checkpoint(text, tmp_path / "text", settings).notes == ()
    sizes = [
        {file.name: file.stat().st_size for file in (tmp_path / each).glob("*.safetensors")}
        for each in ("both", "text")
    ]
    assert sizes[0] == sizes[1]
    assert ("optimizer.safetensors" in sizes[0]) == settings.optimizer
    assert '"modules": {}' in (tmp_path / "both" / "config.json").read_text()
