"""The kernel in Triton that turns heads; whoever imports this has looked for it."""
