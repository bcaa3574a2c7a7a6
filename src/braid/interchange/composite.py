"""Folders that hold an encoder: a language model beside its encoder, or the encoder alone.

Every tensor of such a folder belongs to one part, or is kept: what braid does not train, such as an encoder of
sound, stays as it is and comes back with an export. Parts are converted by tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.architecture import Model, Trunk
from braid.encoders import Encoder, Pixels, Projector
from braid.errors import ConfigError
from braid.interchange import mamba, radio
from braid.interchange.convert import OTHER_TENSORS, Lazy, check
from braid.interchange.family import TEXT_CONFIG
from braid.interchange.files import CONFIG, read_json
from braid.interchange.hub import check_architecture, reader_of, without_unused
from braid.interchange.quantized import Quantization, read_quantization
from braid.interchange.settings import Settings
from braid.interchange.sliced import Renamed
from braid.interchange.tables import Adapter, beneath, rows
from braid.interchange.trained import examine

MODULE = "vision"
"""The name of the module that an import makes."""
OMNI = "nemotron_h_omni"
TYPES = (OMNI, radio.MODEL_TYPE)
"""What `model_type` such folders have."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model in the files."""

    prefix: str
    """Before its canonical names: empty for the language model."""
    shape: Trunk
    adapter: Adapter


@dataclass(frozen=True, kw_only=True)
class Composite:
    """What a config.json says of the parts of a folder."""

    model_type: str
    language: Part | None
    """None where the folder holds an encoder alone."""
    encoder: Part
    token: int = 0
    """The id of the placeholders of images."""
    filled: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that files may leave out, with the values that they then have."""
    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.encoder,) if self.language is None else (self.language, self.encoder)

    @property
    def shape(self) -> Encoder:
        assert isinstance(self.encoder.shape, Encoder)
        return self.encoder.shape

    def owner(self, name: str) -> Part | None:
        """The part to which a tensor of the files belongs; None if it is kept."""
        if is_kept(name):
            return None
        return self.language if self.language is not None and name.startswith(LANGUAGE) else self.encoder


# ------------------------------------------------------------------------------------------------ names

LANGUAGE, VISION_MODEL = "language_model.", "vision_model."
SOUND = ("audio_tower.", "embed_audio.", "sound_encoder.", "sound_projection.")
BESIDE = (*radio.VIDEO, *radio.SUMMARY, *radio.MEAN, *radio.STD)
KEPT = tuple(at + name for at in ("", VISION_MODEL) for name in BESIDE)


def is_kept(name: str) -> bool:
    """Whether a tensor is none of a model that braid trains."""
    return name.startswith(SOUND) or name in KEPT


def kept_notes(names: Collection[str]) -> list[str]:
    """What a user should know of weights that are kept."""
    found = {
        "sound": sum(name.startswith(SOUND) for name in names),
        "video": sum(name.endswith(radio.VIDEO) for name in names),
    }
    told = [f"{kind} ({count} tensor{'s' * (count > 1)})" for kind, count in found.items() if count]
    return [f"braid has the image path alone; kept as it is, for an export: {', '.join(told)}"] if told else []


def _projected(adapter: Adapter, projector: str) -> Adapter:
    """The tower of an omni model, with what is behind it."""
    tower = beneath(adapter, VISION_MODEL)
    ends = (
        *tower.ends,
        *rows(
            "vision_final_layernorm.{}",
            "final_norm.{}",
            radio.PARTS,
            when=radio.has_final_norm,
        ),
        *rows("{}.weight", "projector.{}.weight", projector),
    )
    return replace(tower, name=OMNI, ends=ends)


OMNI_HUB = _projected(radio.HUB, "mlp1.0:norm mlp1.1:up mlp1.3:out")
PROJECTOR = MappingProxyType({"norm": "layer_norm", "up": "linear_1", "out": "linear_2"})
OMNI_MEMORY = _projected(
    radio.MEMORY, " ".join(f"multi_modal_projector.{theirs}:{ours}" for ours, theirs in PROJECTOR.items())
)
FINAL_NORM: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"vision_final_layernorm.weight": torch.ones, "vision_final_layernorm.bias": torch.zeros}
)
"""Published files leave it out, and transformers fills in the identity."""
NEMOTRON_H = next(family for family in mamba.FAMILIES if family.model_type == "nemotron_h")

# --------------------------------------------------------------------------------------------- settings

LEGACY = MappingProxyType(
    {
        "img_context_token_id": "image_token_id",
        "video_context_token_id": "video_token_id",
        "sound_context_token_id": "audio_token_id",
        "llm_config": TEXT_CONFIG,
        "sound_config": "audio_config",
        "vit_hidden_size": "vision_hidden_size",
    }
)
"""Names of older config.json files."""
SIDE = 2
"""Pixel shuffle: 2 x 2 patches make a row."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where a folder says how images are prepared."""


def described(
    folder: Path,
    tensors: Collection[str],
    *,
    model_type: str | None = None,
    mtp_depths: int = 0,
    ignore: Collection[str] = (),
) -> Composite:
    """What the config.json of a folder describes, whose files hold these tensors."""
    config = read_json(folder / CONFIG, ConfigError)
    config |= {} if model_type is None else {"model_type": model_type}
    return read_composite(config, tensors, processor_of(folder), mtp_depths=mtp_depths, ignore=ignore)


def read_composite(
    config: Mapping[str, Any],
    tensors: Collection[str],
    processor: Mapping[str, Any],
    *,
    mtp_depths: int = 0,
    ignore: Collection[str] = (),
) -> Composite:
    """The parts that a config.json describes, or an error with every reason why braid cannot express it."""
    if config["model_type"] == radio.MODEL_TYPE:
        if mtp_depths:
            raise ConfigError(f"--mtp-depths {mtp_depths}: an encoder has no such depths, leave it out")
        found = _read_radio(Settings(config, ignore=ignore), config, tensors, ignore)
    else:
        found = _read_omni(
            Settings(_renamed(config), ignore=ignore), config, tensors, processor, mtp_depths, ignore
        )
    problems = [problem for part in found.parts for problem in part.shape.problems("model")]
    if problems:
        raise ConfigError(problems)
    return found


def _read_radio(
    settings: Settings, config: Mapping[str, Any], tensors: Collection[str], ignore: Collection[str]
) -> Composite:
    shape = radio.alone(radio.read_trunk(settings, tensors))
    if "architectures" not in ignore:
        check_architecture(settings, (radio.ARCHITECTURE,), config.get("architectures"), "encoders")
    settings.close(radio.MODEL_TYPE)
    reader = replace(radio.HUB, others=(radio.MEMORY,))
    return Composite(
        model_type=radio.MODEL_TYPE,
        language=None,
        encoder=Part(prefix=f"modules.{MODULE}.", shape=shape, adapter=reader),
        quantization=_quantization(settings),
    )


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by the names of today; one that has both keeps that of today, as in transformers."""
    named = {name: value for name, value in config.items() if name not in LEGACY}
    older = {LEGACY[name]: value for name, value in config.items() if name in LEGACY}
    return {**older, **named}


def _read_omni(
    settings: Settings,
    config: Mapping[str, Any],
    tensors: Collection[str],
    processor: Mapping[str, Any],
    mtp_depths: int,
    ignore: Collection[str],
) -> Composite:
    text, vision = settings.within(TEXT_CONFIG), settings.within("vision_config")
    for inner, kind in ((text, "nemotron_h"), (vision, radio.MODEL_TYPE)):
        inner.only_type(kind)
    language = NEMOTRON_H.read(text)
    depths = text.integer("num_nextn_predict_layers", 0)
    language = without_unused(replace(language, pattern=language.pattern + f"/{NEMOTRON_H.depth}" * mtp_depths))
    trunk = radio.read_trunk(vision, tensors)
    trunk["pixels"] = _normed(settings, trunk["pixels"], processor)
    # transformers counts rows of 2 x 2 patches, whatever the setting says.
    settings.only("downsample_ratio", 1 / SIDE, default=1 / SIDE)
    settings.repeats("vision_hidden_size", trunk["hidden"], "vision_config.hidden_size")
    frames = settings.integer("video_temporal_patch_size", 2)
    vision.repeats("video_temporal_patch_size", frames, "video_temporal_patch_size of the whole model")
    settings.unused(
        "video_pruning_rate", "video_token_id", "audio_token_id", "audio_config", "force_image_size"
    )
    shape = Encoder(
        **trunk,
        # Megatron gave all of its models a final norm where the language model has MTP depths.
        final_norm=depths > 0,
        group=SIDE**2,
        projector=Projector(
            width=language.hidden,
            ffn=settings.integer("projector_hidden_size", 4096),
            activation="relu2",
            bias=False,
            norm="rms",
        ),
    )
    token = settings.integer("image_token_id")
    if "architectures" not in ignore:
        check_architecture(settings, OMNI_CLASSES, config.get("architectures"), "models with images")
    if depths and not mtp_depths:
        settings.note(
            f"{TEXT_CONFIG}.num_nextn_predict_layers = {depths}: multi-token prediction is left out; "
            f"--mtp-depths {depths} keeps it"
        )
    settings.close(OMNI)
    absent = {} if not shape.final_norm else {n: make for n, make in FINAL_NORM.items() if n not in tensors}
    reader = beneath(reader_of(NEMOTRON_H), LANGUAGE)
    return Composite(
        model_type=OMNI,
        language=Part(prefix="", shape=language, adapter=reader),
        encoder=Part(
            prefix=f"modules.{MODULE}.",
            shape=shape,
            adapter=replace(OMNI_HUB, others=(OMNI_MEMORY,)),
        ),
        token=token,
        filled={name: make(shape.hidden) for name, make in absent.items()},
        quantization=_quantization(settings),
        notes=tuple(note for each in settings.scopes() for note in each.notes),
    )


OMNI_CLASSES = ("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3")
"""Classes of such models: that of transformers, and that of published files."""


def _quantization(settings: Settings) -> Quantization | None:
    return next((found for each in settings.scopes() if (found := read_quantization(each))), None)


def processor_of(folder: Path) -> Mapping[str, Any]:
    """How a folder says that images are prepared; empty where it does not."""
    for name in PROCESSORS:
        if (folder / name).is_file():
            found = read_json(folder / name, ConfigError)
            inner = found.get("image_processor", found)
            return inner if isinstance(inner, dict) else {}
    return {}


def _normed(settings: Settings, pixels: Pixels, processor: Mapping[str, Any]) -> Pixels:
    """Omni models leave the norming of pixels to whoever prepares images: a folder says so in a file of its
    own, and in vision_config where it has none."""
    for name in ("do_rescale", "do_normalize"):
        if processor.get(name, True) is not True:
            settings.refuse(f"{name} of {PROCESSORS[0]}", processor[name], "braid has True")
    if abs(float(processor.get("rescale_factor", 1 / 255)) * 255 - 1) > 1e-6:
        settings.refuse(f"rescale_factor of {PROCESSORS[0]}", processor["rescale_factor"], "braid has 1 / 255")
    mean, std = processor.get("image_mean", pixels.mean), processor.get("image_std", pixels.std)
    return replace(pixels, mean=tuple(map(float, mean)), std=tuple(map(float, std)))


# -------------------------------------------------------------------------------------------------- in


def to_ours(
    files: Mapping[str, Tensor], outlines: Mapping[str, Tensor], composite: Composite
) -> Mapping[str, Tensor]:
    """The tensors of all parts by canonical name, made when asked for. All that does not fit is one error."""
    makers: dict[str, Callable[[], Tensor]] = {}
    faults: list[str] = []
    contradictions: list[str] = []
    for part in composite.parts:
        own = {name: name for name in files if composite.owner(name) is part}
        extra = composite.filled if part is composite.encoder else {}
        seen: Mapping[str, Tensor] = {n: outlines[n] for n in own} | {n: t.to("meta") for n, t in extra.items()}
        held: Mapping[str, Tensor] = Renamed(files, own)
        if extra:
            held = Lazy(
                {**{n: partial(files.__getitem__, n) for n in own}, **{n: t.clone for n, t in extra.items()}}
            )
        found = examine(held, part.adapter, part.shape, outlines=seen)
        faults += found.faults
        if not faults:
            contradictions += found.contradictions(part.adapter, part.shape)
            ours = found.tensors(cast=False)
            makers |= {part.prefix + name: partial(ours.__getitem__, name) for name in ours}
    check(f"{composite.model_type} tensors do not fit the model's shape", faults, OTHER_TENSORS)
    check("these tensors contradict their config.json", contradictions + _other_norming(files, composite))
    return Lazy(makers)


def _other_norming(files: Mapping[str, Tensor], composite: Composite) -> list[str]:
    """Constants of the files that are not those of config.json. A narrow dtype has rounded them."""
    if composite.model_type != radio.MODEL_TYPE:
        return []
    return [
        f"{name} is {files[name].flatten().tolist()}, and config.json says {wanted.flatten().tolist()}"
        for name, wanted in radio.norming(composite.shape).items()
        if name in files
        and not files[name].is_meta
        and not torch.allclose(files[name].float(), wanted.to(files[name].dtype).float(), rtol=1e-3)
    ]


def language_of(composite: Composite) -> Model:
    assert composite.language is not None
    assert isinstance(composite.language.shape, Model)
    return composite.language.shape
