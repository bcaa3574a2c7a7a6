"""Triton kernels of the SSD scan. Importing this package requires Triton."""
