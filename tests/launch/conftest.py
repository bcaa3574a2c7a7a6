"""The fixtures of `tests/train`: ranks that are launched train its small run."""

from tests.train.conftest import corpus, one_thread

__all__ = ["corpus", "one_thread"]
