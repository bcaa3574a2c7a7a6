"""Triton kernel of RoPE. Importing this package requires Triton."""
