"""Training: a plan in, a trained model, its checkpoints and its metrics out."""

from braid.train.building import make_state
from braid.train.loop import Outcome, begin_or_continue, train_to_end
from braid.train.places import Places

__all__ = ["Outcome", "Places", "begin_or_continue", "make_state", "train_to_end"]
