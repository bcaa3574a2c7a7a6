"""Models: blocks with phases, the stack they form, and the language model around it."""
