"""The fastest meshes of a run on a cluster: `search`. docs/step-time.md says how it finds them.

choices.py has the candidates, bricks.py the work that they share, pipeline.py the order of turns, bounds.py
what no candidate goes below, and the closed form. ranking.py ranks the candidates of a mesh, simulate.py
simulates one; search.py decides of which, and team.py has the processes that do it.
"""

from braid.timing.search.choices import Choice, MeshSizes, Shape, Space
from braid.timing.search.ranking import Counts
from braid.timing.search.search import HEADROOM, Found, Search, search
from braid.timing.search.simulate import Setting, Timed, timed

__all__ = [
    "HEADROOM", "Choice", "Counts", "Found", "MeshSizes", "Search", "Setting", "Shape", "Space", "Timed",
    "search", "timed",
]  # fmt: skip
