"""(Profile, Cluster, Plan) -> Forecast. Pure; "fits" is decided here."""

from echelon.simulator.step import simulate
from echelon.simulator.training_stack import TrainingStack

__all__ = ["TrainingStack", "simulate"]
