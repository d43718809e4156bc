"""How a plan cuts a model, for people: repeated blocks folded, each cut with where it comes from, each stage with its work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.plan.placement import cuts_by_parameter
from echelon.plan.plan import Plan
from echelon.plan.profile import PipelineUnit, Profile, fold_path
from echelon.plan.stages import stage_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroup:
    """Modules that are cut alike, or that stay whole for the same reason."""

    path: str  #: `blocks.*.up` for `count` modules
    count: int
    cut: str  #: as a Placement's; "whole"
    source: str = ""
    parts: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        multiplicity = f" x {self.count}" if self.count > 1 else ""
        if self.cut == "whole":
            return f"{self.path}{multiplicity}: whole, {self.why}"
        fused_parts = f" in {len(self.parts)} parts" if self.parts else ""
        return f"{self.path}{multiplicity}: {self.cut}{fused_parts} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage: its units, folded, and its share of the work."""

    number: int
    rank: int  #: of pp
    units: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return f"stage {self.number} on rank {self.rank} of pp ({self.share:.0%} of the work): {', '.join(self.units)}"


def group_cuts(plan: Plan) -> tuple[CutGroup, ...]:
    """What tp does to each module that has parameters, in the model's order of first mention; cut ones first."""
    paths_by_cut: dict[tuple[str, str, str, tuple[int, ...], str], list[str]] = {}
    for placement in plan.tensor.placements:
        fused_parts = max((part.fused_sizes for part in placement.slices), key=len, default=())
        paths_by_cut.setdefault(
            (fold_path(placement.path), placement.cut, placement.source, fused_parts, ""), []
        ).append(placement.path)
    for uncut in plan.tensor.replicated:
        paths_by_cut.setdefault((fold_path(uncut.path), "whole", "", (), uncut.reason), []).append(uncut.path)
    cut_groups = []
    for (path, cut, source, fused_parts, reason), paths in paths_by_cut.items():
        name = path if len(paths) > 1 else paths[0]
        cut_groups.append(
            CutGroup(
                path=name or "the model itself", count=len(paths), cut=cut, source=source, parts=fused_parts, why=reason
            )
        )
    return tuple(cut_groups)


def summarize_stages(plan: Plan, pipeline_units: Sequence[PipelineUnit]) -> tuple[StageSummary, ...]:
    """The stages of a plan whose stages are known."""
    total_work = sum(unit.cost for unit in pipeline_units) or 1.0
    return tuple(
        StageSummary(
            number=stage,
            rank=stage % plan.mesh.pp,
            units=tuple(fold_index_ranges([pipeline_units[index].path for index in unit_range])),
            share=sum(pipeline_units[index].cost for index in unit_range) / total_work,
        )
        for stage, unit_range in enumerate(stage_ranges(plan, len(pipeline_units)))
    )


def fold_index_ranges(paths: Iterable[str]) -> Iterable[str]:
    """`blocks.0, blocks.1, blocks.2` as `blocks.0-2`."""
    run: list[tuple[str, int, str]] = []
    for path in (*paths, ""):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", path)
        current = (match[1], int(match[2]), match[3]) if match else (path, -1, "")
        if run and not (current[1] >= 0 and (current[0], current[1] - 1, current[2]) == run[-1]):
            (prefix, first, suffix), last = run[0], run[-1][1]
            yield prefix if first < 0 else f"{prefix}{first}{f'-{last}' if last > first else ''}{suffix}"
            run = []
        if path:
            run.append(current)


def cut_fraction(plan: Plan, profile: Profile, *cuts: str) -> float:
    """Share of the parameters' bytes that tp cuts; in these ways, where some are named."""
    cut_names = cuts_by_parameter(each for each in plan.tensor.placements if not cuts or each.cut in cuts).keys()
    cut_size = sum(each.bytes for each in profile.parameters if cut_names & {each.name, *each.aliases})
    return cut_size / (profile.bytes or 1)
