"""Hyper-connections in Triton: kernels, and functions that launch them. All of it needs Triton; whoever imports
this has looked for it.

Streams are read and written in their own dtype; all arithmetic and every other tensor is float32. Sums over
channels and over tokens are made by programs in a fixed order and added up in a fixed order."""
