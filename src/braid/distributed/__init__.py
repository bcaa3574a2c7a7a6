"""Ranks that communicate: collectives, the groups of a grid, device meshes, links between pipeline stages."""
