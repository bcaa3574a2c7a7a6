"""Layers: attention, Mamba-2, gated delta net, MLP, MoE, norms, embedding, loss, recompute, initialization.

Modules are stateless apart from their weights: the state of a micro-batch is passed in and returned.
"""
