"""Folders of the hub with an encoder, out of a checkpoint: `composite_folder`.

As with language models, what was imported comes out as it went in, but for what training changed. Tensors that
an import has kept, because braid does not train them, are written back as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.architecture import Model, Trunk
from braid.encoders import Encoder
from braid.errors import ConfigError
from braid.interchange import radio
from braid.interchange.composite import (
    LANGUAGE,
    MODULE,
    NEMOTRON_H,
    OMNI,
    OMNI_CLASSES,
    OMNI_HUB,
    OMNI_MEMORY,
    SIDE,
    VISION_MODEL,
    Composite,
    Part,
    read_composite,
)
from braid.interchange.convert import Lazy
from braid.interchange.export import (
    TRAINING_FIELDS,
    FileForm,
    as_written,
    check_nothing_lost,
    config_of,
    dtype_setting,
    model_fields,
)
from braid.interchange.family import TEXT_CONFIG
from braid.interchange.files import FolderPlan, plan_folder
from braid.interchange.hub import adapter_for, reader_of, without_unused
from braid.interchange.settings import HARMLESS
from braid.interchange.side_files import Source
from braid.interchange.spelling import spelled
from braid.interchange.tables import NameLink, beneath, check_fit, links
from braid.pattern import parse

FRAMES = 2
"""Frames in a patch of the video path, which the type has in any case."""
FREE = TRAINING_FIELDS | {"positions.jitter"}


@dataclass(frozen=True, kw_only=True)
class CompositeModel:
    """A model with an encoder, or an encoder alone."""

    language: Model | None
    encoder: Encoder
    module: str = MODULE
    """The name of the encoder in the checkpoint."""
    token: int = 0

    @property
    def model_type(self) -> str:
        return radio.MODEL_TYPE if self.language is None else OMNI

    @property
    def depths(self) -> int:
        return 0 if self.language is None else len(parse(self.language.pattern).mtp)

    @property
    def stated_depths(self) -> int:
        """What config.json says of MTP depths: their number decides whether the tower has a final norm, so it
        is stated for that alone, too. transformers writes such files itself, as it has no depths."""
        return self.depths or int(self.encoder.final_norm)

    @property
    def parts(self) -> tuple[Part, ...]:
        """With the tables that read any form."""
        at = f"modules.{self.module}."
        if self.language is None:
            return (Part(prefix=at, shape=self.encoder, adapter=replace(radio.HUB, others=(radio.MEMORY,))),)
        text = beneath(reader_of(NEMOTRON_H), LANGUAGE)
        tower = replace(OMNI_HUB, others=(OMNI_MEMORY,))
        return (
            Part(prefix="", shape=self.language, adapter=text),
            Part(prefix=at, shape=self.encoder, adapter=tower),
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The folder that a model was imported from, with what its side files say."""

    source: Source
    kept: Mapping[str, Tensor]
    """Tensors that are no part of the model."""
    processor: Mapping[str, Any]


def composite_folder(
    model: CompositeModel,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    form: str | None = None,
    dtype: torch.dtype,
    settings: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
    outlines: Mapping[str, Tensor],
    as_stored: bool = False,
) -> FolderPlan:
    """The folder of a model. `tensors` go by canonical names; those of a projector have no place in a folder of
    an encoder alone. The other arguments are those of `hub_folder`."""
    shards: Mapping[str, str] = {} if origin is None else origin.source.shards
    stored = origin.source.dtypes if origin is not None and as_stored else MappingProxyType({})
    files = FileForm(dtype=dtype, dtypes=stored, shards=shards)
    source = None if origin is None else origin.source
    tables = [(part, _table(part, form, source)) for part in model.parts]
    config = _config(model, {link.theirs for _, table in tables for link in table}, origin, settings or {})
    if not stored:
        config |= dtype_setting(config, dtype)
    weights: dict[str, Any] = {}
    drawn: dict[str, Tensor] = {}
    for part, table in tables:
        own = {name for link in table for name in link.ours}
        every = [n for n in tensors if (n.startswith(part.prefix) if part.prefix else "modules." not in n)]
        names = {n.removeprefix(part.prefix) for n in every}
        if model.language is None:
            names = {name for name in names if name in own or not name.startswith("projector.")}
        held = Lazy({n: partial(tensors.__getitem__, part.prefix + n) for n in sorted(names)})
        seen = {n: outlines[part.prefix + n] for n in names}
        written, shapes = as_written(held, seen, table, part.adapter, part.shape, files)
        weights |= {name: partial(written.__getitem__, name) for name in written}
        drawn |= shapes
    for name, tensor in _besides(model, config, origin).items():
        weights[name], drawn[name] = partial(_given, tensor), tensor.to("meta")
    beside = next((shards[name] for name in drawn if name in shards), "")
    places = {name: shards.get(name, beside) for name in drawn} if shards else {}
    return plan_folder(folder, config, Lazy(weights), outlines=drawn, shards=places)


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _table(part: Part, form: str | None, source: Source | None) -> list[NameLink]:
    """The links of a part: those by which an import has read the source, or those of a form."""
    check_fit(part.adapter, part.shape)
    if source is not None and form is None:
        held = {name: torch.empty((0,) * source.dims.get(name, 0), device="meta") for name in source.shards}
        return [link for told in spelled(part.adapter, part.shape, held) for link in told]
    if part.prefix:
        return list(links(replace(part.adapter, others=()), part.shape))
    return list(links(beneath(adapter_for(NEMOTRON_H.model_type, form or "hub"), LANGUAGE), part.shape))


def _besides(model: CompositeModel, config: Mapping[str, Any], origin: Origin | None) -> dict[str, Tensor]:
    """Tensors that are no weights of the model: those of the source, or constants. The norming of pixels is
    that of the model, if it has changed since."""
    if model.language is not None:
        summary = radio.constants(model.encoder, config["vision_config"])[radio.SUMMARY[0]]
        return {VISION_MODEL + radio.SUMMARY[0]: summary} if origin is None else dict(origin.kept)
    if origin is None:
        return radio.constants(model.encoder, config)
    now = radio.norming(model.encoder)
    return {
        name: tensor
        if name not in now or torch.allclose(tensor.float(), now[name].to(tensor.dtype).float(), rtol=1e-3)
        else now[name].to(tensor.dtype)
        for name, tensor in origin.kept.items()
    }


# -------------------------------------------------------------------------------------------------- settings


def _config(
    model: CompositeModel, tensors: Collection[str], origin: Origin | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json: that of the source where it describes the model, else a new one. What the type has no
    place for is an error that lists every field."""
    fresh = _fresh(model, {} if origin is not None else settings)
    check_nothing_lost(
        model.model_type, _lost(model, read_composite(fresh, tensors, {}, mtp_depths=model.depths))
    )
    if origin is None:
        return fresh
    kept = {name: value for name, value in origin.source.config.items() if name != "quantization_config"}
    for config in (_with_depths(kept, model), _updated(kept, fresh)):
        if _says(config, model, tensors, origin):
            return config
    return {name: value for name, value in kept.items() if name in HARMLESS} | fresh


def _fresh(model: CompositeModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    tower = {"model_type": radio.MODEL_TYPE, **radio.write_trunk(model.encoder)}
    if model.language is None:
        return {"architectures": [radio.ARCHITECTURE], **tower}
    text = {**config_of(NEMOTRON_H, model.language), **settings}
    text[NEMOTRON_H.depths_setting] = model.stated_depths
    return {
        "architectures": [OMNI_CLASSES[0]],
        "model_type": OMNI,
        TEXT_CONFIG: text,
        "vision_config": tower | {"video_temporal_patch_size": FRAMES},
        "audio_config": None,
        "downsample_ratio": 1 / SIDE,
        "projector_hidden_size": model.encoder.projector.ffn,
        "vision_hidden_size": model.encoder.hidden,
        "video_temporal_patch_size": FRAMES,
        "image_token_id": model.token,
    }


def _with_depths(config: Mapping[str, Any], model: CompositeModel) -> dict[str, Any]:
    """The source's settings, with as many MTP depths as are to be stated."""
    for name in (TEXT_CONFIG, "llm_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            stated = inner.get(NEMOTRON_H.depths_setting) or 0
            if stated != model.depths and bool(stated) != bool(model.stated_depths):
                return {**config, name: {**inner, NEMOTRON_H.depths_setting: model.stated_depths}}
    return dict(config)


def _updated(config: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The source's settings under what a new config.json says, object by object; sound stays."""
    merged = {**config, **{n: v for n, v in fresh.items() if n not in ("architectures", "audio_config")}}
    for name, value in fresh.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            merged[name] = {**config[name], **value}
    return merged


def _says(config: Mapping[str, Any], model: CompositeModel, tensors: Collection[str], origin: Origin) -> bool:
    """Whether a config.json describes this model."""
    ignored = [name for name in origin.source.ignored if name in config or "." in name]
    try:
        found = read_composite(config, tensors, origin.processor, mtp_depths=model.depths, ignore=ignored)
    except ConfigError:
        return False
    return not _lost(model, found)


def _lost(model: CompositeModel, found: Composite) -> list[str]:
    """Every field that differs from those of a config.json."""
    pairs: list[tuple[str, Trunk, Trunk]] = []
    encoder = model.encoder
    if model.language is not None and found.language is not None:
        pairs.append(("model", model.language, found.language.shape))
    else:  # what is behind the trunk has no place in the folder, but for a norm
        encoder = replace(encoder, group=found.shape.group, projector=found.shape.projector)
    pairs.append((f"modules.{model.module}.model", encoder, found.shape))
    lost = []
    for at, ours, theirs in pairs:
        one, other = model_fields(without_unused(ours)), model_fields(theirs)
        lost += [
            f"{at}.{name} = {one.get(name)!r}: a {model.model_type} has {other.get(name)!r}"
            for name in sorted({**one, **other})
            if name not in FREE and one.get(name) != other.get(name)
        ]
    if model.language is not None and model.token != found.token:
        lost.append(f"modules.{model.module}.token = {model.token}: a {model.model_type} has {found.token}")
    return lost
