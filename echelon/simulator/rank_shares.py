"""Which share of a module's work, of what it gives and of what it keeps falls to a rank of the tensor and pipeline axes."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import column_row_pairs, stage_ranges


class RankShares:
    """Which share of a module's work and of its activations falls to a rank."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._tp, self._pp = plan.mesh.tp, plan.mesh.pp
        unit_ranges = stage_ranges(plan, len(profile.pipeline_units)) if plan.mesh.pp > 1 else []
        self._stage_starts = [unit_range.start for unit_range in unit_ranges]
        #: The rank of pp that computes each visit.
        self.unit_ranks = [stage % plan.mesh.pp for stage, unit_range in enumerate(unit_ranges) for _ in unit_range]
        self.loss_rank = (len(unit_ranges) - 1) % plan.mesh.pp if unit_ranges else 0
        self._ranks_by_unit: dict[str, list[int]] = {}
        for unit, rank in zip(profile.pipeline_units, self.unit_ranks, strict=False):
            self._ranks_by_unit.setdefault(fold_path(unit.path), []).append(rank)
        self._cut = {fold_path(placement.path): placement.cut for placement in plan.tensor.placements}
        self._between = set(_paths_between(profile, plan))

    def compute_share(self, path: str, rank: int) -> float:
        """Of what a module computes, by its folded path."""
        is_sharded = path in self._between or self._cut.get(path, "stored") not in ("vocabulary", "stored")
        return self.stage_share(path, rank) / (self._tp if is_sharded else 1)

    def saved_share(self, path: str, rank: int) -> float:
        """Of what a module keeps for backward: a column keeps its input, which is whole, a row one that is cut."""
        is_sharded = path in self._between or self._cut.get(path) == "row"
        return self.stage_share(path, rank) / (self._tp if is_sharded else 1)

    def output_share(self, path: str) -> float:
        """Of what a module gives, the part that a rank of tp has: columns are cut, the sum that a row takes part in is whole."""
        return 1 / self._tp if path in self._between or self._cut.get(path) in ("column", "gather", "logits") else 1.0

    def sent_bytes(self, profile: Profile, rank: int, samples: int) -> float:
        """Bytes that a micro-batch takes from the stages of `rank` to those after them."""
        return sum(
            profile.pipeline_units[start].boundary_bytes.at(samples)
            for start in self._stage_starts
            if start and self.unit_ranks[start - 1] == rank
        )

    def stage_share(self, path: str, rank: int) -> float:
        """Of its calls, those that are in the stages of `rank`. What is outside all units is done where the loss is."""
        if self._pp == 1:
            return 1.0
        for unit, ranks in self._ranks_by_unit.items():
            if is_within(path, unit):
                return ranks.count(rank) / len(ranks)
        return 1.0 if rank == self.loss_rank else 0.0


def is_within(path: str, outer: str) -> bool:
    """Whether a module is `outer` or lies in it."""
    return path == outer or path.startswith(outer + ".")


def _paths_between(profile: Profile, plan: Plan) -> Iterator[str]:
    """Folded paths of what computes on columns: the module that holds a pair, and what in it has no parameters of its own."""
    modules = {module.path: module for module in profile.modules}
    for columns, row in column_row_pairs(plan):
        split_paths = [each.path.split(".") for each in (*columns, row)]
        common_prefix = [components[0] for components in zip(*split_paths, strict=False) if len(set(components)) == 1]
        holder = fold_path(".".join(common_prefix))
        if columns and holder in modules:
            yield holder
            yield from (path for path, each in modules.items() if is_within(path, holder) and not each.parameters)
