"""Which share of a module's work, of what it gives and of what it keeps falls to a rank of the tensor and pipeline axes."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import pairs, stage_ranges


class Shares:
    """Which share of a module's work and of its activations falls to a rank."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._tp, self._pp = plan.mesh.tp, plan.mesh.pp
        ranges = stage_ranges(plan, len(profile.visits)) if plan.mesh.pp > 1 else []
        self._begins = [places.start for places in ranges]
        #: The rank of pp that computes each visit.
        self.ranks = [number % plan.mesh.pp for number, places in enumerate(ranges) for _ in places]
        self.last = (len(ranges) - 1) % plan.mesh.pp if ranges else 0
        self._visits: dict[str, list[int]] = {}
        for visit, rank in zip(profile.visits, self.ranks, strict=False):
            self._visits.setdefault(fold_path(visit.path), []).append(rank)
        self._cut = {fold_path(each.path): each.cut for each in plan.placements}
        self._between = set(_between(profile, plan))

    def work(self, path: str, rank: int) -> float:
        """Of what a module computes, by its folded path."""
        cut = path in self._between or self._cut.get(path, "stored") not in ("vocabulary", "stored")
        return self.staged(path, rank) / (self._tp if cut else 1)

    def kept(self, path: str, rank: int) -> float:
        """Of what a module keeps for backward: a column keeps its input, which is whole, a row one that is cut."""
        cut = path in self._between or self._cut.get(path) == "row"
        return self.staged(path, rank) / (self._tp if cut else 1)

    def cut(self, path: str) -> float:
        """Of what a module gives, the part that a rank of tp has: columns are cut, the sum that a row takes part in is whole."""
        return 1 / self._tp if path in self._between or self._cut.get(path) in ("column", "gather", "logits") else 1.0

    def sent(self, profile: Profile, rank: int, samples: int) -> float:
        """Bytes that a micro-batch takes from the stages of `rank` to those after them."""
        return sum(
            profile.visits[place].crossing.at(samples)
            for place in self._begins
            if place and self.ranks[place - 1] == rank
        )

    def staged(self, path: str, rank: int) -> float:
        """Of its calls, those that are in the stages of `rank`. What is outside all units is done where the loss is."""
        if self._pp == 1:
            return 1.0
        for unit, ranks in self._visits.items():
            if inside(path, unit):
                return ranks.count(rank) / len(ranks)
        return 1.0 if rank == self.last else 0.0


def inside(path: str, outer: str) -> bool:
    """Whether a module is `outer` or lies in it."""
    return path == outer or path.startswith(outer + ".")


def _between(profile: Profile, plan: Plan) -> Iterator[str]:
    """Folded paths of what computes on columns: the module that holds a pair, and what in it has no parameters of its own."""
    modules = {module.path: module for module in profile.modules}
    for columns, row in pairs(plan):
        names = [each.path.split(".") for each in (*columns, row)]
        shared = [same[0] for same in zip(*names, strict=False) if len(set(same)) == 1]
        holder = fold_path(".".join(shared))
        if columns and holder in modules:
            yield holder
            yield from (path for path, each in modules.items() if inside(path, holder) and not each.parameters)
