"""Models in and out of folders of the Hugging Face hub: `from_hf` and `to_hf`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import SHAPE_OF, Model
from braid.errors import ConfigError
from braid.interchange import bamba, deepseek, deepseek_v4, llama, mamba, megatron, qwen3_next
from braid.interchange.convert import Lazy, convert
from braid.interchange.family import ModelFamily
from braid.interchange.files import CONFIG, SafetensorsFolder, read_json, write_folder
from braid.interchange.quantized import Dequantized, Quantization, read_quantization
from braid.interchange.settings import Settings
from braid.interchange.tables import Adapter, check_fit, folded, links
from braid.interchange.trained import targets, to_ours, to_theirs
from braid.pattern import parse

FAMILIES = (
    *llama.FAMILIES,
    *mamba.FAMILIES,
    *bamba.FAMILIES,
    *qwen3_next.FAMILIES,
    *deepseek.FAMILIES,
    *deepseek_v4.FAMILIES,
)

TRAINING_FIELDS = frozenset(
    {
        "dropout",
        "init_std",
        "mtp_loss",
        "moe.aux_loss",
        "moe.sequence_aux_loss",
        "moe.global_aux_loss",
        "moe.z_loss",
        "moe.capacity_factor",
        "moe.drop",
        "moe.pad_to_capacity",
        "moe.jitter",
        "moe.selection_bias_rate",
        "moe.router_dtype",
    }
)
"""Fields of `Model` that do not change what a trained model computes, and so need no place in a config.json."""


def family_of(model_type: str) -> ModelFamily:
    """The family with this `model_type`."""
    families = {family.model_type: family for family in FAMILIES}
    if model_type not in families:
        raise ConfigError(f"braid has no adapter for model_type {model_type!r}\n  known  {', '.join(families)}")
    return families[model_type]


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
    return replace(family.hub, others=(family.memory, folded(family.memory)))


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


def described(folder: Path, *, mtp_depths: int = 0, ignore: Collection[str] = ()) -> HubConfig:
    """What the config.json of a folder describes. `ignore` names settings to leave unread."""
    config = read_json(folder / CONFIG, ConfigError)
    return read_config(config, mtp_depths=mtp_depths, ignore=ignore)


def shape_of(family: ModelFamily, config: Mapping[str, Any], *, mtp_depths: int = 0) -> Model:
    """The shape that a config.json describes, or an error with every reason why braid cannot express it."""
    return read_config({**config, "model_type": family.model_type}, mtp_depths=mtp_depths).shape


def read_config(config: Mapping[str, Any], *, mtp_depths: int = 0, ignore: Collection[str] = ()) -> HubConfig:
    family = family_of(str(config.get("model_type")))
    settings = Settings(config, ignore=ignore)
    shape = family.read(settings)
    _check_architecture(settings, family, config.get("architectures"))
    quantization = read_quantization(settings)
    if (held := config.get("num_nextn_predict_layers")) and not mtp_depths:
        remedy = f"--mtp-depths {held} keeps it" if family.depth else "braid has no names for it here"
        settings.note(f"num_nextn_predict_layers = {held}: multi-token prediction is left out; {remedy}")
    if mtp_depths and not family.depth:
        settings.refuse("mtp_depths", mtp_depths, f"{family.model_type} has none")
    settings.close(family.model_type)
    shape = _without_unused(replace(shape, pattern=shape.pattern + f"/{family.depth}" * mtp_depths))
    problems = list(shape.problems("model"))
    if problems:
        raise ConfigError(problems)
    return HubConfig(family, shape, quantization, tuple(settings.notes))


def _check_architecture(settings: Settings, family: ModelFamily, named: Any) -> None:
    """Refuse a model that has no language-model head: a reward model or a classifier of the same family."""
    if named is None or family.architecture in named or any(name in named for name in family.also):
        return
    settings.refuse("architectures", named, f"braid reads language models, here {family.architecture}")


# ------------------------------------------------------------------------------------------------ out


def to_hf(
    shape: Model,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    model_type: str,
    form: str = "hub",
    dtype: torch.dtype | None = None,
    settings: Mapping[str, Any] | None = None,
    updates: int | None = None,
) -> None:
    """Write a model as a folder of the hub. `dtype` is that of its files, but for what is wide in every file;
    None leaves tensors as they are. `settings` adds what a shape does not know, such as
    `max_position_embeddings` and `eos_token_id`. With `updates` the optimizer's state, which has made so many,
    is among the tensors and is written beside them."""
    family, adapter = family_of(model_type), adapter_for(model_type, form)
    config = config_of(family, shape)
    named = tensors["embedding.weight"].dtype if dtype is None else dtype
    config |= {"dtype": str(named).removeprefix("torch."), **(settings or {})}
    write_trained(folder, config, tensors, adapter, shape, dtype=dtype, updates=updates)


def write_trained(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Model,
    *,
    dtype: torch.dtype | None,
    updates: int | None,
) -> None:
    """Write a model, and with `updates` the state of its optimizer, under the names of any table."""
    weights = {n: partial(tensors.__getitem__, n) for n in tensors if not n.startswith("optimizer.")}
    theirs = convert(Lazy(weights), adapter, shape, "to_theirs")
    state = {} if updates is None else to_theirs(tensors, adapter, shape, updates=updates)
    cast = theirs if dtype is None else _cast(theirs, dtype, adapter, shape)
    write_folder(folder, config, cast, optimizer=state)


def _cast(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, adapter: Adapter, shape: Model
) -> Mapping[str, Tensor]:
    """Their tensors in a dtype, or in float32 where the table says that they are wide. What no optimizer
    updates, selection biases, stays as it is: the choice of experts hangs on small differences, and
    transformers keeps them in their own dtype too."""
    updated = {name for name, target in targets(shape, torch.float32).items() if target.updated}
    ours = {link.theirs: link.ours[0] for link in links(adapter, shape)}
    wide = torch.promote_types(dtype, torch.float32)

    def cast(name: str) -> Tensor:
        if ours[name] not in updated:
            return tensors[name]
        return tensors[name].to(wide if re.fullmatch(adapter.wide, ours[name]) else dtype)

    return Lazy({name: partial(cast, name) for name in tensors})


def config_of(family: ModelFamily, shape: Model) -> dict[str, Any]:
    """The config.json of a model. What the family has no place for is an error that lists every field."""
    check_fit(family.hub, shape)
    config = {"architectures": [family.architecture], "model_type": family.model_type, **family.write(shape)}
    back = shape_of(family, config, mtp_depths=len(parse(shape.pattern).mtp))
    ours, theirs = _fields(_without_unused(shape)), _fields(back)
    lost = [
        f"model.{name} = {ours.get(name)!r}: a {family.model_type} has {theirs.get(name)!r}"
        for name in sorted({**ours, **theirs})
        if name not in TRAINING_FIELDS and ours.get(name) != theirs.get(name)
    ]
    if lost:
        count = "1 field" if len(lost) == 1 else f"{len(lost)} fields"
        raise ConfigError("\n  ".join([f"this model is no {family.model_type}: {count}", *lost]))
    return config


def _without_unused(shape: Model) -> Model:
    """The shape without those of layers that its pattern does not have."""
    kinds = parse(shape.pattern).kinds()
    unused: dict[str, Any] = {name: None for kind, name in SHAPE_OF if kind not in kinds}
    return replace(shape, **unused)


def _fields(shape: Model) -> dict[str, Any]:
    """Every field by its dotted name; the pattern as its layers alone, however they are grouped."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(shape).items():
        if name in (*dict(SHAPE_OF).values(), "hyper") and value is not None:
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[name] = value
    layout = parse(shape.pattern)
    main = "".join(layer.kind.value for layer in layout.layers)
    return flat | {"pattern": "/".join([main, *(str(depth) for depth in layout.mtp)])}
