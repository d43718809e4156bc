"""Model -> Profile by tracing; machine -> Cluster by measuring."""

from echelon.profiler.machine import measure
from echelon.profiler.model import profile

__all__ = ["measure", "profile"]
