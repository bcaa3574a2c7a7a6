"""Triton kernel of the router. Importing this package requires Triton."""
