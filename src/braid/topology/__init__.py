"""Process topology: how the ranks of a job are arranged along parallelism axes. Plain data, without torch."""

from braid.topology.grid import DENSE, Grid, Members
from braid.topology.standard import EXPERT, FAMILIES, GroupFamily, standard, standard_problems
from braid.topology.view import View

__all__ = [
    "DENSE",
    "EXPERT",
    "FAMILIES",
    "Grid",
    "GroupFamily",
    "Members",
    "View",
    "standard",
    "standard_problems",
]
