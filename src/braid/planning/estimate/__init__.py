"""Memory and communication estimate of every pipeline stage.

Every module counts its own activations and collectives (`nn.cost`); the schedule determines which activations
are live at the same time. Weights, gradients and optimizer state follow from the FSDP units. Nothing is
computed and no process starts: the model of one rank per stage is built on the meta device. With several
modules, what the ranks of a station hold of each is added up.
"""

from braid.planning.estimate.advice import Advice, advise
from braid.planning.estimate.edges import EdgeEstimate
from braid.planning.estimate.memory import Memory
from braid.planning.estimate.stages import Estimate, OffloadEstimate, StageEstimate, StationEstimate, estimate
from braid.planning.estimate.weights import counted_by_station

__all__ = [
    "Advice",
    "EdgeEstimate",
    "Estimate",
    "Memory",
    "OffloadEstimate",
    "StageEstimate",
    "StationEstimate",
    "advise",
    "counted_by_station",
    "estimate",
]
