"""This machine as a Cluster: what it has, and what its devices and links were timed at."""

from echelon.hardware.measure_cluster import known_cluster, measure

__all__ = ["known_cluster", "measure"]
