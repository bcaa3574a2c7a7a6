"""Triton kernels of the gated RMSNorm. Importing this package requires Triton."""
