"""Why this plan, and why not another: the forecasts in words."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.figures import seconds as _seconds
from echelon.plan.figures import size as _bytes
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner.search import Candidate
from echelon.simulator import simulate


def explain(candidates: Sequence[Candidate]) -> str:
    """Why the first of what `search` found is the best: its time and memory by cause, and what the next one would cost."""
    best = candidates[0].forecast
    lines = [f'"{best.plan}": {_seconds(best.time.step)} a step, {best.rate:,.0f} samples/s']
    lines += [f"  {line}" for line in (_time(best), _memory(best))]
    if best.plan.ranks == 1:
        rivals = [c.forecast for c in candidates[1:] if c.forecast.plan.ranks > 1]
        if rivals:
            cost = rivals[0].time.exchange + rivals[0].time.optimizer - best.time.optimizer
            lines.append(
                f"  one process: splitting over {rivals[0].plan.ranks} would cost {_seconds(cost)} of exchange and repeated work a step"
            )
        else:
            lines.append("  one process: nothing is exchanged")
    if best.plan.ranks > best.plan.mesh.dp or best.plan.recompute != "none":
        lines.append(
            "  no plan of the data axis alone fits or can be executed: this one cuts the model, or computes blocks again"
        )
    lines += [f"  note: {note}" for note in best.notes]
    for candidate in candidates[1:]:
        lines.append(f'"{candidate.plan}": {_against(best, candidate.forecast)}')
    return "\n".join(lines)


def why_not(profile: Profile, cluster: Cluster, plan: Plan, best: Plan) -> str:
    """What `plan` would cost against `best`, or which rule forbids it."""
    problems = [problem for problem in check(plan, profile, cluster) if problem.severity == "error"]
    if problems:
        return f'"{plan}" cannot be executed: ' + "; ".join(map(str, problems))
    mine, other = simulate(profile, cluster, best), simulate(profile, cluster, plan)
    return f'"{plan}" against "{best}": {_against(mine, other)}'


def _against(best: Forecast, other: Forecast) -> str:
    """The difference in time and bytes, and what binds."""
    if not other.fits:
        needs = other.memory.high + other.memory.framework
        return f"does not fit: up to {_bytes(needs)} per rank of {_bytes(other.capacity)}, most at {other.peak_at}"
    slower = other.time.step - best.time.step
    causes = {
        name: getattr(other.time, name) - getattr(best.time, name)
        for name in ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
    }
    cause = max(causes, key=lambda name: causes[name] * (1 if slower > 0 else -1))
    more = other.memory.peak - best.memory.peak
    return (
        f"{_seconds(abs(slower))} {'slower' if slower > 0 else 'faster'} ({abs(slower) / best.time.step:.0%}), most of it "
        f"{cause}; {_bytes(abs(more))} {'more' if more > 0 else 'less'} memory per rank"
    )


def _time(forecast: Forecast) -> str:
    time = forecast.time
    parts = ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
    told = ", ".join(
        f"{name} {_seconds(getattr(time, name))}" for name in parts if getattr(time, name) > time.step / 200
    )
    hidden = f"; {_seconds(time.hidden)} of exchange hide behind backward" if time.hidden else ""
    return f"time: {told}{hidden}"


def _memory(forecast: Forecast) -> str:
    memory = forecast.memory
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework")
    told = ", ".join(
        f"{name} {_bytes(getattr(memory, name))}" for name in parts if getattr(memory, name) > memory.peak / 200
    )
    return f"memory per rank: {_bytes(memory.total)} of {_bytes(forecast.capacity)} ({told}); the peak is at {forecast.peak_at}"
