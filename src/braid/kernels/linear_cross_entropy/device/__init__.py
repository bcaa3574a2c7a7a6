"""Triton kernels of cross-entropy. Importing this package requires Triton."""
