"""Where each rank of the tensor axis holds a shard of the sequence: around the norms, dropouts and residuals of repeated blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGather:
    """A module that needs the full sequence, and those of its arguments that arrive as shards."""

    path: str
    arguments: tuple[str, ...]  #: a number is a position, anything else a name
    returns_sequence: bool = False  #: it returns the full sequence, which must be split again: no row in it does so


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSegment:
    """Consecutive blocks. Hidden states are split before the first and gathered after the last."""

    blocks: tuple[str, ...]  #: in the order of their calls
    argument: str  #: the blocks' argument with the hidden states; their first output is the next hidden states
    dim: int  #: sequence dim of the hidden states
    gathers: tuple[SequenceGather, ...]
    uses_rng: bool  #: whether the blocks draw random numbers, separately on each rank
    #: Parameters that are whole on every rank but see a shard of the sequence: their gradients are summed over the ranks.
    partial_gradients: tuple[str, ...]
