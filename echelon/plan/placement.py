"""How one module is cut over the ranks of the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: column: outputs are cut and stay cut; row: takes such outputs, and the ranks add up; gather: outputs are cut and put together
#: again at once; vocabulary: a table cut by rows, the ranks add up; attention: heads are cut inside the module.
Cut = Literal["column", "row", "gather", "vocabulary", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One module, or all that `blocks.*.up` stands for."""

    path: str
    cut: Cut
    #: Parts of the outputs that are cut one by one (the q, k and v of a fused projection); empty: the outputs are one part.
    parts: tuple[int, ...] = ()
    #: Attributes of modules that are divided by the axis: counts of heads, widths. By path.
    divide: tuple[str, ...] = ()
    #: Where it comes from: the model's own hint, a known module, a pair that was found, or the universal cut.
    source: Literal["hint", "known", "pair", "universal"] = "universal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncut:
    """A module that stays whole on every rank of the tensor axis, and why."""

    path: str
    why: str
