"""Triton kernels of RMSNorm. Importing this package requires Triton."""
