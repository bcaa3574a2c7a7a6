"""Triton kernels of MLP activations. Importing this package requires Triton."""
