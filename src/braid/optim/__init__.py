"""From gradients to new weights: the learning rate, the length of the gradient, AdamW on main parameters."""
