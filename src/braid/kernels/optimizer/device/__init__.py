"""Triton kernels over lists of tensors. Importing this package requires Triton."""
