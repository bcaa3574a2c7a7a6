"""Kernels in Triton that move rows; whoever imports this has looked for it."""
