"""Model -> Profile by tracing; machine -> Cluster by measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.profiler.machine import known_cluster, measure

if TYPE_CHECKING:
    from echelon.profiler.model import profile

__all__ = ["known_cluster", "measure", "profile"]


def __getattr__(name: str) -> Any:
    # Tracing needs torch; a cluster that is known already must be had without it.
    if name == "profile":
        from echelon.profiler.model import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
