"""How one module is cut over the ranks of the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

#: column      outputs are cut and stay cut
#: between     works channel by channel on what a column gave: its parameters and buffers are cut along with that
#: row         takes such outputs, and the ranks add up
#: attention   nn.MultiheadAttention: heads are cut inside the module, and the ranks add up
#: gather      outputs are cut and put together again at once
#: logits      the same, but the outputs stay cut as long as only a cross entropy reads them
#: vocabulary  a table cut by rows, the ranks add up
#: stored      parameters are cut only at rest: put together while the module `within` runs, which then computes all of it
Cut = Literal["column", "between", "row", "attention", "gather", "logits", "vocabulary", "stored"]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A parameter or buffer of which each rank keeps a part."""

    name: str  #: in the module that is placed
    dim: int
    #: Sizes along `dim` that are dealt out one by one (the q, k and v of a fused projection); empty: all of it at once.
    fused_sizes: tuple[int, ...] = ()

    def largest_shard_shape(self, shape: Sequence[int], shards: int, unit: int) -> tuple[int, ...]:
        """The shape of what the first rank keeps, which is the largest."""
        shard_size = sum(compute_shard_sizes(size, shards, unit)[0] for size in self.fused_sizes or (shape[self.dim],))
        return (*shape[: self.dim], shard_size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One module."""

    path: str
    cut: Cut
    #: What of it is cut; anything else is whole on every rank.
    slices: tuple[TensorSlice, ...] = ()
    #: Columns that stay together (a head): a rank has an integer of them.
    unit: int = 1
    #: Attributes of modules that are divided by the axis: counts of heads, widths. By path.
    divided_attributes: tuple[str, ...] = ()
    #: Of a column and its row: whether something between them draws random numbers, which each rank then does by itself.
    uses_rng: bool = False
    #: Of a row: parameters of the whole model that act on the columns and stay whole. Their gradients add up over the ranks.
    partial_gradients: tuple[str, ...] = ()
    #: Of a row: the module in which views ask for all columns and get those that are there; None: none does.
    view_module: str | None = None
    #: Of `stored`: the module while which runs the parameters are whole; the model itself: "".
    gathered_in: str = ""
    #: Where it comes from: the model's own hint, a known module, a pair that was found, or the universal cut.
    source: Literal["hint", "known", "pair", "universal"] = "universal"


def compute_shard_sizes(size: int, shards: int, unit: int = 1) -> list[int]:
    """How `size` rows are dealt out to `shards` ranks, `unit` of them at a time: as evenly as can be, the larger shares first."""
    base, remainder = divmod(size // unit, shards)
    sizes = [unit * (base + (rank < remainder)) for rank in range(shards)]
    sizes[-1] += size % unit
    return sizes


def shard_attribute(value: int, rank: int, shards: int, *, width: int, unit: int) -> int:
    """What one rank has of an attribute that is divided: of a width whole units, of a count its share."""
    return compute_shard_sizes(value, shards, unit if value >= width else 1)[rank]


def cuts_by_parameter(placements: Iterable[Placement]) -> dict[str, tuple[Placement, TensorSlice]]:
    """Parameters and buffers that are cut, by the name that the model has for them."""
    return {
        f"{placement.path}.{tensor_slice.name}" if placement.path else tensor_slice.name: (placement, tensor_slice)
        for placement in placements
        for tensor_slice in placement.slices
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedModule:
    """A module that stays whole on every rank of the tensor axis, and why."""

    path: str
    reason: str
