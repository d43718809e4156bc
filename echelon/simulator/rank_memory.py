"""The bytes of a rank at a peak, by component, without the overheads of allocators, libraries and drivers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at a moment where its memory may peak."""

    parameters: float  #: model buffers included
    gradients: float
    optimizer: float
    activations: float  #: kept for backward
    temporary: float
    buckets: float  #: what ZeRO gathers, and messages
    #: The part of activations and temporary that is allocated and freed in unequal sizes: allocators leave gaps.
    fragmenting: float = 0.0
    released: float = 0.0  #: freed before the peak; an allocator may cache it
    gathered: float = 0.0  #: the part of `parameters` that is sharded between steps
    blocks: float = 0.0  #: activations of a megabyte or more
    tensors: float = 0.0  #: parameters of a megabyte or more
    axes: int = 0  #: mesh axes above 1, each with a communicator
    is_sharded: bool = False
    is_converted: bool = False  #: the plan's precision is not the profile's
    operator: str = ""  #: that runs at the peak
    operator_bytes: float = 0.0  #: read and written by it
    where: str = ""  #: the place of the peak
