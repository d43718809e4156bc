"""Explains why a plan is the best, and why another one is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.errors import PlanError
from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import format_bytes, format_seconds
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner.candidate import Candidate
from echelon.simulator import simulate

_CAUSES = ("forward", "backward", "bubble", "exchange", "optimizer", "input", "overhead")
_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary", "buckets", "framework")
#: Causes of a difference that are listed.
_MAX_CAUSES = 4


def explain(candidates: Sequence[Candidate]) -> str:
    """Why the first candidate is the best: its time and memory by cause, and what the others would cost."""
    best = candidates[0].forecast
    lines = [f'"{best.plan}": {format_seconds(best.time.step)} a step, {best.samples_per_second:,.0f} samples/s']
    lines += [f"  {line}" for line in (_describe_time(best), _describe_memory(best))]
    if best.plan.ranks == 1:
        rivals = [other.forecast for other in candidates[1:] if other.forecast.plan.ranks > 1]
        if rivals:
            split_cost = rivals[0].time.exchange + rivals[0].time.optimizer - best.time.optimizer
            lines += [
                f"  one process: {rivals[0].plan.ranks} ranks would spend {format_seconds(split_cost)} a step on exchange and repeated work"
            ] * (split_cost > 0)
        else:
            lines.append("  one process: nothing is exchanged")
    if not any(_is_plain_data_parallel(each.forecast) for each in candidates):
        lines.append("  no purely data-parallel plan is among the best: this one cuts the model or recomputes blocks")
    lines += [f"  note: {note}" for note in best.notes]
    for candidate in candidates[1:]:
        lines.append(f'"{candidate.plan}": {_compare_forecasts(best, candidate.forecast)}')
    return "\n".join(lines)


def _is_plain_data_parallel(forecast: Forecast) -> bool:
    return forecast.plan.ranks == forecast.plan.mesh.dp and forecast.plan.recompute == "none"


def why_not(profile: Profile, cluster: Cluster, plan: Plan, best: Plan) -> str:
    """What `plan` would cost compared with `best`, or which rule forbids it."""
    problems = [problem for problem in check(plan, profile, cluster) if problem.severity == "error"]
    refusal = f'"{plan}" cannot be executed: ' + "; ".join(map(str, problems)) if problems else ""
    if any(not problem.not_implemented for problem in problems):
        return refusal
    try:
        best_forecast, plan_forecast = simulate(profile, cluster, best), simulate(profile, cluster, plan)
    except PlanError as error:
        return refusal or f'"{plan}" cannot be forecast: {error}'
    comparison = f'"{plan}" against "{best}": {_compare_forecasts(best_forecast, plan_forecast)}'
    return f"{refusal}\n{comparison}" if refusal else comparison


def _compare_forecasts(best: Forecast, other: Forecast) -> str:
    """The difference in time and memory by cause; for a plan that does not fit, what it lacks."""
    if not other.fits:
        required = other.memory.required
        largest = max(_MEMORY_PARTS, key=lambda part: getattr(other.memory, part))
        return (
            f"does not fit: up to {format_bytes(required)} per rank of {format_bytes(other.capacity)}, {format_bytes(required - other.capacity)} too much; most of it "
            f"{largest} ({format_bytes(getattr(other.memory, largest))}), most at {other.peak_at}"
        )
    extra_seconds = other.time.step - best.time.step
    extra_bytes = other.memory.total - best.memory.total
    time_text = f"{format_seconds(abs(extra_seconds))} {'slower' if extra_seconds > 0 else 'faster'} ({abs(extra_seconds) / best.time.step:.0%})"
    memory_text = f"{format_bytes(abs(extra_bytes))} {'more' if extra_bytes > 0 else 'less'} memory per rank"
    return (
        f"{time_text if extra_seconds else 'as fast'}{_describe_changes(best.time, other.time, _CAUSES, format_seconds, best.time.step)}; "
        f"{memory_text if abs(extra_bytes) >= 1 else 'as much memory per rank'}{_describe_changes(best.memory, other.memory, _MEMORY_PARTS, format_bytes, best.memory.total)}"
    )


def _describe_changes(
    best: object, other: object, names: Sequence[str], format_value: Callable[[float], str], total: float
) -> str:
    """The causes of the difference, largest first."""
    changes = {name: getattr(other, name) - getattr(best, name) for name in names}
    changed = [name for name in names if abs(changes[name]) > total / 200]
    changed.sort(key=lambda name: -abs(changes[name]))
    signs = {name: "+" if changes[name] > 0 else "-" for name in changed}
    texts = [f"{name} {signs[name]}{format_value(abs(changes[name]))}" for name in changed[:_MAX_CAUSES]]
    return f": {', '.join(texts)}" if texts else ""


def _describe_time(forecast: Forecast) -> str:
    time = forecast.time
    seconds = {name: getattr(time, name) for name in _CAUSES}
    causes = ", ".join(f"{name} {format_seconds(each)}" for name, each in seconds.items() if each > time.step / 200)
    hidden = f"; {format_seconds(time.hidden)} of exchange hidden behind backward" if time.hidden else ""
    return f"time: {causes}{hidden}"


def _describe_memory(forecast: Forecast) -> str:
    memory = forecast.memory
    sizes = {name: getattr(memory, name) for name in _MEMORY_PARTS}
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size > memory.peak / 200)
    return f"memory per rank: {format_bytes(memory.total)} of {format_bytes(forecast.capacity)} ({parts}); the peak is at {forecast.peak_at}"
