"""`echelon explain`: a plan in words, and how another one differs in effect and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from echelon.cli.common import ClusterOption, DebugOption, JsonOption, print_answer, read_cluster, read_job
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from echelon.plan.plan import Plan
    from echelon.plan.problem import Problem
    from echelon.plan.profile import Profile


def explain(
    plan: Annotated[str, Argument(metavar="PLAN", help='A plan in short form ("dp=2 zero=1"), or a plan file.')],
    why_not: Annotated[str | None, Option("--why-not", metavar="P", help="Another plan to compare with.")] = None,
    job: Annotated[str | None, Option(metavar="FILE[:name]", help="The job, to show time and memory as well.")] = None,
    cluster: ClusterOption = None,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Explain what a plan does and why another one is not better.

    Goes through the plan decision by decision. With --job it adds time and memory, and what the other plan would cost or which rule
    forbids it.
    """
    requested = _read_plan(plan, "PLAN")
    alternative = _read_plan(why_not, "--why-not") if why_not is not None else None
    answer = _explain_plans(requested, alternative, job, cluster)
    print_answer(json, answer, *_format_answer(answer))


def _read_plan(text: str, argument: str) -> Plan:
    from echelon.errors import PlanError
    from echelon.flow.resolve_plan import parse_plan

    plan = parse_plan(text)
    if plan is None:
        raise PlanError(f"{argument}=auto: expected a plan; `echelon plan` finds the best one")
    return plan


def _explain_plans(requested: Plan, alternative: Plan | None, job: str | None, cluster: str | None) -> dict[str, Any]:
    from echelon.plan.check import check, require_executable
    from echelon.plan.describe import describe_plan, diff_plans

    if job is None and cluster is None:
        from echelon.hardware import known_cluster

        target_cluster = known_cluster()  # only if this machine was measured before
    else:
        target_cluster = read_cluster(cluster)
    job_source, profile = None, None
    if job is not None:
        job_source, profile = read_job(job)
        require_executable(requested, profile, target_cluster)
        requested = job_source.complete_plan(requested)
    problems = check(requested, profile, target_cluster)
    decisions = describe_plan(requested, profile.batch if profile else None).splitlines()
    answer: dict[str, Any] = {"plan": str(requested), "decisions": decisions, "problems": list(map(str, problems))}
    if target_cluster is None:
        answer["problems"] += _compare_with_cores(requested)
    answer |= _describe_cuts(requested, profile)
    plans = [requested]
    if alternative is not None:
        if job_source is not None and not _errors_among(check(alternative, profile, target_cluster)):
            alternative = job_source.complete_plan(alternative)
        problems = check(alternative, profile, target_cluster)
        differences = diff_plans(requested, alternative)
        answer["other"] = {"plan": str(alternative), "differs": differences, "problems": list(map(str, problems))}
        plans += [] if _errors_among(problems) else [alternative]
    if profile is not None and target_cluster is not None:
        from echelon.planner import why_not
        from echelon.simulator import simulate

        for candidate, section in zip(plans, [answer, answer.get("other", {})], strict=False):
            forecast = simulate(profile, target_cluster, candidate)
            memory, capacity = forecast.memory.total, forecast.capacity
            cost = {"step": forecast.time.step, "memory": memory, "capacity": capacity, "fits": forecast.fits}
            section["cost"] = cost
        if alternative is not None:
            answer["other"]["verdict"] = why_not(profile, target_cluster, alternative, requested)
    return answer


def _errors_among(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def _describe_cuts(plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """How the plan cuts the model, if the plan specifies it."""
    from echelon.plan.codec import to_plain
    from echelon.plan.describe import cut_fraction, group_cuts, summarize_stages

    result: dict[str, Any] = {}
    if plan.tensor.placements or plan.tensor.replicated:
        result["cuts"] = [to_plain(item) | {"words": str(item)} for item in group_cuts(plan)]
        result["cut_share"] = cut_fraction(plan, profile) if profile is not None else None
    if plan.pipeline.stages and profile is not None and profile.pipeline_units:
        stages = summarize_stages(plan, profile.pipeline_units)
        result["stages"] = [to_plain(item) | {"words": str(item)} for item in stages]
    return result


def _compare_with_cores(plan: Plan) -> list[str]:
    """A warning about a plan that is too large for a machine that was never measured."""
    from echelon.plan.check import MAX_RANKS_PER_CORE
    from echelon.world import usable_cores

    cores = usable_cores()
    if plan.ranks <= MAX_RANKS_PER_CORE * cores:
        return []
    machine = f"this machine has {cores} core{'s' * (cores > 1)}; `echelon doctor` measures it"
    return [f"dp={plan.mesh.dp}: the plan needs {plan.ranks} devices and {machine}"]


def _format_answer(answer: dict[str, Any]) -> list[str]:
    lines = [f'"{answer["plan"]}"', *(f"  {line}" for line in answer["decisions"] + answer["problems"])]
    if "cost" in answer:
        lines.append(f"  {_format_cost(answer['cost'])}")
    if "cuts" in answer:
        share = answer["cut_share"]
        lines.append("how modules are cut" + (f": {share:.0%} of the parameters' bytes" if share is not None else ""))
        lines += [f"  {item['words']}" for item in answer["cuts"]]
    if "stages" in answer:
        lines += ["how the model is staged", *(f"  {item['words']}" for item in answer["stages"])]
    other = answer.get("other")
    if other:
        lines += ["", f'why not "{other["plan"]}"', *(f"  {line}" for line in other["differs"] + other["problems"])]
        lines += [] if other["differs"] else ["  it is the same plan"]
        if "cost" in other:
            lines += [f"  {_format_cost(other['cost'])}", f"  {other['verdict']}"]
    return lines


def _format_cost(cost: dict[str, Any]) -> str:
    fits = "fits" if cost["fits"] else "does not fit"
    return f"{format_seconds(cost['step'])} a step, {format_bytes(cost['memory'])} of {format_bytes(cost['capacity'])} per rank: {fits}"
