"""Training: builds the state of a run from its plan and runs the training loop.

Nothing is imported here: the launcher only starts processes and should not pay for the workers' imports.
"""
