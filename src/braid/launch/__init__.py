"""Launching ranks: worker pool, rendezvous, process group, watchdog and failure reports."""
