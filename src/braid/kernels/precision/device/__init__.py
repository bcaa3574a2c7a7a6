"""Triton kernels that quantise to fp8_block, bit for bit as `precision.quantize` does. Importing this package
requires Triton."""
