"""The parts of models: modules that hold weights, and the functions between them.

Modules hold weights and shapes, nothing else. What belongs to a micro-batch is passed in and returned.
"""
