"""`echelon explain`: a plan in words, and what another one would change and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import ClusterOption, Debug, Json, print_json, read_cluster, read_subject
from echelon.plan.format_units import seconds, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from echelon.plan.check import Problem
    from echelon.plan.cluster import Cluster
    from echelon.plan.forecast import Forecast
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile


def explain(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help='A plan in short form ("dp=2 zero=1"), or a plan file.')],
    why_not: Annotated[
        str | None, typer.Option("--why-not", metavar="P", help="Another plan to hold against it.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="FILE[:name]", help="The job: with it, costs are told too.")
    ] = None,
    cluster: ClusterOption = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a plan does, and why not another.

    Decision by decision; with --job also its time and memory, and what the other plan would cost or which rule forbids it.
    """
    wanted = _read(plan, "PLAN")
    other = _read(why_not, "--why-not") if why_not is not None else None
    answer = _answer(wanted, other, job, cluster)
    if json:
        print_json(answer)
    else:
        typer.echo(_words(answer))


def _read(text: str, where: str) -> Plan:
    from echelon.errors import PlanError
    from echelon.flow.resolve_plan import read_plan

    plan = read_plan(text)
    if plan is None:
        raise PlanError(f"{where}=auto: give a plan; `echelon plan` finds the best one")
    return plan


def _answer(wanted: Plan, other: Plan | None, job: str | None, cluster: str | None) -> dict[str, Any]:
    from echelon.plan.check import check, require
    from echelon.plan.text import diff
    from echelon.plan.text import explain as in_words

    subject, profile, machines = None, None, _machines(job, cluster)
    if job is not None:
        subject, profile = read_subject(job)
        require(wanted, profile, machines)  # a plan that this job cannot have is no plan to explain
        wanted = subject.complete(wanted)
    answer: dict[str, Any] = {
        "plan": str(wanted),
        "decisions": in_words(wanted, profile.batch if profile else None).splitlines(),
        "problems": [str(problem) for problem in check(wanted, profile, machines)],
    }
    if machines is None:
        answer["problems"] += _remark(wanted)
    answer |= _cuts(wanted, profile)
    plans = [wanted]
    if other is not None:
        if subject is not None and not _errors(check(other, profile, machines)):
            other = subject.complete(other)
        problems = check(other, profile, machines)
        answer["other"] = {
            "plan": str(other),
            "differs": diff(wanted, other),
            "problems": [str(problem) for problem in problems],
        }
        plans += [] if _errors(problems) else [other]
    if profile is not None and machines is not None:
        from echelon.planner import why_not
        from echelon.simulator import simulate

        places: list[dict[str, Any]] = [answer, answer.get("other", {})]
        for each, place in zip(plans, places, strict=False):
            place["cost"] = _cost(simulate(profile, machines, each))
        if other is not None:
            answer["other"]["verdict"] = why_not(profile, machines, other, wanted)
    return answer


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def _cuts(plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """How the model is cut, where the plan says so."""
    from echelon.plan.codec import to_plain
    from echelon.plan.describe import cut_bytes, cuttings, stage_shares

    found: dict[str, Any] = {}
    if plan.placements or plan.uncut:
        found["cuts"] = [to_plain(each) | {"words": str(each)} for each in cuttings(plan)]
        found["cut_share"] = cut_bytes(plan, profile) if profile is not None else None
    if plan.stages and profile is not None and profile.visits:
        found["stages"] = [to_plain(each) | {"words": str(each)} for each in stage_shares(plan, profile.visits)]
    return found


def _machines(job: str | None, cluster: str | None) -> Cluster | None:
    """What the plan is held against: with a job measured if need be, without one only if it is known."""
    if job is not None or cluster is not None:
        return read_cluster(cluster)
    from echelon.hardware import known_cluster

    return known_cluster()


def _remark(plan: Plan) -> list[str]:
    """What can be said about its size on a machine that was never measured."""
    from echelon.plan.check import RANKS_PER_CORE
    from echelon.world import usable_cores

    cores = usable_cores()
    if plan.ranks <= RANKS_PER_CORE * cores:
        return []
    here = f"this machine has {cores} core{'s' * (cores > 1)}"
    return [
        f"dp={plan.mesh.dp}: the plan needs {plan.ranks} devices and {here}; `echelon doctor` measures what is here"
    ]


def _cost(forecast: Forecast) -> dict[str, Any]:
    return {
        "step": forecast.time.step,
        "memory": forecast.memory.total,
        "capacity": forecast.capacity,
        "fits": forecast.fits,
    }


def _words(answer: dict[str, Any]) -> str:
    lines = [f'"{answer["plan"]}"', *(f"  {line}" for line in answer["decisions"] + answer["problems"])]
    if "cost" in answer:
        lines.append(f"  {_price(answer['cost'])}")
    if "cuts" in answer:
        share = answer["cut_share"]
        lines.append("how modules are cut" + (f": {share:.0%} of the parameters' bytes" if share is not None else ""))
        lines += [f"  {each['words']}" for each in answer["cuts"]]
    if "stages" in answer:
        lines += ["how the model is staged", *(f"  {each['words']}" for each in answer["stages"])]
    other = answer.get("other")
    if other:
        lines += ["", f'why not "{other["plan"]}"', *(f"  {line}" for line in other["differs"] + other["problems"])]
        lines += [] if other["differs"] else ["  it is the same plan"]
        if "cost" in other:
            lines += [f"  {_price(other['cost'])}", f"  {other['verdict']}"]
    return "\n".join(lines)


def _price(cost: dict[str, Any]) -> str:
    fits = "fits" if cost["fits"] else "does not fit"
    return f"{seconds(cost['step'])} a step, {size(cost['memory'])} of {size(cost['capacity'])} per rank: {fits}"
