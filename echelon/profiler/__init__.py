"""Model -> Profile by tracing."""

from echelon.profiler.profile_model import profile

__all__ = ["profile"]
