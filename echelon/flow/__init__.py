"""Planner and engine joined: train, verify, or keep your own loop."""

from echelon.flow.train import Trained, parallelize, train
from echelon.flow.verify import verify

__all__ = ["Trained", "parallelize", "train", "verify"]
