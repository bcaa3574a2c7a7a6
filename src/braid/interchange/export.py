"""Models out to folders of the Hugging Face hub: `to_hf`.

A model that was imported comes out as it went in, but for what training changed: settings of config.json that
braid has no field for, the layout of experts and the file of each tensor are those of its source.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braid.architecture import SHAPE_OF, Model, Trunk
from braid.errors import ConfigError
from braid.interchange.convert import Lazy, together
from braid.interchange.family import ModelFamily
from braid.interchange.files import FolderPlan, outlined, plan_folder, write_folder
from braid.interchange.hub import adapter_for, family_of, read_config, reader_of, shape_of, without_unused
from braid.interchange.settings import HARMLESS
from braid.interchange.side_files import Source
from braid.interchange.spelling import spelled
from braid.interchange.tables import Adapter, NameLink, check_fit, copies, links
from braid.interchange.trained import optimizer_state, targets
from braid.pattern import parse

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

OTHER_TYPE = "a --model-type whose models have these values (docs/interchange.md), or these values in the run"
"""What to do where a family has no place for a model."""

FORMS = ("hub", "memory", "packed")
OLDER_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_parameters")
DTYPE_KEYS = ("dtype", "torch_dtype")


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
    given: dict[str, Any] = {"model_type": model_type, "form": form, "dtype": dtype, "settings": settings}
    write_folder(hub_folder(shape, tensors, folder, updates=updates, **given))


def hub_folder(
    shape: Model,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    model_type: str,
    form: str | None = None,
    dtype: torch.dtype | None = None,
    settings: Mapping[str, Any] | None = None,
    source: Source | None = None,
    updates: int | None = None,
    outlines: Mapping[str, Tensor] | None = None,
    as_stored: bool = False,
) -> FolderPlan:
    """The folder that `to_hf` writes. `source` is the folder that the model was imported from; without a `form`
    experts lie as they did there. With `updates` the optimizer's state, which has made so many, is among the
    tensors and is written beside them. `outlines` are the tensors without numbers. `as_stored` gives each
    tensor the dtype that it had in the source."""
    family = family_of(model_type)
    if source is not None and source.config.get("model_type") not in (family.model_type, family.text_type):
        source = None
    shards = MappingProxyType[str, str]({}) if source is None else source.shards
    adapter = reader_of(family) if form is None else adapter_for(model_type, form)
    seen = outlined(tensors) if outlines is None else outlines
    config = config_of(family, shape) if source is None else _merged(family, shape, source)
    dtypes = source.dtypes if source is not None and as_stored else {}
    if not dtypes:  # else config.json says of its dtype what it said
        config |= dtype_setting(config, seen["embedding.weight"].dtype if dtype is None else dtype)
    config |= (settings or {}) if source is None else {}
    kept: dict[str, Any] = {"dtype": dtype, "updates": updates, "outlines": seen, "shards": shards}
    kept["dtypes"] = dtypes
    if source is not None and form is None:
        kept["table"] = stored_links(family, shape, source)
    return plan_trained(folder, config, tensors, adapter, shape, **kept)


def plan_trained(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    shape: Model,
    *,
    dtype: torch.dtype | None,
    updates: int | None,
    outlines: Mapping[str, Tensor] | None = None,
    shards: Mapping[str, str] = MappingProxyType({}),
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    table: Sequence[NameLink] | None = None,
) -> FolderPlan:
    """A model, and with `updates` the state of its optimizer, under the names of any adapter. `dtypes` are
    those of single tensors, in place of `dtype`; `table` are links in place of the adapter's."""
    seen = outlined(tensors) if outlines is None else outlines
    table = list(links(adapter, shape)) if table is None else table
    files = FileForm(dtype=dtype, dtypes=dtypes, shards=shards)
    weights, drawn = as_written(tensors, seen, table, adapter, shape, files)
    state = {} if updates is None else optimizer_state(tensors, table, shape, updates=updates)
    return plan_folder(folder, config, weights, outlines=drawn, optimizer=state, shards=shards)


class FileForm(NamedTuple):
    """How tensors lie in files."""

    dtype: torch.dtype | None
    """None leaves them as they are."""
    dtypes: Mapping[str, torch.dtype]
    """Of single tensors, in place of `dtype`."""
    shards: Mapping[str, str]
    """The file of each tensor, if they come from a folder."""


def as_written(
    tensors: Mapping[str, Tensor],
    outlines: Mapping[str, Tensor],
    table: Sequence[NameLink],
    adapter: Adapter,
    shape: Trunk,
    files: FileForm,
) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model as files hold them, and their outlines."""
    names = {link.theirs for link in table}
    repeatable = [pair for each in (adapter, *adapter.others) for pair in copies(each, shape).items()]
    repeated = {copy: of for copy, of in repeatable if copy in files.shards and of in names}

    def weights(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Their tensors, from ours or from outlines of ours."""
        kept = {n: partial(given.__getitem__, n) for n in given if not n.startswith("optimizer.")}
        theirs = together(Lazy(kept), table, narrowed=files.dtype is None)
        cast = (
            theirs
            if files.dtype is None
            else _cast(theirs, table, files.dtype, files.dtypes, adapter.wide, shape)
        )
        both = {n: partial(cast.__getitem__, n) for n in cast}
        return Lazy(both | {copy: partial(cast.__getitem__, name) for copy, name in repeated.items()})

    shapes = weights(outlines)
    return weights(tensors), {name: shapes[name] for name in shapes}


def stored_links(family: ModelFamily, shape: Model, source: Source) -> list[NameLink]:
    """The links by which an import has read the source: every layer's experts lie as they did. A language model
    that lay beside vision has the names that it has alone."""
    held = {name: torch.empty((0,) * source.dims.get(name, 0), device="meta") for name in source.shards}
    alone = [link for form in FORMS for link in links(adapter_for(family.model_type, form), shape)]
    names = {link.theirs for link in alone}
    renamed = {(link.ours, link.move): link for link in reversed(alone)}
    read = [link for told in spelled(reader_of(family), shape, held) for link in told]
    return [link if link.theirs in names else renamed[link.ours, link.move] for link in read]


def _cast(
    tensors: Mapping[str, Tensor],
    table: Sequence[NameLink],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    always_wide: str,
    shape: Trunk,
) -> Mapping[str, Tensor]:
    """Their tensors in a dtype, or in float32 where the adapter says that they are wide. What no optimizer
    updates, selection biases, stays as it is: the choice of experts hangs on small differences, and
    transformers keeps them in their own dtype too."""
    updated = {name for name, target in targets(shape, torch.float32).items() if target.updated}
    ours = {link.theirs: link.ours[0] for link in table}
    wide = torch.promote_types(dtype, torch.float32)

    def cast(name: str) -> Tensor:
        if ours[name] not in updated:
            return tensors[name]
        usual = wide if re.fullmatch(always_wide, ours[name]) else dtype
        return tensors[name].to(dtypes.get(name, usual))

    return Lazy({name: partial(cast, name) for name in tensors})


def config_of(family: ModelFamily, shape: Model) -> dict[str, Any]:
    """The config.json of a model. What the family has no place for is an error that lists every field."""
    check_fit(family.hub, shape)
    model_type = family.text_type or family.model_type
    config = {"architectures": [family.architecture], "model_type": model_type, **family.write(shape)}
    back = shape_of(family, config, mtp_depths=len(parse(shape.pattern).mtp))
    ours, theirs = model_fields(without_unused(shape)), model_fields(back)
    lost = [
        f"model.{name} = {ours.get(name)!r}: a {family.model_type} has {theirs.get(name)!r}"
        for name in sorted({**ours, **theirs})
        if name not in TRAINING_FIELDS and ours.get(name) != theirs.get(name)
    ]
    check_nothing_lost(family.model_type, lost)
    return config


def check_nothing_lost(model_type: str, lost: Sequence[str]) -> None:
    """Raise if a family has no place for these fields."""
    if lost:
        count = "1 field" if len(lost) == 1 else f"{len(lost)} fields"
        told = [f"this model is no {model_type}: {count}", *lost, f"set   {OTHER_TYPE}"]
        raise ConfigError("\n  ".join(told))


NESTED = (*dict(SHAPE_OF).values(), "hyper", "pixels", "positions", "projector")
"""Fields of a model that have fields of their own."""


def model_fields(shape: Trunk) -> dict[str, Any]:
    """Every field by its dotted name; the pattern as its layers alone, however they are grouped; fields with
    a default of None as what they mean."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(shape).items():
        if name in NESTED and value is not None:
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[name] = value
    if (attention := shape.attention) is not None:
        flat |= {"attention.o_bias": attention.has_o_bias, "attention.scale": attention.score_scale}
    if (latent := shape.latent_attention) is not None and latent.norm_eps is None:
        flat["latent_attention.norm_eps"] = shape.norm_eps
    if (net := shape.delta_net) is not None and net.gate_norm_eps is None:
        flat["delta_net.gate_norm_eps"] = shape.norm_eps
    layout = parse(shape.pattern)
    main = "".join(layer.kind.value for layer in layout.layers)
    return flat | {"pattern": "/".join([main, *(str(depth) for depth in layout.mtp)])}


def _merged(family: ModelFamily, shape: Model, source: Source) -> dict[str, Any]:
    """The config.json that a model came with, changed only where its shape has. It counts the MTP depths that
    are exported: an import may have left out those of the source."""
    config, depths = _described(family, shape, source), len(parse(shape.pattern).mtp)
    stated = config.get(family.depths_setting) or 0
    return config if stated == depths else {**config, family.depths_setting: depths}


def _described(family: ModelFamily, shape: Model, source: Source) -> dict[str, Any]:
    """The source's settings for a shape. Weights that were quantised have been widened, and of a model with
    vision there is the language model alone."""
    fresh, original = config_of(family, shape), family.language_config(source.config)
    kept = {name: value for name, value in original.items() if name != "quantization_config"}
    if _says(kept, shape, source.ignored):
        return kept
    merged = {name: value for name, value in kept.items() if name not in OLDER_ROPE} | fresh
    if _says(merged, shape, source.ignored):
        return merged
    return {name: value for name, value in kept.items() if name in HARMLESS} | fresh


def _says(config: Mapping[str, Any], shape: Model, ignored: Collection[str]) -> bool:
    """Whether a config.json describes this shape."""
    try:
        named = [name for name in ignored if name in config]
        found = read_config(config, mtp_depths=len(parse(shape.pattern).mtp), ignore=named).shape
    except ConfigError:
        return False
    ours, theirs = model_fields(without_unused(shape)), model_fields(found)
    return all(ours.get(name) == theirs.get(name) for name in {*ours, *theirs} - TRAINING_FIELDS)


def dtype_setting(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """The dtype of the files, under the key that config.json has for it."""
    return {next((key for key in DTYPE_KEYS if key in config), "dtype"): str(dtype).removeprefix("torch.")}
