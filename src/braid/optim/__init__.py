"""Optimization: learning-rate schedule, gradient norm and clipping, AdamW with float32 main parameters."""
