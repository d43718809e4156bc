"""Bytes that a rank holds at its peak, by what they are: before what an allocator, libraries and drivers add."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at a moment at which its memory may peak."""

    parameters: float  #: model buffers included
    gradients: float
    optimizer: float
    activations: float  #: kept for backward
    temporary: float
    buckets: float  #: what ZeRO gathers, and messages
    #: Of activations and temporary, what comes and goes in blocks of unequal size: allocators leave gaps between them.
    fragmenting: float = 0.0
    released: float = 0.0  #: freed before the peak: an allocator may keep it
    gathered: float = 0.0  #: of `parameters`, those that are sharded at rest
    blocks: float = 0.0  #: activations of a megabyte or more
    tensors: float = 0.0  #: parameters of a megabyte or more
    axes: int = 0  #: in use: each has a communicator
    is_sharded: bool = False
    is_converted: bool = False  #: the plan's precision is not the profile's
    operator: str = ""  #: running at that moment
    operator_bytes: float = 0.0  #: read and written by it
    where: str = ""  #: of the peak
