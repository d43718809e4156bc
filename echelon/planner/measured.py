"""Search over plans for a machine that was measured.

Every plan of the data axis is forecast: dp, ZeRO stages and micro-batches, each rank with its share of the cores, which is the load that
machines are measured under. Other plans - blocks computed again, the model cut over tp and pp - come in the order of a time that they cannot be
below, and are forecast while that is below what is in hand. What they cannot be below: products take as long in parts as whole, so that the
busiest rank of a cut has its part of them at least; and a plan that computes blocks again does all that it does without.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, product

from echelon.errors import PlanError
from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Recompute, Schedule
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile
from echelon.plan.stages import find_stages
from echelon.planner.candidate import Candidate, CompletePlan
from echelon.planner.goal import Objective
from echelon.planner.server_plans import served_plans
from echelon.planner.space import powers_of_two
from echelon.simulator.cost.curves import operator_seconds
from echelon.simulator.node_load import compute_node_load, require_uniform_node
from echelon.simulator.step import simulate_measured

#: The tensor axis talks in every block: beyond one machine's usual devices it is not searched.
_MAX_TP = 8
#: A bound is reckoned in another order than a forecast: digits that may differ.
_ROUNDING_SLACK = 1 - 1e-9
_RECOMPUTE_OPTIONS: tuple[Recompute, ...] = ("selective", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFamily:
    """Plans that cut the model over one mesh and have one micro-batch."""

    mesh: Mesh
    micro: int | None


@dataclass(slots=True)
class SearchResult:
    """What was forecast, and what of it is good, the best first."""

    objective: Objective
    top: int
    tolerance: float
    forecasted: list[Candidate] = field(default_factory=list)
    feasible: list[tuple[tuple[float, float, float, str], Candidate]] = field(default_factory=list)

    def add(self, candidate: Candidate) -> None:
        """One more."""
        self.forecasted.append(candidate)
        forecast = candidate.forecast
        if forecast.fits and forecast.time.step <= self.objective.goal.step_limit:
            key = self.objective.cost_of(forecast), forecast.time.step, forecast.memory.peak, str(candidate.plan)
            insort(self.feasible, (key, candidate), key=lambda entry: entry[0])

    @property
    def cost_cutoff(self) -> float:
        """What costs more than this is of no interest."""
        if len(self.feasible) < self.top:
            return float("inf")
        return max(self.feasible[0][0][0] * (1 + self.tolerance), self.feasible[self.top - 1][0][0])


class MeasuredSpace:
    """Plans of one model for one machine."""

    def __init__(self, profile: Profile, cluster: Cluster, *, ranks: int | None, complete: CompletePlan | None) -> None:
        require_uniform_node(cluster)
        if ranks is not None and ranks < 1:
            raise PlanError(f"ranks={ranks}: a plan has at least one rank")
        self.profile, self.cluster, self.ranks, self.complete_plan = profile, cluster, ranks, complete
        self._completed_by_mesh: dict[tuple[int, bool], Plan | None] = {}
        self._product_seconds: dict[tuple[object, ...], float] = {}

    def data_parallel_plans(self) -> Iterator[Plan]:
        """Those of the data axis."""
        profile = self.profile
        for dp in [self.ranks] if self.ranks is not None else rank_counts(min(self.cluster.max_ranks, profile.batch)):
            local_batch = -(-profile.batch // dp)
            for zero, micro in product((0, 1, 2, 3) if dp > 1 else (0,), halved_sizes(local_batch)):
                yield self._with_derived_fields(Plan(mesh=Mesh(dp=dp), zero=zero, micro=micro))

    def _with_derived_fields(self, plan: Plan) -> Plan:
        """With what follows from its ranks and the model."""
        cpu = self.cluster.device_kind == "cpu"
        return plan.replace(
            threads=max(self.cluster.cores // plan.ranks, 1) if cpu else None,
            # A model that may run other blocks on other ranks: only whole sharding is safe then.
            shard_as_one=plan.zero > 0 and bool(self.profile.varying_blocks_reason),
            model=self.profile.model,
        )

    def families(self, *, search_tp: bool) -> Iterator[PlanFamily]:
        """The model cut over pp, or where `search_tp` over tp, with or without pp; the rest of the ranks are on dp."""
        profile = self.profile
        for size in [self.ranks] if self.ranks is not None else rank_counts(self.cluster.max_ranks):
            tp_sizes = (
                powers_of_two(min(size, _MAX_TP))[1:] if search_tp and self.complete_plan else [1] * (not search_tp)
            )
            for tp, pp in product(tp_sizes, powers_of_two(size)):
                dp = size // (tp * pp)
                if (
                    tp == pp == 1
                    or dp * tp * pp != size
                    or dp > profile.batch
                    or pp > max(len(profile.pipeline_units), 1)
                ):
                    continue
                local_batch = -(-profile.batch // dp)
                # A pipeline needs several micro-batches, and more than some for each stage gain nothing.
                pipeline_micro_batches = dict.fromkeys(max(local_batch // (factor * pp), 1) for factor in (1, 2, 4, 8))
                for micro in halved_sizes(local_batch) if pp == 1 else pipeline_micro_batches:
                    yield PlanFamily(mesh=Mesh(dp=dp, tp=tp, pp=pp), micro=None if micro == local_batch else micro)

    def step_seconds_bound(self, family: PlanFamily) -> float:
        """Seconds that no plan of the family is faster than."""
        plan = self._with_derived_fields(Plan(mesh=family.mesh, micro=family.micro))
        load = compute_node_load(self.profile, self.cluster, plan)
        total = 0.0
        for samples in load.micro_batch_sizes:
            key = samples, load.ranks, load.threads
            if key not in self._product_seconds:
                self._product_seconds[key] = sum(
                    operator.count * operator_seconds(operator, samples, load, self.profile.precision)
                    for operator in self.profile.operators
                    if operator.kind != "stream"
                )
            total += self._product_seconds[key]
        return total / (family.mesh.tp * family.mesh.pp) * _ROUNDING_SLACK

    def recompute_seconds_bound(self, forecast: Forecast) -> float:
        """Seconds that the plan with blocks computed again is not below: all but what waits for hosts and other ranks, and the memory that is
        not asked for anew."""
        load, time = compute_node_load(self.profile, self.cluster, forecast.plan), forecast.time
        page_fault_seconds = (
            sum(map(self.profile.saved_bytes, load.micro_batch_sizes))
            * load.device.page_fault_seconds
            * load.oversubscription
        )
        return (time.step - time.overhead - time.bubble - page_fault_seconds) * _ROUNDING_SLACK

    def model_parallel_plans(self, family: PlanFamily) -> Iterator[Plan]:
        """The plans of a family that keep all activations."""
        mesh = family.mesh
        template = self._plan_with_placements(mesh)
        if template is None:
            return
        schedules: tuple[Schedule, ...] = ("1f1b",) if mesh.pp == 1 else ("1f1b", "interleaved", "zero-bubble")
        for zero, schedule in product((0, 1, 2, 3) if mesh.dp > 1 else (0,), schedules):
            plan = template.replace(mesh=mesh, micro=family.micro, zero=zero, schedule=schedule, stages=())
            stages = find_stages(plan, self.profile.pipeline_units) if mesh.pp > 1 else ()
            if stages is not None:
                yield self._with_derived_fields(plan.replace(stages=stages))

    def _plan_with_placements(self, mesh: Mesh) -> Plan | None:
        """A plan that knows how tp cuts the model; None where it cannot."""
        if mesh.tp == 1:
            return Plan()
        cut_key = mesh.tp, mesh.pp > 1
        if cut_key not in self._completed_by_mesh:
            try:
                assert self.complete_plan is not None
                self._completed_by_mesh[cut_key] = self.complete_plan(
                    Plan(mesh=Mesh(tp=mesh.tp, pp=2 if mesh.pp > 1 else 1))
                )
            except PlanError:
                self._completed_by_mesh[cut_key] = None
        return self._completed_by_mesh[cut_key]

    def recompute_plans(self, plan: Plan) -> list[Plan]:
        """A plan that keeps all activations, with blocks computed again instead."""
        if not self.profile.fsdp_units or plan.uses_servers or plan.pipeline.schedule == "zero-bubble":
            return []
        return [replace(plan, recompute=recompute) for recompute in _RECOMPUTE_OPTIONS]

    def forecast_executable(self, plans: Iterable[Plan]) -> list[Candidate]:
        """Those of `plans` that can be executed, and what they cost."""
        executable = (plan for plan in plans if not self.errors(plan))
        return [
            Candidate(plan=plan, forecast=simulate_measured(self.profile, self.cluster, plan)) for plan in executable
        ]

    def errors(self, plan: Plan) -> list[Problem]:
        """Why it cannot be executed."""
        return [problem for problem in check(plan, self.profile, self.cluster) if problem.severity == "error"]


def search_measured(
    space: MeasuredSpace, objective: Objective, *, top: int, tolerance: float, exhaustive: bool
) -> SearchResult:
    """The `top` plans that fit and every other whose cost is within `tolerance` of the least, among all that was forecast."""
    result, tie_breaker = SearchResult(objective, top, tolerance), count()
    queue: list[tuple[float, int, PlanFamily | Plan]] = []

    def enqueue(seconds: float, entry: PlanFamily | Plan) -> None:
        ranks = entry.mesh.ranks
        heapq.heappush(queue, (objective.cost(seconds, ranks, 0.0), next(tie_breaker), entry))

    def record(candidate: Candidate) -> None:
        result.add(candidate)
        for plan in space.recompute_plans(candidate.plan):
            enqueue(space.recompute_seconds_bound(candidate.forecast), plan)

    for candidate in space.forecast_executable(space.data_parallel_plans()):
        record(candidate)
    if not result.feasible:
        # Tables that fit no device may fit the hosts: trained by servers, which changes more than where things are.
        for candidate in space.forecast_executable(
            served_plans(space.profile, space.cluster, space.data_parallel_plans())
        ):
            record(candidate)
    # Ranks of tp on a CPU share the cores that one rank's threads use: where another plan fits, looking for cuts, for which the model is
    # run, is not worth its time.
    is_cpu = space.cluster.device_kind == "cpu"
    for search_tp in (False, True):
        if search_tp and is_cpu and result.feasible:
            break
        for family in space.families(search_tp=search_tp):
            enqueue(space.step_seconds_bound(family), family)
        if search_tp or is_cpu:
            _forecast_queue(space, result, queue, record, exhaustive=exhaustive)
    return result


def _forecast_queue(
    space: MeasuredSpace,
    result: SearchResult,
    queue: list[tuple[float, int, PlanFamily | Plan]],
    record: Callable[[Candidate], None],
    *,
    exhaustive: bool,
) -> None:
    """Forecast what is in the queue, while it may be of interest."""
    while queue:
        cost_bound, _, entry = heapq.heappop(queue)
        if not exhaustive and cost_bound > result.cost_cutoff:
            break
        if isinstance(entry, PlanFamily):
            for candidate in space.forecast_executable(space.model_parallel_plans(entry)):
                record(candidate)
        else:
            for candidate in space.forecast_executable([entry]):
                result.add(candidate)


def data_parallel_candidates(profile: Profile, cluster: Cluster, *, ranks: int | None = None) -> list[Candidate]:
    """Every plan of the data axis that passes `check`, whether it fits or not."""
    space = MeasuredSpace(profile, cluster, ranks=ranks, complete=None)
    return space.forecast_executable(space.data_parallel_plans())


def rank_counts(max_ranks: int) -> list[int]:
    """1, 2, 4 ... and the whole machine."""
    return sorted({*powers_of_two(max_ranks), max_ranks})


def halved_sizes(local_batch: int) -> list[int | None]:
    """The whole share at once, then halves of it down to one sample."""
    micro_batch_sizes: list[int | None] = [None]
    size = local_batch
    while size > 1:
        size = -(-size // 2)
        micro_batch_sizes.append(size)
    return micro_batch_sizes
