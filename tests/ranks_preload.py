"""What the server of `tests.ranks` loads once, so that no rank has to."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import braid.prove.preload  # noqa: F401

# What is loaded here stays: a collector that went through it in every rank would write to all of its pages.
gc.collect()
gc.freeze()
