"""The fastest meshes of a run on a cluster: `search`. docs/step-time.md says how it finds them.

choices.py has the candidates, bricks.py the work that they share, pipeline.py the order of turns, bounds.py
what no candidate goes below. search.py bounds, ranks and simulates.
"""

from braid.timing.search.choices import Choice, MeshSizes, Shape, Space
from braid.timing.search.search import HEADROOM, Counts, Found, Search, Timed, search

__all__ = ["HEADROOM", "Choice", "Counts", "Found", "MeshSizes", "Search", "Shape", "Space", "Timed", "search"]
