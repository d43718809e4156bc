"""Who executes: this process, or ranks that it starts.

`python file.py` and `parallelize` start ranks by running the same command again in each; the command line runs
`echelon.flow.rank_main`. Either way nothing is pickled: each rank makes the job from its own source.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from echelon.errors import (
    DivergenceError,
    EchelonError,
    JobError,
    PlanError,
    UnshardableStateError,
    UnsplittableModelError,
    UnverifiedPlanError,
    WorldError,
)
from echelon.flow.job_file import file_being_read
from echelon.flow.job_source import main_script
from echelon.flow.resolve_plan import ResolvedPlan
from echelon.launchers import rank_ipc
from echelon.launchers.command import command_environment
from echelon.launchers.environment import fix_hash_seed
from echelon.launchers.local import INTERRUPTED_EXIT_CODE, launch
from echelon.plan.plan import Plan
from echelon.world import World, read_world

#: What ranks report to the process that started them when the plan turned out to compute something else, or cannot be executed.
DISPROOF_ERRORS = tuple(
    kind.__name__
    for kind in (UnverifiedPlanError, DivergenceError, UnshardableStateError, PlanError, UnsplittableModelError)
)


#: What each training in this process returned, or its error; None: a loop of the user's own, which ranks could not skip.
_RESULTS: list[dict[str, Any] | None] = []


def record_result(result: dict[str, Any] | None) -> None:
    """Remember what a training in this process returned, for ranks that a later one starts."""
    _RESULTS.append(result)


def require_rank_count(plan: Plan, world: World) -> None:
    """The ranks that a launcher started are those that the plan needs."""
    if world.size != plan.ranks:
        raise WorldError(
            f'the plan "{plan}" is for {plan.ranks} rank{"s" * (plan.ranks > 1)} and {world.size} were started; start {plan.ranks}, or give '
            f"a plan for {world.size} (dp={world.size})"
        )


def rerun_script(resolved: ResolvedPlan) -> NoReturn:
    """Run this very command once per rank, then end this process: the ranks have executed the rest of the script too."""
    plan = resolved.plan
    if main_script() is None or hasattr(sys, "ps1"):
        raise JobError(
            f'the plan "{plan}" needs {plan.ranks} processes, which are started by running your script again, and this is not a script: '
            'write the job to file.py and say `echelon train file.py`, or use plan="dp=1"'
        )
    if None in _RESULTS:
        raise JobError(
            f'the plan "{plan}" needs {plan.ranks} processes, which are started by running your script again, and this script has already called '
            "parallelize() for one process, which they would repeat; move one of the two to a script of its own"
        )
    try:
        exit_code = _launch([sys.executable, *sys.orig_argv[1:]], resolved, earlier_results=_RESULTS)
    except KeyboardInterrupt as interrupt:
        print(interrupt, file=sys.stderr)  # noqa: T201
        exit_code = INTERRUPTED_EXIT_CODE
    raise SystemExit(exit_code)


def run_ranks(verb: str, spec: str, resolved: ResolvedPlan, options: Mapping[str, Any], *, debug: bool = False) -> int:
    """Run a verb of the command line once per rank; returns the exit code."""
    command = [sys.executable, "-m", "echelon.flow.rank_main", verb, spec, json.dumps(dict(options))]
    return _launch([*command, "--debug"] if debug else command, resolved, one_at_a_time=verb == "verify")


def _launch(
    command: list[str], resolved: ResolvedPlan, *, one_at_a_time: bool = False, earlier_results: Sequence[Any] = ()
) -> int:
    plan = resolved.plan
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as folder:
        path = resolved.save_for_ranks(Path(folder))
        environment = {rank_ipc.PLAN_VARIABLE: str(path), **command_environment()}
        if earlier_results:
            results_file = Path(folder, "done.json")
            results_file.write_text(json.dumps(earlier_results), encoding="utf-8")
            environment[rank_ipc.RESULTS_VARIABLE] = str(results_file)
        return launch(command, plan.ranks, threads=plan.threads, environment=environment, one_at_a_time=one_at_a_time)


def prepare_process(entry_point: str) -> World:
    """What every entry from Python does first: refuse to run while a job file is only read, and have our errors told in words."""
    file = file_being_read()
    if file is not None:
        raise JobError(
            f"echelon.{entry_point} was called while {file} is read, which would run it twice; put it under "
            "if __name__ == '__main__':"
        )
    world = read_world()
    if world.size > 1 and main_script() is not None and not _has_process_group():
        fix_hash_seed()  # torchrun, Slurm and MPI leave each rank a random one
    if not isinstance(sys.excepthook, _ExceptionHook):
        sys.excepthook = _ExceptionHook(sys.excepthook, world.rank, in_script=_is_user_script())
    return world


def _has_process_group() -> bool:
    """Whether the script made a process group of its own."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _is_user_script() -> bool:
    """Whether Python runs a script of the user's; our own command line tells errors itself."""
    script = main_script()
    package_folder = Path(__file__).resolve().parent.parent
    return script is not None and script.stem != "echelon" and not script.resolve().is_relative_to(package_folder)


class _ExceptionHook:
    """What becomes of an error that ends this process: one message to the launcher, where one listens, with its traceback if it is
    not ours; one of ours in a script is one message and its exit code."""

    def __init__(self, default_hook: Callable[..., Any], rank: int, *, in_script: bool) -> None:
        self._default_hook, self._rank, self._in_script = default_hook, rank, in_script

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_ours = isinstance(error, EchelonError)
        if isinstance(error, KeyboardInterrupt) and rank_ipc.has_launcher():
            return  # the launcher was told of it before we were
        if rank_ipc.report_failure(error, self._rank, with_traceback=not is_ours):
            return
        if isinstance(error, EchelonError) and self._in_script:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
            raise SystemExit(error.exit_code)
        self._default_hook(kind, error, trace)
