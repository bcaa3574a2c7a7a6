"""What the server of `launch.local_ranks` loads once, so that no rank has to."""

import gc

import numpy
import numpy.ma  # noqa: F401
import safetensors  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import braid.prove.outcome  # noqa: F401

# What is loaded here stays: a collector that went through it in every rank would write to all of its pages.
gc.collect()
gc.freeze()
