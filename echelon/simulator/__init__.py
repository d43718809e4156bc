"""(Profile, Cluster, Plan) -> Forecast. Pure; "fits" is decided here."""

from echelon.simulator.stack import Stack
from echelon.simulator.step import simulate

__all__ = ["Stack", "simulate"]
