"""What a search chooses: a mesh, segments per rank, micro-batches, recompute, sharding and schedule.

A choice changes neither the model nor the samples of a step, so it does not change what a run computes.
`meshes` enumerates meshes by divisors and the rules of planning, without a `Run` for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from braid.architecture import Model
from braid.choices import Recompute, Strategy, recomputed
from braid.config import Run
from braid.pattern import Kind, Layout, PatternError, compact, cut, cut_into, joined, parse
from braid.planning import divisibility, layouts, split
from braid.planning.divisibility import AxisSizes
from braid.planning.plan import block_costs
from braid.planning.split import Costs
from braid.schedule import DUAL_PIPE_V

MOST_CP = 16
"""The largest cp that is searched. tp goes up to the fast domain of a cluster."""
MOST_SEGMENTS = 4
"""The most segments of a rank that are searched."""
STRATEGIES: tuple[Strategy, ...] = ("none", "optimizer", "gradients", "all")


class MeshSizes(NamedTuple):
    """The parallel axes that are chosen; dp and edp follow."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int


class Shape(NamedTuple):
    """How a pipeline runs."""

    segments: int = 1
    """Of a rank."""
    dual: bool = False
    """DualPipeV, in place of (interleaved) 1F1B."""
    overlap: bool = False
    """Whether exchanges with experts overlap with another micro-batch."""

    @property
    def fine(self) -> bool:
        """Whether blocks with experts are split into phases."""
        return self.dual or self.overlap

    def name(self, pp: int) -> str:
        """As a table shows it."""
        plain = (
            "dual_pipe_v" if self.dual else "" if pp == 1 else "interleaved" if self.segments > 1 else "1f1b"
        )
        return " ".join(filter(None, (plain, "overlap" if self.overlap else ""))) or "in sequence"


class Choice(NamedTuple):
    """A candidate."""

    mesh: MeshSizes
    shape: Shape
    micro_batches: int
    recompute: tuple[Recompute, ...]
    shard: Strategy


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of a run on a number of ranks."""

    run: Run
    world: int
    most_tp: int
    """The largest tp: ranks of a fast domain."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names of options: `mesh.ep`."""

    # -------------------------------------------------------------------------------------- the model

    @cached_property
    def given(self) -> Layout:
        return parse(self.run.model.pattern)

    @cached_property
    def layout(self) -> Layout:
        """Without `|`."""
        return joined(self.given)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        return self.layout.kinds()

    def sample_flops(self) -> int:
        """FLOPs of one sequence in a step, the same for all candidates."""
        return 3 * (sum(self._block_costs.blocks) + self._block_costs.last)

    @cached_property
    def _block_costs(self) -> Costs:
        return block_costs(self.run, self.layout)

    @cached_property
    def _cuts(self) -> dict[tuple[int, int, bool], Layout | None]:
        return {}

    def cut(self, pp: int, shape: Shape) -> Layout | None:
        """The layers in the segments of a pipeline; None if there is no such cut. `|` of the pattern are kept
        where they make as many segments."""
        key = (pp, shape.segments, shape.dual)
        if key not in self._cuts:
            self._cuts[key] = self._cut(*key)
        return self._cuts[key]

    def _cut(self, pp: int, segments: int, dual: bool) -> Layout | None:
        count = pp * (2 if dual else segments)
        if count > len(self.layout.blocks):
            return None
        if count == 1 or len(self.given.segments) == count:
            return self.layout if count == 1 else self.given
        if segments == 1:
            pattern = str(self.layout)
            return layouts.layout_of(pattern, pp, folded=dual, costs=lambda _: self._block_costs)
        try:
            return cut(self.layout, count)
        except PatternError:
            return cut_into(self.layout, split.in_line(self._block_costs, count))

    def is_default_cut(self, pp: int, shape: Shape) -> bool:
        """Whether planning makes this cut by itself, so that the pattern need not say it."""
        count = pp * (2 if shape.dual else shape.segments)
        mine = len(self.given.segments)
        return mine == count or pp == 1 or (shape.segments == 1 and mine == 1)

    # ------------------------------------------------------------------------------------- dimensions

    def meshes(self) -> Iterator[tuple[MeshSizes, AxisSizes]]:
        """All meshes that fit the ranks and the model."""
        ranks = len(divisibility.ranks_of(self.run.mesh, self.world))
        experts = self.run.model.moe.experts if self.run.model.moe and Kind.MOE in self.kinds else 1
        for pp in self._values("mesh.pp", divisors(ranks, len(self.layout.blocks))):
            for tp in self._values("mesh.tp", divisors(ranks // pp, self.most_tp)):
                for cp in self._values("mesh.cp", divisors(ranks // pp // tp, MOST_CP)):
                    for ep in self._values("mesh.ep", divisors(experts)):
                        for etp in self._values("mesh.etp", divisors(ranks // pp, self.most_tp)):
                            sizes = MeshSizes(tp, cp, pp, ep, etp)
                            if (axes := self._axes(sizes)) is not None:
                                yield sizes, axes

    def _values(self, name: str, values: list[int]) -> list[int]:
        return values if name not in self.fixed else [self.fixed[name]] if self.fixed[name] in values else []

    def _axes(self, sizes: MeshSizes) -> AxisSizes | None:
        ranks = len(divisibility.ranks_of(self.run.mesh, self.world))
        if sizes.etp > 1 and (Kind.MOE not in self.kinds or sizes.etp > sizes.tp * sizes.cp):
            return None
        if ranks % (sizes.tp * sizes.cp * sizes.pp) or ranks // sizes.pp % (sizes.ep * sizes.etp):
            return None
        if self.run.data.sequence_tokens % (sizes.tp * sizes.cp):
            return None
        mesh = replace(self.run.mesh, **sizes._asdict(), overlap=False)
        if any(divisibility.fits(mesh, self.world)):
            return None
        axes = divisibility.axis_sizes(mesh, self.world)
        wrong = divisibility.layers(self.run.model, mesh, self.run.train.dtype, self.kinds, axes)
        return None if any(wrong) else axes

    def shapes(self, sizes: MeshSizes) -> list[Shape]:
        """The schedules of a mesh."""
        exchanges = sizes.ep * sizes.etp > 1
        segments = range(1, MOST_SEGMENTS + 1) if sizes.pp > 1 else (1,)
        found = [Shape(count, False, overlap) for count in segments for overlap in (False, True)]
        found += [Shape(1, True, overlap) for overlap in (False, True) if sizes.pp > 1]
        wanted = {"auto": False, DUAL_PIPE_V: True}.get(self.fixed.get("mesh.schedule", ""))
        overlap = self.fixed.get("mesh.overlap")
        return [
            shape
            for shape in found
            if (exchanges or not shape.overlap)
            and wanted in (None, shape.dual)
            and overlap in (None, shape.overlap)
            and self.cut(sizes.pp, shape) is not None
        ]

    def micro_batches(self, axes: AxisSizes) -> list[int]:
        """Numbers of micro-batches, the fewest first."""
        samples = self.run.train.batch_samples
        counts = divisors(samples // axes.dp) if samples % axes.dp == 0 else []
        return self._values("train.micro_batches", counts)

    @cached_property
    def recomputes(self) -> list[tuple[Recompute, ...]]:
        """What may be recomputed: ever more regions, from the cheapest on; and what the run recomputes."""
        if "train.recompute" in self.fixed:
            return [self.fixed["train.recompute"]]
        regions: list[Recompute] = ["norm"]
        moe = self.run.model.moe
        if Kind.MLP in self.kinds or (Kind.MOE in self.kinds and moe is not None and moe.shared_ffn):
            regions.append("activation")
        regions += ["experts"] if Kind.MOE in self.kinds else []
        regions += ["core"] if any(kind.is_mixer for kind in self.kinds) else []
        levels = [tuple(regions[:count]) for count in range(len(regions) + 1)]
        levels += [("norm", "activation", "core")] if {"activation", "experts", "core"} <= set(regions) else []
        found = dict.fromkeys([*levels, ("full",)])
        own = recomputed(self.run.train.recompute)
        if all(recomputed(each) != own for each in found):
            found[self.run.train.recompute] = None
        return list(found)

    def recomputes_of(self, sizes: MeshSizes) -> list[tuple[Recompute, ...]]:
        """Those that the mesh allows."""
        if self.run.mesh.dispatcher == "deep_ep" and sizes.ep * sizes.etp > 1:
            return [names for names in self.recomputes if not {"block", "full"} & set(names)]
        return self.recomputes

    def shards(self, axes: AxisSizes) -> list[Strategy]:
        """Sharding strategies that differ."""
        if "mesh.shard" in self.fixed:
            return [self.fixed["mesh.shard"]]
        if axes.dp * axes.cp * axes.edp == 1:
            return [self.run.mesh.shard]
        return [name for name in STRATEGIES if name != "none" or self.run.mesh.replicate == 1]

    # -------------------------------------------------------------------------------------- one choice

    def run_of(self, choice: Choice) -> Run:
        """The run with a choice."""
        shape, train = choice.shape, self.run.train
        own = self.run.mesh
        mesh = replace(
            own,
            **choice.mesh._asdict(),
            shard=choice.shard,
            schedule="dual_pipe_v" if shape.dual else "auto",
            overlap=shape.overlap,
            delay_weights=own.delay_weights and shape.fine,
            late_weights=own.late_weights and shape.fine and (own.delay_weights or shape.dual),
            paired_ends=own.paired_ends and shape.overlap and choice.mesh.pp == 1,
            early_release=own.early_release and shape.overlap,
        )
        return replace(
            self.run,
            model=self._model_of(choice),
            mesh=mesh,
            train=replace(train, micro_batches=choice.micro_batches, recompute=choice.recompute),
        )

    def _model_of(self, choice: Choice) -> Model:
        if self.is_default_cut(choice.mesh.pp, choice.shape):
            return self.run.model
        layout = self.cut(choice.mesh.pp, choice.shape)
        assert layout is not None
        one = choice.shape.segments == 1
        return replace(self.run.model, pattern=compact(self.layout if one else layout))

    def model_cut(self, choice: Choice) -> Model:
        """The model with `|` where planning would place them, which takes longer than all else."""
        layout = self.cut(choice.mesh.pp, choice.shape)
        assert layout is not None
        return replace(self.run.model, pattern=compact(layout))

    def own(self) -> Choice:
        """What the run chooses itself."""
        mesh, train = self.run.mesh, self.run.train
        sizes = MeshSizes(mesh.tp, mesh.cp, mesh.pp, mesh.ep, mesh.etp)
        dual = mesh.schedule == DUAL_PIPE_V
        count = len(self.given.segments)
        segments = 1 if dual or mesh.pp == 1 or count % mesh.pp else count // mesh.pp
        shape = Shape(segments, dual, mesh.overlap)
        return Choice(sizes, shape, train.micro_batches, train.recompute, mesh.shard)


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of a number, ascending, up to `most`."""
    bound = number if most is None else min(most, number)
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return [each for each in sorted({*small, *(number // each for each in small)}) if each <= bound]
