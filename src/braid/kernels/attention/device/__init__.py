"""Kernels of packed attention. Importing this package requires Triton."""
