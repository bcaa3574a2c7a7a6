"""Models with images, and encoders of images: what transformers computes, and the same folder after a round
trip."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.checkpoint import LazyCheckpoint
from braid.errors import CheckpointError, ConfigError
from braid.interchange.composite import read_composite, to_ours
from braid.interchange.files import SafetensorsFolder
from braid.train.export_settings import ExportSettings
from braid.train.exporting import export_checkpoint
from braid.train.importing import Imported, ImportSettings, import_folder
from braid.train.state import weight_names
from tests.interchange.models import BOUNDS
from tests.interchange.omni import (
    IMAGES,
    OMNI,
    PATCH,
    RADIO,
    TOKEN,
    compare_omni,
    compare_radio,
    composite_of,
    prepare,
    rows_with,
    their_omni,
    their_radio,
)
from tests.model.radio_reference import images

pytestmark = pytest.mark.costly("models are built by transformers and compared, gradients too")

transformers = pytest.importorskip("transformers")

CASES = [(case, grids) for case in OMNI for grids in IMAGES]
FINAL_NORM = "nemotron_h_omni, final norm, tanh, no biases"
SOUND = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "subsampling_conv_channels": 4,
    "projection_hidden_size": 4,
    "projection_bias": False,
}


# ----------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("case", "grids"), CASES)
def test_logits_and_every_gradient(case: str, grids: str) -> None:
    found = compare_omni(case, IMAGES[grids])
    assert found.logits < BOUNDS[torch.float64]
    assert found.gradients < BOUNDS[torch.float64], found.worst


@pytest.mark.parametrize("case", RADIO)
@pytest.mark.parametrize("kind", [{}, {"hidden_act": "gelu_pytorch_tanh"}, {"use_swiglu_ffn": True}])
def test_features_and_every_gradient(case: str, kind: dict[str, Any]) -> None:
    found = compare_radio(RADIO[case], **kind)
    assert found.logits < BOUNDS[torch.float64]
    assert found.gradients < BOUNDS[torch.float64], found.worst


# ------------------------------------------------------------------------------------------ round trips


def imported(folder: Path, out: Path, *, world: int = 1, **settings: Any) -> Imported:
    return import_folder(folder, out, ImportSettings(**settings), world=world)


def exported(made: Imported, out: Path, *, world: int = 1, **settings: Any) -> tuple[str, ...]:
    return export_checkpoint(made.path, out, ExportSettings(**settings), world=world).notes


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def assert_same_folder(one: Path, other: Path) -> None:
    assert config_in(one) == config_in(other)
    files = sorted(file.name for file in one.glob("*.safetensors"))
    assert files == sorted(file.name for file in other.glob("*.safetensors"))
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def weights(made: Imported) -> dict[str, Tensor]:
    return dict(LazyCheckpoint(made.path, weight_names(made.path)))


@pytest.fixture
def omni(tmp_path: Path) -> Path:
    """A folder of a model with images and sound, in two files."""
    their_omni("nemotron_h_omni", torch.float32, audio_config=SOUND).save_pretrained(
        tmp_path / "omni", max_shard_size="60KB"
    )
    assert len(list((tmp_path / "omni").glob("*.safetensors"))) > 1
    return tmp_path / "omni"


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_folder_comes_back_byte_for_byte_with_the_parts_that_braid_does_not_train(
    omni: Path, tmp_path: Path, world: int
) -> None:
    made = imported(omni, tmp_path / "run", world=world)
    assert any("sound (47 tensors), video (1 tensor)" in note for note in made.notes)
    assert not any("sound" in name or "audio" in name for name in weights(made))
    notes = exported(made, tmp_path / "back", world=world)
    assert any("written as it was imported" in note for note in notes)
    assert_same_folder(omni, tmp_path / "back")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "back")
    assert model.audio_tower is not None


@pytest.mark.parametrize(
    ("case", "dtype"), list(zip(OMNI, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True))
)
def test_tensors_and_settings_come_back(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    their_omni(case, torch.float32).to(dtype).save_pretrained(tmp_path / "omni")
    made = imported(tmp_path / "omni", tmp_path / "run")
    exported(made, tmp_path / "back")
    given, back = (dict(SafetensorsFolder(tmp_path / name)) for name in ("omni", "back"))
    empty = {name for name, tensor in given.items() if name.endswith(".cls_token.token") and not tensor.numel()}
    assert back.keys() == given.keys() - empty
    assert all(back[name].dtype == given[name].dtype and torch.equal(back[name], given[name]) for name in back)
    assert config_in(tmp_path / "omni") == config_in(tmp_path / "back")


def test_settings_come_from_the_file(tmp_path: Path) -> None:
    vision = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-4, "norm_mean": [0.1, 0.2, 0.3]}
    their_omni("nemotron_h_omni", torch.float32, vision_config=vision).save_pretrained(tmp_path / "omni")
    run = imported(tmp_path / "omni", tmp_path / "run").run
    assert run is not None
    module = run.modules["vision"]
    shape = module.model
    assert (module.token, module.items, shape.prefix, shape.group) == (TOKEN, "image", 3, 4)
    assert shape.mlp is not None
    assert shape.pixels is not None
    assert shape.positions is not None
    assert (shape.mlp.activation, shape.norm_eps, shape.layer_scale) == ("gelu_tanh", 1e-4, 0.7)
    assert (shape.pixels.patch, shape.pixels.mean) == (PATCH, (0.1, 0.2, 0.3))
    assert (shape.positions.rows, shape.positions.columns) == (5, 5)
    assert (shape.projector.ffn, shape.projector.activation, shape.projector.norm) == (11, "relu2", "rms")


def test_images_are_normed_as_the_processor_of_the_folder_says(omni: Path, tmp_path: Path) -> None:
    """In omni models the tower does not norm its input."""
    given = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1.0]}
    (omni / "preprocessor_config.json").write_text(json.dumps(given))
    made = imported(omni, tmp_path / "run")
    assert made.run is not None
    pixels = made.run.modules["vision"].model.pixels
    assert pixels is not None
    assert (pixels.mean, pixels.std) == ((0.5, 0.5, 0.5), (0.25, 0.5, 1.0))
    exported(made, tmp_path / "back")
    assert_same_folder(omni, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text()) == given


def test_a_model_of_braid_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Without the folder that it came from, as if it were braid's own; transformers computes the same of it."""
    theirs = their_omni(FINAL_NORM, torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    made = imported(tmp_path / "theirs", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "hub")
    notes = exported(made, tmp_path / "ours", model_type="nemotron_h_omni")
    assert any("video path" in note for note in notes)
    again = imported(tmp_path / "ours", tmp_path / "again")
    assert made.run is not None
    assert again.run is not None
    assert again.run.modules["vision"] == made.run.modules["vision"]
    assert again.run.model == made.run.model
    one, other = weights(made), weights(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    load = transformers.AutoModelForMultimodalLM.from_pretrained
    loaded = load(tmp_path / "ours", experts_implementation="eager").eval()
    pictures = images([(2, 4), (6, 2)], PATCH)
    given = prepare(made.run.modules["vision"].model, pictures, torch.float32)
    tokens = rows_with([[(2, 4), (6, 2)]]).tokens_BT
    with torch.no_grad():
        logits = [model(tokens, use_cache=False, **given).logits for model in (loaded, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_a_final_norm_that_files_leave_out_is_the_identity(tmp_path: Path) -> None:
    """As transformers reads them: published files have none."""
    from safetensors.torch import load_file, save_file

    their_omni(FINAL_NORM, torch.float32).save_pretrained(tmp_path / "omni")
    file = tmp_path / "omni" / "model.safetensors"
    held = {name: t for name, t in load_file(file).items() if "vision_final_layernorm" not in name}
    save_file(held, file, {"format": "pt"})
    made = imported(tmp_path / "omni", tmp_path / "run")
    ours = weights(made)
    assert torch.equal(ours["modules.vision.final_norm.weight"], torch.ones(12))
    assert torch.equal(ours["modules.vision.final_norm.bias"], torch.zeros(12))
    exported(made, tmp_path / "back")
    assert SafetensorsFolder(tmp_path / "back").keys() - held.keys() == {
        "vision_final_layernorm.weight",
        "vision_final_layernorm.bias",
    }


# ------------------------------------------------------------------------------------- an encoder alone


@pytest.mark.parametrize("changes", [{}, {"video_temporal_patch_size": 2}, {"use_swiglu_ffn": True}])
def test_an_encoder_alone_comes_back_byte_for_byte(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = their_radio(torch.float32, **changes)
    theirs.save_pretrained(tmp_path / "radio")
    made = imported(tmp_path / "radio", tmp_path / "run")
    assert made.run is None
    # Files have other names and layouts than the model in memory, which parity is shown with.
    ours, given = weights(made), theirs.state_dict()
    memory = to_ours(given, given, composite_of(theirs))
    assert ours.keys() == memory.keys()
    assert all(torch.equal(ours[name], memory[name]) for name in ours)
    assert all(name.startswith("modules.vision.") for name in ours)
    exported(made, tmp_path / "back")
    assert_same_folder(tmp_path / "radio", tmp_path / "back")


def test_an_encoder_comes_out_of_a_model_with_images(omni: Path, tmp_path: Path) -> None:
    made = imported(omni, tmp_path / "run")
    notes = exported(made, tmp_path / "radio", module="vision")
    assert notes == ("left out: modules.vision.projector, which an encoder of type radio does not have",)
    model = transformers.AutoModel.from_pretrained(tmp_path / "radio").eval()
    whole = transformers.AutoModelForMultimodalLM.from_pretrained(omni).vision_model.eval()
    assert made.run is not None
    given = prepare(made.run.modules["vision"].model, images([(3, 2), (7, 5)], PATCH), torch.float32)
    model.make_preprocessor_external()
    with torch.no_grad():
        found = [each(*given.values()).features for each in (model, whole)]
    torch.testing.assert_close(*found)
    # And it goes back in, as the module of a run that has no language model.
    again = weights(imported(tmp_path / "radio", tmp_path / "again"))
    tower = {name: each for name, each in weights(made).items() if name in again}
    assert len(tower) == len(again)
    assert all(torch.equal(again[name], tower[name]) for name in again)


def test_an_encoder_without_layer_scale_in_its_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    their_radio(torch.float32, layerscale_value=1.0).save_pretrained(tmp_path / "radio")
    file = tmp_path / "radio" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "layer_scale" not in n}, file, {"format": "pt"})
    made = imported(tmp_path / "radio", tmp_path / "run")
    assert not any(".scale." in name for name in weights(made))
    exported(made, tmp_path / "back")
    assert_same_folder(tmp_path / "radio", tmp_path / "back")
    config = config_in(tmp_path / "radio") | {"layerscale_value": 0.5}
    with pytest.raises(ConfigError, match=r"layerscale_value = 0\.5: the files have no layer_scale tensors"):
        read_composite(config, SafetensorsFolder(tmp_path / "radio"), {})


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("downsample_ratio", 0.25, r"downsample_ratio = 0\.25: braid has 0\.5"),
        ("image_token_id", None, "image_token_id"),
        ("vision_hidden_size", 13, r"vision_hidden_size = 13: contradicts vision_config\.hidden_size = 12"),
        ("twist", 1, "twist = 1: braid does not know this setting"),
        ("vision_config.hidden_act", "relu", r"vision_config\.hidden_act = 'relu': braid has 'gelu' or"),
        ("vision_config.drop_path_rate", 0.1, r"vision_config\.drop_path_rate = 0\.1"),
        ("vision_config.num_channels", 4, r"vision_config\.num_channels = 4: braid has 3 or 1"),
        ("vision_config.norm_std", [1.0], r"vision_config\.norm_std = \[1\.0\]: must be 3 numbers"),
        ("vision_config.model_type", "siglip", r"vision_config\.model_type = 'siglip'"),
        ("vision_config.twist", 1, r"vision_config\.twist = 1"),
        ("text_config.attention_bias", True, r"text_config\.attention_bias = True"),
    ],
)
def test_what_braid_cannot_express_is_refused_by_name(name: str, value: Any, rule: str) -> None:
    theirs = their_omni("nemotron_h_omni", torch.float32)
    config = json.loads(theirs.config.to_json_string(use_diff=False))
    at, _, inner = name.rpartition(".")
    (config[at] if at else config)[inner] = value
    with pytest.raises(ConfigError, match=rule):
        read_composite(config, theirs.state_dict(), {})


def test_all_tensors_that_do_not_fit_are_told_at_once(omni: Path, tmp_path: Path) -> None:
    config = config_in(omni)
    config["vision_config"]["num_hidden_layers"] = 1
    config["text_config"]["layers_block_type"] += ["mlp"]
    (omni / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        imported(omni, tmp_path / "run")
    told = str(error.value)
    assert "missing  language_model.backbone.layers.5.norm.weight" in told
    assert "extra    vision_model.radio_model.model.blocks.1.norm1.weight" in told
    assert "\n  set   a config.json" in told


def test_a_norming_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    their_radio(torch.float32).save_pretrained(tmp_path / "radio")
    config = config_in(tmp_path / "radio") | {"norm_mean": [0.5, 0.5, 0.5]}
    (tmp_path / "radio" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"norm_mean is .*, and config\.json says"):
        imported(tmp_path / "radio", tmp_path / "run")


def test_exports_that_have_no_place_for_a_model(omni: Path, tmp_path: Path) -> None:
    made = imported(omni, tmp_path / "run")
    with pytest.raises(ConfigError, match="--module sound: there is no such module"):
        exported(made, tmp_path / "a", module="sound")
    with pytest.raises(ConfigError, match="--optimizer: folders of nemotron_h_omni hold weights alone"):
        exported(made, tmp_path / "b", optimizer=True)
    with pytest.raises(ConfigError, match="an encoder by itself is written as radio"):
        exported(made, tmp_path / "c", module="vision", model_type="llama")
    their_omni(FINAL_NORM, torch.float32).save_pretrained(tmp_path / "normed")
    normed = imported(tmp_path / "normed", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"this model is no radio: 1 field\n.*final_norm = True: .*\n  set "):
        exported(normed, tmp_path / "d", module="vision")
