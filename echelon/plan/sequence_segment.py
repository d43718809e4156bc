"""Where each rank of the tensor axis has a part of the sequence only: around the norms, dropouts and residuals of repeated blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGather:
    """A module that needs the whole sequence, and those of its arguments that come as parts."""

    path: str
    arguments: tuple[str, ...]  #: a number is a position, anything else a name
    returns_sequence: bool = False  #: it gives the whole sequence too, which is cut again: no row in it does that


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSegment:
    """Blocks one after another. Hidden states are cut before the first and put together behind the last."""

    blocks: tuple[str, ...]  #: in the order of their calls
    argument: str  #: of the blocks that holds the hidden states; what they return first are hidden states again
    dim: int  #: of the hidden states that is the sequence
    gathers: tuple[SequenceGather, ...]
    uses_rng: bool  #: whether the blocks draw random numbers, which each rank does by itself for its part
    #: Parameters that are whole on every rank but meet a part of the sequence there: their gradients add up over the ranks.
    partial_gradients: tuple[str, ...]
