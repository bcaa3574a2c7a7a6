"""Rotary positions in a config.json: read into, and written from, the fields of an attention shape.

Newer files hold one object `rope_parameters`; older ones hold `rope_theta`, `partial_rotary_factor` and an
object `rope_scaling`. Both are read, the newer is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from braid.architecture import Attention, LatentAttention, Yarn
from braid.interchange.settings import Settings

KNOWN = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings")
YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What a file says about rotary positions."""

    base: float
    fraction: float
    scaling: Yarn | None


def read_rope(
    settings: Settings, *, base: float = 10_000.0, fraction: float = 1.0, inert: tuple[str, ...] = ()
) -> Rope:
    """`base` and `fraction` are the family's defaults; `inert` are entries without effect in this family."""
    older = settings.table("rope_scaling")
    outside = {"rope_theta": settings.number("rope_theta", base)}
    outside["partial_rotary_factor"] = settings.number("partial_rotary_factor", fraction)
    newer = settings.table("rope_parameters")
    for name in outside.keys() & newer.keys():
        settings.repeats(name, newer[name], f"rope_parameters.{name}")
    given = {**outside, **newer, **older}
    kind = str(given.get("rope_type", given.get("type", "default")))
    known = {*KNOWN, *inert, *{"yarn": YARN, "llama3": LLAMA3}.get(kind, ())}
    for name in sorted(given.keys() - known):
        settings.refuse(f"rope_parameters.{name}", given[name], f"unknown where rope_type is {kind!r}")
    scaling = None
    match kind:
        case "yarn":
            scaling = _yarn(settings, given)
        case "llama3":
            scaling = _llama3(settings, given)
        case "default":
            pass
        case _:
            settings.refuse("rope_parameters.rope_type", kind, "braid has 'default', 'llama3' and 'yarn'")
    return Rope(
        base=_number(settings, given, "rope_theta"),
        fraction=_number(settings, given, "partial_rotary_factor"),
        scaling=scaling,
    )


def _yarn(settings: Settings, given: Mapping[str, Any]) -> Yarn:
    mscale, all_dim = (_number(settings, given, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        settings.refuse("rope_parameters.mscale_all_dim", all_dim, "needs mscale beside it")
    if given.get("attention_factor") is not None:
        settings.refuse("rope_parameters.attention_factor", given["attention_factor"], "braid has None")
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        settings.refuse("rope_parameters.truncate", truncate, "must be true or false")
    both = bool(mscale and all_dim)
    return Yarn(
        factor=_number(settings, given, "factor"),
        original_tokens=_original(settings, given),
        beta_fast=_number(settings, given, "beta_fast", 32.0),
        beta_slow=_number(settings, given, "beta_slow", 1.0),
        mscale=mscale if both else 1.0,
        mscale_all_dim=all_dim if both else 0.0,
        truncate=truncate is True,
    )


def _llama3(settings: Settings, given: Mapping[str, Any]) -> Yarn:
    return Yarn(
        factor=_number(settings, given, "factor"),
        original_tokens=_original(settings, given),
        beta_fast=_number(settings, given, "high_freq_factor"),
        beta_slow=_number(settings, given, "low_freq_factor"),
        ramp="rotations",
        mscale=0.0,
    )


def _number(settings: Settings, given: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number; the default, if there is one, stands for null and, as in transformers, for 0."""
    value = given.get(name)
    if default is not None and value in (None, 0):
        return default
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    settings.refuse(f"rope_parameters.{name}", value, "must be a number")
    return 1.0


def _original(settings: Settings, given: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    if given.get(name) is None:
        return settings.integer("max_position_embeddings")
    value = _number(settings, given, name)
    if not value.is_integer():
        settings.refuse(f"rope_parameters.{name}", value, "must be a whole number")
        return 1
    return int(value)


def write_rope(shape: Attention | LatentAttention) -> dict[str, Any]:
    """`rope_parameters` of an attention shape, all of whose channels turn."""
    parameters: dict[str, Any] = {"rope_theta": shape.rope_base, "rope_type": "default"}
    scaling = shape.rope_scaling
    if scaling is None:
        return parameters
    parameters |= {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_tokens}
    if scaling.ramp == "rotations":
        high, low = scaling.beta_fast, scaling.beta_slow
        return parameters | {"rope_type": "llama3", "high_freq_factor": high, "low_freq_factor": low}
    parameters |= {"rope_type": "yarn", "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.mscale_all_dim:
        parameters |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    if not scaling.truncate:
        parameters["truncate"] = False
    return parameters
