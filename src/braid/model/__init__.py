"""The hybrid language model: blocks split into phases, the stack, MTP depths, head and generation."""
