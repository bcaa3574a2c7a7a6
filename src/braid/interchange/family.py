"""A family of models on the Hugging Face hub: its tables, and its config.json in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from braid.architecture import Model
from braid.errors import ConfigError
from braid.interchange.settings import HARMLESS, Settings
from braid.interchange.tables import Adapter, Copy, Shape, TableRow, rows

TEXT_CONFIG = "text_config"
"""Where a model with vision has the settings of its language model."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One `model_type`."""

    model_type: str
    text_type: str = ""
    """The `model_type` of the language model alone, where the family's own is that of a model with vision. An
    import takes both, an export writes this one."""
    vision: tuple[str, ...] = ()
    """Settings beside `text_config` that describe vision."""
    architecture: str
    """The class of transformers that config.json names."""
    also: tuple[str, ...] = ()
    """Other classes with the same weights and a language-model head."""
    hub: Adapter
    """The table of files on the hub: one tensor per expert."""
    memory: Adapter
    """The table of the model's state_dict in transformers, where experts are stacked."""
    read: Callable[[Settings], Model]
    write: Callable[[Model], Mapping[str, Any]]
    """Settings of a model; what they have no place for is found by reading them back."""
    depth: str = ""
    """The layers of an MTP depth of this family, as a pattern; empty where it has none."""
    depths_setting: str = "num_nextn_predict_layers"
    """The setting that counts MTP depths."""

    def language_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the language model alone. A model with vision has most of it in `text_config`."""
        if not self.text_type or TEXT_CONFIG not in config:
            return dict(config)
        outer = {name: value for name, value in config.items() if name not in (TEXT_CONFIG, *self.vision)}
        inner = config[TEXT_CONFIG]
        if not isinstance(inner, dict):
            raise ConfigError(f"{TEXT_CONFIG} = {inner!r}: must be an object")
        twice = sorted(name for name in outer.keys() & inner.keys() - HARMLESS if outer[name] != inner[name])
        if twice:
            told = [f"{n} = {outer[n]!r}: contradicts {TEXT_CONFIG}.{n} = {inner[n]!r}" for n in twice]
            raise ConfigError("\n  ".join([f"this {self.model_type} config.json contradicts itself", *told]))
        return outer | inner | {"model_type": self.text_type, "architectures": [self.architecture]}


Part = TypeVar("Part")


def needed(part: Part | None, name: str) -> Part:
    """A part of the shape without which the family has no settings to write."""
    if part is None:
        raise ConfigError(f"model.{name} is not set, and a model of this family has it")
    return part


def untied(shape: Shape) -> bool:
    return not shape.tied


def tied(shape: Shape) -> bool:
    return bool(shape.tied)


HEAD = "lm_head.weight"
"""What all families call the head, some of them under a prefix."""


def ends(embedding: str, final_norm: tuple[TableRow, ...], head: str = HEAD) -> tuple[TableRow, ...]:
    """Embedding, final norm and head."""
    return (*rows(embedding, "embedding.weight"), *final_norm, *rows(head, "head.weight", when=untied))


def head_copy(embedding: str, head: str = HEAD) -> tuple[Copy, ...]:
    """Where head and embedding are one, a file may hold both."""
    return (Copy(theirs=head, of=embedding, when=tied),)


def read_model(settings: Settings, *, eps: str = "rms_norm_eps", default_eps: float = 1e-6) -> dict[str, Any]:
    """The fields of `Model` that all families have."""
    return {
        "hidden": settings.integer("hidden_size"),
        "vocab": settings.integer("vocab_size"),
        "tied": settings.flag("tie_word_embeddings", False),
        "norm_eps": settings.number(eps, default_eps),
        "init_std": settings.number("initializer_range", 0.02),
    }


def write_model(shape: Model, *, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """The settings that all families have."""
    return {
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        eps: shape.norm_eps,
        "initializer_range": shape.init_std,
    }
