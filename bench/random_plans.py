"""Plans drawn with a seed, forecast and run here: `python -m bench.forecast --drawn 60 [--seed 0] [--ranks 1,2,4]`.

For each model the plans are drawn from all that can be executed, tensor and pipeline axes and recomputation included, and the plan that
`search` chooses is one of them. Plans of more ranks than cores are reported apart: they prove numbers, not speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from bench.common import Row
from echelon.errors import PlanError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Recompute
from echelon.plan.profile import Profile
from echelon.planner import search
from echelon.planner.plan_space import PlanSpace
from echelon.simulator import simulate

#: The issue: half of the plans within 15 %, and the chosen plan within 5 % of the best that was measured.
ERROR, CHOICE = 0.15, 1.05


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plan of a model, its forecast, and whether it is what `search` chooses."""

    model: str
    plan: Plan
    forecast: Forecast
    chosen: bool


def draw(
    jobs: dict[str, Callable[[], Job]], profiles: dict[str, Profile], cluster: Cluster, *, count: int, seed: int, ranks: Sequence[int]
) -> list[Drawn]:  # fmt: skip
    """About `count` plans, as many of each model, and for each the one that is chosen."""
    lot = random.Random(seed)
    found = []
    for name, make in jobs.items():
        job, profile = make(), profiles[name]
        every = _all(profile, job, cluster, ranks)
        best = search(profile, cluster, complete=lambda plan, job=job, profile=profile: complete(plan, job, profile))[
            0
        ].plan
        others = [plan for plan in every if plan != best]
        for plan in (best, *lot.sample(others, min(-(-count // len(jobs)) - 1, len(others)))):
            found.append(Drawn(name, plan, simulate(profile, cluster, plan), plan == best))
    return found


def _all(profile: Profile, job: Job, cluster: Cluster, ranks: Sequence[int]) -> list[Plan]:
    """Every plan for these numbers of ranks that can be executed and fits."""
    found: dict[str, Plan] = {}
    for size in ranks:
        for plan in _plans(profile, job, cluster, size):
            good = not [problem for problem in check(plan, profile, cluster) if problem.severity == "error"]
            if good and simulate(profile, cluster, plan).fits:
                found[str(plan)] = plan
    return list(found.values())


def _plans(profile: Profile, job: Job, cluster: Cluster, size: int) -> Iterable[Plan]:
    again: list[Recompute] = ["none", "block", "selective"] if profile.fsdp_units else ["none"]
    try:
        plain = [each.plan for each in PlanSpace(profile, cluster, ranks=size).data_parallel_candidates()]
    except PlanError:
        plain = []
    yield from (replace(plan, recompute=recompute) for plan, recompute in product(plain, again))
    threads = max(cluster.cores // size, 1)
    for tp, pp in ((size, 1), (1, size)):
        if size == 1:
            continue
        try:
            cut = complete(Plan(mesh=Mesh(tp=tp, pp=pp), threads=threads), job, profile)
        except PlanError:
            continue
        for micro, recompute in product((None, max(profile.batch // 4, 1)), again):
            yield replace(cut, micro=micro, recompute=recompute)


def rows(drawn: Sequence[Drawn], measured: dict[int, float], cores: int) -> list[Row]:
    """Every plan, the median of the errors, and what was chosen against the best."""
    made, errors, apart = [], [], []
    for place, each in enumerate(drawn):
        error = each.forecast.time.step / measured[place] - 1
        crowded = each.plan.ranks > cores
        (apart if crowded else errors).append(abs(error))
        figures = f"{each.forecast.time.step * 1e3:.1f} ms", f"{measured[place] * 1e3:.1f} ms"
        made.append(
            _row(
                each.model,
                str(each.plan),
                *figures,
                abs(error),
                f"{error:+.1%}" + (" (apart)" if crowded else ""),
                None,
            )
        )
    made.append(_row("all", f"median of {len(errors)} plans", "", "", median(errors), f"{median(errors):.1%}", ERROR))
    if apart:
        made.append(
            _row(
                "all",
                f"median of {len(apart)} plans with more ranks than cores",
                "",
                "",
                median(apart),
                f"{median(apart):.1%}",
                None,
            )
        )
    for model in dict.fromkeys(each.model for each in drawn):
        times = {
            place: measured[place]
            for place, each in enumerate(drawn)
            if each.model == model and each.plan.ranks <= cores
        }
        chosen = [measured[place] for place in times if drawn[place].chosen]
        if not chosen:
            made.append(_row(model, "chosen plan has more ranks than cores", "", "", 0.0, "not compared", None))
            continue
        ratio = chosen[0] / min(times.values())
        made.append(_row(model, "chosen over best of those drawn", "", "", ratio, f"{ratio:.3f}", CHOICE))
    return made


def _row(model: str, plan: str, forecast: str, truth: str, value: float, text: str, limit: float | None) -> Row:
    return Row(
        what={"model": model, "plan": plan, "of": "step", "forecast": forecast, "truth": truth},
        value=value,
        text=text,
        limit=limit,
    )
