"""The engine: executes a schedule on one rank. It runs the ops of the list and adds none of its own."""
