"""How a plan cuts a model, for people: repeated blocks folded, each cut with where it comes from, each stage with its work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.plan.placement import cut_parameters
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, Visit, fold_path
from echelon.plan.stages import stage_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Modules that are cut alike, or that stay whole for the same reason."""

    path: str  #: `blocks.*.up` for `count` modules
    count: int
    cut: str  #: as a Placement's; "whole"
    source: str = ""
    parts: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        many = f" x {self.count}" if self.count > 1 else ""
        if self.cut == "whole":
            return f"{self.path}{many}: whole, {self.why}"
        fused = f" in {len(self.parts)} parts" if self.parts else ""
        return f"{self.path}{many}: {self.cut}{fused} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """One stage: its units, folded, and its share of the work."""

    number: int
    rank: int  #: of pp
    units: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return f"stage {self.number} on rank {self.rank} of pp ({self.share:.0%} of the work): {', '.join(self.units)}"


def cuttings(plan: Plan) -> tuple[Cutting, ...]:
    """What tp does to each module that has parameters, in the model's order of first mention; cut ones first."""
    found: dict[tuple[str, str, str, tuple[int, ...], str], list[str]] = {}
    for each in plan.placements:
        parts = max((part.parts for part in each.slices), key=len, default=())
        found.setdefault((fold_path(each.path), each.cut, each.source, parts, ""), []).append(each.path)
    for other in plan.uncut:
        found.setdefault((fold_path(other.path), "whole", "", (), other.why), []).append(other.path)
    folded = []
    for (path, cut, source, parts, why), paths in found.items():
        name = path if len(paths) > 1 else paths[0]
        folded.append(
            Cutting(path=name or "the model itself", count=len(paths), cut=cut, source=source, parts=parts, why=why)
        )
    return tuple(folded)


def stage_shares(plan: Plan, visits: Sequence[Visit]) -> tuple[StageShare, ...]:
    """The stages of a plan whose stages are known."""
    total = sum(visit.work for visit in visits) or 1.0
    return tuple(
        StageShare(
            number=number,
            rank=number % plan.mesh.pp,
            units=tuple(runs([visits[place].path for place in places])),
            share=sum(visits[place].work for place in places) / total,
        )
        for number, places in enumerate(stage_ranges(plan, len(visits)))
    )


def runs(paths: Iterable[str]) -> Iterable[str]:
    """`blocks.0, blocks.1, blocks.2` as `blocks.0-2`."""
    run: list[tuple[str, int, str]] = []
    for path in (*paths, ""):
        split = re.fullmatch(r"(.*?)(\d+)(\D*)", path)
        this = (split[1], int(split[2]), split[3]) if split else (path, -1, "")
        if run and not (this[1] >= 0 and (this[0], this[1] - 1, this[2]) == run[-1]):
            (head, first, tail), last = run[0], run[-1][1]
            yield head if first < 0 else f"{head}{first}{f'-{last}' if last > first else ''}{tail}"
            run = []
        if path:
            run.append(this)


def cut_bytes(plan: Plan, profile: Profile, *cuts: str) -> float:
    """Share of the parameters' bytes that tp cuts; in these ways, where some are named."""
    names = cut_parameters(each for each in plan.placements if not cuts or each.cut in cuts).keys()
    cut = sum(each.bytes for each in profile.parameters if names & {each.name, *each.aliases})
    return cut / (profile.bytes or 1)
