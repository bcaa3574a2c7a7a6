"""Triton kernels of permute and unpermute. Importing this package requires Triton."""
