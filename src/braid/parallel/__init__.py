"""What turns an arrangement of ranks into communicators: groups of a grid, and device meshes for FSDP2."""

from braid.parallel.groups import close_groups, open_groups, opened_groups
from braid.parallel.mesh import close_mesh, dense_mesh, expert_mesh, mesh_over

__all__ = [
    "close_groups",
    "close_mesh",
    "dense_mesh",
    "expert_mesh",
    "mesh_over",
    "open_groups",
    "opened_groups",
]
