"""Planner, verifier and engine joined: `train`, `verify`, or `parallelize` for your own loop."""

from echelon.flow.train import parallelize, train
from echelon.flow.train_result import TrainResult
from echelon.flow.verify import verify

__all__ = ["TrainResult", "parallelize", "train", "verify"]
