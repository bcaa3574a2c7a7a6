"""Equivalent mutants: those that change nothing that a test could see, each with the reason. Others are drawn
in their place.

A mutant is told by its file, its function, and what it makes of which text: not by its line, so that the list
holds while code around it moves.
"""

from __future__ import annotations

from typing import NamedTuple

from scripts.mutants.mutant import Mutant


class Equivalent(NamedTuple):
    """A mutant that is as right as the source."""

    file: str
    function: str
    old: str
    """What the mutant replaces, white space apart."""
    new: str
    why: str

    def matches(self, mutant: Mutant) -> bool:
        place = (self.file, self.function) == (mutant.file, mutant.function)
        return place and _words(self.old) == _words(mutant.old) and _words(self.new) == _words(mutant.new)


def _words(text: str) -> str:
    return "".join(text.split())


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        file="nn/position_table.py",
        function="resized_taps.points",
        old="size - 1",
        new="(size + 1)",
        why="points lie less than half a place beyond the last entry, where both taps read that entry",
    ),
    Equivalent(
        file="kernels/optimizer/fused.py",
        function="FusedOptimizer.squares",
        old='self.launch(kernels.tensor_sums, (len(tensors), 1), sums, (), {"BLOCK": 512}, warps=4)',
        new='self.launch(kernels.tensor_sums, (len(tensors), 1), sums, (), {"BLOCK": 512}, warps=5)',
        why="how many warps a program has changes no result, and only a GPU refuses five",
    ),
    Equivalent(
        file="architecture.py",
        function="Attention.of_layer",
        old='replace(self, window=self.window if sliding else None, window_pattern="S")',
        new="replace(self, window=self.window if sliding else None)",
        why="nobody asks the shape of a single layer for the windows of others",
    ),
    Equivalent(
        file="topology/transfer.py",
        function="local_rows",
        old="""sorted(
            [
                *((piece.start, piece.stop, by_peer.setdefault(piece.peer, [])) for piece in pieces),
                *((start, stop, of_rank) for start, stop in kept),
            ],
            key=lambda part: part[0],
        )""",
        new="""sorted([*((piece.start, piece.stop, by_peer.setdefault(piece.peer, [])) for piece in pieces),
            *((start, stop, of_rank) for start, stop in kept)])""",
        why="no two parts begin at the same row, so that nothing after it is compared",
    ),
    Equivalent(
        file="engine/fsdp2.py",
        function="_param_groups",
        old="[] if state._fsdp_param_group is None else [state._fsdp_param_group]",
        new="([state._fsdp_param_group] if state._fsdp_param_group is None else [])",
        why="for a torch before 2.13: tests run with the one that is installed",
    ),
    Equivalent(
        file="kernels/rotary/fused.py",
        function="Fused.__call__",
        old="ENTRIES // power_of_two(x.shape[-1])",
        new="(ENTRIES * power_of_two(x.shape[-1]))",
        why="how many rows a program takes changes no result, and only a GPU has a limit",
    ),
    Equivalent(
        file="kernels/hyper_connection/fused.py",
        function="Fused.of",
        old="USUAL.project if dtype == torch.bfloat16 else SHORT",
        new="(SHORT if dtype == torch.bfloat16 else USUAL.project)",
        why="variants differ in speed alone",
    ),
    Equivalent(
        file="kernels/hyper_connection/fused.py",
        function="Fused.of",
        old="replace(USUAL, project=project, launch=Launcher())",
        new="replace(USUAL, project=project)",
        why="two may share a launcher: what it remembers goes by all that kernels differ in",
    ),
    Equivalent(
        file="model/language.py",
        function="LanguageModel.nothing",
        old="torch.zeros((), dtype=wide, device=self.device)",
        new="torch.zeros((), device=self.device)",
        why="a float32 zero, added to float64 numbers, is as exact",
    ),
    Equivalent(
        file="nn/moe/permute.py",
        function="order_by_capacity",
        old="torch.full((rows + 1,), slots, dtype=torch.int64, device=experts_NS.device)",
        new="torch.full((rows + 1,), slots, device=experts_NS.device)",
        why="torch fills with a whole number as int64 anyway",
    ),
    Equivalent(
        file="optim/adamw.py",
        function="AdamW.__init__",
        old="torch.zeros_like(tensor, requires_grad=False)",
        new="torch.zeros_like(tensor)",
        why="zeros like a parameter require no gradient anyway",
    ),
    Equivalent(
        file="pattern.py",
        function="cut",
        old="pp > 1",
        new="(pp >= 1)",
        why="a layout of one segment, cut into one, stays the same",
    ),
    Equivalent(
        file="engine/fsdp.py",
        function="shard_units",
        old="unit.wide or stored == compute",
        new="unit.wide",
        why="FSDP casts weights to the dtype that they have, which changes nothing",
    ),
    Equivalent(
        file="kernels/ssd/fused.py",
        function="FusedSsd.tiles",
        old="wide or columns * depth > 128 * 128",
        new="(wide and columns * depth > 128 * 128)",
        why="how many tokens a program takes changes no result, and only a GPU has a limit",
    ),
)
