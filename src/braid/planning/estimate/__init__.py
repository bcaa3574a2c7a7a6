"""Will it fit, and what is sent: memory and communication of every pipeline stage.

Activations and the calls of layers are each module's own count (`nn.cost`), and the schedule tells which of
them are there together; weights, gradients and optimizer state follow from the units that sharding works on.
Nothing is computed and no process starts: the model of one rank per stage is built without memory.
"""

from braid.planning.estimate.advice import Advice, advise
from braid.planning.estimate.memory import Memory
from braid.planning.estimate.stages import Estimate, StageEstimate, estimate

__all__ = ["Advice", "Estimate", "Memory", "StageEstimate", "advise", "estimate"]
