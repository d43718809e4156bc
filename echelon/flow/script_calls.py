"""Calls of `train`, `verify` and `parallelize` in a user's script, which starts its ranks by running itself once in each.

    python file.py                      rank 0, 1, ...: the same command
      train(a): 1 process, trained        returns the recorded result
      train(b): starts ranks              trains, passes its result on and ends
      ... continues with the result
      train(c): starts ranks              a and b return recorded results, c trains

`parallelize` has no result to pass on: its ranks run the rest of the script, and the process that started them ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from echelon.errors import EchelonError, JobError, LaunchError
from echelon.flow.job_file import file_being_read
from echelon.flow.job_source import is_user_script, main_script
from echelon.flow.resolve_plan import ResolvedPlan
from echelon.flow.spawn import launch_for_result, launch_ranks
from echelon.flow.train_result import TrainResult
from echelon.launchers import rank_ipc
from echelon.launchers.environment import fix_hash_seed, keep_freed_memory
from echelon.launchers.local import INTERRUPTED_EXIT_CODE
from echelon.plan.certificate import Certificate
from echelon.world import World, read_world

R = TypeVar("R", TrainResult, Certificate)

#: The result or error of each finished call in this process; None: a loop of the user's own, which ranks could not skip.
_results: list[dict[str, str] | None] = []


def call_in_script(
    entry_point: str, execute: Callable[[World], R], result_type: type[R], adopt: Callable[[R], None] | None = None
) -> R:
    """Call `execute` once per script. `adopt` receives a result that another process has computed."""
    world = prepare_process(entry_point)
    if world.launched:
        if earlier := rank_ipc.take_previous_result():
            if "error" in earlier:
                raise LaunchError(f"this call failed before the script started its ranks: {earlier['error']}")
            result = result_type.from_json(earlier["result"])
            if adopt is not None:
                adopt(result)
            return result
        if result_path := rank_ipc.take_result_path():
            _execute_and_exit(execute, world, result_path)
        return execute(world)
    try:
        result = execute(world)
    except BaseException as error:  # the script may handle it and continue with another call
        _results.append({"error": rank_ipc.format_error(error)})
        raise
    _results.append({"result": result.to_json()})
    return result


def _execute_and_exit(
    execute: Callable[[World], TrainResult | Certificate], world: World, result_path: Path
) -> NoReturn:
    """On a rank that was started for this call: the process that started it continues with the script."""
    try:
        result = execute(world)
    except Exception as error:  # past the script's own handlers, which are for the process that started the ranks
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(getattr(error, "exit_code", 1)) from None
    if world.is_main:
        result_path.write_text(result.to_json(), encoding="utf-8")
    raise SystemExit(INTERRUPTED_EXIT_CODE if getattr(result, "interrupted", False) else 0)


def rerun_script(resolved: ResolvedPlan) -> str:
    """Run this command once per rank up to the present call; the result of rank 0, as text."""
    return launch_for_result(_own_command(resolved), resolved, earlier_results=_results)


def become_ranks(resolved: ResolvedPlan) -> NoReturn:
    """Run this command once per rank to its end, in place of this process."""
    raise SystemExit(launch_ranks(_own_command(resolved), resolved, earlier_results=_results))


def record_own_loop() -> None:
    """Note that the script now steps through a loop of its own, which ranks could not skip."""
    _results.append(None)


def _own_command(resolved: ResolvedPlan) -> list[str]:
    plan = resolved.plan
    start = f'the plan "{plan}" needs {plan.ranks} processes, which echelon starts by running your script once in each, but this'
    if main_script() is None or hasattr(sys, "ps1"):
        remedy = 'move the job to file.py and run `echelon train file.py`, or use plan="dp=1"'
        raise JobError(f"{start} is not a script: {remedy}")
    if None in _results:
        problem = "script has already called parallelize() for one process, and each would repeat that loop"
        raise JobError(f"{start} {problem}; move one of the two to a script of its own")
    return [sys.executable, *sys.orig_argv[1:]]


def prepare_process(entry_point: str) -> World:
    """Prepare this process for a call from Python: refuse it while a job file is read, and report errors in one message."""
    if file := file_being_read():
        reason = f"was called while {file} is read, which would run it twice"
        raise JobError(f"echelon.{entry_point} {reason}; put it under if __name__ == '__main__':")
    if "torch" not in sys.modules:
        keep_freed_memory()
    world = read_world()
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if world.size > 1 and main_script() is not None and not has_group:
        fix_hash_seed()  # torchrun, Slurm and MPI leave each rank a random one
    if not isinstance(sys.excepthook, _ExceptionHook):
        sys.excepthook = _ExceptionHook(sys.excepthook, world.rank, in_script=is_user_script())
    return world


class _ExceptionHook:
    """Reports an error that ends this process: to the launcher if there is one (with a traceback unless it is an EchelonError);
    else, in a script, an EchelonError is printed as one message and sets the exit code."""

    def __init__(self, default_hook: Callable[..., Any], rank: int, *, in_script: bool) -> None:
        self._default_hook, self._rank, self._in_script = default_hook, rank, in_script

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_ours = isinstance(error, EchelonError)
        if isinstance(error, KeyboardInterrupt) and rank_ipc.has_launcher():
            return  # the launcher received the signal before this process
        if rank_ipc.report_failure(error, self._rank, with_traceback=not is_ours):
            return
        is_message = is_ours or (isinstance(error, KeyboardInterrupt) and str(error))
        if not (is_message and self._in_script):
            self._default_hook(kind, error, trace)
            return
        print(f"error: {error}" if is_ours else error, file=sys.stderr, flush=True)  # noqa: T201
        os._exit(getattr(error, "exit_code", INTERRUPTED_EXIT_CODE))
