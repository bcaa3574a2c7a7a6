"""Triton kernels that quantise to fp8_block. Importing this package requires Triton."""
