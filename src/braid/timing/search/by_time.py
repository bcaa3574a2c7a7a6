"""The meshes of a search with their pipelines cut by predicted time, where that is faster and fits."""

from __future__ import annotations

from collections.abc import Sequence

from braid.timing.search.simulate import Setting, Timed, timed
from braid.timing.split import split_by_time


def cut_by_time(setting: Setting, found: Sequence[Timed], limit: int) -> list[Timed]:
    """The same candidates, the fastest first. Ranks with several segments in order keep their cut."""
    return sorted((_faster(setting, each, limit) for each in found), key=lambda each: each.seconds)


def _faster(setting: Setting, found: Timed, limit: int) -> Timed:
    shape, world = found.choice.shape, setting.space.world
    if found.choice.mesh.pp == 1 or (shape.segments > 1 and not shape.dual):
        return found
    cut = split_by_time(found.run, world, setting.cluster, setting.calibration, load=setting.load, limit=limit)
    if not cut.fits or cut.seconds >= cut.before:
        return found
    other = timed(setting, found.choice, cut.run)
    return other if other.seconds < found.seconds and other.peak <= limit else found
