"""How a module is cut over the ranks of the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

#: column      outputs are cut and stay cut
#: between     works channel by channel on the outputs of a column: its parameters and buffers are cut in the same way
#: row         takes such outputs; an all-reduce follows
#: attention   nn.MultiheadAttention: heads are cut inside the module; an all-reduce follows
#: gather      outputs are cut and gathered at once
#: logits      the same, but the outputs stay cut as long as only a cross entropy reads them
#: vocabulary  an embedding cut by rows; an all-reduce follows
#: stored      parameters are sharded at rest: gathered while the module `gathered_in` runs
Cut = Literal["column", "between", "row", "attention", "gather", "logits", "vocabulary", "stored"]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A parameter or buffer of which each rank keeps a shard."""

    name: str  #: in its module
    dim: int
    fused_sizes: tuple[int, ...] = ()  #: sizes along `dim` that are cut one by one (q, k, v); empty: not fused

    def largest_shard_shape(self, shape: Sequence[int], shards: int, unit: int) -> tuple[int, ...]:
        """The shape of the first rank's shard, which is the largest."""
        shard_size = sum(compute_shard_sizes(size, shards, unit)[0] for size in self.fused_sizes or (shape[self.dim],))
        return (*shape[: self.dim], shard_size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The cut of one module."""

    path: str
    cut: Cut
    slices: tuple[TensorSlice, ...] = ()  #: the tensors that are cut; the others are whole on every rank
    unit: int = 1  #: columns that stay together (a head): each rank has a multiple of them
    divided_attributes: tuple[str, ...] = ()  #: module attributes to divide by the axis: head counts, widths
    uses_rng: bool = False  #: column, row: whether something between them draws random numbers, separately on each rank
    #: row: parameters anywhere in the model that act on the columns and stay whole; their gradients are summed over the ranks.
    partial_gradients: tuple[str, ...] = ()
    view_module: str | None = None  #: row: the module in which views ask for all columns and get the local ones
    gathered_in: str = ""  #: stored: the module ("": the model) during which the parameters are whole
    #: The model's own tp plan, a known module, a pair found by trial, or a cut that always works.
    source: Literal["hint", "known", "pair", "universal"] = "universal"


def compute_shard_sizes(size: int, shards: int, unit: int = 1) -> list[int]:
    """Split `size` rows over `shards` ranks in multiples of `unit`, as evenly as possible, the larger shards first."""
    base, remainder = divmod(size // unit, shards)
    sizes = [unit * (base + (rank < remainder)) for rank in range(shards)]
    sizes[-1] += size % unit
    return sizes


def shard_attribute(value: int, rank: int, shards: int, *, width: int, unit: int) -> int:
    """One rank's value of a divided attribute: of a width, a multiple of `unit`; of a count, its share."""
    return compute_shard_sizes(value, shards, unit if value >= width else 1)[rank]


def cuts_by_parameter(placements: Iterable[Placement]) -> dict[str, tuple[Placement, TensorSlice]]:
    """Parameters and buffers that are cut, by their name in the model."""
    cuts = [(placement, part) for placement in placements for part in placement.slices]
    return {f"{placement.path}.{part.name}".removeprefix("."): (placement, part) for placement, part in cuts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedModule:
    """A module that is whole on every rank of the tensor axis, and why."""

    path: str
    reason: str
