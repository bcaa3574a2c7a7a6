"""braid trains hybrid language models; the topology never changes the answer."""

__version__ = "0.1.0"
