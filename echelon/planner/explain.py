"""Why this plan, and why not another: the forecasts in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.errors import PlanError
from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import seconds as _seconds
from echelon.plan.format_units import size as _bytes
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner.candidate import Candidate
from echelon.simulator import simulate

_CAUSES = ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework")
#: So many causes of a difference are told.
_TOLD = 4


def explain(candidates: Sequence[Candidate]) -> str:
    """Why the first of what `search` found is the best: its time and memory by cause, and what the next one would cost."""
    best = candidates[0].forecast
    lines = [f'"{best.plan}": {_seconds(best.time.step)} a step, {best.rate:,.0f} samples/s']
    lines += [f"  {line}" for line in (_time(best), _memory(best))]
    if best.plan.ranks == 1:
        rivals = [c.forecast for c in candidates[1:] if c.forecast.plan.ranks > 1]
        if rivals:
            cost = rivals[0].time.exchange + rivals[0].time.optimizer - best.time.optimizer
            lines += [
                f"  one process: splitting over {rivals[0].plan.ranks} would cost {_seconds(cost)} of exchange and repeated work a step"
            ] * (cost > 0)
        else:
            lines.append("  one process: nothing is exchanged")
    if not any(_plain(each.forecast) for each in candidates):
        lines.append(
            "  no plan of the data axis alone is among the best: this one cuts the model, or computes blocks again"
        )
    lines += [f"  note: {note}" for note in best.notes]
    for candidate in candidates[1:]:
        lines.append(f'"{candidate.plan}": {_against(best, candidate.forecast)}')
    return "\n".join(lines)


def _plain(forecast: Forecast) -> bool:
    return forecast.plan.ranks == forecast.plan.mesh.dp and forecast.plan.recompute == "none"


def why_not(profile: Profile, cluster: Cluster, plan: Plan, best: Plan) -> str:
    """What `plan` would cost against `best`, and which rule forbids it."""
    problems = [problem for problem in check(plan, profile, cluster) if problem.severity == "error"]
    refused = f'"{plan}" cannot be executed: ' + "; ".join(map(str, problems)) if problems else ""
    if any(not problem.ahead for problem in problems):
        return refused
    try:
        mine, other = simulate(profile, cluster, best), simulate(profile, cluster, plan)
    except PlanError as error:
        return refused or f'"{plan}" cannot be forecast: {error}'
    told = f'"{plan}" against "{best}": {_against(mine, other)}'
    return f"{refused}\n{told}" if refused else told


def _against(best: Forecast, other: Forecast) -> str:
    """The difference in time and bytes, by cause, and what binds."""
    if not other.fits:
        needs = other.memory.needed
        largest = max(_PARTS, key=lambda part: getattr(other.memory, part))
        return (
            f"does not fit: up to {_bytes(needs)} per rank of {_bytes(other.capacity)}, {_bytes(needs - other.capacity)} too much; most of it "
            f"{largest} ({_bytes(getattr(other.memory, largest))}), most at {other.peak_at}"
        )
    slower = other.time.step - best.time.step
    more = other.memory.total - best.memory.total
    time = f"{_seconds(abs(slower))} {'slower' if slower > 0 else 'faster'} ({abs(slower) / best.time.step:.0%})"
    memory = f"{_bytes(abs(more))} {'more' if more > 0 else 'less'} memory per rank"
    return (
        f"{time if slower else 'as fast'}{_causes(best.time, other.time, _CAUSES, _seconds, best.time.step)}; "
        f"{memory if abs(more) >= 1 else 'as much memory per rank'}{_causes(best.memory, other.memory, _PARTS, _bytes, best.memory.total)}"
    )


def _causes(best: object, other: object, names: Sequence[str], show: Callable[[float], str], whole: float) -> str:
    """Where the difference comes from, the largest first."""
    changes = {name: getattr(other, name) - getattr(best, name) for name in names}
    told = sorted((name for name in names if abs(changes[name]) > whole / 200), key=lambda name: -abs(changes[name]))
    words = [f"{name} {'+' if changes[name] > 0 else '-'}{show(abs(changes[name]))}" for name in told[:_TOLD]]
    return f": {', '.join(words)}" if words else ""


def _time(forecast: Forecast) -> str:
    time = forecast.time
    told = ", ".join(
        f"{name} {_seconds(getattr(time, name))}" for name in _CAUSES if getattr(time, name) > time.step / 200
    )
    hidden = f"; {_seconds(time.hidden)} of exchange hide behind backward" if time.hidden else ""
    return f"time: {told}{hidden}"


def _memory(forecast: Forecast) -> str:
    memory = forecast.memory
    told = ", ".join(
        f"{name} {_bytes(getattr(memory, name))}" for name in _PARTS if getattr(memory, name) > memory.peak / 200
    )
    return f"memory per rank: {_bytes(memory.total)} of {_bytes(forecast.capacity)} ({told}); the peak is at {forecast.peak_at}"
