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
class Slice:
    """A parameter or buffer of which each rank keeps a part."""

    name: str  #: in the module that is placed
    dim: int
    #: Sizes along `dim` that are dealt out one by one (the q, k and v of a fused projection); empty: all of it at once.
    parts: tuple[int, ...] = ()

    def most(self, shape: Sequence[int], ways: int, unit: int) -> tuple[int, ...]:
        """The shape of what the first rank keeps, which is the largest."""
        mine = sum(shares(size, ways, unit)[0] for size in self.parts or (shape[self.dim],))
        return (*shape[: self.dim], mine, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One module."""

    path: str
    cut: Cut
    #: What of it is cut; anything else is whole on every rank.
    slices: tuple[Slice, ...] = ()
    #: Columns that stay together (a head): a rank has a whole number of them.
    unit: int = 1
    #: Attributes of modules that are divided by the axis: counts of heads, widths. By path.
    divide: tuple[str, ...] = ()
    #: Of a column and its row: whether something between them draws random numbers, which each rank then does by itself.
    draws: bool = False
    #: Of a row: parameters of the whole model that act on the columns and stay whole. Their gradients add up over the ranks.
    partial: tuple[str, ...] = ()
    #: Of a row: the module in which views ask for all columns and get those that are there; None: none does.
    fits: str | None = None
    #: Of `stored`: the module while which runs the parameters are whole; the model itself: "".
    within: str = ""
    #: Where it comes from: the model's own hint, a known module, a pair that was found, or the universal cut.
    source: Literal["hint", "known", "pair", "universal"] = "universal"


def shares(size: int, ways: int, unit: int = 1) -> list[int]:
    """How `size` rows are dealt out to `ways` ranks, `unit` of them at a time: as evenly as can be, the larger shares first."""
    base, more = divmod(size // unit, ways)
    dealt = [unit * (base + (rank < more)) for rank in range(ways)]
    dealt[-1] += size % unit
    return dealt


def portion(value: int, rank: int, ways: int, *, width: int, unit: int) -> int:
    """What one rank has of an attribute that is divided: of a width whole units, of a count its share."""
    return shares(value, ways, unit if value >= width else 1)[rank]


def cut_parameters(placements: Iterable[Placement]) -> dict[str, tuple[Placement, Slice]]:
    """Parameters and buffers that are cut, by the name that the model has for them."""
    return {
        f"{each.path}.{part.name}" if each.path else part.name: (each, part)
        for each in placements
        for part in each.slices
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncut:
    """A module that stays whole on every rank of the tensor axis, and why."""

    path: str
    why: str
