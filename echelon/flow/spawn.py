"""Start the ranks of a plan on this machine. Nothing is pickled: each rank makes the job from its own source."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError, WorldError
from echelon.flow.resolve_plan import ResolvedPlan
from echelon.launchers import rank_ipc
from echelon.launchers.command import command_environment
from echelon.launchers.local import launch
from echelon.plan.plan import Plan
from echelon.world import World


def require_rank_count(plan: Plan, world: World) -> None:
    """Refuse a plan for another number of ranks than a launcher started."""
    if world.size != plan.ranks:
        need = f'the plan "{plan}" needs {plan.ranks} rank{"s" * (plan.ranks > 1)}, but {world.size} were started'
        raise WorldError(f"{need}; start {plan.ranks}, or use a plan for {world.size} (dp={world.size})")


def run_ranks(verb: str, spec: str, resolved: ResolvedPlan, options: Mapping[str, Any], *, debug: bool = False) -> str:
    """Run a verb of the command line once per rank; the result of rank 0, as text."""
    command = [sys.executable, "-m", "echelon.flow.rank_main", verb, spec, json.dumps(dict(options), default=str)]
    return launch_for_result([*command, "--debug"] if debug else command, resolved, one_at_a_time=verb == "verify")


def launch_for_result(
    command: Sequence[str], resolved: ResolvedPlan, *, one_at_a_time: bool = False, earlier_results: Sequence[Any] = ()
) -> str:
    """Run `command` once per rank until the call that it contains has returned; the result of rank 0, as text."""
    with tempfile.TemporaryDirectory(prefix="echelon-result-") as folder:
        result_file = Path(folder, "result.json")
        environment = {rank_ipc.RESULT_VARIABLE: str(result_file)}
        launch_ranks(command, resolved, environment, one_at_a_time=one_at_a_time, earlier_results=earlier_results)
        try:
            return result_file.read_text(encoding="utf-8")
        except OSError:
            reason = "a script must reach it in every rank, by the same path"
            raise LaunchError(f"the ranks ended before the call that started them: {reason}") from None


def launch_ranks(
    command: Sequence[str],
    resolved: ResolvedPlan,
    environment: Mapping[str, str] | None = None,
    *,
    one_at_a_time: bool = False,
    earlier_results: Sequence[Any] = (),
) -> int:
    """Run `command` once per rank of the plan, which it receives; the exit code."""
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as folder:
        variables = {rank_ipc.PLAN_VARIABLE: str(resolved.save_for_ranks(Path(folder))), **command_environment()}
        if earlier_results:
            results_file = Path(folder, "done.json")
            results_file.write_text(json.dumps(list(earlier_results)), encoding="utf-8")
            variables[rank_ipc.RESULTS_VARIABLE] = str(results_file)
        plan, variables = resolved.plan, {**variables, **(environment or {})}
        return launch(command, plan.ranks, threads=plan.threads, environment=variables, one_at_a_time=one_at_a_time)
