"""Models in from folders of the Hugging Face hub: `from_hf`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from braid.architecture import SHAPE_OF, Model, Trunk
from braid.errors import ConfigError
from braid.interchange import (
    bamba,
    deepseek,
    deepseek_v4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mamba,
    megatron,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from braid.interchange.family import ModelFamily
from braid.interchange.files import CONFIG, SafetensorsFolder, read_json
from braid.interchange.quantized import Dequantized, Quantization, read_quantization
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, folded
from braid.interchange.trained import to_ours
from braid.pattern import parse

FAMILIES = (
    *llama.FAMILIES,
    *mamba.FAMILIES,
    *bamba.FAMILIES,
    *qwen3_next.FAMILIES,
    *qwen3_5.FAMILIES,
    *olmo_hybrid.FAMILIES,
    *deepseek.FAMILIES,
    *deepseek_v4.FAMILIES,
    *gpt_oss.FAMILIES,
    *glm4_moe.FAMILIES,
    *granite.FAMILIES,
)


def family_of(model_type: str) -> ModelFamily:
    """The family with this `model_type`."""
    families = {family.model_type: family for family in FAMILIES}
    named = families | {family.text_type: family for family in FAMILIES if family.text_type}
    if model_type not in named:
        raise ConfigError(f"braid has no adapter for model_type {model_type!r}\n  known  {', '.join(families)}")
    return named[model_type]


def adapter_for(
    model_type: str, form: str = "hub", *, experts: megatron.Experts = "stacked", interleave: int = 0
) -> Adapter:
    """The table of a family. A Hugging Face family has the forms `hub` (files), `memory` (state_dict) and
    `packed` (the same, with experts one below the other). `megatron` has `indexed`, `hybrid` and `stacked`,
    each with the layouts of `megatron.Experts`, and with gate and up interleaved or not."""
    if model_type == "megatron":
        forms: Mapping[str, Adapter] = {
            name: megatron.adapter(name, experts, interleave=interleave) for name in megatron.DEPTH_LAYERS
        }
    else:
        family = family_of(model_type)
        forms = {"hub": family.hub, "memory": family.memory, "packed": folded(family.memory)}
    if form not in forms:
        raise ConfigError(f"{model_type} has no form {form!r}: {', '.join(forms)}")
    return forms[form]


def reader_of(family: ModelFamily) -> Adapter:
    """The table for files of a family in any form: somebody may have saved a state_dict."""
    return replace(family.hub, others=(family.memory, folded(family.memory), *family.hub.others))


# ------------------------------------------------------------------------------------------------- in


def from_hf(folder: Path, *, mtp_depths: int = 0) -> tuple[Model, Mapping[str, Tensor]]:
    """The shape of a model in a folder of the hub, and its weights by canonical name, read when asked for.

    Multi-token prediction is left out unless `mtp_depths` says how many depths the files hold.
    """
    read = described(folder, mtp_depths=mtp_depths)
    files = read.stored(folder)
    return read.shape, to_ours(files, reader_of(read.family), read.shape, outlines=files.outlines()).tensors


class HubConfig(NamedTuple):
    """What a config.json says."""

    family: ModelFamily
    shape: Model
    quantization: Quantization | None
    notes: tuple[str, ...]
    """What a user should know about settings that are accepted."""

    def stored(self, folder: Path) -> SafetensorsFolder | Dequantized:
        """The weights of the folder, widened if they are quantised."""
        files = SafetensorsFolder(folder)
        return files if self.quantization is None else Dequantized(files, self.quantization)


def described(
    folder: Path, *, model_type: str | None = None, mtp_depths: int = 0, ignore: Collection[str] = ()
) -> HubConfig:
    """What the config.json of a folder describes. `model_type` takes the place of its own; `ignore` names
    settings to leave unread."""
    config = read_json(folder / CONFIG, ConfigError)
    config |= {} if model_type is None else {"model_type": model_type}
    return read_config(config, mtp_depths=mtp_depths, ignore=ignore)


def shape_of(family: ModelFamily, config: Mapping[str, Any], *, mtp_depths: int = 0) -> Model:
    """The shape that a config.json describes, or an error with every reason why braid cannot express it."""
    return read_config({**config, "model_type": family.model_type}, mtp_depths=mtp_depths).shape


def read_config(config: Mapping[str, Any], *, mtp_depths: int = 0, ignore: Collection[str] = ()) -> HubConfig:
    family = _family_in(config)
    given = family.language_config(config)
    settings = Settings(given, ignore=ignore)
    if any(name in config for name in family.vision):
        settings.note("the language model alone is imported: vision is left out")
    shape = family.read(settings)
    if "architectures" not in ignore:
        classes = (family.architecture, *family.also)
        check_architecture(settings, classes, config.get("architectures"), "language models")
    read = [read_quantization(each) for each in settings.scopes()]
    quantization = next((found for found in read if found is not None), None)
    if (held := given.get(family.depths_setting)) and not mtp_depths:
        remedy = f"--mtp-depths {held} keeps it" if family.depth else "braid has no names for it here"
        settings.note(f"{family.depths_setting} = {held}: multi-token prediction is left out; {remedy}")
    if mtp_depths and not family.depth:
        raise ConfigError(f"--mtp-depths {mtp_depths}: {family.model_type} has no such depths, leave it out")
    settings.close(family.model_type)
    shape = without_unused(replace(shape, pattern=shape.pattern + f"/{family.depth}" * mtp_depths))
    problems = list(shape.problems("model"))
    if problems:
        raise ConfigError(problems)
    return HubConfig(family, shape, quantization, tuple(settings.notes))


def _family_in(config: Mapping[str, Any]) -> ModelFamily:
    """The family that a config.json names."""
    remedy = "  set   braid import --model-type TYPE, if it is one of these under another name"
    if (model_type := config.get("model_type")) is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ConfigError(f"this config.json has no model_type\n  known  {known}\n{remedy}")
    try:
        return family_of(str(model_type))
    except ConfigError as error:
        raise ConfigError(f"{error}\n{remedy}") from error


def check_architecture(settings: Settings, classes: Sequence[str], named: Any, what: str) -> None:
    """Refuse a class of transformers that is none of these: a reward model or a classifier of the same family,
    say, which has no language-model head."""
    if named is None or (isinstance(named, list) and any(name in named for name in classes)):
        return
    rule = f"braid reads {what}, here {classes[0]}"
    settings.refuse("architectures", named, f"{rule}; --ignore architectures if it is one by another name")


AnyTrunk = TypeVar("AnyTrunk", bound=Trunk)


def without_unused(shape: AnyTrunk) -> AnyTrunk:
    """The shape without those of layers that its pattern does not have."""
    kinds = parse(shape.pattern).kinds()
    unused: dict[str, Any] = {name: None for kind, name in SHAPE_OF if kind not in kinds}
    return replace(shape, **unused)
