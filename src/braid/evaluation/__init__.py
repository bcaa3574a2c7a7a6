"""What a checkpoint is worth on texts and on multiple choice (`braid eval`), and an adapter with which
lm-evaluation-harness drives it (`harness.py`)."""
