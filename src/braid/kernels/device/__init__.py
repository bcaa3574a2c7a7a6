"""What kernels in Triton have in common; whoever imports this has looked for it."""
