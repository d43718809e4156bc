"""The grid of ranks: axis vocabulary, rank <-> coordinate, groups.

    dp  data: each rank has its own samples
    cp  context: each rank has a part of every sequence
    tp  tensor: each rank has a part of every matrix
    pp  pipeline: each rank has some of the layers
    ep  expert: each rank has some of the experts (cut out of dp x cp)

The last axis varies fastest, so that tp, which communicates most, lies on neighbouring devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes. `ep` regroups dp x cp ranks and adds none of its own."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if type(size) is not int or size < 1:
                raise ValueError(f"{axis}={size!r}: the size of an axis is an integer of at least 1")
        if (self.dp * self.cp) % self.ep:
            ranks = self.dp * self.cp
            raise ValueError(f"ep={self.ep} does not divide dp x cp = {ranks}; experts are spread over those ranks")

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis, `ep` included."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, axis) for axis in AXES)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a mesh of {self.ranks}")
        coordinate = {}
        for axis in reversed(AXES):
            rank, coordinate[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinate[axis] for axis in AXES}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; omitted axes are at 0."""
        unknown = set(coordinate) - set(AXES)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such axis; the axes are {', '.join(AXES)}")
        rank = 0
        for axis in AXES:
            index, size = coordinate.get(axis, 0), getattr(self, axis)
            if not 0 <= index < size:
                raise ValueError(f"{axis}={index} is outside 0..{size - 1}")
            rank = rank * size + index
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only on `axis`: each rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            coordinate = self.coordinate(rank)
            coordinate.pop(axis)
            groups.setdefault(tuple(coordinate.values()), []).append(rank)
        return tuple(tuple(group) for group in groups.values())
