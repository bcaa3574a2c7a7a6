"""Triton kernels of the causal convolution. Importing this package requires Triton."""
