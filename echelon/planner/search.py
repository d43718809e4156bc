"""Searches for the best plans of a job on a cluster."""

from __future__ import annotations

from typing import get_args

from echelon.errors import PlanError
from echelon.plan.check import require_executable
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Profile
from echelon.planner.best_first import search_best_first
from echelon.planner.candidate import MIN_IMPROVEMENT, Candidate, CompletePlan, simplest_first
from echelon.planner.data_plans import server_forecasts, should_offer_servers, uneven_share_forecasts
from echelon.planner.goal import Goal, Objective
from echelon.planner.nothing_found import no_plan_error
from echelon.planner.plan_space import PlanSpace
from echelon.planner.tp_selection import replicate_faster_modules


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    top: int = 5,
    ranks: int | None = None,
    complete: CompletePlan | None = None,
    goal: Goal | None = None,
    exhaustive: bool = False,
    beyond: bool = False,
    precisions: tuple[Precision | None, ...] = (None,),
) -> tuple[Candidate, ...]:
    """The best `top` plans that fit and can be executed, best first. `ranks`: only plans over this many ranks.

    `complete` finds how tp can cut the model; without it, no plan for a measured machine uses tp. `goal`: by default the fastest.
    `exhaustive`: forecast every plan, also those that cannot be the best. `beyond`: include axes that are forecast and not executed yet.
    `precisions`: None stands for the job's.
    """
    _check_precisions(precisions, beyond=beyond)
    space = PlanSpace(profile, cluster, ranks=ranks, beyond=beyond, precisions=precisions)
    if set(precisions) != {None} and space.simulator.is_measured:
        raise PlanError("precisions are searched only on clusters with data sheets; set the job's precision instead")
    search = _Search(space, Objective(goal or Goal(), cluster), complete, top, exhaustive=exhaustive)
    candidates = search.run()
    if not candidates:
        raise no_plan_error(space, search.objective, search.errors)
    return search.replicate_faster(simplest_first(candidates, search.objective, top))


def _check_precisions(precisions: tuple[Precision | None, ...], *, beyond: bool) -> None:
    unknown = next((each for each in precisions if each not in (None, *get_args(Precision))), None)
    if unknown is not None:
        raise PlanError(f"precision={unknown}: not one of {', '.join(get_args(Precision))}")
    if "fp8" in precisions and not beyond:
        raise PlanError("precision=fp8: it is forecast and not executed yet; --beyond includes it in the search")


class _Search:
    """One search, with the cuts of the model that it has found."""

    def __init__(
        self, space: PlanSpace, objective: Objective, complete: CompletePlan | None, top: int, *, exhaustive: bool
    ) -> None:
        self.space, self.objective, self.errors = space, objective, list[PlanError]()
        self._complete, self._top, self._exhaustive = complete, top, exhaustive
        self._templates: dict[tuple[object, ...], Plan | PlanError] = {}

    def run(self) -> list[Candidate]:
        """The plans that fit, best first."""
        space, max_tp = self.space, self.space.max_tp
        if space.simulator.is_measured and (self._complete is None or space.cluster.device_kind == "cpu"):
            # On a CPU, ranks of tp share the cores that one rank's threads would use: if another plan fits, running the model to find
            # cuts is not worth the time.
            space.max_tp = 1
        candidates = self._run()
        if not candidates and self._complete is not None and space.max_tp < max_tp:
            space.max_tp = max_tp
            candidates = self._run()
        return candidates

    def replicate_faster(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Replicate modules that are faster so. The search's bounds hold for plans that cut everything, so this comes after it."""
        space, objective = self.space, self.objective
        if objective.goal.kind == "memory" or not any(each.plan.tensor.placements for each in candidates):
            return candidates
        forecasts = [
            replicate_faster_modules(each.plan, space.profile, space.simulator.forecast)
            if each.plan.tensor.placements
            else each.forecast
            for each in candidates
        ]
        improved = [Candidate(plan=forecast.plan, forecast=forecast) for forecast in forecasts]
        improved.sort(key=lambda candidate: objective.cost_of(candidate.forecast))
        return simplest_first(improved, objective, len(improved))

    def _run(self) -> list[Candidate]:
        space, objective, requested = self.space, self.objective, self._top
        tolerance = MIN_IMPROVEMENT if objective.goal.kind != "devices" else 0.0
        extra = uneven_share_forecasts(space, objective)
        if not space.simulator.is_measured and should_offer_servers(space.profile, space.cluster):
            extra += server_forecasts(space, objective)
        while True:
            forecasts = search_best_first(
                space, objective, top=requested, tolerance=tolerance, exhaustive=self._exhaustive
            )
            candidates = self._completed([*forecasts, *extra])
            # Plans that were not forecast cost no less than the last one found, but the model's actual cuts may raise the cost of these.
            if len(forecasts) < requested or (
                candidates and objective.cost_of(candidates[0].forecast) <= objective.cost_of(forecasts[-1])
            ):
                # Tables that fit no device may fit host memory. Servers change the training itself, so they come last.
                return candidates or self._completed(server_forecasts(space, objective))
            requested *= 4

    def _completed(self, forecasts: list[Forecast]) -> list[Candidate]:
        """Plans with the model's actual cuts, forecast again, best first."""
        candidates: list[Candidate] = []
        self.errors = []
        for forecast in forecasts:
            if self._complete is not None and forecast.plan.incomplete:
                try:
                    forecast = self.space.simulator.forecast(self._with_cuts(forecast.plan, self._complete))
                except PlanError as error:
                    self.errors.append(error)
                    continue
            if self.objective.accepts(forecast):
                candidates.append(Candidate(plan=forecast.plan, forecast=forecast))
        return sorted(candidates, key=lambda candidate: self.objective.key(candidate.forecast))

    def _with_cuts(self, plan: Plan, complete: CompletePlan) -> Plan:
        """An executable plan with its cuts."""
        key = plan.mesh.tp, plan.tensor.sequence, plan.mesh.pp > 1
        if key not in self._templates:
            try:
                self._templates[key] = complete(plan)
            except PlanError as error:
                self._templates[key] = error
        template = self._templates[key]
        if isinstance(template, PlanError):
            raise template
        plan = self.space.with_cuts(plan, template)
        if plan.incomplete:
            raise PlanError(f'"{plan}": the model cannot be cut this way')
        if self.space.errors(plan):
            require_executable(plan, self.space.profile, self.space.first_cluster)
        return plan
