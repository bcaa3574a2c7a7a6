"""Processes that become ranks: started, brought together, watched, and reported on when they fail."""
