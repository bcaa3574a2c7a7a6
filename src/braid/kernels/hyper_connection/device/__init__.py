"""Triton kernels of hyper-connections, and functions that launch them. Importing this package requires Triton.

Streams are read and written in their own dtype; all arithmetic and all other tensors are float32. Reductions
over channels and tokens run in a fixed order, within programs and across them, so results are deterministic."""
