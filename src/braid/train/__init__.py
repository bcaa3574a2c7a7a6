"""Training: a plan in, a trained model, its checkpoints and its metrics out.

Nothing is imported here, so that a launcher, which only starts processes, does not wait for what they need.
"""
