"""Experts leave a run in the layout in which they came: one tensor each, stacked, packed, or of every kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from braid.architecture import Model
from braid.interchange import adapter_for, config_of, convert, family_of, shape_of
from braid.interchange.files import CONFIG, INDEX
from braid.interchange.trained import targets
from braid.train.export_settings import ExportSettings
from braid.train.exporting import export_checkpoint
from braid.train.importing import ImportSettings, import_folder
from tests.interchange.models import CONFIGS, model_type
from tests.interchange.test_deepseek_v4 import SHAPE as DEEPSEEK_V4

transformers = pytest.importorskip("transformers")

CASES = (
    "qwen3_moe",
    "mixtral",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe",
    "gpt_oss",
    "kimi_k2, beta_fast = beta_slow, eps of its own",
)
FORMS = ("hub", "memory", "packed")
QUICK = ("qwen3_moe", "deepseek_v4", "gpt_oss")
"""Families that `make test` tries: usual names, names of their own, and packed experts on the hub."""
LONG = ((), (pytest.mark.long,))


def shape_with_depth(case: str) -> Model:
    """The shape of a case with experts, with multi-token prediction where its family has it."""
    if case == "deepseek_v4":
        return DEEPSEEK_V4
    name, settings = CONFIGS[case]
    config = getattr(transformers, f"{name}ForCausalLM").config_class(**settings).to_diff_dict()
    family = family_of(model_type(case))
    shape = shape_of(family, {key: value for key, value in config.items() if key != "time_step_limit"})
    return replace(shape, pattern=shape.pattern + (f"/{family.depth}" if family.depth else ""))


def theirs(shape: Model, family: str, form: str) -> dict[str, Tensor]:
    """Random tensors under the names of a form; `mixed` has stacked experts in every other layer that has
    experts."""
    draw = torch.Generator().manual_seed(4)
    ours = {
        name: torch.randn(target.shape, generator=draw).to(torch.bfloat16)
        for name, target in targets(shape, torch.bfloat16).items()
    }

    def written(form: str) -> Mapping[str, Tensor]:
        return convert(ours, adapter_for(family, form), shape, "to_theirs")

    if form != "mixed":
        return dict(written(form))
    each, stacked = dict(written("hub")), dict(written("memory"))
    layers = sorted({name.split(".mlp.")[0] for name in stacked.keys() - each.keys()})
    chosen = tuple(f"{layer}.mlp." for layer in layers[::2])
    kept = {name: tensor for name, tensor in each.items() if not name.startswith(chosen)}
    return kept | {name: tensor for name, tensor in stacked.items() if name.startswith(chosen)}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A folder as others write it: two files and their index."""
    folder.mkdir()
    names = sorted(tensors)
    files = {
        f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] if len(names) > 1 else names for n in (1, 2)
    }
    for file, inside in files.items():
        held = {name: tensors[name].contiguous().clone() for name in inside}
        save_file(held, folder / file, {"format": "pt"})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(config))


def stored(folder: Path) -> dict[str, tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *(pytest.param(case, form, marks=LONG[case not in QUICK]) for case in CASES for form in FORMS),
        ("qwen3_moe", "mixed"),
        ("glm4_moe", "mixed"),
    ],
)
def test_the_layout_that_came_in_goes_out(case: str, form: str, tmp_path: Path) -> None:
    """Also where multi-token prediction is left out, and a file lacks what it held of that."""
    shape, family = shape_with_depth(case), model_type(case)
    write(tmp_path / "hub", config_of(family_of(family), shape), theirs(shape, family, form))
    for depths in {0, len(shape.pattern.split("/")) - 1}:
        run, back = tmp_path / f"run{depths}", tmp_path / f"back{depths}"
        made = import_folder(tmp_path / "hub", run, ImportSettings(mtp_depths=depths))
        export_checkpoint(made.path, back, ExportSettings())
        before, after = stored(tmp_path / "hub"), stored(back)
        assert after.keys() <= before.keys()
        for name, (file, tensor) in after.items():
            assert file == before[name][0]
            assert tensor.dtype == before[name][1].dtype
            assert torch.equal(tensor, before[name][1])
        if "/" not in shape.pattern or depths:
            assert after.keys() == before.keys()
            for file in back.glob("*.safetensors"):
                assert file.read_bytes() == (tmp_path / "hub" / file.name).read_bytes()


def test_a_layout_that_is_asked_for_is_the_one_that_is_written(tmp_path: Path) -> None:
    shape = shape_with_depth("qwen3_moe")
    write(tmp_path / "hub", config_of(family_of("qwen3_moe"), shape), theirs(shape, "qwen3_moe", "memory"))
    made = import_folder(tmp_path / "hub", tmp_path / "run", ImportSettings())
    for experts, form in (("each", "hub"), ("stacked", "memory"), ("packed", "packed")):
        export_checkpoint(made.path, tmp_path / experts, ExportSettings(experts=experts))
        expected = theirs(shape, "qwen3_moe", form)
        found = {name: list(tensor.shape) for name, (_, tensor) in stored(tmp_path / experts).items()}
        assert found == {name: list(tensor.shape) for name, tensor in expected.items()}
