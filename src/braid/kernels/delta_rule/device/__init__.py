"""Triton kernels of the gated delta rule. Importing this package requires Triton."""
